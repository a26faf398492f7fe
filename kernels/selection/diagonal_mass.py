# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention mass of sampled rows by token distance, in fixed point.

Probabilities are computed again and added as integers by atomics: integers add up to the same bits in
any order, within a rank and over ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import fixed_point_one
from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, block_at, load_rows, precision_for
from .masses import seen_probabilities


@triton.jit(do_not_specialize=["rank"])
def _diagonal_kernel(
    q_ptr, rows_ptr, starts_ptr, k_ptr, lse_ptr, column_ptr, cut_ptr, out_ptr,
    k_ss, k_sb, k_sh, num_rows, batch_heads, length, seq_length, rank, world, inner,
    near, sink, scale, one,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    IN_STRATUM: tl.constexpr, FIT: tl.constexpr, COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    kv_heads: tl.constexpr = HEADS // GROUP
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    # One block of keys, backwards: distances to a row then ascend along with the addresses of their
    # sums, which the compiler must see to give a warp's addends places side by side.
    start = tl.program_id(0) * BLOCK
    keys = BLOCK - 1 - tl.arange(0, BLOCK)
    k = load_rows(k_ptr + batch * k_sb + kv_head * k_sh, start, k_ss, keys, length, D, EVEN)
    local = start + keys
    block = block_at(tl.program_id(0), rank, world, inner)
    position = block * BLOCK + keys
    scale = scale * LOG2E
    # Rows ascend: how many come too early to have any of these keys beyond their window.
    every = tl.arange(0, ALL_ROWS)
    row_blocks = tl.load(rows_ptr + every, mask=every < num_rows, other=2147483647) // BLOCK
    early = tl.sum((row_blocks - block < near).to(tl.int32), 0)
    # Rows that are held out do not count.
    first = early // IN_STRATUM * FIT // ROWS * ROWS
    tiles = tl.cdiv(num_rows // IN_STRATUM * FIT - first, ROWS)
    # All heads' tiles in one loop, so that the loads of the next run ahead over heads.
    for turn in range(GROUP * tiles):
        head = batch * HEADS + kv_head * GROUP + turn // tiles
        column = position < sink
        if COLUMNS:
            # The columns taken are those up to the cut, in the order of their choice.
            mass = tl.load(column_ptr + head * length + local, mask=local < length, other=0)
            cut = tl.load(cut_ptr + head)
            tied = (mass == cut) & (position <= tl.load(cut_ptr + batch_heads + head))
            column = column | (mass > cut) | tied
        # The first row that counts: none for columns, those beyond their window for others.
        least = tl.maximum(position, (block + near) * BLOCK)
        least = tl.where(column, 1073741824, least)
        r = first + turn % tiles * ROWS + tl.arange(0, ROWS)
        r = r // FIT * IN_STRATUM + r % FIT
        # Whether keys are of the row's document is not to be told from the first row that counts.
        p, row = seen_probabilities(
            q_ptr,
            rows_ptr,
            None,
            lse_ptr,
            r,
            head,
            k,
            least,
            num_rows,
            batch_heads,
            scale,
            HEADS,
            D,
            PREC,
        )
        if starts_ptr is not None:
            began = tl.load(starts_ptr + batch * num_rows + r, mask=r < num_rows, other=0)
            p = tl.where(position[:, None] >= began[None, :], p, 0.0)
        addend = (p * one + 0.5).to(tl.int32)
        nearest = row - (block * BLOCK + BLOCK - 1)
        distance = nearest[None, :] + tl.arange(0, BLOCK)[:, None]
        to = out_ptr + head * seq_length + distance
        tl.atomic_add(to, addend, mask=addend > 0, sem="relaxed")


def diagonal_masses(sampled_rows, key, lse, num_sinks, selected_columns):
    """Launch the diagonals' sums; see the reference."""
    sample = sampled_rows
    length, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = sample.query.shape
    seq_length = length * sample.world
    mass = torch.zeros(batch, heads, seq_length, dtype=torch.int32, device=key.device)
    column, cut = (sample.rows, sample.rows) if selected_columns is None else selected_columns
    block = sample.block_size
    # Without tensor cores a product's operands are held in registers.
    rows = 16 if key.dtype == torch.float32 else 32
    launch(
        _diagonal_kernel, (cdiv(length, block), batch * kv_heads),
        sample.query, sample.rows, sample.starts, key, lse, column, cut, mass,
        *key.stride()[:3], num_rows, batch * heads, length, seq_length, sample.rank, sample.world,
        sample.inner,
        sample.window_blocks, num_sinks, sample.softmax_scale, fixed_point_one(num_rows),
        HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block,
        IN_STRATUM=sample.rows_per_stratum,
        FIT=sample.num_selection_rows, COLUMNS=selected_columns is not None,
        ALL_ROWS=next_power_of_2(num_rows), ROWS=rows, EVEN=length % block == 0, PREC=precision_for(key),
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return mass
