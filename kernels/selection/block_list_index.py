# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The lists of a block-list index from selected blocks: counts, then lists, each in two launches.

A query block sees the key blocks selected in ``blocks``, those at the distances in ``member``, and nothing
later."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import block_at, owner_of
from ..limits import fits_int32


@triton.jit
def _sees(blocks_ptr, member_ptr, distance, at, mask):
    """Whether a query block sees a key block, whose entry is ``at``, and which is ``distance`` before it; and
    whether only by ``blocks``."""
    listed = tl.load(blocks_ptr + at, mask=mask, other=0) != 0
    slash = tl.load(member_ptr + distance, mask=mask, other=0) != 0
    return listed | slash, listed & ~slash


@triton.jit(do_not_specialize=["rank"])
def _round_kernel(
    blocks_ptr,  # [b, h, nb, NB]
    member_ptr,  # [b, h, NB]
    round_ptr,  # [O * b * h * nb + 1]: counts to write, or prefix counts
    list_ptr,  # [capacity], or None to count
    num_extra_ptr,  # [b, h, nb], or None to list
    local_blocks,
    num_blocks,
    capacity,
    # Layout
    rank,
    world,
    inner,
    BLOCK_N: tl.constexpr,
):
    """One program a query block: its counts, or its lists, by round."""
    q_block = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    outer = world // inner
    own = block_at(q_block, rank, world, inner)
    blocks_ptr += (bh * local_blocks + q_block) * num_blocks
    member_ptr += bh * num_blocks
    round_ptr += bh * local_blocks + q_block
    num_extra = 0
    for round_index in range(outer):
        at = round_ptr + round_index * tl.num_programs(1).to(tl.int64) * local_blocks
        count = 0
        if list_ptr is not None:
            count = tl.load(at)
        for first in range(0, tl.cdiv(own + 1 - round_index, outer), BLOCK_N):
            quotient = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            distance = quotient * outer + round_index
            mask = distance <= own
            seen, extra = _sees(blocks_ptr, member_ptr, distance, own - distance, mask)
            increment = seen.to(tl.int32)
            if list_ptr is not None:
                slot = count + tl.cumsum(increment, 0) - 1
                tl.store(list_ptr + slot, quotient.to(tl.int16), mask=seen & (slot < capacity))
            num_extra += tl.sum(extra.to(tl.int32), 0)
            count += tl.sum(increment, 0)
        if list_ptr is None:
            tl.store(at + 1, count)  # the prefix counts begin with 0
    if list_ptr is None:
        tl.store(num_extra_ptr + bh * local_blocks + q_block, num_extra)


@triton.jit(do_not_specialize=["rank"])
def _rank_kernel(
    blocks_ptr,  # [b, h, nb, NB]
    member_ptr,  # [b, h, NB]
    rank_ptr,  # [W * b * h * nb + 1]: counts to write, or prefix counts
    list_ptr,  # [capacity], or None to count
    local_blocks,
    num_blocks,
    capacity,
    # Layout
    rank,
    world,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a tile of key blocks: counts, or lists, of the own query blocks that see them."""
    bh = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    key_block = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    mask = key_block < num_blocks
    source, local_block = owner_of(key_block, world, inner)
    at = rank_ptr + (source * tl.num_programs(1).to(tl.int64) + bh) * local_blocks + local_block
    member_ptr += bh * num_blocks
    # No query block before this one comes after any of these key blocks.
    first_q_block = first // world
    blocks_ptr += bh * local_blocks * num_blocks
    count = tl.zeros([BLOCK_N], tl.int32)
    if list_ptr is not None:
        count = tl.load(at, mask=mask, other=0)
    # Several query blocks at a time: each time waits for memory.
    for first_row in range(first_q_block, local_blocks, BLOCK_M):
        q_block = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        distance = block_at(q_block, rank, world, inner)[:, None] - key_block[None, :]
        inside = (q_block < local_blocks)[:, None] & mask[None, :] & (distance >= 0)
        block = q_block.to(tl.int64)[:, None] * num_blocks + key_block[None, :]
        seen, _ = _sees(blocks_ptr, member_ptr, distance, block, inside)  # [BLOCK_M, BLOCK_N]
        increment = seen.to(tl.int32)
        if list_ptr is not None:
            slot = count[None, :] + tl.cumsum(increment, 0) - 1
            entry = q_block.to(tl.int16)[:, None] + tl.zeros([BLOCK_M, BLOCK_N], tl.int16)
            tl.store(list_ptr + slot, entry, mask=seen & (slot < capacity))
        count += tl.sum(increment, 0)
    if list_ptr is None:
        tl.store(at + 1, count, mask=mask)


def _launch_both(
    blocks,
    member,
    round_ptr,
    round_list,
    rank_ptr,
    rank_list,
    num_extra,
    capacity,
    world,
    inner,
    rank,
):
    """Count if the lists are None, else list."""
    batch, heads, local_blocks, num_blocks = blocks.shape
    blocks = blocks.contiguous().view(torch.uint8)
    launch(
        _round_kernel,
        (local_blocks, batch * heads),
        blocks_ptr=blocks,
        member_ptr=member,
        round_ptr=round_ptr,
        list_ptr=round_list,
        num_extra_ptr=num_extra,
        local_blocks=local_blocks,
        num_blocks=num_blocks,
        capacity=capacity,
        rank=rank,
        world=world,
        inner=inner,
        BLOCK_N=min(1024, next_power_of_2(cdiv(num_blocks * inner, world))),
        num_warps=4,
    )
    block_n = 64
    launch(
        _rank_kernel,
        (cdiv(num_blocks, block_n), batch * heads),
        blocks_ptr=blocks,
        member_ptr=member,
        rank_ptr=rank_ptr,
        list_ptr=rank_list,
        local_blocks=local_blocks,
        num_blocks=num_blocks,
        capacity=capacity,
        rank=rank,
        world=world,
        inner=inner,
        BLOCK_M=16,
        BLOCK_N=block_n,
        num_warps=4,
    )


def block_list_offsets(blocks, member, world, inner, rank):
    batch, heads, local_blocks, _ = blocks.shape
    lines = batch * heads * local_blocks

    # The prefix counts begin with 0; all else is written.
    sizes = lines * (world // inner) + 1, lines * world + 1
    counts = torch.zeros(sum(sizes), dtype=torch.int32, device=blocks.device)
    round_counts, rank_counts = counts.split(sizes)
    shape = batch, heads, local_blocks
    num_extra = torch.empty(shape, dtype=torch.int32, device=blocks.device)
    _launch_both(
        blocks,
        member,
        round_ptr=round_counts,
        round_list=None,
        rank_ptr=rank_counts,
        rank_list=None,
        num_extra=num_extra,
        capacity=None,
        world=world,
        inner=inner,
        rank=rank,
    )
    dtype = torch.int32 if fits_int32(blocks.numel()) else torch.int64
    return round_counts.cumsum(0, dtype=dtype), rank_counts.cumsum(0, dtype=dtype), num_extra


def block_lists(blocks, member, world, inner, rank, round_ptr, rank_ptr, capacity):
    round_list = torch.empty(capacity, dtype=torch.int16, device=blocks.device)
    rank_list = torch.empty_like(round_list)
    _launch_both(
        blocks,
        member,
        round_ptr=round_ptr,
        round_list=round_list,
        rank_ptr=rank_ptr,
        rank_list=rank_list,
        num_extra=None,
        capacity=capacity,
        world=world,
        inner=inner,
        rank=rank,
    )
    return round_list, rank_list
