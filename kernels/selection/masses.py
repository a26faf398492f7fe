# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention mass of the sampled rows by column and by block distance, in one pass over a rank's keys.

A token diagonal crosses two block distances, unless it is a multiple of the block: which of the two a row
sees depends on its offset in its block. So the mass of a row at a token distance is split between both, in
proportion to the diagonal's pairs. Sums over distances are integers, added by atomics: the same bits in any
order, within a rank and over ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import fixed_point_one
from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, block_at, load_rows, precision_for, row_dims
from .probabilities import add_three, probabilities_by_row


@triton.jit
def add_mass(ptr, distance, mass, num_blocks, one):
    """Add masses in fixed point to the sums at their distances. All [BLOCK_M]."""
    addend = (mass * one + 0.5).to(tl.int32)
    mask = (addend > 0) & (distance >= 0) & (distance < num_blocks)
    tl.atomic_add(ptr + distance, addend, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["rank"])
def _mass_kernel(
    # Sampled rows
    q_ptr,  # [R, b, h, D]
    rows_ptr,  # [R]
    starts_ptr,  # [b, R], or None
    further_ptr,  # [b, NB], or None
    # Keys of this rank
    k_ptr,  # [s, b, hk, D]
    lse_ptr,  # [b, h, R]
    # Outputs
    value_ptr,  # [b, h, s]
    mass_ptr,  # [b, h, NB]
    held_out_mass_ptr,  # [b, h, NB]
    stride_kn,
    stride_kb,
    stride_kh,
    num_rows,
    batch_heads,
    key_len,
    num_blocks,
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
    TILE_HEADS: tl.constexpr,
    TILE_STRATA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIVIDE_BY_COST: tl.constexpr,
    DROP_MAX_STRATUM: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a tile of keys of a KV head."""
    kv_heads: tl.constexpr = HEADS // GROUP
    parts: tl.constexpr = BLOCK // BLOCK_N
    # A tile has one row of each of some strata, of some heads. Tensor cores take 64 rows, and with few strata
    # in a tile, few of them come before the keys.
    BLOCK_M: tl.constexpr = TILE_HEADS * TILE_STRATA
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)  # heads can be 2^30 elements apart
    first_key = tl.program_id(0) * BLOCK_N
    keys = tl.arange(0, BLOCK_N)
    k_ptr = k_ptr + batch * stride_kb + kv_head * stride_kh
    k = load_rows(k_ptr, first_key, stride_kn, keys, key_len, D, EVEN)  # [BLOCK_N, D]
    local = first_key + keys
    block = block_at(tl.program_id(0) // parts, rank, world, inner)
    offset = tl.program_id(0) % parts * BLOCK_N + keys
    # Keys past the end have positions past every row.
    position = block * BLOCK + offset  # [BLOCK_N]
    key_part = offset.to(tl.float32) / BLOCK  # [BLOCK_N], offset as a fraction of the block
    scale = softmax_scale * LOG2E
    # Rows ascend: how many come before this block, and how many before it or have it in their window.
    every = tl.arange(0, ROWS_POW2)
    row_blocks = tl.load(rows_ptr + every, mask=every < num_rows, other=2147483647) // BLOCK
    rows_before = tl.sum((row_blocks < block).to(tl.int32), 0)
    rows_near = tl.sum((row_blocks - block < tl.maximum(window_blocks, 1)).to(tl.int32), 0)
    strata = num_rows // ROWS_PER_STRATUM
    first_stratum = rows_before // ROWS_PER_STRATUM // TILE_STRATA * TILE_STRATA
    tiles = tl.maximum(tl.cdiv(strata - first_stratum, TILE_STRATA), 1)
    head_of_line = tl.arange(0, BLOCK_M) // TILE_STRATA  # [BLOCK_M], in the tile
    row_of_line = (
        tl.arange(0, BLOCK_M) % TILE_STRATA * ROWS_PER_STRATUM
    )  # [BLOCK_M], after its first
    q_offsets = (row_of_line * batch_heads + head_of_line)[:, None] * D + row_dims(D)[None, :]
    lse_offsets = head_of_line * num_rows + row_of_line
    # Over the strata of a tile that are 8 apart, which the same thread has.
    total = tl.zeros([BLOCK_M // 16, 8, BLOCK_N], tl.float32)
    largest = tl.zeros([BLOCK_M // 16, 8, BLOCK_N], tl.float32)
    if NUM_SELECTION_ROWS > 1:
        mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # One loop over heads, strata and the rows of a stratum, so that loads are prefetched across heads.
    for i in range(tl.cdiv(GROUP, TILE_HEADS) * tiles * ROWS_PER_STRATUM):
        j = i % ROWS_PER_STRATUM
        tile = i // ROWS_PER_STRATUM
        group_head = tile // tiles * TILE_HEADS
        head = batch * HEADS + kv_head * GROUP + group_head
        r = (first_stratum + tile % tiles * TILE_STRATA) * ROWS_PER_STRATUM + j
        row_mask = row_of_line < num_rows - r  # [BLOCK_M]
        if GROUP % TILE_HEADS != 0:
            row_mask = row_mask & (head_of_line < GROUP - group_head)
        p, row = probabilities_by_row(
            q_ptr + (r.to(tl.int64) * batch_heads + head) * D + q_offsets,
            lse_ptr + head * num_rows + r + lse_offsets,
            rows_ptr + r + row_of_line,
            row_mask,
            r >= rows_near,
            k,
            block,
            key_part,
            scale,
            D,
            BLOCK,
            PREC,
        )  # [BLOCK_M, BLOCK_N], [BLOCK_M]
        if starts_ptr is not None:
            start = tl.load(starts_ptr + batch * num_rows + r + row_of_line, mask=row_mask, other=0)
            p = tl.where(position[None, :] >= start[:, None], p, 0.0)
        distance = row // BLOCK - block  # [BLOCK_M]
        whole = tl.sum(p, 1)  # [BLOCK_M]
        if j < NUM_SELECTION_ROWS:
            # How far the row's offset in its block is past the key's, in blocks, goes to the distance after;
            # how far the key's is past the row's, to the distance before.
            row_part = (row % BLOCK).to(tl.float32) / BLOCK
            further = tl.sum(p * tl.maximum(row_part[:, None], key_part[None, :]), 1)
            after = further - tl.sum(p * key_part[None, :], 1)
            before = further - row_part * whole
            add_three(
                (mass_ptr + (head + head_of_line) * num_blocks)[:, None],
                distance,
                (before * one + 0.5).to(tl.int32),
                ((whole - before - after) * one + 0.5).to(tl.int32),
                (after * one + 0.5).to(tl.int32),
                num_blocks,
            )
            beyond_window = tl.where((distance >= window_blocks)[:, None], p, 0.0)
            if NUM_SELECTION_ROWS > 1:
                mass += beyond_window
            else:
                mass = beyond_window
            if j == NUM_SELECTION_ROWS - 1:
                by_thread = tl.reshape(mass, [BLOCK_M // 16, 2, 8, BLOCK_N])
                total += tl.sum(by_thread, 1)
                if DROP_MAX_STRATUM:
                    largest = tl.maximum(largest, tl.max(by_thread, 1))
                if NUM_SELECTION_ROWS > 1:
                    mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if NUM_SELECTION_ROWS == ROWS_PER_STRATUM or j >= NUM_SELECTION_ROWS:
            held_out_ptr = held_out_mass_ptr + (head + head_of_line) * num_blocks
            add_mass(held_out_ptr, distance, whole, num_blocks, one)
        if (j == ROWS_PER_STRATUM - 1) & (tile % tiles == tiles - 1):
            value = tl.sum(tl.reshape(total, [TILE_HEADS, TILE_STRATA // 2, BLOCK_N]), 1)
            if DROP_MAX_STRATUM:
                most = tl.max(tl.reshape(largest, [TILE_HEADS, TILE_STRATA // 2, BLOCK_N]), 1)
                value = tl.maximum(value - most, 0.0)
            if DIVIDE_BY_COST:
                # Query blocks that see the column beyond their window.
                cost = num_blocks - block - window_blocks
                if further_ptr is not None:
                    cost = tl.load(further_ptr + batch * num_blocks + block) + 1 - window_blocks
                value = value * tl.where(cost > 0, 1.0 / tl.maximum(cost, 1), 0.0)
            bits = tl.where(
                (position < num_sinks)[None, :], 2147483647, value.to(tl.int32, bitcast=True)
            )  # [TILE_HEADS, BLOCK_N]
            tile_head = tl.arange(0, TILE_HEADS)[:, None]
            mask = (local < key_len)[None, :] & (tile_head < GROUP - group_head)
            tl.store(value_ptr + (head + tile_head) * key_len + local[None, :], bits, mask=mask)
            total = tl.zeros([BLOCK_M // 16, 8, BLOCK_N], tl.float32)
            largest = tl.zeros([BLOCK_M // 16, 8, BLOCK_N], tl.float32)


def attention_masses(sampled_rows, key, lse, num_sinks, divide_by_cost):
    rows = sampled_rows
    key_len, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = rows.query.shape
    num_blocks = cdiv(key_len * rows.world, rows.block_size)
    values = torch.empty(batch, heads, key_len, dtype=torch.int32, device=key.device)
    masses = torch.zeros(2, batch, heads, num_blocks, dtype=torch.int32, device=key.device)
    group = heads // kv_heads
    # Strata that are 8 apart are added up within a thread: a tile has 16 or more.
    tile_heads = min(4, next_power_of_2(group))
    if key.dtype != torch.float32:
        # Three programs fit the registers of a multiprocessor, and their loads and sums hide behind each
        # other's: faster than two with 128 keys.
        block_n, options = 64, dict(num_warps=4, num_stages=2, maxnreg=168)
    else:
        # Without tensor cores a product's operands are held in registers.
        block_n, options = 32, dict(num_warps=8, num_stages=2)
    if dim > 128:  # not measured: 80 KB of shared memory, as a tile has 64 rows
        block_n //= 2
        options["num_stages"] = 2 if key.element_size() == 2 else 1
    launch(
        _mass_kernel,
        (cdiv(key_len, block_n), batch * kv_heads),
        q_ptr=rows.query,
        rows_ptr=rows.rows,
        starts_ptr=rows.starts,
        further_ptr=None if rows.costs is None else rows.costs.further,
        k_ptr=key,
        lse_ptr=lse,
        value_ptr=values,
        mass_ptr=masses[0],
        held_out_mass_ptr=masses[1],
        stride_kn=key.stride(0),
        stride_kb=key.stride(1),
        stride_kh=key.stride(2),
        num_rows=num_rows,
        batch_heads=batch * heads,
        key_len=key_len,
        num_blocks=num_blocks,
        rank=rows.rank,
        world=rows.world,
        inner=rows.inner,
        window_blocks=rows.window_blocks,
        num_sinks=num_sinks,
        softmax_scale=rows.softmax_scale,
        one=fixed_point_one(num_rows),
        HEADS=heads,
        GROUP=group,
        D=dim,
        BLOCK=rows.block_size,
        ROWS_PER_STRATUM=rows.rows_per_stratum,
        NUM_SELECTION_ROWS=rows.num_selection_rows,
        ROWS_POW2=next_power_of_2(num_rows),
        TILE_HEADS=tile_heads,
        TILE_STRATA=64 // tile_heads,
        BLOCK_N=block_n,
        DIVIDE_BY_COST=divide_by_cost,
        DROP_MAX_STRATUM=rows.drop_max_stratum,
        EVEN=key_len % block_n == 0,
        PREC=precision_for(key),
        **options,
    )
    return values, masses
