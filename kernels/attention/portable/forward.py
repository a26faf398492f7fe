# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Forward of one round: slash blocks and columns in one online softmax.

For a query row ``i`` over the keys ``k`` of the round that its head attends to,

    lse_i = log( exp(lse_i') + sum_k exp(scale q_i.k) )
    out_i = exp(lse_i' - lse_i) out_i' + sum_k exp(scale q_i.k - lse_i) v_k

with the sums in float32, where ``'`` marks the result of the rounds before (the accumulator). Each program
computes BLOCK_M rows of one query block of one head.

With marks (:mod:`..marks`), blocks come in another order, those first that have much attention in many
heads: the query block itself, columns, blocks of which rows see a part, the first block that the query block
may attend to, and all others, the nearest first. After each block, its share in the sums so far is known.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import launch
from ...common.tiles import LN2, LOG2E, block_at, load_rows, store_rows, tile_for
from ..launch_args import mark_arguments
from ..operands import ForwardInputs
from .kv_tiles import (
    column_range,
    column_tile,
    diagonal_tile,
    kv_arguments,
    pattern_of_head,
    query_rows_of_program,
    slash_range,
    slash_tile,
)


@triton.jit
def _online_softmax(
    q,  # [BLOCK_M, D]
    k,  # [BLOCK_N, D]
    v,  # [BLOCK_N, D]
    mask,  # [BLOCK_M, BLOCK_N], read if MASKED
    acc,  # [BLOCK_M, D]
    m,  # [BLOCK_M]
    l,  # [BLOCK_M]
    scale,
    MASKED: tl.constexpr,
    PREC: tl.constexpr,
):
    """Add one tile of keys to the running output, maximum and sum of each row; logits are of base 2.

    Returns:
        the three, the tile's own sum in the same unit, and the factor for what was summed before.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PREC)  # [BLOCK_M, BLOCK_N]
    if MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    # A row with no score above -inf so far has no maximum to subtract yet.
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(scores * scale - finite[:, None])  # [BLOCK_M, BLOCK_N]
    alpha = tl.math.exp2(m - finite)
    tile_sum = tl.sum(p, 1)
    l = l * alpha + tile_sum
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PREC)
    return acc, m_new, l, tile_sum, alpha


@triton.jit
def _add_mark(words, row, k_block, mark):
    """Or a mark, int32, to the byte of a key block.

    Args:
        row: offset of the query block's marks, in bytes.
    """
    byte = row + k_block
    mark_at = mark << ((byte.to(tl.int32) & 3) * 8)
    tl.atomic_or(words + (byte >> 2), mark_at, mask=mark > 0, sem="relaxed")


@triton.jit
def _attend_columns(
    q,
    acc,
    m,
    l,
    scale,
    offs_n,
    starts,
    columns,
    column_ptr,
    member,
    column_k_ptr,
    column_v_ptr,
    q_block,
    head,
    first_block,
    rank,
    world,
    round_index,
    outer,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    RANGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """Add the columns of a query block."""
    low, high, block = column_range(
        column_ptr, q_block, head, first_block, rank, world, round_index, outer, INNER, HEADS, RANGES
    )  # fmt: skip
    for first in range(low, high, BLOCK_N):
        k, v, mask = column_tile(
            first, high, offs_n, block, starts, columns, member, column_k_ptr, column_v_ptr,
            BLOCK, D, RANGES,
        )  # fmt: skip
        acc, m, l, tile_sum, alpha = _online_softmax(q, k, v, mask, acc, m, l, scale, True, PREC)
    return acc, m, l


@triton.jit(do_not_specialize=["round_start", "wrap", "rank", "round_index"])
def _forward_kernel(
    # Operands and results
    q_ptr,  # [s, b, h, d]
    k_ptr,  # [I, s, b, hk, d]
    v_ptr,  # [I, s, b, hk, d]
    accumulator_ptr,  # [s, b, h, d] float32, read unless FIRST
    out_ptr,  # [s, b, h, d]
    lse_ptr,  # [b, h, s]
    # The pattern (types.PatternOperand), the gathered columns [b, h, C, d], and visible ranges or None
    block_ptr,
    block_list,
    member,
    columns,
    column_ptr,
    column_k_ptr,
    column_v_ptr,
    first_keys,
    kv_block_bounds,
    # The marks of blocks (BlockMarks), or None
    words,
    least_share_ptr,  # [b]
    # Strides (r: rank, m: query row, n: key row, b: batch entry, h: head)
    stride_qm,
    stride_qb,
    stride_qh,
    stride_kr,
    stride_kn,
    stride_kb,
    stride_kh,
    stride_vr,
    stride_vn,
    stride_vb,
    stride_vh,
    stride_am,
    stride_ab,
    stride_ah,
    stride_om,
    stride_ob,
    stride_oh,
    # Sizes
    ptr_len,  # NB + 1
    list_len,
    column_len,  # C
    query_len,  # s
    key_len,  # s
    local_blocks,  # nb
    softmax_scale,
    # The layout and the round (types.Round)
    round_start,
    wrap,
    rank,
    world,
    round_index,
    outer,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
    LISTS: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
    LAST: tl.constexpr,
    MARKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles: tl.constexpr = BLOCK // BLOCK_N
    # Blocks with a mask of visible keys come last, or first.
    FROM_MASKED: tl.constexpr = 1 if RANGES and MARKS else 0
    TO_MASKED: tl.constexpr = -1 if RANGES and MARKS else 2 if RANGES else 1
    q_block, part = query_rows_of_program(local_blocks, BLOCK, BLOCK_M)
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // HEADS
    head = bh % HEADS
    kv_head = head // GROUP
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    block_ptr, block_list, member, columns, column_ptr, column_k_ptr, column_v_ptr = (
        pattern_of_head(
            bh, q_block, block_ptr, block_list, member, columns, column_ptr, column_k_ptr, column_v_ptr,
            ptr_len, list_len, column_len, local_blocks, round_start, D, LISTS,
        )
    )  # fmt: skip

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    start = q_block * BLOCK + part * BLOCK_M
    q = load_rows(q_ptr, start, stride_qm, offs_m, query_len, D, EVEN)  # [BLOCK_M, D]
    scale = softmax_scale * LOG2E
    lse_ptr += bh * query_len + start + offs_m
    inside = start + offs_m < query_len
    if FIRST:
        acc = tl.zeros(q.shape, tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
    else:
        accumulator_ptr += batch * stride_ab + head * stride_ah
        acc = load_rows(accumulator_ptr, start, stride_am, offs_m, query_len, D, EVEN)
        acc = acc.to(tl.float32)
        m = tl.load(lse_ptr, mask=inside, other=0.0) * LOG2E
        # A row without any weight so far may meet no tile here either.
        l = tl.where(m == float("-inf"), 0.0, 1.0)

    low, unmasked_end, high, last_block, starts, first_block, group = slash_range(
        block_ptr, block_list, first_keys, kv_block_bounds, q_block, start, offs_m, inside, batch,
        query_len, local_blocks, rank, wrap, round_index, outer, INNER, LISTS, RANGES,
    )  # fmt: skip
    least = 0.0
    block = 0
    mark_row = bh
    of_round = group
    if MARKS:
        least = tl.where(inside, tl.load(least_share_ptr + batch), float("inf"))  # [BLOCK_M]
        block = block_at(q_block, rank, world, INNER)
        mark_row = (bh * local_blocks + q_block) * (ptr_len - 1)
        of_round = rank // INNER - round_index + wrap * outer
    if FIRST:
        # Block distance 0 is the first of the list, and the only one that needs a causal mask.
        low += 1
        own_k = k_ptr + rank % INNER * stride_kr.to(tl.int64)
        own_v = v_ptr + rank % INNER * stride_vr.to(tl.int64)
        for tile in range(tl.cdiv((part + 1) * BLOCK_M, BLOCK_N)):
            k, v, mask = diagonal_tile(
                tile, q_block, start + offs_m, offs_n, starts, own_k, own_v, stride_kn, stride_vn, key_len,
                rank, world, INNER, BLOCK, BLOCK_N, D, RANGES, EVEN,
            )  # fmt: skip
            acc, m, l, tile_sum, alpha = _online_softmax(
                q, k, v, mask, acc, m, l, scale, True, PREC
            )
        if MARKS:
            _add_mark(words, mark_row, block, tl.full([], 1, tl.int32))
    if COLUMNS and MARKS:
        acc, m, l = _attend_columns(
            q, acc, m, l, scale, offs_n, starts, columns, column_ptr, member, column_k_ptr, column_v_ptr,
            q_block, head, first_block, rank, world, round_index, outer,
            INNER, HEADS, BLOCK, BLOCK_N, D, RANGES, PREC,
        )  # fmt: skip
    for MASKED in tl.static_range(FROM_MASKED, TO_MASKED, -1 if FROM_MASKED > TO_MASKED else 1):
        begin = tl.maximum(low, unmasked_end) if MASKED else low
        end = high if MASKED else unmasked_end
        if MARKS:
            first_entry = begin
            if not MASKED:
                # The first block that the query block may attend to is listed last, if at all.
                last_entry = tl.load(block_list + end - 1, mask=begin < end, other=0).to(tl.int32)
                if (last_block - last_entry) * outer + of_round == first_block:
                    first_entry = end - 1
            for j in range(begin, end):
                entry = tl.where(j == begin, first_entry, j - (first_entry > begin).to(tl.int32))
                share = tl.zeros([BLOCK_M], tl.float32)
                for piece in tl.static_range(tiles):
                    k, v, mask = slash_tile(
                        entry * tiles + piece, offs_n, block_list, last_block, group, starts, k_ptr, v_ptr,
                        stride_kr, stride_kn, stride_vr, stride_vn, key_len, outer,
                        INNER, BLOCK, BLOCK_N, D, MASKED,
                    )  # fmt: skip
                    acc, m, l, tile_sum, alpha = _online_softmax(
                        q, k, v, mask, acc, m, l, scale, MASKED, PREC
                    )
                    share = share * alpha + tile_sum
                k_block = (last_block - tl.load(block_list + entry).to(tl.int32)) * outer + of_round
                below = (share < least * l).to(tl.int32)
                mark = (tl.sum(below, 0) < BLOCK_M).to(tl.int32)
                mark = tl.where(block - k_block <= 1, 1, mark)
                _add_mark(words, mark_row, k_block, mark)
        else:
            for j in range(begin * tiles, end * tiles):
                k, v, mask = slash_tile(
                    j, offs_n, block_list, last_block, group, starts, k_ptr, v_ptr,
                    stride_kr, stride_kn, stride_vr, stride_vn, key_len, outer,
                    INNER, BLOCK, BLOCK_N, D, MASKED,
                )  # fmt: skip
                acc, m, l, tile_sum, alpha = _online_softmax(
                    q, k, v, mask, acc, m, l, scale, MASKED, PREC
                )
    if COLUMNS and not MARKS:
        acc, m, l = _attend_columns(
            q, acc, m, l, scale, offs_n, starts, columns, column_ptr, member, column_k_ptr, column_v_ptr,
            q_block, head, first_block, rank, world, round_index, outer,
            INNER, HEADS, BLOCK, BLOCK_N, D, RANGES, PREC,
        )  # fmt: skip

    out_ptr += batch * stride_ob + head * stride_oh
    # A row without any weight so far is stored as 0, and is NaN only if it has none at the end.
    weight = l if LAST else tl.where(l == 0.0, 1.0, l)
    store_rows(out_ptr, start, stride_om, offs_m, query_len, acc / weight[:, None], D, EVEN)
    tl.store(lse_ptr, (m + tl.math.log2(l)) * LN2, mask=inside)


def forward(inputs: ForwardInputs, out: Tensor) -> None:
    """:func:`...attention.forward` into ``out``, which may be the accumulator."""
    query, keys, index, accumulator = inputs.query, inputs.keys, inputs.index, inputs.accumulator
    length, batch, heads, dim = query.shape
    tile = tile_for("forward", dim, index.block_size, query)
    acc_in = out if accumulator is None else accumulator
    launch(
        _forward_kernel,
        (index.local_blocks * (index.block_size // tile.block_m), batch * heads),
        q_ptr=query,
        accumulator_ptr=acc_in,
        out_ptr=out,
        lse_ptr=inputs.lse,
        stride_qm=query.stride(0),
        stride_qb=query.stride(1),
        stride_qh=query.stride(2),
        stride_am=acc_in.stride(0),
        stride_ab=acc_in.stride(1),
        stride_ah=acc_in.stride(2),
        stride_om=out.stride(0),
        stride_ob=out.stride(1),
        stride_oh=out.stride(2),
        query_len=length,
        softmax_scale=inputs.softmax_scale,
        **kv_arguments(query, keys, index),
        **mark_arguments(inputs.marks),
        LAST=keys.round.last,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
