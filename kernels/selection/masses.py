# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What sampled rows give to each column and each block distance, in one pass over a rank's keys.

A token diagonal crosses two block distances, unless it is a multiple of the block: which of the two a row
sees depends on where in its block it is. So a row's mass at a token distance is shared out between
both, as its diagonal's pairs are. Sums over distances are integers, added by atomics: the same bits in any
order, within a rank and over ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import fixed_point_one
from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, block_at, load_rows, precision_for
from .lse import load_sampled


@triton.jit
def seen_probabilities(
    q_ptr, rows_ptr, starts_ptr, lse_ptr, r, head, k, position, num_rows, batch_heads, scale,
    HEADS: tl.constexpr, D: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Probabilities that rows ``r`` of a head give to keys, ``[keys, rows]``, at most 1, 0 for keys after the
    row and of other documents; what is not a number counts as no mass. And the rows' positions, far below 0
    past the last."""
    row = tl.load(rows_ptr + r, mask=r < num_rows, other=-1073741824)
    lse = tl.load(lse_ptr + head * num_rows + r, mask=r < num_rows, other=0.0) * LOG2E
    q = load_sampled(q_ptr, r, head, batch_heads, num_rows, D)
    scores = tl.dot(k, tl.trans(q), input_precision=PREC) * scale
    p = tl.math.exp2(scores - lse[None, :])
    # In this order, which makes one instruction of each, what is not a number becomes 0.
    p = tl.where(p > 0.0, p, 0.0)
    p = tl.where(p < 1.0, p, 1.0)
    p = tl.where(position[:, None] <= row[None, :], p, 0.0)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + head // HEADS * num_rows + r, mask=r < num_rows, other=0)
        p = tl.where(position[:, None] >= start[None, :], p, 0.0)
    return p, row


@triton.jit
def row_probabilities(
    q,
    lse_ptr,
    rows_ptr,
    there,
    clear,
    k,
    block,
    key_part,
    scale,
    BLOCK: tl.constexpr,
    PREC: tl.constexpr,
):
    """:func:`seen_probabilities` of a block, ``[rows, keys]``, from pointers to the rows' queries,
    log-sum-exp and positions, of which those count that are ``there``. ``clear``: they come after all of
    the keys. ``key_part``: where in the block keys are, as a share of it."""
    row = tl.load(rows_ptr, mask=there, other=-1073741824)
    lse = tl.load(lse_ptr, mask=there, other=float("inf")) * LOG2E
    scores = tl.dot(tl.load(q, mask=there[:, None], other=0.0), tl.trans(k), input_precision=PREC)
    p = tl.math.exp2(scores * scale - lse[:, None])
    p = tl.where(p > 0.0, p, 0.0)
    p = tl.where(p < 1.0, p, 1.0)
    if not clear:
        # Exact: of few blocks.
        after = tl.minimum(tl.maximum(row - block * BLOCK, -1), BLOCK).to(tl.float32) / BLOCK
        p = tl.where(key_part[None, :] <= after[:, None], p, 0.0)
    return p, row


@triton.jit
def add_mass(ptr, distance, mass, num_blocks, one):
    """Add masses, in fixed point, to the sums of their distances."""
    addend = (mass * one + 0.5).to(tl.int32)
    there = (addend > 0) & (distance >= 0) & (distance < num_blocks)
    tl.atomic_add(ptr + distance, addend, mask=there, sem="relaxed")


@triton.jit
def add_masses(ptr, distance, before, here, after, num_blocks, one):
    """:func:`add_mass` of three, to the sums of a distance, and of the one before and the one after it. Side
    by side, for the compiler to add them at once."""
    both = tl.join(tl.join(before, after), tl.join(here, tl.zeros_like(here)))
    addend = (tl.reshape(both, [both.shape[0], 4]) * one + 0.5).to(tl.int32)
    to = (distance - 1)[:, None] + tl.arange(0, 4)[None, :]
    there = (addend > 0) & (to >= 0) & (to < num_blocks)
    tl.atomic_add(ptr[:, None] + to, addend, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["rank"])
def _mass_kernel(
    q_ptr, rows_ptr, starts_ptr, further_ptr, k_ptr, lse_ptr, value_ptr, slash_ptr, held_ptr,
    k_ss, k_sb, k_sh, num_rows, batch_heads, length, num_blocks, rank, world, inner, near, sink, scale, one,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    IN_STRATUM: tl.constexpr, FIT: tl.constexpr, ALL_ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    STRATA: tl.constexpr, KEYS: tl.constexpr, PER_COST: tl.constexpr, TWICE: tl.constexpr,
    EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    kv_heads: tl.constexpr = HEADS // GROUP
    parts: tl.constexpr = BLOCK // KEYS
    # A tile's lines: so many strata of so many heads. Tensor cores take 64 lines, and few strata a tile
    # leave few that come before the keys.
    lines: tl.constexpr = TOGETHER * STRATA
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    start = tl.program_id(0) * KEYS
    keys = tl.arange(0, KEYS)
    k = load_rows(k_ptr + batch * k_sb + kv_head * k_sh, start, k_ss, keys, length, D, EVEN)
    local = start + keys
    block = block_at(tl.program_id(0) // parts, rank, world, inner)
    offset = tl.program_id(0) % parts * KEYS + keys
    # Keys past the end have positions past every row.
    position = block * BLOCK + offset
    # The same as a share of the block, as distances within it are taken.
    key_part = offset.to(tl.float32) / BLOCK
    scale = scale * LOG2E
    # Rows ascend: how many come before this block, and how many before it or have it in their window.
    every = tl.arange(0, ALL_ROWS)
    row_blocks = tl.load(rows_ptr + every, mask=every < num_rows, other=2147483647) // BLOCK
    early = tl.sum((row_blocks < block).to(tl.int32), 0)
    close = tl.sum((row_blocks - block < tl.maximum(near, 1)).to(tl.int32), 0)
    strata = num_rows // IN_STRATUM
    first = early // IN_STRATUM // STRATA * STRATA
    tiles = tl.maximum(tl.cdiv(strata - first, STRATA), 1)
    g = tl.arange(0, lines) // STRATA
    across = tl.arange(0, lines) % STRATA * IN_STRATUM
    to_query = (across * batch_heads + g)[:, None] * D + tl.arange(0, D)[None, :]
    to_lse = g * num_rows + across
    # Over the strata of a tile that are 8 apart, which the same thread has.
    total = tl.zeros([lines // 16, 8, KEYS], tl.float32)
    largest = tl.zeros([lines // 16, 8, KEYS], tl.float32)
    if FIT > 1:
        mass = tl.zeros([lines, KEYS], tl.float32)
    # All in one loop, so that the loads of the next tile run ahead over heads.
    for turn in range(tl.cdiv(GROUP, TOGETHER) * tiles * IN_STRATUM):
        j = turn % IN_STRATUM
        tile = turn // IN_STRATUM
        in_group = tile // tiles * TOGETHER
        head = batch * HEADS + kv_head * GROUP + in_group
        r = (first + tile % tiles * STRATA) * IN_STRATUM + j
        there = across < num_rows - r
        if GROUP % TOGETHER != 0:
            there = there & (g < GROUP - in_group)
        p, row = row_probabilities(
            q_ptr + (r.to(tl.int64) * batch_heads + head) * D + to_query,
            lse_ptr + head * num_rows + r + to_lse, rows_ptr + r + across,
            there, r >= close, k, block, key_part, scale, BLOCK, PREC,
        )  # fmt: skip
        if starts_ptr is not None:
            began = tl.load(starts_ptr + batch * num_rows + r + across, mask=there, other=0)
            p = tl.where(position[None, :] >= began[:, None], p, 0.0)
        apart = row // BLOCK - block
        whole = tl.sum(p, 1)
        if j < FIT:
            # By how much of a block the row is further on in its own than the key in its, and the
            # other way round; both have the further one of the two.
            row_part = (row % BLOCK).to(tl.float32) / BLOCK
            further = tl.sum(p * tl.maximum(row_part[:, None], key_part[None, :]), 1)
            after = further - tl.sum(p * key_part[None, :], 1)
            before = further - row_part * whole
            add_masses(
                slash_ptr + (head + g) * num_blocks, apart, before, whole - before - after, after,
                num_blocks, one,
            )  # fmt: skip
            counts = tl.where((apart >= near)[:, None], p, 0.0)
            if FIT > 1:
                mass += counts
            else:
                mass = counts
            if j == FIT - 1:
                by_thread = tl.reshape(mass, [lines // 16, 2, 8, KEYS])
                total += tl.sum(by_thread, 1)
                if TWICE:
                    largest = tl.maximum(largest, tl.max(by_thread, 1))
                if FIT > 1:
                    mass = tl.zeros([lines, KEYS], tl.float32)
        if FIT == IN_STRATUM or j >= FIT:
            add_mass(held_ptr + (head + g) * num_blocks, apart, whole, num_blocks, one)
        if (j == IN_STRATUM - 1) & (tile % tiles == tiles - 1):
            value = tl.sum(tl.reshape(total, [TOGETHER, STRATA // 2, KEYS]), 1)
            if TWICE:
                most = tl.max(tl.reshape(largest, [TOGETHER, STRATA // 2, KEYS]), 1)
                value = tl.maximum(value - most, 0.0)
            if PER_COST:
                # Query blocks that see the column beyond their window.
                seen = num_blocks - block - near
                if further_ptr is not None:
                    seen = tl.load(further_ptr + batch * num_blocks + block) + 1 - near
                value = value * tl.where(seen > 0, 1.0 / tl.maximum(seen, 1), 0.0)
            bits = tl.where(
                (position < sink)[None, :], 2147483647, value.to(tl.int32, bitcast=True)
            )
            one_of = tl.arange(0, TOGETHER)[:, None]
            inside = (local < length)[None, :] & (one_of < GROUP - in_group)
            tl.store(value_ptr + (head + one_of) * length + local[None, :], bits, mask=inside)
            total = tl.zeros([lines // 16, 8, KEYS], tl.float32)
            largest = tl.zeros([lines // 16, 8, KEYS], tl.float32)


def attention_masses(sampled_rows, key, lse, num_sinks, divide_by_cost):
    """Launch the sums; see the reference."""
    sample = sampled_rows
    length, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = sample.query.shape
    block, num_blocks = (
        sample.block_size,
        cdiv(length * sample.world, sample.block_size),
    )
    values = torch.empty(batch, heads, length, dtype=torch.int32, device=key.device)
    masses = torch.zeros(2, batch, heads, num_blocks, dtype=torch.int32, device=key.device)
    group = heads // kv_heads
    together = min(4, next_power_of_2(group))
    # Without tensor cores a product's operands are held in registers. With them, three programs fit a
    # multiprocessor's, whose loads and sums hide behind each other's: faster there than two with 128 keys.
    keys, warps, most = 32, 8, {}
    if key.dtype != torch.float32:
        keys, warps, most = 64, 4, dict(maxnreg=168)
    launch(
        _mass_kernel, (cdiv(length, keys), batch * kv_heads),
        sample.query, sample.rows, sample.starts, None if sample.costs is None else sample.costs.further,
        key, lse, values, *masses,
        *key.stride()[:3], num_rows, batch * heads, length, num_blocks,
        sample.rank, sample.world, sample.inner, sample.window_blocks, num_sinks, sample.softmax_scale,
        fixed_point_one(num_rows),
        HEADS=heads, GROUP=group, D=dim, BLOCK=block,
        IN_STRATUM=sample.rows_per_stratum,
        FIT=sample.num_selection_rows, ALL_ROWS=next_power_of_2(num_rows),
        TOGETHER=together, STRATA=64 // together, KEYS=keys, PER_COST=divide_by_cost,
        TWICE=sample.drop_max_stratum,
        EVEN=length % keys == 0, PREC=precision_for(key), num_warps=warps, num_stages=2,
        **most,
    )  # fmt: skip
    return values, masses
