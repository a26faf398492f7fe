# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The memory that the one-pass backward adds the queries' gradient to, and the gradient made of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch
from .descriptors import tile_dim
from .query_sums import BLOCK_M

ROWS = BLOCK_M.value
"""Rows of a query tile."""


def new_query_sums(query: Tensor) -> Tensor:
    """Zeros, float32 ``[b * h, rows, 32]``: 2 ``tile_dim`` rows for each tile of 64 queries, in the order of
    ``query_sums._to_rows``.

    Args:
        query: ``[s, b, h, d]``.
    """
    length, batch, heads, dim = query.shape
    rows = cdiv(length, ROWS) * 2 * tile_dim(dim)
    return torch.zeros(batch * heads, rows, 32, dtype=torch.float32, device=query.device)


def finish_query_sums(query_sums: Tensor, query: Tensor, softmax_scale: float) -> Tensor:
    """The queries' gradient, ``[s, b, h, d]`` in the query's dtype, of what was added to ``query_sums``."""
    length, batch, heads, dim = query.shape
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch(
        _finish_kernel,
        (cdiv(length, ROWS), batch * heads),
        sums_ptr=query_sums,
        grad_query_ptr=grad_query,
        length=length,
        stride_m=grad_query.stride(0),
        stride_b=grad_query.stride(1),
        stride_h=grad_query.stride(2),
        softmax_scale=softmax_scale,
        HEADS=heads,
        HEAD_DIM=dim,
        D=tile_dim(dim),
        BLOCK_M=ROWS,
        num_warps=8,
    )
    return grad_query


@triton.jit
def _finish_kernel(
    sums_ptr,  # [b * h, tiles * 2 * D, 32]
    grad_query_ptr,
    length,
    stride_m,
    stride_b,
    stride_h,
    softmax_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    tile = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_M)[:, None]
    d = tl.arange(0, D)[None, :]
    half = d // (D // 2)
    col = d % (D // 2)
    # As in query_sums._to_rows.
    line = (col // 8 * 4 + row // 16) * 4 + row // 2 % 4
    entry = ((row % 2 * 4 + col // 2 % 4) * 2 + row // 8 % 2) * 2 + col % 2
    tiles = tl.num_programs(0)
    base = sums_ptr + (batch_head * tiles + tile) * (2 * D * 32)
    total = tl.load(base + (half * D + line) * 32 + entry)
    at = (tile * BLOCK_M + row).to(tl.int64)
    out = grad_query_ptr + batch_head // HEADS * stride_b + batch_head % HEADS * stride_h
    gradient = (total * softmax_scale).to(grad_query_ptr.dtype.element_ty)
    tl.store(out + at * stride_m + d, gradient, mask=(at < length) & (d < HEAD_DIM))
