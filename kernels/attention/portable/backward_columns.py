# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the columns' keys and values through the queries of one rank.

    dv_k = sum_i p_ik dout_i        dk = scale sum_i ds_ik q_i

A program holds a tile of one head's columns, of whatever rank they are, and loops over the later queries of
this rank, every SPLITS-th block. It writes its part of the sums to a buffer: no atomics, so
the result is deterministic. The factor ``scale`` is left to the gradient of keys, which adds the columns'
rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch
from ...common.tiles import (
    LOG2E,
    block_at,
    blocks_before,
    gather_rows,
    load_line,
    precision_for,
    tile_for,
)
from .. import launch_args
from ..launch_args import column_arguments, column_splits, key_ranges
from ..operands import BackwardInputs
from .query_tiles import add_tile, put_aside, query_arguments, query_tile


@triton.jit(do_not_specialize=["rank"])
def _column_kernel(
    # Operands and results
    q_ptr,  # [s, b, h, d]
    column_k_ptr,  # [b, h, C, d]
    column_v_ptr,  # [b, h, C, d]
    do_ptr,  # [s, b, h, d]
    lse_ptr,  # [b, h, s]
    delta_ptr,  # [b, h, s]
    dk_ptr,  # [b, h, SPLITS, C, d] float32
    dv_ptr,
    # The pattern (types.PatternOperand), and visible ranges or None
    member,
    columns,
    column_ptr,
    first_keys,
    q_block_bounds,
    # Strides (m: query row, b: batch entry, h: head)
    stride_qm,
    stride_qb,
    stride_qh,
    stride_dom,
    stride_dob,
    stride_doh,
    # Sizes
    ptr_len,  # NB + 1
    column_len,  # C
    query_len,  # s
    local_blocks,  # nb
    softmax_scale,
    # The layout
    rank,
    world,
    inner,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHAIN: tl.constexpr,
):
    tiles: tl.constexpr = BLOCK // BLOCK_M
    split = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    end = tl.load(column_ptr + bh * ptr_len + ptr_len - 1)
    if first >= end:
        return
    batch = bh // HEADS
    head = bh % HEADS
    q_ptr += batch * stride_qb + head * stride_qh
    do_ptr += batch * stride_dob + head * stride_doh
    lse_ptr += bh * query_len
    delta_ptr += bh * query_len
    member += bh * (ptr_len - 1)
    columns += bh * column_len

    entry = first + tl.arange(0, BLOCK_N)
    listed = entry < end
    position = tl.load(columns + entry, mask=listed, other=0)
    k_block = position // BLOCK
    entry = tl.where(listed, entry, first)
    k = gather_rows(column_k_ptr + bh * column_len * D, entry, D)  # [BLOCK_N, D]
    v = gather_rows(column_v_ptr + bh * column_len * D, entry, D)  # [BLOCK_N, D]
    scale = softmax_scale * LOG2E
    offs_m = tl.arange(0, BLOCK_M)
    # Columns are ascending: no query block before the first column's attends to any of this tile.
    first_q_block = tl.load(columns + first) // BLOCK // world + split
    end_q_block = local_blocks
    if RANGES:
        # Nor does one after the last that sees the last column.
        first_keys += batch * query_len
        q_block_bounds += (2 * batch + 1) * local_blocks * world
        end_q_block = blocks_before(
            tl.load(q_block_bounds + tl.max(k_block, 0)), rank, world, inner
        )
    # Splits take turns, so that each has as many near and far query blocks.
    num_tiles = tl.cdiv(tl.maximum(end_q_block - first_q_block, 0), SPLITS) * tiles
    row = (bh * SPLITS + split) * column_len + first
    offs_n = tl.arange(0, BLOCK_N)
    for start_tile in range(0, tl.maximum(num_tiles, 1), CHAIN):
        dk = tl.zeros(k.shape, tl.float32)
        dv = tl.zeros(v.shape, tl.float32)
        for j in range(start_tile, tl.minimum(start_tile + CHAIN, num_tiles)):
            q_block = first_q_block + j // tiles * SPLITS
            distance = block_at(q_block, rank, world, inner) - k_block
            seen = listed & (distance > 0)
            covered = tl.load(member + distance, mask=seen, other=1)
            mask = (seen & (covered == 0))[:, None]
            start = q_block * BLOCK + j % tiles * BLOCK_M
            q, do, lse, delta = query_tile(
                start,
                offs_m,
                q_ptr,
                do_ptr,
                lse_ptr,
                delta_ptr,
                stride_qm,
                stride_dom,
                query_len,
                D,
                EVEN,
            )
            if RANGES:
                starts = load_line(first_keys, start, offs_m, query_len, 0, EVEN)
                mask &= position[:, None] >= starts[None, :]
            dk, dv = add_tile(q, k, v, do, mask, dk, dv, lse, delta, scale, True, PREC)
        put_aside(dk_ptr, row, D, offs_n, row + end - first, dk, start_tile == 0, D, False)
        put_aside(dv_ptr, row, D, offs_n, row + end - first, dv, start_tile == 0, D, False)


def backward_columns(inputs: BackwardInputs, column_kv: Tensor, rank: int) -> Tensor:
    """See :func:`...attention.backward_columns`."""
    assert inputs.query_sums is None, "the portable kernels have no one-pass backward"
    query, index = inputs.query, inputs.index
    length, batch, heads, dim = query.shape
    column_k, column_v = column_kv
    num_columns = column_k.shape[2]
    tile = tile_for("column", dim, index.block_size, query)
    splits = column_splits(index, batch * heads, tile.block_n)
    gradients = torch.empty(
        (2, batch, heads, splits, num_columns, dim), dtype=torch.float32, device=query.device
    )
    dk, dv = gradients
    launch(
        _column_kernel,
        (cdiv(num_columns, tile.block_n), splits, batch * heads),
        **query_arguments(inputs),
        column_k_ptr=column_k,
        column_v_ptr=column_v,
        dk_ptr=dk,
        dv_ptr=dv,
        **column_arguments(index, rank, splits),
        **key_ranges(index, rank),
        column_len=num_columns,
        D=dim,
        EVEN=length % index.block_size == 0,
        PREC=precision_for(query),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CHAIN=launch_args.CHAIN,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return gradients
