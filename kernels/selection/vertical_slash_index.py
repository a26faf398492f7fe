# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The lists of a vertical-slash index from selected diagonals and columns, in two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from ..limits import check_blocks_per_round


@triton.jit
def _slash_kernel(
    # Selected slashes: one of the two
    distances_ptr,  # [b, h, NB], or None
    diagonals_ptr,  # [b, h, K], or None
    columns_ptr,  # [b, h, C], or entries of seq_length or more
    # Outputs
    found_ptr,  # [b, h, C]: the columns without other entries between them
    num_found_ptr,  # [b, h]
    member_ptr,  # [b, h, NB]
    round_list,  # [b, h, NB]
    round_ptr,  # [b, h, NB + 1]
    rank_list,  # [b, h, length of rank_list]
    rank_ptr,  # [b, h, length of rank_list + 1]
    num_diagonals,
    num_columns,
    seq_length,
    window_blocks,
    num_blocks,
    num_rounds,
    num_rank_classes,  # 2 W
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,  # block distances of a step
    BLOCK_K: tl.constexpr,  # diagonals of a step
    BLOCK_C: tl.constexpr,  # columns of a step
):
    """One program a head."""
    bh = tl.program_id(0).to(tl.int64)
    num_found = 0
    for first in range(0, num_columns, BLOCK_C):
        j = first + tl.arange(0, BLOCK_C)
        column = tl.load(columns_ptr + bh * num_columns + j, mask=j < num_columns, other=seq_length)
        found = column < seq_length  # [BLOCK_C]
        place = num_found + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(found_ptr + bh * num_columns + place, column.to(tl.int32), mask=found)
        num_found += tl.sum(found.to(tl.int32), 0)
    tl.store(num_found_ptr + bh, num_found)
    member_ptr += bh * num_blocks
    offsets = tl.arange(0, BLOCK_N)
    for first in range(0, num_blocks, BLOCK_N):
        distance = first + offsets  # [BLOCK_N]
        mask = distance < num_blocks
        if distances_ptr is not None:
            member = tl.load(distances_ptr + bh * num_blocks + distance, mask=mask, other=0) != 0
        else:
            member = distance < window_blocks
        tl.store(member_ptr + distance, (member | (distance == 0)).to(tl.uint8), mask=mask)
    tl.debug_barrier()  # entries that other threads have just written are written again
    if diagonals_ptr is not None:
        for first in range(0, num_diagonals, BLOCK_K):
            j = first + tl.arange(0, BLOCK_K)
            mask = j < num_diagonals
            diagonal = tl.load(diagonals_ptr + bh * num_diagonals + j, mask=mask, other=0)
            mask &= diagonal < seq_length
            # A token diagonal crosses two block distances, unless it is a multiple of the block.
            nearer = diagonal // BLOCK  # [BLOCK_K]
            farther = nearer + (diagonal % BLOCK != 0).to(tl.int32)
            ones = tl.full([BLOCK_K], 1, tl.uint8)
            tl.store(member_ptr + nearer, ones, mask=mask & (nearer < num_blocks))
            tl.store(member_ptr + farther, ones, mask=mask & (farther < num_blocks))
    tl.debug_barrier()
    _sorted_list(member_ptr, round_list, round_ptr, bh, num_blocks, num_rounds, BLOCK_N)
    _sorted_list(member_ptr, rank_list, rank_ptr, bh, num_blocks, num_rank_classes, BLOCK_N)


@triton.jit
def _sorted_list(member_ptr, list_ptr, ptr_ptr, bh, num_blocks, num_classes, BLOCK_N: tl.constexpr):
    """Store a head's members ``d`` sorted by (``d % num_classes``, ``d // num_classes``), as quotients, and
    their prefix counts."""
    class_len = tl.cdiv(num_blocks, num_classes)
    list_len = class_len * num_classes
    list_ptr += bh * list_len
    ptr_ptr += bh * (list_len + 1)
    offsets = tl.arange(0, BLOCK_N)
    tl.store(ptr_ptr, 0)
    before = 0
    for first in range(0, list_len, BLOCK_N):
        at = first + offsets  # [BLOCK_N]
        mask = at < list_len
        distance = at % class_len * num_classes + at // class_len
        present = mask & (distance < num_blocks)
        member = tl.load(member_ptr + distance, mask=present, other=0).to(tl.int32)
        count = before + tl.cumsum(member, 0)
        tl.store(ptr_ptr + at + 1, count, mask=mask)
        # Distances that are no members fill the list from its end, with zeros.
        slot = tl.where(member != 0, count - 1, list_len - 1 - (at - count))
        tl.store(list_ptr + slot, tl.where(member != 0, at % class_len, 0).to(tl.int16), mask=mask)
        before += tl.sum(member, 0)


