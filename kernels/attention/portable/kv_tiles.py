# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The walk over a round's keys that the forward and the query gradient share.

A program holds [BLOCK_M, D] query rows of one head and loops over tiles of [BLOCK_N, D] keys and values: the
query block's own key block (in the first round), the key blocks of its slashes, and its gathered columns.
Block numbers are local to a rank (``q_block``), of the sequence (``block``), or of the blocks of the round's
inner group in the order of the sequence ("group blocks").
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...common.tiles import (
    block_at,
    gather_rows,
    list_start,
    load_rows,
    owner_of,
    precision_for,
    seen_from,
)
from ...types import PatternOperand
from ..launch_args import round_arguments
from ..operands import RoundKeys


def kv_arguments(query: Tensor, keys: RoundKeys, index: PatternOperand) -> dict[str, Any]:
    """Arguments of both kernels: the keys of a round, and which of them the query blocks attend to."""
    key, value = keys.key, keys.value
    column_k, column_v = key, value  # not read
    if keys.column_kv is not None:
        column_k, column_v = keys.column_kv
    first_keys = kv_block_bounds = None
    if index.visible is not None:
        local = index.visible.on(keys.round.rank, index.world, index.inner, index.block_size)
        first_keys, kv_block_bounds = local.start, local.kv_block_bounds
    stride_kr, stride_kn, stride_kb, stride_kh, _ = key.stride()
    stride_vr, stride_vn, stride_vb, stride_vh, _ = value.stride()
    return dict(
        k_ptr=key,
        v_ptr=value,
        stride_kr=stride_kr,
        stride_kn=stride_kn,
        stride_kb=stride_kb,
        stride_kh=stride_kh,
        stride_vr=stride_vr,
        stride_vn=stride_vn,
        stride_vb=stride_vb,
        stride_vh=stride_vh,
        key_len=key.shape[1],
        column_k_ptr=column_k,
        column_v_ptr=column_v,
        first_keys=first_keys,
        kv_block_bounds=kv_block_bounds,
        **round_arguments(index, keys.round),
        GROUP=query.shape[2] // key.shape[3],
        D=query.shape[3],
        COLUMNS=keys.column_kv is not None,
        EVEN=query.shape[0] % index.block_size == 0,
        PREC=precision_for(query),
    )


