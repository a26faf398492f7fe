# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the gathered columns on Hopper GPUs, in Gluon: what ``hopper_backward_key.py`` does for a key
block, for a tile of one head's columns."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...common.launch import cdiv, launch
from ...common.tiles import LOG2E, block_at, blocks_before
from ..launch_args import column_splits
from .common import descriptor_heads_first
from .key_common import (
    QROWS,
    documents_of,
    key_buffers,
    key_start,
    key_step,
    load_held,
    load_moving,
    moving_queries,
)


@gluon.jit
def _load_columns(
    descs, k_desc, v_desc, held, moving,
    batch, head, bh, first, a_first, total,
    BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    DOCS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK // 2
    tiles: gl.constexpr = BLOCK // QROWS
    load_held(k_desc, v_desc, held, batch, head, first, ROWS, D)
    for n in range(total):
        at = (a_first + n // tiles * SPLITS) * BLOCK + n % tiles * QROWS
        load_moving(n, descs, moving, batch, head, bh, at, D, STAGES, DOCS)


@gluon.jit
def _column_keep(member, block, position, listed, a, rank, world, inner, DOCS: gl.constexpr):
    """0 for the columns that local query block ``a`` attends to as columns, -inf for the others. With packed
    documents their positions, and -1."""
    distance = block_at(a, rank, world, inner) - block
    seen = listed & (distance > 0)
    covered = gl.load(member + distance, mask=seen, other=1)
    if DOCS:
        keep = gl.where(covered == 0, position, -1).to(gl.float32)
    else:
        keep = gl.where(covered == 0, 0.0, float("-inf"))
    return keep


@gluon.jit
def _attend_columns(
    dk_ptr, dv_ptr, columns, member,
    held, moving,
    line, first, end, a_first, rank, world, inner, nb, total, softmax_scale,
    HALF: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK // 2
    tiles: gl.constexpr = BLOCK // QROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    scale = softmax_scale * LOG2E
    entry = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    listed = entry < end
    position = gl.load(columns + entry, mask=listed, other=0)
    block = position // BLOCK
    MASK: gl.constexpr = 3 if DOCS else 2
    k, v, dk, dv, p_operand, ds_operand = key_start(held, moving, HALF, o_layout, a_layout, ROWS, D)
    bias = _column_keep(member, block, position, listed, a_first, rank, world, inner, DOCS)
    dk, dv, p_operand, ds_operand = key_step(
        0, -1, total > 1, dk, dv, p_operand, ds_operand, k, v, moving, scale,
        bias, bias, s_layout, a_layout, ROWS, D, STAGES, MASK,
    )  # fmt: skip
    bias = _column_keep(
        member, block, position, listed, a_first + 1 // tiles * SPLITS, rank, world, inner, DOCS
    )
    for n in range(1, total):
        # The next tile's are on their way while this one is computed.
        following = _column_keep(
            member,
            block,
            position,
            listed & (n + 1 < total),
            a_first + (n + 1) // tiles * SPLITS,
            rank,
            world,
            inner,
            DOCS,
        )
        dk, dv, p_operand, ds_operand = key_step(
            n, n - 1, n + 1 < total, dk, dv, p_operand, ds_operand, k, v, moving, scale,
            bias, bias, s_layout, a_layout, ROWS, D, STAGES, MASK,
        )  # fmt: skip
        bias = following
    dk, dv, p_operand, ds_operand = warpgroup_mma_wait(0, deps=[dk, dv, p_operand, ds_operand])
    rows = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    at = (line + rows)[:, None] * D + d[None, :]
    inside = (first + rows < end)[:, None]
    gl.store(dk_ptr + at, dk, mask=inside)
    gl.store(dv_ptr + at, dv, mask=inside)


@gluon.jit(do_not_specialize=["rank"])
def _column_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
    dk_ptr, dv_ptr, member, columns, column_ptr, start_desc, extent_ptr,
    ptr_len, column_len, nb, softmax_scale, rank, world, inner,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    # The first columns are seen by the most queries: start them first, of all heads.
    split = gl.program_id(0)
    batch = gl.program_id(1) // HEADS
    head = gl.program_id(1) % HEADS
    bh = gl.program_id(1).to(gl.int64)
    first = gl.program_id(2) * BLOCK
    end = gl.load(column_ptr + bh * ptr_len + ptr_len - 1)
    member += bh * (ptr_len - 1)
    columns += bh * column_len
    # Columns are sorted: no query block up to the first one's sees any of this tile. Query blocks
    # go round the splits, so that each split has as many near and far ones.
    tiles: gl.constexpr = BLOCK // QROWS
    a_first = gl.load(columns + first, mask=first < end, other=0) // BLOCK
    a_first = a_first // world + split
    a_end = nb
    if DOCS:
        # Nor one after the last one's document.
        final = (
            gl.load(columns + gl.minimum(first + BLOCK, end) - 1, mask=first < end, other=0)
            // BLOCK
        )
        seen_to = gl.load(extent_ptr + (2 * (bh // HEADS) + 1) * nb * world + final)
        a_end = blocks_before(seen_to, rank, world, inner)
    total = (gl.maximum(a_end - a_first, 0) + SPLITS - 1) // SPLITS * tiles
    # No query sees a tile of these: one tile of zeros past the end.
    a_first = gl.where((first < end) & (total > 0), a_first, nb)
    total = gl.where(a_first < nb, total, 1)
    line = (bh * SPLITS + split) * column_len + first

    held, moving = key_buffers(
        q_desc, do_desc, k_desc, v_desc, lse_desc, BLOCK // 2, D, STAGES, DOCS
    )
    descs = (q_desc, do_desc, lse_desc, delta_desc)
    if DOCS:
        descs = (q_desc, do_desc, lse_desc, delta_desc, start_desc)
    gl.warp_specialize(
        [
            (_attend_columns, (
                dk_ptr, dv_ptr, columns, member,
                held, moving,
                line, first, end, a_first, rank, world, inner, nb, total, softmax_scale,
                0, BLOCK, D, STAGES, SPLITS, DOCS,
            )),
            (_attend_columns, (
                dk_ptr, dv_ptr, columns, member,
                held, moving,
                line, first, end, a_first, rank, world, inner, nb, total, softmax_scale,
                1, BLOCK, D, STAGES, SPLITS, DOCS,
            )),
            (_load_columns, (
                descs, k_desc, v_desc, held, moving,
                batch, head, gl.program_id(1), first, a_first, total, BLOCK, D, STAGES, SPLITS,
                DOCS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def backward_columns(query, columns, grad_out, lse, delta, index, rank, softmax_scale):
    """Launch the columns' gradients; see :func:`kernels.attention_backward_columns`."""
    _, batch, heads, dim = query.shape
    block, num_columns = index.block_size, columns.shape[-2]
    splits = column_splits(index, batch * heads, block)
    shape = (2, batch, heads, splits, num_columns, dim)
    gradients = torch.empty(shape, dtype=torch.float32, device=query.device)
    queries, lines = moving_queries(query, grad_out, lse, delta)
    half = [1, 1, block // 2, dim]
    launch(
        _column_kernel, (splits, batch * heads, cdiv(num_columns, block)),
        *queries, *(descriptor_heads_first(t, half) for t in columns), *lines, *gradients,
        index.member, index.columns, index.column_ptr, *documents_of(index, rank),
        index.column_ptr.shape[-1], num_columns, index.local_blocks, softmax_scale,
        rank, index.world, index.inner,
        HEADS=heads, D=dim, BLOCK=block, STAGES=3, SPLITS=splits,
        DOCS=index.documents is not None, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return gradients
