# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Small vectors that are the same in every layer and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

_readers: list[list[Tensor]] = []


def constant(
    numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A vector on the device, ``[len(numbers)]``. Made once, since the host waits for the copy; of many, such
    as the prices of a sweep, those that were used last are kept."""
    found = _made(numbers, device, dtype)
    for kept in _readers:
        kept.append(found)
    return found


@lru_cache(maxsize=1024)
def _made(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


@contextmanager
def constants_read() -> Iterator[list[Tensor]]:
    """The constants that are read within: for captured searches (:mod:`.search_graph`), which read them where
    they are, later too."""
    kept: list[Tensor] = []
    _readers.append(kept)
    try:
        yield kept
    finally:
        _readers[:] = [each for each in _readers if each is not kept]
