# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Top-k of integers by ``torch.topk``: the reference implementation of ``topk.py``, which also runs where
``k`` is too large for its tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import positions_at


def select_topk(
    values: Tensor,
    k: int,
    fill_position: int,
    rank: int = 0,
    world: int = 1,
    inner: int = 1,
    block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest positive values along the last dimension; of equal values, the lower positions.

    Args:
        values: int32 ``[b, h, L]``, contiguous, 0 or more. Zeros are never selected.
        k: 1 to L.
        fill_position: the position of missing entries, where fewer than ``k`` values are positive.
        rank, world, inner, block_size: the striped layout that gives the positions of ``values``; the default
            gives 0, 1, ...

    Returns:
        selection: int32 ``[2, b, h, k]``, values and positions in no particular order (0 and
            ``fill_position`` for missing entries).
        threshold: int32 ``[2, b, h]``, the smallest selected value and the last selected position with this
            value: values above it, and equal ones up to that position, are exactly the selected ones. (0, -1)
            if nothing is selected.
    """
    local = torch.arange(values.shape[-1], device=values.device)
    return _topk(values, positions_at(local, rank, world, block_size, inner), k, fill_position)


def merge_topk(candidates: Tensor, k: int, fill_position: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of several selections: :func:`select_topk` of everything that they are from.

    Args:
        candidates: int32 ``[ranks, 2, b, h, candidates]``, contiguous, with different positions.
    """
    values, positions = candidates.permute(1, 2, 3, 0, 4).flatten(-2)
    return _topk(values, positions.long(), k, fill_position)


def _topk(values, position, k, fill_position):
    # One 64-bit key: by value, then by lower position. Zeros order below everything else.
    key = torch.where(values > 0, (values.long() << 32) + (2**31 - 1 - position), -1)
    best = key.topk(k).values
    selected = best >= 0
    value = torch.where(selected, best >> 32, 0)
    place = torch.where(selected, 2**31 - 1 - (best & (2**32 - 1)), fill_position)
    least = best.amin(-1)
    threshold = torch.where(least >= 0, least >> 32, 0)
    last_position = torch.where(least >= 0, 2**31 - 1 - (least & (2**32 - 1)), -1)
    return torch.stack((value, place)).int(), torch.stack((threshold, last_position)).int()
