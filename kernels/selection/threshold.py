# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Slashes and columns at a price, from few columns that may be worth it: the keys of these candidates are at
hand on every rank, and their probabilities are computed again, which takes next to no time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import fixed_point_one, float_bits
from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, gather_rows, precision_for
from .masses import seen_probabilities


@triton.jit
def _share_kernel(
    q_ptr, rows_ptr, starts_ptr, keys_ptr, position_ptr, value_ptr, lse_ptr, out_ptr,
    num_rows, batch_heads, count, seq_length, num_blocks, least, scale, one,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, IN_STRATUM: tl.constexpr,
    FIT: tl.constexpr, STRATA: tl.constexpr, KEYS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    listed = entry < count
    position = tl.load(position_ptr + head * count + entry, mask=listed, other=seq_length)
    # As integers, bits of what is positive order like it, and sinks come before all.
    value = tl.load(value_ptr + head * count + entry, mask=listed, other=0)
    position = tl.where(value >= least, position, seq_length)
    # Few of a tile's candidates may be taken, and often none is.
    if tl.min(position, 0) >= seq_length:
        return
    k = gather_rows(keys_ptr + head * count * D, tl.where(listed, entry, 0), D)
    scale = scale * LOG2E
    to = out_ptr + head * num_blocks
    for stratum in range(0, num_rows // IN_STRATUM, STRATA):
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
            apart = row[None, :] - position[:, None]
            far = (apart % BLOCK).to(tl.float32) / BLOCK
            # Side by side, for the compiler to add them at once.
            both = (tl.join(p * (1.0 - far), p * far) * one + 0.5).to(tl.int32)
            distance = (apart // BLOCK)[:, :, None] + tl.arange(0, 2)[None, None, :]
            there = (both > 0) & (distance >= 0) & (distance < num_blocks)
            tl.atomic_add(to + distance, both, mask=there, sem="relaxed")


def slash_mass_in_columns(sampled_rows, keys, positions, values, min_value, lse, num_blocks):
    """Launch the sums by distance; see the reference."""
    sample = sampled_rows
    batch, heads, count, dim = keys.shape
    num_rows = len(sample.rows)
    masses = torch.zeros(batch, heads, num_blocks, dtype=torch.int32, device=keys.device)
    tile = 64
    launch(
        _share_kernel, (cdiv(count, tile), batch * heads),
        sample.query, sample.rows, sample.starts, keys, positions, values, lse, masses,
        num_rows, batch * heads, count, sample.seq_length, num_blocks, float_bits(min_value),
        sample.softmax_scale, fixed_point_one(num_rows),
        HEADS=heads, D=dim, BLOCK=sample.block_size, IN_STRATUM=sample.rows_per_stratum,
        FIT=sample.num_selection_rows,
        STRATA=32, KEYS=tile, PREC=precision_for(keys), num_warps=4, num_stages=2,
    )  # fmt: skip
    return masses


@triton.jit
def _slash_kernel(
    total_ptr, inside_ptr, seen_ptr, price_ptr, member_ptr, usual_ptr, outside_ptr, value_ptr,
    num_blocks, near, unit, one, usual_price,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    price = tl.load(price_ptr + bh % HEADS)
    before = 0
    for first in range(0, num_blocks, WIDTH):
        distance = first + tl.arange(0, WIDTH)
        there = distance < num_blocks
        at = bh * num_blocks + distance
        mass = tl.load(total_ptr + at, mask=there, other=0) - tl.load(
            inside_ptr + at, mask=there, other=0
        )
        # The two sums are rounded apart.
        seen = num_blocks - distance if SPREAD else num_blocks
        if seen_ptr is not None:
            seen = tl.load(seen_ptr + bh // HEADS * num_blocks + distance, mask=there, other=1.0)
        value = tl.maximum(mass, 0).to(tl.float32) / one / (unit * seen)
        kept = (distance < near) | (value >= price)
        usual = (distance < near) | (value >= usual_price)
        tl.store(value_ptr + at, value, mask=there)
        tl.store(member_ptr + at, kept.to(tl.uint8), mask=there)
        tl.store(usual_ptr + at, usual.to(tl.uint8), mask=there)
        outside = tl.where(there & ~usual, 1, 0)
        tl.store(outside_ptr + at, before + tl.cumsum(outside, 0), mask=there)
        before += tl.sum(outside, 0)


def select_slashes_by_price(
    slash_mass, mass_in_columns, price, reference_price, window_blocks, cost_per_block_pair, fixed_point_one,
    stratified, costs=None,
):  # fmt: skip
    """Launch the choice of slashes; see the reference."""
    batch, heads, num_blocks = slash_mass.shape
    member = torch.empty(slash_mass.shape, dtype=torch.uint8, device=slash_mass.device)
    usual = torch.empty_like(member)
    value = torch.empty(slash_mass.shape, dtype=torch.float32, device=slash_mass.device)
    outside = torch.empty_like(slash_mass)
    launch(
        _slash_kernel, (batch * heads,),
        slash_mass, mass_in_columns, None if costs is None else costs.seen, price,
        member, usual, outside, value,
        num_blocks, window_blocks, cost_per_block_pair, float(fixed_point_one), reference_price,
        HEADS=heads, WIDTH=min(4096, next_power_of_2(num_blocks)), SPREAD=stratified, num_warps=4,
    )  # fmt: skip
    return member, usual, outside, value


@triton.jit
def _column_kernel(
    q_ptr, rows_ptr, starts_ptr, further_ptr, factor_ptr, keys_ptr, position_ptr, lse_ptr,
    member_ptr, usual_ptr, outside_ptr, price_ptr,
    column_ptr, value_ptr, held_ptr,
    num_rows, batch_heads, count, seq_length, num_blocks, sink, scale, unit,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, IN_STRATUM: tl.constexpr, FIT: tl.constexpr,
    STRATA: tl.constexpr, KEYS: tl.constexpr, TWICE: tl.constexpr, SPREAD: tl.constexpr,
    CHOOSE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Without anything to choose, only what is measured by held-out rows, or all, is computed.
    skipped: tl.constexpr = 0 if CHOOSE or FIT == IN_STRATUM else FIT
    head = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    listed = entry < count
    position = tl.load(position_ptr + head * count + entry, mask=listed, other=seq_length)
    k = gather_rows(keys_ptr + head * count * D, tl.where(listed, entry, 0), D)
    scale = scale * LOG2E
    member_ptr += head * num_blocks
    usual_ptr += head * num_blocks
    block = position // BLOCK
    total = tl.zeros([KEYS], tl.float32)
    largest = tl.zeros([KEYS], tl.float32)
    held = tl.zeros([KEYS], tl.float32)
    for stratum in range(0, num_rows // IN_STRATUM, STRATA):
        mass = tl.zeros([KEYS, STRATA], tl.float32)
        for j in tl.static_range(skipped, IN_STRATUM):
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
            apart = (row // BLOCK)[None, :] - block[:, None]
            if CHOOSE and j < FIT:
                covered = tl.load(usual_ptr + apart, mask=p > 0, other=1)
                mass += tl.where(covered == 0, p, 0.0)
            if j >= FIT or FIT == IN_STRATUM:
                covered = tl.load(member_ptr + apart, mask=p > 0, other=1)
                held += tl.sum(tl.where(covered == 0, p, 0.0), 1)
        if CHOOSE:
            total += tl.sum(mass, 1)
            largest = tl.maximum(largest, tl.max(mass, 1))
    at = head * count + entry
    tl.store(held_ptr + at, held, mask=listed)
    if CHOOSE:
        if TWICE:
            total = tl.maximum(total - largest, 0.0)
        # Query blocks that the column adds to: those at distances that are no slash.
        there = listed & (position < seq_length)
        further = num_blocks - 1 - block
        if further_ptr is not None:
            further = tl.load(further_ptr + head // HEADS * num_blocks + block, mask=there, other=0)
        adds = tl.load(outside_ptr + head * num_blocks + further, mask=there, other=0)
        if not SPREAD:
            adds = tl.zeros_like(adds) + num_blocks
        adds = tl.maximum(adds, 1)
        if factor_ptr is not None:
            adds = adds.to(tl.float32) * tl.load(factor_ptr + head // HEADS)
        value = total / (unit * adds)
        kept = (total > 0) & (value >= tl.load(price_ptr + head % HEADS))
        kept = there & (kept | (position < sink))
        tl.store(column_ptr + at, tl.where(kept, position, seq_length), mask=listed)
        tl.store(value_ptr + at, tl.where(there, value, 0.0), mask=listed)


def select_columns_by_price(
    sampled_rows, keys, positions, lse, slashes, reference_slashes, num_outside, price, num_sinks,
    cost_per_block,
):  # fmt: skip
    """Launch the choice of columns; see the reference."""
    columns = torch.empty_like(positions)
    value = torch.empty(positions.shape, dtype=torch.float32, device=keys.device)
    held = torch.empty_like(value)
    slashes, chosen = (slashes, reference_slashes, num_outside, price), (columns, value, held)
    _launch_columns(
        sampled_rows, keys, positions, lse, slashes, chosen, num_sinks, cost_per_block, True
    )
    return columns, value, held


def column_masses(sampled_rows, keys, positions, lse, slashes):
    """Launch the measuring of columns; see the reference."""
    held = torch.empty(positions.shape, dtype=torch.float32, device=keys.device)
    # What is not looked at stands in for what is not there.
    slashes, chosen = (slashes, slashes, positions, held), (positions, held, held)
    _launch_columns(sampled_rows, keys, positions, lse, slashes, chosen, 0, 1.0, False)
    return held


def _launch_columns(sampled_rows, keys, positions, lse, slashes, chosen, sink, unit, choose):
    sample = sampled_rows
    batch, heads, count, dim = keys.shape
    num_rows, num_blocks = len(sample.rows), slashes[0].shape[-1]
    tile = 64
    launch(
        _column_kernel, (cdiv(count, tile), batch * heads),
        sample.query, sample.rows, sample.starts,
        *((None, None) if sample.costs is None else (sample.costs.further, sample.costs.factor)),
        keys, positions, lse, *slashes, *chosen,
        num_rows, batch * heads, count, sample.seq_length, num_blocks, sink, sample.softmax_scale, unit,
        HEADS=heads, D=dim, BLOCK=sample.block_size, IN_STRATUM=sample.rows_per_stratum,
        FIT=sample.num_selection_rows,
        STRATA=32, KEYS=tile,
        TWICE=sample.drop_max_stratum, SPREAD=sample.stratified,
        CHOOSE=choose, PREC=precision_for(keys), num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _recall_kernel(
    mass_ptr, member_ptr, column_ptr, held_ptr, out_ptr, num_blocks, count, seq_length, one, rows,
    WIDTH: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    kept = tl.zeros([WIDTH], tl.float32)
    for first in range(0, num_blocks, WIDTH):
        there = first + at < num_blocks
        to = bh * num_blocks + first + at
        member = tl.load(member_ptr + to, mask=there, other=0)
        mass = tl.load(mass_ptr + to, mask=there, other=0)
        kept += tl.where(member != 0, mass, 0).to(tl.float32)
    kept = kept / one
    for first in range(0, count, WIDTH):
        there = first + at < count
        to = bh * count + first + at
        column = tl.load(column_ptr + to, mask=there, other=seq_length)
        kept += tl.load(held_ptr + to, mask=column < seq_length, other=0.0)
    tl.store(out_ptr + bh, tl.sum(kept, 0) / rows)


def attention_recall(
    slash_mass, slashes, columns, column_mass, seq_length, fixed_point_one, num_rows
):
    """Launch the sums; see the reference."""
    batch, heads, num_blocks = slashes.shape
    recall = torch.empty(batch, heads, dtype=torch.float32, device=slashes.device)
    launch(
        _recall_kernel, (batch * heads,),
        slash_mass, slashes, columns, column_mass, recall, num_blocks, columns.shape[-1], seq_length,
        float(fixed_point_one), float(num_rows), WIDTH=1024, num_warps=4,
    )  # fmt: skip
    return recall
