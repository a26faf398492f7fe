# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Exact top-k of integers, ties to the lower position, without sorting.

A program holds a tile of values and finds its k-th largest bit by bit: a bit is set if at least k values
reach it. Each tile passes its top k on to the next level, until one tile holds all that are left."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from . import topk_torch
from .probabilities import key_positions

TILE = 16384
"""Values that a program holds. Larger ``k`` than half of it are left to ``torch.topk``: the levels of tiles
would not get smaller."""


@triton.jit(do_not_specialize=["rank"])
def _topk_kernel(
    value_ptr,
    position_ptr,  # like the values; None to take the positions from the layout
    # Outputs
    out_ptr,  # [2, lines, tiles, k]: values, positions
    threshold_ptr,  # [2, lines, tiles]: values, positions
    num_values,
    list_len,  # the values of a line are stored in lists of this length
    stride_list,
    stride_line,
    stride_out,
    stride_threshold,
    k,
    fill_position,
    # Layout
    rank,
    world,
    inner,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_POW2: tl.constexpr,  # k, rounded up
):
    """One program a tile of a line's values. A line is one head of one batch entry."""
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    line = tl.program_id(1).to(tl.int64)
    j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = j < num_values
    if position_ptr is not None:
        at = line * stride_line + (j // list_len) * stride_list + j % list_len
        value = tl.load(value_ptr + at, mask=mask, other=0)  # [BLOCK_N]
        position = tl.load(position_ptr + at, mask=mask, other=fill_position)  # [BLOCK_N]
    else:
        value = tl.load(value_ptr + line * stride_line + j, mask=mask, other=0)
        position = key_positions(j, rank, world, inner, BLOCK)
    # The largest value that at least k of the tile's reach; 0, which selects nothing, if fewer are positive.
    # Once exactly k reach it, its lower bits do not matter.
    threshold = tile * 0
    bit = threshold + (1 << 30)
    while bit > 0:
        higher = threshold | bit
        reach = tl.sum((value >= higher).to(tl.int32), 0)
        threshold = tl.where(reach >= k, higher, threshold)
        bit = tl.where(reach == k, 0, bit >> 1)
    # Exactly the smallest of them: values that earlier tiles left out may lie between.
    least = tl.min(tl.where(value >= threshold, value, 2147483647), 0)
    threshold = tl.where(threshold > 0, least, 0)
    ties = value == threshold
    wanted = k - tl.sum((value > threshold).to(tl.int32), 0)
    tied = (threshold > 0) & (tl.sum(ties.to(tl.int32), 0) > wanted)
    # Of the values at the threshold, those up to this position: all or none, unless there are too many.
    last_position = tl.max(tl.where(ties & (threshold > 0), position, -1), 0)
    last_position = tl.where(tied, 0, last_position)
    for i in range(tl.where(tied, 31, 0)):
        higher = last_position | (1 << (30 - i))
        fewer = tl.sum((ties & (position < higher)).to(tl.int32), 0) < wanted
        last_position = tl.where(fewer, higher, last_position)
    selected = (value > threshold) | (ties & (position <= last_position))
    slot = tl.cumsum(selected.to(tl.int32), 0) - 1
    selected = selected & (slot < k)  # repeated positions must not write past the end
    out_ptr += (line * tiles + tile) * k
    tl.store(out_ptr + slot, value, mask=selected)
    tl.store(out_ptr + stride_out + slot, position, mask=selected)
    spare = tl.arange(0, K_POW2)
    empty = (spare >= tl.sum(selected.to(tl.int32), 0)) & (spare < k)
    tl.store(out_ptr + spare, tl.full([K_POW2], 0, tl.int32), mask=empty)
    tl.store(out_ptr + stride_out + spare, tl.zeros([K_POW2], tl.int32) + fill_position, mask=empty)
    tl.store(threshold_ptr + line * tiles + tile, threshold)
    tl.store(threshold_ptr + stride_threshold + line * tiles + tile, last_position)


def _launch_levels(
    values,
    positions,
    shape,
    num_values,
    list_len,
    stride_list,
    stride_line,
    k,
    fill_position,
    rank=0,
    world=1,
    inner=1,
    block_size=1,
):
    """Launch levels of tiles until one tile is left.

    Args:
        shape: (b, h), of the lines.
        positions: None to take the first level's positions from the layout.
    """
    while True:
        block_n = min(TILE, max(256, next_power_of_2(num_values)))
        tiles = cdiv(num_values, block_n)
        out = torch.empty((2, *shape, tiles * k), dtype=torch.int32, device=values.device)
        threshold = torch.empty((2, *shape, tiles), dtype=torch.int32, device=values.device)
        launch(
            _topk_kernel,
            (tiles, shape[0] * shape[1]),
            value_ptr=values,
            position_ptr=positions,
            out_ptr=out,
            threshold_ptr=threshold,
            num_values=num_values,
            list_len=list_len,
            stride_list=stride_list,
            stride_line=stride_line,
            stride_out=out.numel() // 2,
            stride_threshold=threshold.numel() // 2,
            k=k,
            fill_position=fill_position,
            rank=rank,
            world=world,
            inner=inner,
            BLOCK=block_size,
            BLOCK_N=block_n,
            K_POW2=next_power_of_2(k),
            num_warps=max(4, block_n // 1024),
        )
        if tiles == 1:
            return out, threshold[..., 0]
        values, positions = out[0], out[1]
        num_values = list_len = stride_list = stride_line = tiles * k


def select_topk(values, k, fill_position, rank=0, world=1, inner=1, block_size=128):
    if k > TILE // 2:
        return topk_torch.select_topk(values, k, fill_position, rank, world, inner, block_size)
    length = values.shape[-1]
    return _launch_levels(
        values,
        None,
        values.shape[:2],
        num_values=length,
        list_len=length,
        stride_list=length,
        stride_line=length,
        k=k,
        fill_position=fill_position,
        rank=rank,
        world=world,
        inner=inner,
        block_size=block_size,
    )


def merge_topk(candidates, k, fill_position):
    if k > TILE // 2:
        return topk_torch.merge_topk(candidates, k, fill_position)
    ranks, _, batch, heads, per_rank = candidates.shape
    return _launch_levels(
        candidates,
        candidates[:, 1],
        (batch, heads),
        num_values=ranks * per_rank,
        list_len=per_rank,
        stride_list=2 * batch * heads * per_rank,
        stride_line=per_rank,
        k=k,
        fill_position=fill_position,
    )