@triton.jit
def _column_kernel(
    found_ptr,  # [b, h, C]
    num_found_ptr,  # [b, h]
    # Outputs
    list_ptr,  # [b, h, C]
    ptr_ptr,  # [b, h, NB + 1]
    num_columns,
    seq_length,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a tile of a head's columns, or of its prefix counts.

    It counts the columns before each of its entries: for a column that is its place in the sorted list, for a
    block its prefix count.
    """
    bh = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    column_tiles = tl.cdiv(num_columns, BLOCK_M)
    found_ptr += bh * num_columns
    num_found = tl.load(num_found_ptr + bh)
    entry = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    if tile < column_tiles:
        own = tl.load(found_ptr + entry, mask=entry < num_found, other=seq_length)
    else:
        entry = entry - column_tiles * BLOCK_M
        own = tl.minimum(entry * BLOCK, seq_length)
    earlier = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, num_found, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        column = tl.load(found_ptr + j, mask=j < num_found, other=seq_length)
        earlier += (column[None, :] < own[:, None]).to(tl.int32)
    before = tl.sum(earlier, 1)
    if tile < column_tiles:
        place = tl.where(entry < num_found, before, entry)  # the rest of the list has no columns
        tl.store(list_ptr + bh * num_columns + place, own, mask=entry < num_columns)
    else:
        num_counts = num_blocks + 1
        tl.store(ptr_ptr + bh * num_counts + entry, before, mask=entry < num_counts)


def vertical_slash_lists(
    distances, diagonals, window_blocks, columns, seq_length, block_size, world, inner
):
    check_blocks_per_round(seq_length, block_size, world, inner)
    batch, heads, num_columns = columns.shape
    num_blocks = cdiv(seq_length, block_size)
    rank_classes = 2 * world

    def empty(length, dtype=torch.int32):
        return torch.empty(batch, heads, length, dtype=dtype, device=columns.device)

    member = empty(num_blocks, torch.uint8)
    round_list, round_ptr = empty(num_blocks, torch.int16), empty(num_blocks + 1)
    rank_len = cdiv(num_blocks, rank_classes) * rank_classes
    rank_list, rank_ptr = empty(rank_len, torch.int16), empty(rank_len + 1)
    column_list, column_ptr = empty(num_columns), empty(num_blocks + 1)
    found, num_found = empty(num_columns), empty(1)
    if distances is not None:
        distances, diagonals = distances.contiguous().view(torch.uint8), None
    else:
        diagonals = diagonals.contiguous()
    launch(
        _slash_kernel,
        (batch * heads,),
        distances_ptr=distances,
        diagonals_ptr=diagonals,
        columns_ptr=columns.contiguous(),
        found_ptr=found,
        num_found_ptr=num_found,
        member_ptr=member,
        round_list=round_list,
        round_ptr=round_ptr,
        rank_list=rank_list,
        rank_ptr=rank_ptr,
        num_diagonals=None if diagonals is None else diagonals.shape[-1],
        num_columns=num_columns,
        seq_length=seq_length,
        window_blocks=window_blocks,
        num_blocks=num_blocks,
        num_rounds=world // inner,
        num_rank_classes=rank_classes,
        BLOCK=block_size,
        BLOCK_N=min(4096, next_power_of_2(num_blocks)),
        BLOCK_K=128,
        BLOCK_C=min(4096, max(128, next_power_of_2(num_columns))),
        num_warps=4,
    )
    block_m = 64
    launch(
        _column_kernel,
        (cdiv(num_columns, block_m) + cdiv(num_blocks + 1, block_m), batch * heads),
        found_ptr=found,
        num_found_ptr=num_found,
        list_ptr=column_list,
        ptr_ptr=column_ptr,
        num_columns=num_columns,
        seq_length=seq_length,
        num_blocks=num_blocks,
        BLOCK=block_size,
        BLOCK_M=block_m,
        BLOCK_N=64,
        num_warps=4,
    )
    return member, round_list, round_ptr, rank_list, rank_ptr, column_list, column_ptr
