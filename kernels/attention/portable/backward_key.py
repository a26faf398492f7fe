# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the keys and values of one rank through the queries of one rank.

    dv_k = sum_i p_ik dout_i        dk = scale sum_i ds_ik q_i

A program holds BLOCK_N keys of one block and loops over the query blocks that attend to them, for every query
head of the group: the slash list the other way round (``RingStep.block_distances``). Where it is given the
columns' gradients, it adds the rows that lie in its block. Of block lists it may have one segment of these
query blocks (:mod:`.segments`). All sums are in a fixed order, so the result is deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import launch
from ...common.tiles import (
    LOG2E,
    block_at,
    blocks_before,
    first_beyond,
    load_line,
    load_row,
    load_rows,
    precision_for,
    store_rows,
    tile_for,
)
from ..launch_args import (
    BLOCK_DISTANCES,
    block_distances,
    chain_tiles,
    key_ranges,
    partial_sums,
)
from ..operands import BackwardInputs, StepKeys
from .query_tiles import add_tile, put_aside, query_arguments, query_tile
from .segments import end_turn, find_segments, wait_for_turn


@triton.jit(do_not_specialize=["rank", "query_rank", *BLOCK_DISTANCES])
def _key_kernel(
    # Operands and results
    q_ptr,  # [s, b, h, d]
    k_ptr,  # [s, b, hk, d]
    v_ptr,  # [s, b, hk, d]
    do_ptr,  # [s, b, h, d]
    lse_ptr,  # [b, h, s]
    delta_ptr,  # [b, h, s]
    dk_ptr,  # [s, b, hk, d]
    dv_ptr,  # [s, b, hk, d]
    partial_dk_ptr,  # [s, b, hk, d] float32, added if ACCUMULATE; sums are put aside there
    partial_dv_ptr,
    column_dk_ptr,  # [b, h, SPLITS, C, d] float32, read if COLUMNS
    column_dv_ptr,
    # Segments.programs, or None; and how many programs have added to each tile of keys
    programs_ptr,
    turns_ptr,
    # The pattern by key rank (types.PatternOperand); visible ranges and the queries' rank, or None
    block_ptr,
    block_list,
    columns,
    column_ptr,
    first_keys,
    q_block_bounds,
    query_rank,
    # Strides (m: query row, n: key row, b: batch entry, h: head; d: of dk, dv and the partial sums)
    stride_qm,
    stride_qb,
    stride_qh,
    stride_kn,
    stride_kb,
    stride_kh,
    stride_vn,
    stride_vb,
    stride_vh,
    stride_dom,
    stride_dob,
    stride_doh,
    stride_dn,
    stride_db,
    stride_dh,
    # Sizes
    ptr_len,
    list_len,
    column_ptr_len,  # NB + 1
    column_len,  # C
    query_len,  # s
    key_len,  # s
    local_blocks,  # nb
    softmax_scale,
    # The layout (``rank`` has the keys), and how key blocks meet query blocks (launch_args.block_distances)
    rank,
    world,
    inner,
    residue_00,
    wrap_00,
    residue_01,
    wrap_01,
    residue_10,
    wrap_10,
    residue_11,
    wrap_11,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    DIAGONAL: tl.constexpr,  # whether queries and keys are of the same rank
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    LISTS: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHAIN: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    parts: tl.constexpr = BLOCK // BLOCK_N
    tiles: tl.constexpr = BLOCK // BLOCK_M
    k_block = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    line = tl.program_id(1)
    segment = 0
    is_last = True
    if programs_ptr is not None:
        programs_ptr += 4 * k_block
        k_block = tl.load(programs_ptr)
        if k_block < 0:
            return
        line = tl.load(programs_ptr + 1)
        segment = tl.load(programs_ptr + 2)
        is_last = segment + 1 == tl.load(programs_ptr + 3)
    kv_heads: tl.constexpr = HEADS // GROUP
    batch = (line // kv_heads).to(tl.int64)
    kv_head = (line % kv_heads).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    start_n = k_block * BLOCK + part * BLOCK_N
    k_ptr += batch * stride_kb + kv_head * stride_kh
    k = load_rows(k_ptr, start_n, stride_kn, offs_n, key_len, D, EVEN)  # [BLOCK_N, D]
    v_ptr += batch * stride_vb + kv_head * stride_vh
    v = load_rows(v_ptr, start_n, stride_vn, offs_n, key_len, D, EVEN)  # [BLOCK_N, D]
    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros(v.shape, tl.float32)
    scale = softmax_scale * LOG2E
    head_offset = batch * stride_db + kv_head * stride_dh
    partial_dk_ptr += head_offset
    partial_dv_ptr += head_offset
    in_chain = 0
    asides = 1 if ACCUMULATE else 0
    # How this key block meets query blocks: see RingStep.block_distances.
    parity = (k_block & 1) == 1
    same_residue = tl.where(parity, residue_10, residue_00)
    same_wrap = tl.where(parity, wrap_10, wrap_00)
    other_residue = tl.where(parity, residue_11, residue_01)
    other_wrap = tl.where(parity, wrap_11, wrap_01)
    if RANGES:
        block = block_at(k_block, rank, world, inner)
        position = block * BLOCK + part * BLOCK_N + offs_n  # [BLOCK_N]
        first_keys += batch * query_len
        q_block_bounds += 2 * batch * local_blocks * world + block
        # Query blocks before end_unmasked see it whole; from end_q_block on they attend to nothing.
        end_unmasked = blocks_before(tl.load(q_block_bounds), query_rank, world, inner)
        end_q_block = blocks_before(
            tl.load(q_block_bounds + local_blocks * world), query_rank, world, inner
        )
    begin_segment = segment * SEGMENT  # in what is left of the group's lists
    for g in range(GROUP):
        head = kv_head * GROUP + g
        bh = batch * HEADS + head
        q_head = q_ptr + batch * stride_qb + head * stride_qh
        do_head = do_ptr + batch * stride_dob + head * stride_doh
        lse_head = lse_ptr + bh * query_len
        delta_head = delta_ptr + bh * query_len
        if DIAGONAL:
            in_chain += tiles - part * BLOCK_N // BLOCK_M
            for tile in range(part * BLOCK_N // BLOCK_M, tiles if segment == 0 else 0):
                start_m = k_block * BLOCK + tile * BLOCK_M
                q, do, lse, delta = query_tile(
                    start_m, offs_m, q_head, do_head, lse_head, delta_head, stride_qm, stride_dom,
                    query_len, D, EVEN,
                )  # fmt: skip
                mask = (start_n + offs_n)[:, None] <= (start_m + offs_m)[None, :]
                if RANGES:
                    starts = load_line(first_keys, start_m, offs_m, query_len, 0, EVEN)
                    mask &= position[:, None] >= starts[None, :]
                dk, dv = add_tile(q, k, v, do, mask, dk, dv, lse, delta, scale, True, PREC)
        for apart in tl.static_range(1 if LISTS else 2):
            if LISTS:  # entries are query blocks
                first = 0
                low = tl.load(block_ptr + residue_00 + bh * local_blocks + k_block)
                high = tl.load(block_ptr + residue_00 + bh * local_blocks + k_block + 1)
                unmasked_end = high
                if RANGES:
                    own_list = block_list + bh * list_len
                    unmasked_end = first_beyond(own_list, low, high, end_unmasked - 1)
                    high = first_beyond(own_list, low, high, end_q_block - 1)
            else:
                residue = same_residue if apart == 0 else other_residue
                first = k_block + apart + 2 * (same_wrap if apart == 0 else other_wrap)
                low = tl.load(block_ptr + bh * ptr_len + residue)
                # Query blocks first, first + 2, and so on.
                count = tl.maximum((end_q_block if RANGES else local_blocks) + 1 - first, 0) // 2
                high = tl.load(block_ptr + bh * ptr_len + residue + count)
                unmasked_end = high
                if RANGES:
                    count = tl.maximum(end_unmasked + 1 - first, 0) // 2
                    unmasked_end = tl.load(block_ptr + bh * ptr_len + residue + count)
            if DIAGONAL and apart == 0:
                low += 1
            if programs_ptr is not None:
                count = tl.maximum(high - low, 0)
                high = low + tl.minimum(tl.maximum(begin_segment + SEGMENT, 0), count)
                low += tl.minimum(tl.maximum(begin_segment, 0), count)
                begin_segment -= count
                unmasked_end = tl.minimum(unmasked_end, high)
            for MASKED in tl.static_range(2 if RANGES else 1):
                begin = tl.maximum(low, unmasked_end) if MASKED else low
                end = high if MASKED else unmasked_end
                num_tiles = tl.maximum(end - begin, 0) * tiles
                step = CHAIN if CHAIN > 0 else tl.maximum(num_tiles, 1)
                for start_tile in range(0, num_tiles, step):
                    end_tile = tl.minimum(start_tile + step, num_tiles)
                    # From begin on, and not by j alone: of a number that only bounds of inner loops read,
                    # here begin_segment, Triton 3.6 and 3.7 keep the first value (triton-lang/triton#9036).
                    for j in range(start_tile, end_tile):
                        e = tl.load(block_list + bh * list_len + begin + j // tiles).to(tl.int32)
                        start_m = (first + (1 if LISTS else 2) * e) * BLOCK + j % tiles * BLOCK_M
                        q, do, lse, delta = query_tile(
                            start_m, offs_m, q_head, do_head, lse_head, delta_head, stride_qm,
                            stride_dom, query_len, D, EVEN,
                        )  # fmt: skip
                        mask = 0
                        if MASKED:
                            starts = load_line(first_keys, start_m, offs_m, query_len, 0, EVEN)
                            mask = position[:, None] >= starts[None, :]
                        dk, dv = add_tile(
                            q, k, v, do, mask, dk, dv, lse, delta, scale, MASKED, PREC
                        )
                    if CHAIN > 0:
                        in_chain += end_tile - start_tile
                        if in_chain >= CHAIN:
                            put_aside(
                                partial_dk_ptr, start_n, stride_dn, offs_n, key_len,
                                dk * softmax_scale, asides == 0, D, EVEN,
                            )  # fmt: skip
                            put_aside(
                                partial_dv_ptr, start_n, stride_dn, offs_n, key_len, dv, asides == 0,
                                D, EVEN,
                            )  # fmt: skip
                            dk = tl.zeros(k.shape, tl.float32)
                            dv = tl.zeros(v.shape, tl.float32)
                            in_chain = 0
                            asides += 1
        if COLUMNS:
            column_ptr_block = (
                column_ptr + bh * column_ptr_len + block_at(k_block, rank, world, inner)
            )
            end_column = tl.load(column_ptr_block + 1) if is_last else 0
            for j in range(tl.load(column_ptr_block), end_column):
                row = tl.load(columns + bh * column_len + j) % BLOCK - part * BLOCK_N
                for split in range(SPLITS):
                    at = ((bh * SPLITS + split) * column_len + j) * D
                    here = (offs_n == row)[:, None]
                    dk += tl.where(here, load_row(column_dk_ptr + at, D)[None, :], 0.0)
                    dv += tl.where(here, load_row(column_dv_ptr + at, D)[None, :], 0.0)
    dk = dk * softmax_scale
    if programs_ptr is not None:
        turns_ptr += (line.to(tl.int64) * local_blocks + k_block) * parts + part
        wait_for_turn(turns_ptr, segment)
        asides += segment
    if ACCUMULATE:
        dk += load_rows(partial_dk_ptr, start_n, stride_dn, offs_n, key_len, D, EVEN)
        dv += load_rows(partial_dv_ptr, start_n, stride_dn, offs_n, key_len, D, EVEN)
    elif CHAIN > 0 or programs_ptr is not None:
        read = tl.where(asides > 0, key_len, 0)
        dk += load_rows(partial_dk_ptr, start_n, stride_dn, offs_n, read, D, False)
        dv += load_rows(partial_dv_ptr, start_n, stride_dn, offs_n, read, D, False)
    if is_last:
        store_rows(dk_ptr + head_offset, start_n, stride_dn, offs_n, key_len, dk, D, EVEN)
        store_rows(dv_ptr + head_offset, start_n, stride_dn, offs_n, key_len, dv, D, EVEN)
    else:
        store_rows(partial_dk_ptr, start_n, stride_dn, offs_n, key_len, dk, D, EVEN)
        store_rows(partial_dv_ptr, start_n, stride_dn, offs_n, key_len, dv, D, EVEN)
    if programs_ptr is not None:
        end_turn(turns_ptr)


def backward_key(
    inputs: BackwardInputs,
    keys: StepKeys,
    grad_kv: Tensor,
    accumulator: Tensor | None,
    column_gradients: Tensor | None,
) -> None:
    """:func:`...attention.backward_key` into ``grad_kv``, which may be the accumulator."""
    assert inputs.query_sums is None, "the portable kernels have no one-pass backward"
    query, index = inputs.query, inputs.index
    key, value, ring_step = keys.key, keys.value, keys.ring_step
    length, batch, heads, dim = query.shape
    kv_heads = key.shape[2]
    tile = tile_for("key", dim, index.block_size, query)
    dk, dv = grad_kv
    parts = index.block_size // tile.block_n
    grid = (index.local_blocks * parts, batch * kv_heads)
    segments = find_segments(index, kv_heads, ring_step)
    chain = chain_tiles(
        index.local_blocks * (heads // kv_heads) * (index.block_size // tile.block_m)
    )
    if segments is not None:
        chain = 0  # a segment is shorter
        grid = (len(segments.programs) * parts, 1)
    partial_dk, partial_dv = partial_sums(grad_kv, accumulator, chain, segments is not None)
    column_dk, column_dv, splits, num_columns = inputs.lse, inputs.lse, 1, 0  # not read
    if column_gradients is not None:
        column_dk, column_dv = column_gradients
        splits, num_columns = column_gradients.shape[3:5]
    launch(
        _key_kernel,
        grid,
        **query_arguments(inputs),
        k_ptr=key,
        v_ptr=value,
        dk_ptr=dk,
        dv_ptr=dv,
        partial_dk_ptr=partial_dk,
        partial_dv_ptr=partial_dv,
        stride_kn=key.stride(0),
        stride_kb=key.stride(1),
        stride_kh=key.stride(2),
        stride_vn=value.stride(0),
        stride_vb=value.stride(1),
        stride_vh=value.stride(2),
        stride_dn=dk.stride(0),
        stride_db=dk.stride(1),
        stride_dh=dk.stride(2),
        key_len=key.shape[0],
        column_dk_ptr=column_dk,
        column_dv_ptr=column_dv,
        programs_ptr=None if segments is None else segments.programs,
        turns_ptr=None if segments is None else segments.new_turns(parts),
        columns=index.columns,
        column_ptr=index.column_ptr,
        column_ptr_len=index.column_ptr.shape[-1],
        column_len=num_columns,
        block_ptr=index.rank_ptr,
        block_list=index.rank_list,
        ptr_len=index.rank_ptr.shape[-1],
        list_len=index.list_strides[1],
        **key_ranges(index, ring_step.rank),
        query_rank=None if index.visible is None else ring_step.rank,
        local_blocks=index.local_blocks,
        rank=ring_step.source,
        world=index.world,
        inner=index.inner,
        **dict(zip(BLOCK_DISTANCES, block_distances(index, ring_step))),
        HEADS=heads,
        GROUP=heads // kv_heads,
        BLOCK=index.block_size,
        D=dim,
        DIAGONAL=ring_step.source == ring_step.rank,
        ACCUMULATE=accumulator is not None,
        COLUMNS=column_gradients is not None,
        LISTS=index.has_block_lists,
        RANGES=index.visible is not None,
        EVEN=length % index.block_size == 0,
        PREC=precision_for(query),
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CHAIN=chain,
        SEGMENT=0 if segments is None else segments.blocks,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