@triton.jit
def query_rows_of_program(local_blocks, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """The query block of this program, and which of its BLOCK_M rows. The last blocks come first: they have
    the most keys."""
    parts: tl.constexpr = BLOCK // BLOCK_M
    program = local_blocks * parts - 1 - tl.program_id(0)
    return program // parts, program % parts


@triton.jit
def pattern_of_head(
    bh,
    q_block,
    block_ptr,
    block_list,
    member,
    columns,
    column_ptr,
    column_k_ptr,
    column_v_ptr,
    ptr_len,
    list_len,
    column_len,
    local_blocks,
    round_start,
    D: tl.constexpr,
    LISTS: tl.constexpr,
):
    """The pattern's pointers, advanced to a head (``block_ptr`` to a query block)."""
    block_ptr += list_start(bh, q_block, ptr_len, local_blocks, round_start, LISTS)
    block_list += bh * list_len
    member += bh * (ptr_len - 1)
    columns += bh * column_len
    column_ptr += bh * ptr_len
    column_k_ptr += bh * column_len * D
    column_v_ptr += bh * column_len * D
    return block_ptr, block_list, member, columns, column_ptr, column_k_ptr, column_v_ptr


@triton.jit
def slash_range(
    block_ptr,
    block_list,
    first_keys,
    kv_block_bounds,
    q_block,
    start,
    offs_m,
    inside,
    batch,
    query_len,
    local_blocks,
    rank,
    wrap,
    round_index,
    outer,
    INNER: tl.constexpr,
    LISTS: tl.constexpr,
    RANGES: tl.constexpr,
):
    """The part of the slash list that a query block attends to.

    Returns:
        low, unmasked_end, high: entries from low on are key blocks that all rows see whole, those from
        unmasked_end to high need a mask.
        last_block: the last group block that the query block may attend to.
        starts: [BLOCK_M], the first keys that its rows see.
        first_block: the first block of the sequence that they attend to.
        group: the keys' inner group, numbered without wrap-around, as last_block is.
    """
    low = tl.load(block_ptr)
    last_block = block_at(q_block, rank % INNER, INNER, INNER) - wrap
    high = tl.load(block_ptr + 1 if LISTS else block_ptr + last_block + 1)
    unmasked_end = high
    starts = 0
    first_block = 0
    group = 0
    if RANGES:
        starts = tl.load(first_keys + batch * query_len + start + offs_m, mask=inside, other=0)
        kv_block_bounds += batch * 2 * local_blocks + q_block
        first_block = tl.load(kv_block_bounds)
        group = rank // INNER - round_index + wrap * outer
        unmasked_end = seen_from(
            tl.load(kv_block_bounds + local_blocks),
            block_ptr,
            block_list,
            low,
            high,
            last_block,
            group,
            outer,
            LISTS,
        )
        high = seen_from(
            first_block, block_ptr, block_list, low, high, last_block, group, outer, LISTS
        )
    return low, unmasked_end, high, last_block, starts, first_block, group


@triton.jit
def diagonal_tile(
    tile,
    q_block,
    rows,
    offs_n,
    starts,
    k_ptr,
    v_ptr,
    stride_kn,
    stride_vn,
    key_len,
    rank,
    world,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tile ``tile`` of the query block's own key block: k and v [BLOCK_N, D], and the causal mask
    [BLOCK_M, BLOCK_N], also of visible keys."""
    start = q_block * BLOCK + tile * BLOCK_N
    k = load_rows(k_ptr, start, stride_kn, offs_n, key_len, D, EVEN)
    v = load_rows(v_ptr, start, stride_vn, offs_n, key_len, D, EVEN)
    mask = rows[:, None] >= (start + offs_n)[None, :]
    if RANGES:
        position = block_at(q_block, rank, world, INNER) * BLOCK + tile * BLOCK_N + offs_n
        mask &= position[None, :] >= starts[:, None]
    return k, v, mask


@triton.jit
def slash_tile(
    j,
    offs_n,
    block_list,
    last_block,
    group,
    starts,
    k_ptr,
    v_ptr,
    stride_kr,
    stride_kn,
    stride_vr,
    stride_vn,
    key_len,
    outer,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tile ``j`` of the slashes' key blocks, counted from the begin of the head's list: k and v [BLOCK_N, D],
    and the mask of visible keys [BLOCK_M, BLOCK_N] (0 if not MASKED)."""
    tiles: tl.constexpr = BLOCK // BLOCK_N
    block = last_block - tl.load(block_list + j // tiles).to(tl.int32)
    source, local_block = owner_of(block, INNER, INNER)
    start = local_block * BLOCK + j % tiles * BLOCK_N
    source = source.to(tl.int64)
    k = load_rows(k_ptr + source * stride_kr, start, stride_kn, offs_n, key_len, D, True)
    v = load_rows(v_ptr + source * stride_vr, start, stride_vn, offs_n, key_len, D, True)
    mask = 0
    if MASKED:
        position = (block * outer + group) * BLOCK + j % tiles * BLOCK_N + offs_n
        mask = position[None, :] >= starts[:, None]
    return k, v, mask


@triton.jit
def column_range(
    column_ptr,
    q_block,
    head,
    first_block,
    rank,
    world,
    round_index,
    outer,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    RANGES: tl.constexpr,
):
    """The columns that a query block attends to, low to high in the head's list, and the block's number in
    the sequence. Each head has its columns in one of the rounds, so that rounds have equal work."""
    block = block_at(q_block, rank, world, INNER)
    high = tl.load(column_ptr + block)
    high = tl.where(head * outer // HEADS == round_index, high, 0)
    low = 0
    if RANGES:
        low = tl.load(column_ptr + first_block)
    return low, high, block


@triton.jit
def column_tile(
    first,
    end,
    offs_n,
    block,
    starts,
    columns,
    member,
    column_k_ptr,
    column_v_ptr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    RANGES: tl.constexpr,
):
    """Columns ``first`` to ``first + BLOCK_N`` of the head's list, which ends at ``end`` for query block
    ``block`` of the sequence: k and v [BLOCK_N, D], and a mask [1, BLOCK_N], or [BLOCK_M, BLOCK_N] with
    ranges. A column in a block that a slash covers is masked: the query block attends to it there."""
    entry = first + offs_n
    listed = entry < end
    position = tl.load(columns + entry, mask=listed, other=0)
    distance = block - position // BLOCK
    covered = tl.load(member + distance, mask=listed, other=1)
    # Entries past the end repeat the first: any other token's numbers could be NaN, which 0 does not hide.
    entry, mask = tl.where(listed, entry, first), listed & (covered == 0)
    k = gather_rows(column_k_ptr, entry, D)
    v = gather_rows(column_v_ptr, entry, D)
    mask = mask[None, :]
    if RANGES:
        mask &= tl.load(columns + entry)[None, :] >= starts[:, None]
    return k, v, mask
