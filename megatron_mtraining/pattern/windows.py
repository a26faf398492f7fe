# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Layers with a sliding window: all keys in it are attended to, whatever the settings. Their pattern is dense
attention under the visible ranges of the window, so nothing is searched, and no block out of it is computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import DENSE, MTrainingConfig
from ..visibility import VisibleRanges


@lru_cache(maxsize=64)
def exact(config: MTrainingConfig) -> MTrainingConfig:
    """The settings of such a layer: dense, for sequences of any length, and with all of its gradient."""
    return replace(config, policy=DENSE, window=0, sink=0, backward_threshold=0.0)


def sliding_window(
    size: int, batch: int, seq_length: int, device, within: VisibleRanges | None = None
) -> VisibleRanges:
    """What queries of sequences see within a sliding window (:meth:`VisibleRanges.windowed`), and of packed
    documents ``within`` these; the same object in all layers of a batch."""
    if within is None:
        return _window(size, batch, seq_length, device)
    return within.once(("window", size), lambda: within.windowed(size))


@lru_cache(maxsize=8)
def _window(size: int, batch: int, seq_length: int, device) -> VisibleRanges:
    with torch.inference_mode(False):  # kept for training, too
        start = torch.zeros(batch, seq_length, dtype=torch.int32, device=device)
        return VisibleRanges(start, check=False).windowed(size)


def window_density(window: VisibleRanges, within: VisibleRanges | None, block: int) -> Tensor:
    """Share of the pairs that are visible without the window, which are those ``within`` packed documents or
    all causal ones: float32 ``[b]``, computed once."""

    def share() -> Tensor:
        n = window.seq_length
        every = n * (n + 1) / 2 if within is None else within.pairs(block).sum(1)
        return (window.pairs(block).sum(1) / every).float()

    return window.once(("window density", block), share)
