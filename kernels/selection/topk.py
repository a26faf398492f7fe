# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The exact largest of many integers, ties to the lower position, without sorting.

A program holds a tile and finds a value that its ``count`` largest reach bit by bit: a bit stays if
as many values reach it. Tiles offer what they took to a next level, until one tile holds all offers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from . import topk_torch
from .lse import key_positions

TILE = 16384
"""Values that a program holds. Larger ``k`` than half of it are left to ``torch.topk``: the levels of tiles
would not get smaller."""


@triton.jit(do_not_specialize=["rank"])
def _select_kernel(
    value_ptr, position_ptr, out_ptr, cut_ptr,
    length, inner, outer, line, out_half, cut_half, count, none, rank, world, node,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    bh = tl.program_id(1).to(tl.int64)
    j = tile * WIDTH + tl.arange(0, WIDTH)
    inside = j < length
    if LISTED:
        at = bh * line + (j // inner) * outer + j % inner
        value = tl.load(value_ptr + at, mask=inside, other=0)
        position = tl.load(position_ptr + at, mask=inside, other=none)
    else:
        value = tl.load(value_ptr + bh * line + j, mask=inside, other=0)
        position = key_positions(j, rank, world, node, BLOCK)
    # The largest value that `count` of the tile's reach; 0, which none is taken at, if fewer have any.
    # If just so many reach what is found by then, its lower bits do not matter.
    cut = tile * 0
    bit = cut + (1 << 30)
    while bit > 0:
        higher = cut | bit
        reach = tl.sum((value >= higher).to(tl.int32), 0)
        cut = tl.where(reach >= count, higher, cut)
        bit = tl.where(reach == count, 0, bit >> 1)
    # Exactly the least of them: what tiles before did not offer may lie between.
    least = tl.min(tl.where(value >= cut, value, 2147483647), 0)
    cut = tl.where(cut > 0, least, 0)
    ties = value == cut
    wanted = count - tl.sum((value > cut).to(tl.int32), 0)
    tied = (cut > 0) & (tl.sum(ties.to(tl.int32), 0) > wanted)
    # Of values at the cut, those up to this position: all or none, unless there are too many.
    last = tl.max(tl.where(ties & (cut > 0), position, -1), 0)
    last = tl.where(tied, 0, last)
    for i in range(tl.where(tied, 31, 0)):
        higher = last | (1 << (30 - i))
        fewer = tl.sum((ties & (position < higher)).to(tl.int32), 0) < wanted
        last = tl.where(fewer, higher, last)
    taken = (value > cut) | (ties & (position <= last))
    slot = tl.cumsum(taken.to(tl.int32), 0) - 1
    taken = taken & (slot < count)  # positions given twice must not write past the end
    out_ptr += (bh * tiles + tile) * count
    tl.store(out_ptr + slot, value, mask=taken)
    tl.store(out_ptr + out_half + slot, position, mask=taken)
    spare = tl.arange(0, SLOTS)
    empty = (spare >= tl.sum(taken.to(tl.int32), 0)) & (spare < count)
    tl.store(out_ptr + spare, tl.full([SLOTS], 0, tl.int32), mask=empty)
    tl.store(out_ptr + out_half + spare, tl.zeros([SLOTS], tl.int32) + none, mask=empty)
    tl.store(cut_ptr + bh * tiles + tile, cut)
    tl.store(cut_ptr + cut_half + bh * tiles + tile, last)


def _levels(values, positions, shape, length, inner, outer, line, count, none, layout):
    """Levels of tiles until one is left; the first may have positions by layout, not listed."""
    rank, world, node, block = layout
    while True:
        width = min(TILE, max(256, next_power_of_2(length)))
        tiles = cdiv(length, width)
        out = torch.empty((2, *shape, tiles * count), dtype=torch.int32, device=values.device)
        cut = torch.empty((2, *shape, tiles), dtype=torch.int32, device=values.device)
        launch(
            _select_kernel, (tiles, shape[0] * shape[1]),
            values, values if positions is None else positions, out, cut,
            length, inner, outer, line, out.numel() // 2, cut.numel() // 2, count, none, rank, world, node,
            LISTED=positions is not None, BLOCK=block, WIDTH=width,
            SLOTS=next_power_of_2(count), num_warps=max(4, width // 1024),
        )  # fmt: skip
        if tiles == 1:
            return out, cut[..., 0]
        values, positions = out[0], out[1]
        length = inner = outer = line = tiles * count


def select_topk(values, k, fill_position, rank=0, world=1, inner=1, block_size=128):
    """Launch the selection; see the reference."""
    if k > TILE // 2:
        return topk_torch.select_topk(values, k, fill_position, rank, world, inner, block_size)
    length = values.shape[-1]
    return _levels(
        values, None, values.shape[:2], length, length, length, length, k, fill_position,
        (rank, world, inner, block_size),
    )  # fmt: skip


def merge_topk(candidates, k, fill_position):
    """Launch the selection from offers; see the reference."""
    if k > TILE // 2:
        return topk_torch.merge_topk(candidates, k, fill_position)
    ranks, _, batch, heads, offered = candidates.shape
    positions = candidates[:, 1]
    outer = 2 * batch * heads * offered
    return _levels(
        candidates, positions, (batch, heads), ranks * offered, offered, outer, offered, k, fill_position,
        (0, 1, 1, 1),
    )  # fmt: skip
