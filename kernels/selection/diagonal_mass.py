# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention mass of the sampled rows by token distance, in fixed point.

Probabilities are computed again and added as integers by atomics: the sums have the same bits in any order,
within a rank and over ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import fixed_point_one
from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, block_at, load_rows, precision_for
from .probabilities import probabilities_by_key

NO_POSITION = tl.constexpr(1073741824)
"""A position after every row."""


@triton.jit(do_not_specialize=["rank"])
def _diagonal_kernel(
    # Sampled rows
    q_ptr,  # [R, b, h, D]
    rows_ptr,  # [R]
    starts_ptr,  # [b, R], or None
    # Keys of this rank
    k_ptr,  # [s, b, hk, D]
    lse_ptr,  # [b, h, R]
    # Selected columns
    value_ptr,  # [b, h, s], or None
    threshold_ptr,  # [2, b, h]: value and last position; or None
    # Output
    mass_ptr,  # [b, h, N]
    stride_kn,
    stride_kb,
    stride_kh,
    num_rows,
    batch_heads,
    key_len,
    seq_length,
    # Layout
    rank,
    world,
    inner,
    window_blocks,
    num_sinks,
    softmax_scale,
    one,  # in fixed point
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_PER_STRATUM: tl.constexpr,
    NUM_SELECTION_ROWS: tl.constexpr,
    ROWS_POW2: tl.constexpr,  # R, rounded up
    BLOCK_M: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a block of keys of a KV head."""
    kv_heads: tl.constexpr = HEADS // GROUP
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)  # heads can be 2^30 elements apart
    # The keys backwards: distances to a row then ascend along with the addresses of their sums, which the
    # compiler must see to give a warp's atomics adjacent addresses.
    first_key = tl.program_id(0) * BLOCK
    keys = BLOCK - 1 - tl.arange(0, BLOCK)
    k_ptr = k_ptr + batch * stride_kb + kv_head * stride_kh
    k = load_rows(k_ptr, first_key, stride_kn, keys, key_len, D, EVEN)  # [BLOCK, D]
    local = first_key + keys  # [BLOCK]
    block = block_at(tl.program_id(0), rank, world, inner)
    position = block * BLOCK + keys  # [BLOCK]
    scale = softmax_scale * LOG2E
    # Rows ascend: how many come too early to have any of these keys beyond their window.
    every = tl.arange(0, ROWS_POW2)
    row_blocks = tl.load(rows_ptr + every, mask=every < num_rows, other=2147483647) // BLOCK
    rows_before = tl.sum((row_blocks - block < window_blocks).to(tl.int32), 0)
    # Numbered without the held-out rows, which do not count.
    first = rows_before // ROWS_PER_STRATUM * NUM_SELECTION_ROWS // BLOCK_M * BLOCK_M
    tiles = tl.cdiv(num_rows // ROWS_PER_STRATUM * NUM_SELECTION_ROWS - first, BLOCK_M)
    # One loop over heads and rows, so that loads are prefetched across heads.
    for i in range(GROUP * tiles):
        head = batch * HEADS + kv_head * GROUP + i // tiles
        selected = position < num_sinks  # [BLOCK]
        if value_ptr is not None:
            value = tl.load(value_ptr + head * key_len + local, mask=local < key_len, other=0)
            threshold = tl.load(threshold_ptr + head)
            tied = (value == threshold) & (position <= tl.load(threshold_ptr + batch_heads + head))
            selected = selected | (value > threshold) | tied
        # The first row position that counts for a key: one beyond the window, and none for selected columns.
        first_row = tl.maximum(position, (block + window_blocks) * BLOCK)
        first_row = tl.where(selected, NO_POSITION, first_row)  # [BLOCK]
        r = first + i % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        r = r // NUM_SELECTION_ROWS * ROWS_PER_STRATUM + r % NUM_SELECTION_ROWS  # [BLOCK_M]
        # Visible ranges are compared with the keys' positions below, not with the first rows that count.
        p, row = probabilities_by_key(
            k,
            first_row,
            r,
            head,
            q_ptr,
            rows_ptr,
            None,
            lse_ptr,
            num_rows,
            batch_heads,
            scale,
            HEADS,
            D,
            PREC,
        )  # [BLOCK, BLOCK_M], [BLOCK_M]
        if starts_ptr is not None:
            start = tl.load(starts_ptr + batch * num_rows + r, mask=r < num_rows, other=0)
            p = tl.where(position[:, None] >= start[None, :], p, 0.0)
        addend = (p * one + 0.5).to(tl.int32)
        nearest = row - (block * BLOCK + BLOCK - 1)
        distance = nearest[None, :] + tl.arange(0, BLOCK)[:, None]  # [BLOCK, BLOCK_M]
        to = mass_ptr + head * seq_length + distance
        tl.atomic_add(to, addend, mask=addend > 0, sem="relaxed")


def diagonal_masses(sampled_rows, key, lse, num_sinks, selected_columns):
    rows = sampled_rows
    key_len, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = rows.query.shape
    seq_length, block = key_len * rows.world, rows.block_size
    masses = torch.zeros(batch, heads, seq_length, dtype=torch.int32, device=key.device)
    values, threshold = (None, None) if selected_columns is None else selected_columns
    launch(
        _diagonal_kernel,
        (cdiv(key_len, block), batch * kv_heads),
        q_ptr=rows.query,
        rows_ptr=rows.rows,
        starts_ptr=rows.starts,
        k_ptr=key,
        lse_ptr=lse,
        value_ptr=values,
        threshold_ptr=threshold,
        mass_ptr=masses,
        stride_kn=key.stride(0),
        stride_kb=key.stride(1),
        stride_kh=key.stride(2),
        num_rows=num_rows,
        batch_heads=batch * heads,
        key_len=key_len,
        seq_length=seq_length,
        rank=rows.rank,
        world=rows.world,
        inner=rows.inner,
        window_blocks=rows.window_blocks,
        num_sinks=num_sinks,
        softmax_scale=rows.softmax_scale,
        one=fixed_point_one(num_rows),
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        BLOCK=block,
        ROWS_PER_STRATUM=rows.rows_per_stratum,
        NUM_SELECTION_ROWS=rows.num_selection_rows,
        ROWS_POW2=next_power_of_2(num_rows),
        # Without tensor cores a product's operands are held in registers.
        BLOCK_M=16 if key.dtype == torch.float32 or dim > 128 else 32,
        EVEN=key_len % block == 0,
        PREC=precision_for(key),
        num_warps=8,
        num_stages=2,
    )
    return masses
