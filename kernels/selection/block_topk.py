# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The best key blocks of each query block, by integers: so many of them, or a share of their sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import launch, next_power_of_2
from ..common.tiles import block_at

ONE = tl.constexpr(2**30)
"""A share of 1."""


@triton.jit(do_not_specialize=["wanted", "first_block", "rank"])
def _take_kernel(
    values_ptr, blocks_ptr, num_blocks, wanted, first_block, window, sink, rank, world, inner,
    SHARE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A query block; one program each, which holds its values in registers."""
    own = block_at(first_block + tl.program_id(0), rank, world, inner)
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    block = tl.arange(0, WIDTH)
    value = tl.load(values_ptr + line * num_blocks + block, mask=block <= own, other=0)
    always = (block <= own) & ((block >= own - window) | (block < sink))
    free = tl.where(always, 0, value)
    if SHARE:
        total = tl.sum(value, 0)
        wanted = ((total.to(tl.int64) * wanted + (ONE - 1)) // ONE).to(tl.int32)
        wanted -= tl.sum(tl.where(always, value, 0), 0)
    # The largest value such that all that is as large is enough: bit by bit, from 1 on.
    low = tl.full([], 1, tl.int32)
    high = tl.full([], 2147483647, tl.int32)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        counted = tl.where(free >= middle, free if SHARE else 1, 0)
        enough = tl.sum(counted, 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    missing = wanted - tl.sum(tl.where(free > low, free if SHARE else 1, 0), 0)
    if SHARE:
        missing = (missing + low - 1) // low
    equal = free == low
    taken = (free > low) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    taken = always | (taken & (wanted > 0))
    tl.store(blocks_ptr + line * num_blocks + block, taken.to(tl.uint8), mask=block < num_blocks)


def top_blocks(
    values, by_mass, target, first_block, previous_blocks, sink_blocks, rank, world, inner
):  # fmt: skip
    """Launch the choice; see the reference."""
    batch, heads, count, num_blocks = values.shape
    blocks = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    width = next_power_of_2(num_blocks)
    launch(
        _take_kernel, (count, batch * heads), values.contiguous(), blocks, num_blocks, target,
        first_block, previous_blocks, sink_blocks, rank, world, inner,
        SHARE=by_mass, WIDTH=width, num_warps=min(16, max(1, width // 1024)),
    )  # fmt: skip
    return blocks
