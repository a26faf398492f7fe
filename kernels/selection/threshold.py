# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Selection of slashes and columns by price, and recall.

Few columns can be worth the price. Every rank has the keys of these candidates, and computes their
probabilities again, which takes little time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.fixed_point import fixed_point_one as one_of_rows
from ..common.fixed_point import float_bits
from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, gather_rows, precision_for
from .probabilities import (
    NO_ROW,
    add_three,
    clamp_probability,
    load_sampled_queries,
    probabilities_by_key,
)

_BLOCK_N = 64
"""Columns of a tile."""
_TILE_STRATA = 32
"""Sampled rows of a tile, each of another stratum."""


@triton.jit
def _mass_in_columns_kernel(
    # Sampled rows
    q_ptr,  # [R, b, h, D]
    rows_ptr,  # [R]
    starts_ptr,  # [b, R], or None
    # Columns
    keys_ptr,  # [b, h, C, D]
    position_ptr,  # [b, h, C]
    value_ptr,  # [b, h, C]
    lse_ptr,  # [b, h, R]
    # Output
    mass_ptr,  # [b, h, NB]
    num_rows,
    batch_heads,
    num_columns,
    seq_length,
    num_blocks,
    min_value,  # as bits of a float32
    softmax_scale,
    one,  # in fixed point
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_PER_STRATUM: tl.constexpr,
    NUM_SELECTION_ROWS: tl.constexpr,
    TILE_STRATA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a tile of columns of a head."""
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < num_columns
    position = tl.load(position_ptr + head * num_columns + column, mask=mask, other=seq_length)
    # Bits of positive floats order like integers, and sinks have the largest integer.
    value = tl.load(value_ptr + head * num_columns + column, mask=mask, other=0)
    position = tl.where(value >= min_value, position, seq_length)  # [BLOCK_N]
    # Few candidates are worth enough, and often none of a tile.
    if tl.min(position, 0) >= seq_length:
        return
    k = gather_rows(keys_ptr + head * num_columns * D, tl.where(mask, column, 0), D)  # [BLOCK_N, D]
    scale = softmax_scale * LOG2E
    block = tl.where(position < seq_length, position // BLOCK, num_blocks)  # [BLOCK_N]
    key_part = (position % BLOCK).to(tl.float32) / BLOCK  # [BLOCK_N], of a block
    mass_ptr += head * num_blocks
    for stratum in range(0, num_rows // ROWS_PER_STRATUM, TILE_STRATA):
        for j in range(NUM_SELECTION_ROWS):
            r = (stratum + tl.arange(0, TILE_STRATA)) * ROWS_PER_STRATUM + j
            row = tl.load(rows_ptr + r, mask=r < num_rows, other=NO_ROW)  # [TILE_STRATA]
            lse = tl.load(lse_ptr + head * num_rows + r, mask=r < num_rows, other=0.0) * LOG2E
            q = load_sampled_queries(q_ptr, r, head, batch_heads, num_rows, D)  # [TILE_STRATA, D]
            scores = tl.dot(q, tl.trans(k), input_precision=PREC) * scale
            # [TILE_STRATA, BLOCK_N]: a row's sums are within a few threads.
            p = clamp_probability(tl.math.exp2(scores - lse[:, None]))
            p = tl.where(position[None, :] <= row[:, None], p, 0.0)
            if starts_ptr is not None:
                start = tl.load(
                    starts_ptr + head // HEADS * num_rows + r, mask=r < num_rows, other=0
                )
                p = tl.where(position[None, :] >= start[:, None], p, 0.0)
            # Exact: fractions of a block, which is a power of 2.
            apart = ((row % BLOCK).to(tl.float32) / BLOCK)[:, None] - key_part[None, :]
            is_before = apart < 0
            further = tl.where(is_before, apart + 1.0, apart)
            nearer_mass = (p * (1.0 - further) * one + 0.5).to(tl.int32)
            farther_mass = (p * further * one + 0.5).to(tl.int32)
            # Columns of one block are added up first, since atomics are most of the time: their pairs with a
            # row are at the blocks' distance, one less or one more.
            before = tl.where(is_before, nearer_mass, 0)
            here = tl.where(is_before, farther_mass, nearer_mass)
            after = tl.where(is_before, 0, farther_mass)
            distance = row // BLOCK
            current = tl.min(block, 0)
            while current < num_blocks:
                same = (block == current)[None, :]
                add_three(
                    mass_ptr,
                    distance - current,
                    tl.sum(tl.where(same, before, 0), 1),
                    tl.sum(tl.where(same, here, 0), 1),
                    tl.sum(tl.where(same, after, 0), 1),
                    num_blocks,
                )
                current = tl.min(tl.where(block > current, block, num_blocks), 0)


def slash_mass_in_columns(sampled_rows, keys, positions, values, min_value, lse, num_blocks):
    rows = sampled_rows
    batch, heads, num_columns, dim = keys.shape
    num_rows = len(rows.rows)
    masses = torch.zeros(batch, heads, num_blocks, dtype=torch.int32, device=keys.device)
    launch(
        _mass_in_columns_kernel,
        (cdiv(num_columns, _BLOCK_N), batch * heads),
        q_ptr=rows.query,
        rows_ptr=rows.rows,
        starts_ptr=rows.starts,
        keys_ptr=keys,
        position_ptr=positions,
        value_ptr=values,
        lse_ptr=lse,
        mass_ptr=masses,
        num_rows=num_rows,
        batch_heads=batch * heads,
        num_columns=num_columns,
        seq_length=rows.seq_length,
        num_blocks=num_blocks,
        min_value=float_bits(min_value),
        softmax_scale=rows.softmax_scale,
        one=one_of_rows(num_rows),
        HEADS=heads,
        D=dim,
        BLOCK=rows.block_size,
        ROWS_PER_STRATUM=rows.rows_per_stratum,
        NUM_SELECTION_ROWS=rows.num_selection_rows,
        TILE_STRATA=64,  # of tensor cores
        BLOCK_N=_BLOCK_N,
        PREC=precision_for(keys),
        num_warps=4,
        num_stages=2,
    )
    return masses


@triton.jit
def _slash_kernel(
    slash_mass_ptr,  # [b, h, NB]
    mass_in_columns_ptr,  # [b, h, NB]
    seen_ptr,  # [b, NB], or None
    price_ptr,  # [h]
    # Outputs, [b, h, NB]
    slashes_ptr,
    reference_slashes_ptr,
    num_outside_ptr,
    value_ptr,
    num_blocks,
    window_blocks,
    cost_per_block_pair,
    one,  # in fixed point
    reference_price,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRATIFIED: tl.constexpr,
):
    """One program a head."""
    bh = tl.program_id(0).to(tl.int64)
    price = tl.load(price_ptr + bh % HEADS)
    outside_before = 0
    for first in range(0, num_blocks, BLOCK_N):
        distance = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        mask = distance < num_blocks
        at = bh * num_blocks + distance
        mass = tl.load(slash_mass_ptr + at, mask=mask, other=0)
        mass = mass - tl.load(mass_in_columns_ptr + at, mask=mask, other=0)
        block_pairs = num_blocks - distance if STRATIFIED else num_blocks
        if seen_ptr is not None:
            block_pairs = tl.load(
                seen_ptr + bh // HEADS * num_blocks + distance, mask=mask, other=1.0
            )
        # The difference of two sums that are rounded apart may be negative.
        value = tl.maximum(mass, 0).to(tl.float32) / one / (cost_per_block_pair * block_pairs)
        if seen_ptr is not None:  # no range is as long: not a number would rank before all others
            value = tl.where(block_pairs > 0, value, 0.0)
        selected = (distance < window_blocks) | (value >= price)
        reference = (distance < window_blocks) | (value >= reference_price)
        tl.store(value_ptr + at, value, mask=mask)
        tl.store(slashes_ptr + at, selected.to(tl.uint8), mask=mask)
        tl.store(reference_slashes_ptr + at, reference.to(tl.uint8), mask=mask)
        outside = tl.where(mask & ~reference, 1, 0)
        tl.store(num_outside_ptr + at, outside_before + tl.cumsum(outside, 0), mask=mask)
        outside_before += tl.sum(outside, 0)


def select_slashes_by_price(
    slash_mass,
    mass_in_columns,
    price,
    reference_price,
    window_blocks,
    cost_per_block_pair,
    fixed_point_one,
    stratified,
    costs=None,
):
    batch, heads, num_blocks = slash_mass.shape
    slashes = torch.empty(slash_mass.shape, dtype=torch.uint8, device=slash_mass.device)
    reference_slashes = torch.empty_like(slashes)
    num_outside = torch.empty_like(slash_mass)
    value = torch.empty(slash_mass.shape, dtype=torch.float32, device=slash_mass.device)
    launch(
        _slash_kernel,
        (batch * heads,),
        slash_mass_ptr=slash_mass,
        mass_in_columns_ptr=mass_in_columns,
        seen_ptr=None if costs is None else costs.seen,
        price_ptr=price,
        slashes_ptr=slashes,
        reference_slashes_ptr=reference_slashes,
        num_outside_ptr=num_outside,
        value_ptr=value,
        num_blocks=num_blocks,
        window_blocks=window_blocks,
        cost_per_block_pair=cost_per_block_pair,
        one=float(fixed_point_one),
        reference_price=reference_price,
        HEADS=heads,
        BLOCK_N=min(4096, next_power_of_2(num_blocks)),
        STRATIFIED=stratified,
        num_warps=4,
    )
    return slashes, reference_slashes, num_outside, value


@triton.jit
def _column_kernel(
    # Sampled rows
    q_ptr,  # [R, b, h, D]
    rows_ptr,  # [R]
    starts_ptr,  # [b, R], or None
    further_ptr,  # [b, NB], or None
    factor_ptr,  # [b], or None
    # Candidates
    keys_ptr,  # [b, h, C, D]
    position_ptr,  # [b, h, C]
    lse_ptr,  # [b, h, R]
    # Slashes
    slashes_ptr,  # [b, h, NB]
    reference_slashes_ptr,  # [b, h, NB], or None to select nothing
    num_outside_ptr,  # [b, h, NB], or None
    price_ptr,  # [h], or None
    # Outputs, [b, h, C]
    column_ptr,  # or None
    value_ptr,  # or None
    mass_ptr,
    num_rows,
    batch_heads,
    num_columns,
    seq_length,
    num_blocks,
    num_sinks,
    softmax_scale,
    cost_per_block,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_PER_STRATUM: tl.constexpr,
    NUM_SELECTION_ROWS: tl.constexpr,
    TILE_STRATA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DROP_MAX_STRATUM: tl.constexpr,
    STRATIFIED: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a tile of candidates of a head."""
    SELECT: tl.constexpr = reference_slashes_ptr is not None
    ALL_MEASURE: tl.constexpr = NUM_SELECTION_ROWS == ROWS_PER_STRATUM
    # With nothing to select, only the rows that measure the mass are needed.
    FIRST_ROW: tl.constexpr = 0 if SELECT or ALL_MEASURE else NUM_SELECTION_ROWS
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < num_columns
    position = tl.load(position_ptr + head * num_columns + column, mask=mask, other=seq_length)
    k = gather_rows(keys_ptr + head * num_columns * D, tl.where(mask, column, 0), D)  # [BLOCK_N, D]
    scale = softmax_scale * LOG2E
    slashes_ptr += head * num_blocks
    if SELECT:
        reference_slashes_ptr += head * num_blocks
    block = position // BLOCK  # [BLOCK_N]
    # Over the tiles of strata.
    total = tl.zeros([BLOCK_N, TILE_STRATA], tl.float32)
    largest = tl.zeros([BLOCK_N, TILE_STRATA], tl.float32)
    measured = tl.zeros([BLOCK_N, TILE_STRATA], tl.float32)
    for stratum in range(0, num_rows // ROWS_PER_STRATUM, TILE_STRATA):
        mass = tl.zeros([BLOCK_N, TILE_STRATA], tl.float32)
        for j in tl.static_range(FIRST_ROW, ROWS_PER_STRATUM):
            r = (stratum + tl.arange(0, TILE_STRATA)) * ROWS_PER_STRATUM + j
            p, row = probabilities_by_key(
                k,
                position,
                r,
                head,
                q_ptr,
                rows_ptr,
                starts_ptr,
                lse_ptr,
                num_rows,
                batch_heads,
                scale,
                HEADS,
                D,
                PREC,
            )  # [BLOCK_N, TILE_STRATA], [TILE_STRATA]
            distance = (row // BLOCK)[None, :] - block[:, None]
            if SELECT and j < NUM_SELECTION_ROWS:
                slash = tl.load(reference_slashes_ptr + distance, mask=p > 0, other=1)
                mass += tl.where(slash == 0, p, 0.0)
            if j >= NUM_SELECTION_ROWS or ALL_MEASURE:
                slash = tl.load(slashes_ptr + distance, mask=p > 0, other=1)
                measured += tl.where(slash == 0, p, 0.0)
        if SELECT:
            total += mass
            largest = tl.maximum(largest, mass)
    at = head * num_columns + column
    tl.store(mass_ptr + at, tl.sum(measured, 1), mask=mask)
    if SELECT:
        value = tl.sum(total, 1)
        if DROP_MAX_STRATUM:
            value = tl.maximum(value - tl.max(largest, 1), 0.0)
        # The cost: query blocks that the column adds to, those at distances that are no slash.
        present = mask & (position < seq_length)
        further = num_blocks - 1 - block
        if further_ptr is not None:
            further = tl.load(
                further_ptr + head // HEADS * num_blocks + block, mask=present, other=0
            )
        query_blocks = tl.load(num_outside_ptr + head * num_blocks + further, mask=present, other=0)
        if not STRATIFIED:
            query_blocks = tl.zeros_like(query_blocks) + num_blocks
        query_blocks = tl.maximum(query_blocks, 1)
        if factor_ptr is not None:
            query_blocks = query_blocks.to(tl.float32) * tl.load(factor_ptr + head // HEADS)
        value = value / (cost_per_block * query_blocks)
        selected = (value > 0) & (value >= tl.load(price_ptr + head % HEADS))
        selected = present & (selected | (position < num_sinks))
        tl.store(column_ptr + at, tl.where(selected, position, seq_length), mask=mask)
        tl.store(value_ptr + at, tl.where(present, value, 0.0), mask=mask)


def select_columns_by_price(
    sampled_rows,
    keys,
    positions,
    lse,
    slashes,
    reference_slashes,
    num_outside,
    price,
    num_sinks,
    cost_per_block,
):
    columns = torch.empty_like(positions)
    value = torch.empty(positions.shape, dtype=torch.float32, device=keys.device)
    mass = _launch_columns(
        sampled_rows,
        keys,
        positions,
        lse,
        slashes,
        dict(
            reference_slashes_ptr=reference_slashes,
            num_outside_ptr=num_outside,
            price_ptr=price,
            column_ptr=columns,
            value_ptr=value,
        ),
        num_sinks,
        cost_per_block,
    )
    return columns, value, mass


def column_masses(sampled_rows, keys, positions, lse, slashes):
    nothing = dict.fromkeys(
        ("reference_slashes_ptr", "num_outside_ptr", "price_ptr", "column_ptr", "value_ptr")
    )
    return _launch_columns(sampled_rows, keys, positions, lse, slashes, nothing, 0, 1.0)


def _launch_columns(
    sampled_rows, keys, positions, lse, slashes, selection, num_sinks, cost_per_block
):
    """Launch :func:`_column_kernel`; ``selection`` has the operands that only a selection needs."""
    rows = sampled_rows
    batch, heads, num_columns, dim = keys.shape
    mass = torch.empty(positions.shape, dtype=torch.float32, device=keys.device)
    launch(
        _column_kernel,
        (cdiv(num_columns, _BLOCK_N), batch * heads),
        q_ptr=rows.query,
        rows_ptr=rows.rows,
        starts_ptr=rows.starts,
        further_ptr=None if rows.costs is None else rows.costs.further,
        factor_ptr=None if rows.costs is None else rows.costs.factor,
        keys_ptr=keys,
        position_ptr=positions,
        lse_ptr=lse,
        slashes_ptr=slashes,
        **selection,
        mass_ptr=mass,
        num_rows=len(rows.rows),
        batch_heads=batch * heads,
        num_columns=num_columns,
        seq_length=rows.seq_length,
        num_blocks=slashes.shape[-1],
        num_sinks=num_sinks,
        softmax_scale=rows.softmax_scale,
        cost_per_block=cost_per_block,
        HEADS=heads,
        D=dim,
        BLOCK=rows.block_size,
        ROWS_PER_STRATUM=rows.rows_per_stratum,
        NUM_SELECTION_ROWS=rows.num_selection_rows,
        TILE_STRATA=_TILE_STRATA,
        BLOCK_N=_BLOCK_N,
        DROP_MAX_STRATUM=rows.drop_max_stratum,
        STRATIFIED=rows.stratified,
        PREC=precision_for(keys),
        num_warps=4,
        num_stages=2,
    )
    return mass


@triton.jit
def _recall_kernel(
    slash_mass_ptr,  # [b, h, NB]
    slashes_ptr,  # [b, h, NB]
    column_ptr,  # [b, h, C]
    column_mass_ptr,  # [b, h, C]
    recall_ptr,  # [b, h]
    num_blocks,
    num_columns,
    seq_length,
    one,  # in fixed point
    num_rows,
    BLOCK_N: tl.constexpr,
):
    """One program a head."""
    bh = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_N)
    mass = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, num_blocks, BLOCK_N):
        mask = first + offsets < num_blocks
        at = bh * num_blocks + first + offsets
        slash = tl.load(slashes_ptr + at, mask=mask, other=0)
        slash_mass = tl.load(slash_mass_ptr + at, mask=mask, other=0)
        mass += tl.where(slash != 0, slash_mass, 0).to(tl.float32)
    mass = mass / one
    for first in range(0, num_columns, BLOCK_N):
        mask = first + offsets < num_columns
        at = bh * num_columns + first + offsets
        column = tl.load(column_ptr + at, mask=mask, other=seq_length)
        mass += tl.load(column_mass_ptr + at, mask=column < seq_length, other=0.0)
    tl.store(recall_ptr + bh, tl.sum(mass, 0) / num_rows)


def attention_recall(
    slash_mass, slashes, columns, column_mass, seq_length, fixed_point_one, num_rows
):
    batch, heads, num_blocks = slashes.shape
    recall = torch.empty(batch, heads, dtype=torch.float32, device=slashes.device)
    launch(
        _recall_kernel,
        (batch * heads,),
        slash_mass_ptr=slash_mass,
        slashes_ptr=slashes,
        column_ptr=columns,
        column_mass_ptr=column_mass,
        recall_ptr=recall,
        num_blocks=num_blocks,
        num_columns=columns.shape[-1],
        seq_length=seq_length,
        one=float(fixed_point_one),
        num_rows=float(num_rows),
        BLOCK_N=1024,
        num_warps=4,
    )
    return recall
