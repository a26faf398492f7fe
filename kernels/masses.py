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

from .launch import cdiv, launch, next_power_of_2
from .reference_choice import fixed_point_one
from .scores import load_sampled
from .tiles import LOG2E, block_at, load_rows, precision_for


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
    p = tl.where((position[:, None] <= row[None, :]) & (p == p), tl.where(p < 1, p, 1.0), 0.0)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + head // HEADS * num_rows + r, mask=r < num_rows, other=0)
        p = tl.where(position[:, None] >= start[None, :], p, 0.0)
    return p, row


@triton.jit
def add_mass(ptr, distance, mass, num_blocks, one):
    """Add masses, in fixed point, to the sums of their distances."""
    addend = (mass * one + 0.5).to(tl.int32)
    there = (addend > 0) & (distance >= 0) & (distance < num_blocks)
    tl.atomic_add(ptr + distance, addend, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["rank"])
def _mass_kernel(
    q_ptr, rows_ptr, starts_ptr, further_ptr, k_ptr, lse_ptr, value_ptr, slash_ptr, held_ptr,
    k_ss, k_sb, k_sh, num_rows, batch_heads, length, num_blocks, rank, world, inner, near, sink, scale, one,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    IN_STRATUM: tl.constexpr, FIT: tl.constexpr, ALL_ROWS: tl.constexpr, STRATA: tl.constexpr,
    KEYS: tl.constexpr, PER_COST: tl.constexpr, TWICE: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    kv_heads: tl.constexpr = HEADS // GROUP
    parts: tl.constexpr = BLOCK // KEYS
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
    scale = scale * LOG2E
    # Rows ascend: how many come before this block.
    every = tl.arange(0, ALL_ROWS)
    row_blocks = tl.load(rows_ptr + every, mask=every < num_rows, other=2147483647) // BLOCK
    early = tl.sum((row_blocks < block).to(tl.int32), 0)
    strata = num_rows // IN_STRATUM
    first = early // IN_STRATUM // STRATA * STRATA
    for g in range(GROUP):
        head = batch * HEADS + kv_head * GROUP + g
        total = tl.zeros([KEYS], tl.float32)
        largest = tl.zeros([KEYS], tl.float32)
        for stratum in range(first, strata, STRATA):
            mass = tl.zeros([KEYS, STRATA], tl.float32)
            for j in range(FIT):
                r = (stratum + tl.arange(0, STRATA)) * IN_STRATUM + j
                p, row = seen_probabilities(
                    q_ptr,
                    rows_ptr,
                    starts_ptr,
                    lse_ptr,
                    r,
                    head,
                    k,
                    position,
                    num_rows,
                    batch_heads,
                    scale,
                    HEADS,
                    D,
                    PREC,
                )
                apart = row // BLOCK - block
                mass += tl.where((apart >= near)[None, :], p, 0.0)
                # By how much of a block the row is further on in its own than the key in its.
                further = ((row % BLOCK)[None, :] - offset[:, None]).to(tl.float32) / BLOCK
                after = tl.sum(p * tl.maximum(further, 0.0), 0)
                before = tl.sum(p * tl.maximum(-further, 0.0), 0)
                to = slash_ptr + head * num_blocks
                whole = tl.sum(p, 0)
                add_mass(to, apart - 1, before, num_blocks, one)
                add_mass(to, apart, whole - before - after, num_blocks, one)
                add_mass(to, apart + 1, after, num_blocks, one)
                if FIT == IN_STRATUM:
                    add_mass(held_ptr + head * num_blocks, apart, whole, num_blocks, one)
            total += tl.sum(mass, 1)
            largest = tl.maximum(largest, tl.max(mass, 1))
            for j in range(FIT, IN_STRATUM):
                r = (stratum + tl.arange(0, STRATA)) * IN_STRATUM + j
                p, row = seen_probabilities(
                    q_ptr,
                    rows_ptr,
                    starts_ptr,
                    lse_ptr,
                    r,
                    head,
                    k,
                    position,
                    num_rows,
                    batch_heads,
                    scale,
                    HEADS,
                    D,
                    PREC,
                )
                to = held_ptr + head * num_blocks
                add_mass(to, row // BLOCK - block, tl.sum(p, 0), num_blocks, one)
        if TWICE:
            total = tl.maximum(total - largest, 0.0)
        if PER_COST:
            # Query blocks that see the column beyond their window.
            seen = num_blocks - block - near
            if further_ptr is not None:
                seen = tl.load(further_ptr + batch * num_blocks + block) + 1 - near
            total = tl.where(seen > 0, total / tl.maximum(seen, 1), 0.0)
        bits = tl.where(position < sink, 2147483647, total.to(tl.int32, bitcast=True))
        tl.store(value_ptr + head * length + local, bits, mask=local < length)


def row_masses(sample, key, lse, sink, per_cost):
    """Launch the sums; see :func:`kernels.row_masses`."""
    length, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = sample.query.shape
    block, num_blocks = sample.block_size, cdiv(length * sample.world, sample.block_size)
    values = torch.empty(batch, heads, length, dtype=torch.int32, device=key.device)
    masses = torch.zeros(2, batch, heads, num_blocks, dtype=torch.int32, device=key.device)
    # Without tensor cores a product's operands are held in registers.
    keys, warps = (64, 8) if key.dtype == torch.float32 else (block, 4)
    launch(
        _mass_kernel, (cdiv(length, keys), batch * kv_heads),
        sample.query, sample.rows, sample.starts, None if sample.costs is None else sample.costs.further,
        key, lse, values, *masses,
        *key.stride()[:3], num_rows, batch * heads, length, num_blocks,
        sample.rank, sample.world, sample.inner, sample.near, sink, sample.softmax_scale,
        fixed_point_one(num_rows),
        HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block,
        IN_STRATUM=sample.rows_in_stratum, FIT=sample.fit, ALL_ROWS=next_power_of_2(num_rows), STRATA=32,
        KEYS=keys, PER_COST=per_cost, TWICE=sample.twice, EVEN=length % keys == 0, PREC=precision_for(key),
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return values, masses
