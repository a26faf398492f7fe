# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The key blocks with the largest integers of each query block: a number of them, or a fraction of their
sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import launch, next_power_of_2
from ..common.tiles import block_at

ONE = tl.constexpr(2**30)
"""A fraction of 1."""


@triton.jit(do_not_specialize=["target", "first_block", "rank"])
def _top_blocks_kernel(
    values_ptr,  # [b, h, count, NB]
    blocks_ptr,  # [b, h, count, NB]
    num_blocks,
    target,
    first_block,
    previous_blocks,
    sink_blocks,
    # Layout
    rank,
    world,
    inner,
    BY_MASS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # all blocks of the sequence
):
    """One program a query block, which holds its values in registers."""
    own = block_at(first_block + tl.program_id(0), rank, world, inner)
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    block = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    value = tl.load(values_ptr + line * num_blocks + block, mask=block <= own, other=0)
    always = (block <= own) & ((block >= own - previous_blocks) | (block < sink_blocks))
    free = tl.where(always, 0, value)
    if BY_MASS:
        total = tl.sum(value, 0)
        target = ((total.to(tl.int64) * target + (ONE - 1)) // ONE).to(tl.int32)
        target -= tl.sum(tl.where(always, value, 0), 0)
    # Bisection for the largest value such that all values from it on reach the target; from 1 on.
    low = tl.full([], 1, tl.int32)
    high = tl.full([], 2147483647, tl.int32)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        weight = tl.where(free >= middle, free if BY_MASS else 1, 0)
        reached = tl.sum(weight, 0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    # How many of the values equal to it are needed beside the larger ones.
    missing = target - tl.sum(tl.where(free > low, free if BY_MASS else 1, 0), 0)
    if BY_MASS:
        missing = (missing + low - 1) // low
    equal = free == low
    selected = (free > low) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    selected = always | (selected & (target > 0))
    tl.store(
        blocks_ptr + line * num_blocks + block,
        selected.to(tl.uint8),
        mask=block < num_blocks,
    )


def top_blocks(
    values, by_mass, target, first_block, previous_blocks, sink_blocks, rank, world, inner
):
    batch, heads, count, num_blocks = values.shape
    blocks = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    block_n = next_power_of_2(num_blocks)
    launch(
        _top_blocks_kernel,
        (count, batch * heads),
        values_ptr=values.contiguous(),
        blocks_ptr=blocks,
        num_blocks=num_blocks,
        target=target,
        first_block=first_block,
        previous_blocks=previous_blocks,
        sink_blocks=sink_blocks,
        rank=rank,
        world=world,
        inner=inner,
        BY_MASS=by_mass,
        BLOCK_N=block_n,
        num_warps=min(16, max(1, block_n // 1024)),
    )
    return blocks
