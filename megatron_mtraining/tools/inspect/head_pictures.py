# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a picture of a head shows: its dense attention, and its pattern, by cells of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.types import LayerInput
from .measure import CHUNK_BYTES, LayerPattern, attention_of_rows

CELLS = 256
"""Cells along a side of a picture, at most."""
CPU_ROWS = 2**14
"""Query rows of a picture that is computed on a CPU, at most; on a GPU all are."""


def cells_of(seq_length: int) -> int:
    """Cells along a side of a picture: the largest divisor of the length up to :data:`CELLS`."""
    return max(cells for cells in range(1, min(CELLS, seq_length) + 1) if seq_length % cells == 0)


def rows_of_picture(seq_length: int, device: torch.device) -> Tensor:
    """The query rows of a picture, int64 ``[n]``: all, or on a CPU evenly spread ones."""
    stride = 1 if device.type == "cuda" else -(-seq_length // CPU_ROWS)
    return torch.arange(stride - 1, seq_length, stride, device=device)


def attention_picture(given: LayerInput, head: int) -> Tensor:
    """The attention mass of one head in each cell, averaged over the cell's rows: float32 ``[cells, cells]``
    on the CPU."""
    length, _, heads, _ = given.query.shape
    cells, rows = cells_of(length), rows_of_picture(length, given.query.device)
    query = given.query[:, :, head : head + 1]
    kv_head = head * given.key.shape[2] // heads
    key = given.key[:, :, kv_head : kv_head + 1]
    size = length // cells
    picture = torch.zeros(cells, cells, device=query.device)
    for here, p in attention_of_rows(query, key, rows, given.softmax_scale, size):
        by_cell = p[0].unflatten(-1, (-1, size)).sum(-1)
        picture[:, : by_cell.shape[-1]].index_add_(0, here // size, by_cell)
    return _mean_over_rows(picture, rows, size)


def density_picture(
    pattern: LayerPattern | None, head: int, seq_length: int, device: torch.device
) -> Tensor:
    """The fraction of the pairs in each cell that a head's pattern keeps: float32 ``[cells, cells]`` on the
    CPU.

    Args:
        pattern: None for dense attention.
        device: the pattern's.
    """
    cells, rows = cells_of(seq_length), rows_of_picture(seq_length, device)
    position, size = torch.arange(seq_length, device=device), seq_length // cells
    density = torch.zeros(cells, cells, device=device)
    for here in rows.split(max(1, CHUNK_BYTES // (16 * seq_length))):
        kept = position <= here[:, None]
        if pattern is not None:
            kept &= pattern.mask(head, here)[:, :seq_length]
        density.index_add_(0, here // size, kept.unflatten(-1, (cells, size)).float().mean(-1))
    return _mean_over_rows(density, rows, size)


def _mean_over_rows(sums: Tensor, rows: Tensor, size: int) -> Tensor:
    return (sums / torch.bincount(rows // size, minlength=len(sums))[:, None]).cpu()
