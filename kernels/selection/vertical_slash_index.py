# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The lists of a vertical-slash index from chosen diagonals and columns, in two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from ..limits import check_blocks_per_round


@triton.jit
def _slash_kernel(
    distances_ptr, diagonals_ptr, member_ptr, round_list, round_ptr, rank_list, rank_ptr,
    count, near, num_blocks, rounds, ranks,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    member_ptr += bh * num_blocks
    entry = tl.arange(0, WIDTH)
    for first in range(0, num_blocks, WIDTH):
        at = first + entry
        inside = at < num_blocks
        if GIVEN:
            member = tl.load(distances_ptr + bh * num_blocks + at, mask=inside, other=0) != 0
        else:
            member = at < near
        tl.store(member_ptr + at, (member | (at == 0)).to(tl.uint8), mask=inside)
    tl.debug_barrier()  # the marks below fall on entries that other threads have just written
    if not GIVEN:
        for first in range(0, count, WALK):
            j = first + tl.arange(0, WALK)
            diagonal = tl.load(diagonals_ptr + bh * count + j, mask=j < count, other=0)
            # A token diagonal crosses two block distances, unless it is a multiple of the block.
            one = diagonal // BLOCK
            two = one + (diagonal % BLOCK != 0).to(tl.int32)
            mark = tl.full([WALK], 1, tl.uint8)
            there = (j < count) & (one < num_blocks)
            tl.store(member_ptr + one, mark, mask=there)
            there = (j < count) & (two < num_blocks)
            tl.store(member_ptr + two, mark, mask=there)
    tl.debug_barrier()
    _sorted_list(member_ptr, round_list, round_ptr, bh, num_blocks, rounds, WIDTH)
    _sorted_list(member_ptr, rank_list, rank_ptr, bh, num_blocks, ranks, WIDTH)


@triton.jit
def _sorted_list(member_ptr, list_ptr, ptr_ptr, bh, num_blocks, classes, WIDTH: tl.constexpr):
    """Members by (residue, quotient) of so many classes, and the prefix counts."""
    length = tl.cdiv(num_blocks, classes)
    entries = length * classes
    list_ptr += bh * entries
    ptr_ptr += bh * (entries + 1)
    entry = tl.arange(0, WIDTH)
    tl.store(ptr_ptr, 0)
    before = 0
    for first in range(0, entries, WIDTH):
        at = first + entry
        inside = at < entries
        distance = at % length * classes + at // length
        there = inside & (distance < num_blocks)
        member = tl.load(member_ptr + distance, mask=there, other=0).to(tl.int32)
        upto = before + tl.cumsum(member, 0)
        tl.store(ptr_ptr + at + 1, upto, mask=inside)
        # What is no member fills the list from its end, with zeros.
        slot = tl.where(member != 0, upto - 1, entries - 1 - (at - upto))
        tl.store(list_ptr + slot, tl.where(member != 0, at % length, 0).to(tl.int16), mask=inside)
        before += tl.sum(member, 0)


@triton.jit
def _column_kernel(
    columns_ptr, list_ptr, ptr_ptr, count, seq_length, num_blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    # Each program counts how many columns come before each of its own: before a column that is its
    # place in the sorted list, before a block an entry of the prefix counts.
    bh = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    tiles = tl.cdiv(count, WIDTH)
    columns_ptr += bh * count
    place = tile * WIDTH + tl.arange(0, WIDTH)
    if tile < tiles:
        own = tl.load(columns_ptr + place, mask=place < count, other=0)
        # What is no column comes after all, in its order: no two entries are equal.
        own = tl.where(own < seq_length, own, seq_length + place).to(tl.int32)
    else:
        place = place - tiles * WIDTH
        own = tl.minimum(place * BLOCK, seq_length)
    earlier = tl.zeros([WIDTH, WALK], tl.int32)
    for first in range(0, count, WALK):
        j = first + tl.arange(0, WALK)
        key = tl.load(columns_ptr + j, mask=j < count, other=2147483647)
        key = tl.where(key < seq_length, key, seq_length + j).to(tl.int32)
        earlier += (key[None, :] < own[:, None]).to(tl.int32)
    before = tl.sum(earlier, 1)
    if tile < tiles:
        tl.store(list_ptr + bh * count + before, tl.minimum(own, seq_length), mask=place < count)
    else:
        limit = num_blocks + 1
        tl.store(ptr_ptr + bh * limit + place, before, mask=place < limit)


def vertical_slash_lists(
    distances, diagonals, window_blocks, columns, seq_length, block_size, world, inner
):  # fmt: skip
    """Launch the lists; see the reference."""
    check_blocks_per_round(seq_length, block_size, world, inner)
    batch, heads, count = columns.shape
    num_blocks = cdiv(seq_length, block_size)
    lines, device = batch * heads, columns.device

    def empty(length, dtype=torch.int32):
        return torch.empty(batch, heads, length, dtype=dtype, device=device)

    member = empty(num_blocks, torch.uint8)
    rounds, ranks = (
        (empty(entries, torch.int16), empty(entries + 1))
        for entries in (num_blocks, cdiv(num_blocks, 2 * world) * 2 * world)
    )
    column_list, column_ptr = empty(count), empty(num_blocks + 1)
    if distances is not None:
        distances = diagonals = distances.contiguous().view(torch.uint8)
    else:
        distances = diagonals = diagonals.contiguous()
    given = distances.dtype == torch.uint8
    width = min(4096, next_power_of_2(num_blocks))
    launch(
        _slash_kernel, (lines,),
        distances, diagonals, member, *rounds, *ranks, diagonals.shape[-1], window_blocks, num_blocks,
        world // inner, 2 * world, GIVEN=given, BLOCK=block_size, WIDTH=width, WALK=128, num_warps=4,
    )  # fmt: skip
    width = 64
    programs = cdiv(count, width) + cdiv(num_blocks + 1, width)
    launch(
        _column_kernel, (programs, lines),
        columns.contiguous(), column_list, column_ptr, count, seq_length, num_blocks,
        BLOCK=block_size, WIDTH=width, WALK=64, num_warps=4,
    )  # fmt: skip
    return member, *rounds, *ranks, column_list, column_ptr
