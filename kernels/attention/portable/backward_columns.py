# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...common.launch import cdiv, launch
from ...common.tiles import (
    LOG2E,
    block_at,
    blocks_before,
    document_keys,
    gather_rows,
    load_line,
    load_rows,
    precision_for,
    store_rows,
    tile_for,
)
from ..launch_args import column_splits
from .backward_key import _add_tile


@triton.jit(do_not_specialize=["rank"])
def _column_kernel(
    q_ptr, column_k, column_v, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    member, columns, column_ptr, start_ptr, extent_ptr,
    q_ss, q_sb, q_sh, do_ss, do_sb, do_sh,
    ptr_len, column_len, query_len, nb, softmax_scale, rank, world, inner,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, WALK: tl.constexpr, SPLITS: tl.constexpr, DOCS: tl.constexpr,
    EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    walks: tl.constexpr = BLOCK // WALK
    split = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * KEEP
    end = tl.load(column_ptr + bh * ptr_len + ptr_len - 1)
    if first >= end:
        return
    batch = bh // HEADS
    head = bh % HEADS
    q_ptr += batch * q_sb + head * q_sh
    do_ptr += batch * do_sb + head * do_sh
    lse_ptr += bh * query_len
    delta_ptr += bh * query_len
    member += bh * (ptr_len - 1)
    columns += bh * column_len

    entry = first + tl.arange(0, KEEP)
    listed = entry < end
    position = tl.load(columns + entry, mask=listed, other=0)
    block = position // BLOCK
    entry = tl.where(listed, entry, first)
    k = gather_rows(column_k + bh * column_len * D, entry, D)
    v = gather_rows(column_v + bh * column_len * D, entry, D)
    dk = tl.zeros([KEEP, D], tl.float32)
    dv = tl.zeros([KEEP, D], tl.float32)
    scale = softmax_scale * LOG2E
    queries = tl.arange(0, WALK)
    # Columns are sorted: no query block up to the first one's sees any of this tile.
    a_first = tl.load(columns + first) // BLOCK // world + split
    a_end = nb
    if DOCS:
        # Nor one after the last one's document.
        start_ptr += batch * query_len
        seen_to = tl.load(extent_ptr + (2 * batch + 1) * nb * world + tl.max(block, 0))
        a_end = blocks_before(seen_to, rank, world, inner)
    # Query blocks go round the splits, so that each split has as many near and far ones.
    for j in range(0, tl.cdiv(tl.maximum(a_end - a_first, 0), SPLITS) * walks):
        a = a_first + j // walks * SPLITS
        distance = block_at(a, rank, world, inner) - block
        seen = listed & (distance > 0)
        covered = tl.load(member + distance, mask=seen, other=1)
        keep = (seen & (covered == 0))[:, None]
        at = a * BLOCK + j % walks * WALK
        q = load_rows(q_ptr, at, q_ss, queries, query_len, D, EVEN)
        do = load_rows(do_ptr, at, do_ss, queries, query_len, D, EVEN)
        lse = load_line(lse_ptr, at, queries, query_len, float("inf"), EVEN) * LOG2E
        delta = load_line(delta_ptr, at, queries, query_len, 0.0, EVEN)
        if DOCS:
            begins = load_line(start_ptr, at, queries, query_len, 0, EVEN)
            keep &= position[:, None] >= begins[None, :]
        dk, dv = _add_tile(q, k, v, do, keep, dk, dv, lse, delta, scale, True, PREC)
    line = (bh * SPLITS + split) * column_len + first
    rows = tl.arange(0, KEEP)
    store_rows(dk_ptr, line, D, rows, line + end - first, dk, D, False)
    store_rows(dv_ptr, line, D, rows, line + end - first, dv, D, False)


def backward_columns(query, columns, grad_out, lse, delta, index, rank, softmax_scale):
    """Launch the columns' gradients; see :func:`kernels.attention_backward_columns`."""
    length, batch, heads, dim = query.shape
    nb, block, num_columns = index.local_blocks, index.block_size, columns.shape[-2]
    tile = tile_for("column", dim, block, query)
    splits = column_splits(index, batch * heads, tile.keep)
    shape = (2, batch, heads, splits, num_columns, dim)
    gradients = torch.empty(shape, dtype=torch.float32, device=query.device)
    launch(
        _column_kernel, (cdiv(num_columns, tile.keep), splits, batch * heads),
        query, *columns, grad_out, lse, delta, *gradients,
        index.member, index.columns, index.column_ptr, *document_keys(index, rank),
        *query.stride()[:3], *grad_out.stride()[:3],
        index.column_ptr.shape[-1], num_columns, length, nb, softmax_scale, rank, index.world, index.inner,
        HEADS=heads, D=dim, BLOCK=block, KEEP=tile.keep, WALK=tile.walk, SPLITS=splits,
        DOCS=index.documents is not None, EVEN=length % block == 0, PREC=precision_for(query),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return gradients
