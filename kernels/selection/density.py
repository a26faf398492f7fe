# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Density of a vertical-slash pattern, in one launch: counted each time that a layer trains."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import launch, next_power_of_2


@triton.jit
def _density_kernel(
    member_ptr,  # [b, h, NB]
    column_ptr,  # [b, h, NB + 1]
    density_ptr,  # [b, h]
    num_blocks,
    seq_length,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a head. Integers throughout, so that the quotient at the end alone is rounded."""
    head = tl.program_id(0).to(tl.int64)
    member_ptr += head * num_blocks
    column_ptr += head * (num_blocks + 1)
    slashes = tl.zeros([BLOCK_N], tl.int64)
    block_pairs = tl.zeros([BLOCK_N], tl.int64)
    column_blocks = tl.zeros([BLOCK_N], tl.int64)
    of_last_block = tl.zeros([BLOCK_N], tl.int64)
    outside_before = 0
    for first in range(0, num_blocks, BLOCK_N):
        distance = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        mask = distance < num_blocks
        member = tl.load(member_ptr + distance, mask=mask, other=1)
        outside = (member == 0).to(tl.int32)
        # The columns of this block are seen by the distances up to this one that are no slash.
        block = num_blocks - 1 - distance
        count = tl.load(column_ptr + block + 1, mask=mask, other=0)
        count -= tl.load(column_ptr + block, mask=mask, other=0)
        outside_upto = outside_before + tl.cumsum(outside, 0)
        slash = mask & (member != 0)
        slashes += slash.to(tl.int64)
        block_pairs += tl.where(slash, block + 1, 0).to(tl.int64)
        column_blocks += count.to(tl.int64) * outside_upto
        of_last_block += (count * outside).to(tl.int64)
        outside_before += tl.sum(outside, 0)
    # Of 64 bits.
    length = head * 0 + seq_length
    tokens = (head * 0 + num_blocks) * BLOCK
    # Twice the pairs. The diagonal blocks are triangles.
    twice = 2 * BLOCK * (tl.sum(block_pairs, 0) * BLOCK + tl.sum(column_blocks, 0))
    twice -= tokens * (BLOCK - 1)
    # Queries that the last block lacks: the mean of their keys.
    keys = 2 * BLOCK * (tl.sum(slashes, 0) - 1) + 2 * tl.sum(of_last_block, 0)
    keys += BLOCK + (length - (tokens - BLOCK)) + 1
    twice -= (tokens - length) * keys
    density = twice.to(tl.float64) / (length * (length + 1)).to(tl.float64)
    tl.store(density_ptr + head, density.to(tl.float32))


def vertical_slash_density(member, column_ptr, seq_length, block_size):
    batch, heads, num_blocks = member.shape
    density = torch.empty(batch, heads, dtype=torch.float32, device=member.device)
    launch(
        _density_kernel,
        (batch * heads,),
        member_ptr=member,
        column_ptr=column_ptr,
        density_ptr=density,
        num_blocks=num_blocks,
        seq_length=seq_length,
        BLOCK=block_size,
        BLOCK_N=min(1024, next_power_of_2(num_blocks)),
        num_warps=4,
    )
    return density
