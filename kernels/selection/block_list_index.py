# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The lists of a block-list index from chosen blocks: counts, then lists, each in two launches.

A query block sees what it has in ``blocks``, what is at a distance of ``member``, and itself; nothing later.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import block_at, owner_of


@triton.jit
def _sees(blocks, member, distance, block, inside):
    """Whether a query block sees ``block``, so far before it, and whether by ``blocks`` alone."""
    given = tl.load(blocks + block, mask=inside, other=0) != 0
    near = tl.load(member + distance, mask=inside, other=0) != 0
    return given | near, given & ~near


@triton.jit(do_not_specialize=["rank"])
def _round_kernel(
    blocks, member, ptr_ptr, list_ptr, beside_ptr, nb, num_blocks, capacity, rank, world, inner,
    FILL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A query block's counts, or its lists, by round; one program each."""
    a = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    outer = world // inner
    own = block_at(a, rank, world, inner)
    blocks += (bh * nb + a) * num_blocks
    member += bh * num_blocks
    ptr_ptr += bh * nb + a
    beside = 0
    for number in range(outer):
        at = ptr_ptr + number * tl.num_programs(1).to(tl.int64) * nb
        count = 0
        if FILL:
            count = tl.load(at)
        for first in range(0, tl.cdiv(own + 1 - number, outer), WIDTH):
            quotient = first + tl.arange(0, WIDTH)
            distance = quotient * outer + number
            inside = distance <= own
            seen, alone = _sees(blocks, member, distance, own - distance, inside)
            there = seen.to(tl.int32)
            if FILL:
                slot = count + tl.cumsum(there, 0) - 1
                tl.store(list_ptr + slot, quotient.to(tl.int16), mask=seen & (slot < capacity))
            beside += tl.sum(alone.to(tl.int32), 0)
            count += tl.sum(there, 0)
        if not FILL:
            tl.store(at + 1, count)  # the prefix counts begin with 0
    if not FILL:
        tl.store(beside_ptr + bh * nb + a, beside)


@triton.jit(do_not_specialize=["rank"])
def _rank_kernel(
    blocks, member, ptr_ptr, list_ptr, nb, num_blocks, capacity, rank, world, inner,
    FILL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Counts, or lists, of so many key blocks: the own query blocks that see them, one after the other."""
    bh = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * WIDTH
    block = first + tl.arange(0, WIDTH)
    inside = block < num_blocks
    source, c = owner_of(block, world, inner)
    at = ptr_ptr + (source * tl.num_programs(1).to(tl.int64) + bh) * nb + c
    member += bh * num_blocks
    # No query block before this one comes after any of these.
    a_first = first // world
    blocks += (bh * nb + a_first) * num_blocks
    count = tl.zeros([WIDTH], tl.int32)
    if FILL:
        count = tl.load(at, mask=inside, other=0)
    for a in range(a_first, nb):
        distance = block_at(a, rank, world, inner) - block
        seen, _ = _sees(blocks, member, distance, block, inside & (distance >= 0))
        if FILL:
            own = (tl.zeros([WIDTH], tl.int32) + a).to(tl.int16)
            tl.store(list_ptr + count, own, mask=seen & (count < capacity))
        count += seen.to(tl.int32)
        blocks += num_blocks
    if not FILL:
        tl.store(at + 1, count, mask=inside)


def _launch(blocks, member, rounds, ranks, beside, capacity, world, inner, rank, fill):
    """Both kernels; ``rounds`` and ``ranks`` are prefix counts (or where to count) and lists."""
    batch, heads, nb, num_blocks = blocks.shape
    blocks, width = blocks.contiguous().view(torch.uint8), 64
    numbers = nb, num_blocks, capacity, rank, world, inner
    launch(
        _round_kernel, (nb, batch * heads), blocks, member, *rounds, beside, *numbers,
        FILL=fill, WIDTH=min(1024, next_power_of_2(cdiv(num_blocks * inner, world))), num_warps=4,
    )  # fmt: skip
    launch(
        _rank_kernel, (cdiv(num_blocks, width), batch * heads), blocks, member, *ranks, *numbers,
        FILL=fill, WIDTH=width, num_warps=2,
    )  # fmt: skip


def block_list_offsets(blocks, member, world, inner, rank):
    """Launch the counts; see the reference."""
    batch, heads, nb, _ = blocks.shape
    lines = batch * heads * nb

    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.int32, device=blocks.device)

    rounds, ranks, beside = (
        zeros(lines * (world // inner) + 1),
        zeros(lines * world + 1),
        zeros(batch, heads, nb),
    )
    arguments = (rounds, rounds), (ranks, ranks), beside, 0, world, inner, rank, False
    _launch(blocks, member, *arguments)
    rounds, ranks = (counts.cumsum(0, dtype=torch.int32) for counts in (rounds, ranks))
    return rounds, ranks, beside.sum(-1)


def block_lists(blocks, member, world, inner, rank, round_ptr, rank_ptr, capacity):
    """Launch the lists; see the reference."""
    rounds, ranks = (
        (ptr, torch.empty(capacity, dtype=torch.int16, device=blocks.device))
        for ptr in (round_ptr, rank_ptr)
    )
    _launch(blocks, member, rounds, ranks, round_ptr, capacity, world, inner, rank, True)
    return rounds[1], ranks[1]
