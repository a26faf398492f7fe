# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient of the queries of one round.

With ``p_ik = exp(scale q_i.k - lse_i)`` and ``delta_i = sum(out_i * dout_i)``,

    ds_ik = p_ik (dout_i.v_k - delta_i)        dq_i = dq_i' + scale sum_k ds_ik k

where ``'`` marks the gradient of the rounds before (the accumulator). Each program computes BLOCK_M
rows of one query block of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import launch
from ...common.tiles import LOG2E, load_rows, store_rows, tile_for
from ..operands import BackwardInputs, RoundKeys
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
from .query_tiles import query_arguments


@triton.jit
def _add_tile(
    q,  # [BLOCK_M, D]
    k,  # [BLOCK_N, D]
    v,  # [BLOCK_N, D]
    do,  # [BLOCK_M, D]
    mask,  # [BLOCK_M, BLOCK_N], read if MASKED
    dq,  # [BLOCK_M, D]
    lse,  # [BLOCK_M], of base 2
    delta,  # [BLOCK_M]
    scale,
    MASKED: tl.constexpr,
    PREC: tl.constexpr,
):
    """dq with one tile of keys added, without the factor ``softmax_scale``, and the tile's probabilities."""
    scores = tl.dot(q, tl.trans(k), input_precision=PREC)  # [BLOCK_M, BLOCK_N]
    dp = tl.dot(do, tl.trans(v), input_precision=PREC)  # [BLOCK_M, BLOCK_N]
    if MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    p = tl.math.exp2(scores * scale - lse[:, None])
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PREC), p


@triton.jit(do_not_specialize=["first_head", "round_start", "wrap", "rank", "round_index"])
def _query_kernel(
    # Operands and results
    q_ptr,  # [s, b, h, d]
    k_ptr,  # [I, s, b, hk, d]
    v_ptr,  # [I, s, b, hk, d]
    do_ptr,  # [s, b, h, d]
    accumulator_ptr,  # [s, b, h, d] float32, read unless FIRST
    dq_ptr,  # [s, b, h, d]
    lse_ptr,  # [b, h, s]
    delta_ptr,  # [b, h, s]
    attended_ptr,  # [b, h, s], or None
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
    stride_dom,
    stride_dob,
    stride_doh,
    stride_am,
    stride_ab,
    stride_ah,
    stride_dqm,
    stride_dqb,
    stride_dqh,
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
    first_head,  # of the heads of all batch entries
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles: tl.constexpr = BLOCK // BLOCK_N
    q_block, part = query_rows_of_program(local_blocks, BLOCK, BLOCK_M)
    bh = (first_head + tl.program_id(1)).to(tl.int64)
    batch = bh // HEADS
    head = bh % HEADS
    kv_head = head // GROUP
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    do_ptr += batch * stride_dob + head * stride_doh
    block_ptr, block_list, member, columns, column_ptr, column_k_ptr, column_v_ptr = (
        pattern_of_head(
            bh, q_block, block_ptr, block_list, member, columns, column_ptr, column_k_ptr, column_v_ptr,
            ptr_len, list_len, column_len, local_blocks, round_start, D, LISTS,
        )
    )  # fmt: skip

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    start = q_block * BLOCK + part * BLOCK_M
    inside = start + offs_m < query_len
    q = load_rows(q_ptr, start, stride_qm, offs_m, query_len, D, EVEN)  # [BLOCK_M, D]
    do = load_rows(do_ptr, start, stride_dom, offs_m, query_len, D, EVEN)  # [BLOCK_M, D]
    # A row past the end gets lse = inf, hence p = 0.
    lse = (
        tl.load(lse_ptr + bh * query_len + start + offs_m, mask=inside, other=float("inf")) * LOG2E
    )
    delta = tl.load(delta_ptr + bh * query_len + start + offs_m, mask=inside, other=0.0)
    scale = softmax_scale * LOG2E
    dq = tl.zeros(q.shape, tl.float32)
    attended = tl.zeros([BLOCK_M], tl.float32)

    low, unmasked_end, high, last_block, starts, first_block, group = slash_range(
        block_ptr, block_list, first_keys, kv_block_bounds, q_block, start, offs_m, inside, batch,
        query_len, local_blocks, rank, wrap, round_index, outer, INNER, LISTS, RANGES,
    )  # fmt: skip
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
            dq, p = _add_tile(q, k, v, do, mask, dq, lse, delta, scale, True, PREC)
            if attended_ptr is not None:
                attended += tl.sum(p, 1)
    for MASKED in tl.static_range(2 if RANGES else 1):
        begin = tl.maximum(low, unmasked_end) if MASKED else low
        end = high if MASKED else unmasked_end
        for j in range(begin * tiles, end * tiles):
            k, v, mask = slash_tile(
                j, offs_n, block_list, last_block, group, starts, k_ptr, v_ptr,
                stride_kr, stride_kn, stride_vr, stride_vn, key_len, outer,
                INNER, BLOCK, BLOCK_N, D, MASKED,
            )  # fmt: skip
            dq, p = _add_tile(q, k, v, do, mask, dq, lse, delta, scale, MASKED, PREC)
            if attended_ptr is not None:
                attended += tl.sum(p, 1)
    if COLUMNS:
        low, high, block = column_range(
            column_ptr, q_block, head, first_block, rank, world, round_index, outer, INNER, HEADS, RANGES
        )  # fmt: skip
        for first in range(low, high, BLOCK_N):
            k, v, mask = column_tile(
                first, high, offs_n, block, starts, columns, member, column_k_ptr, column_v_ptr,
                BLOCK, D, RANGES,
            )  # fmt: skip
            dq, p = _add_tile(q, k, v, do, mask, dq, lse, delta, scale, True, PREC)
            if attended_ptr is not None:
                attended += tl.sum(p, 1)

    if attended_ptr is not None:
        attended_ptr += bh * query_len + start + offs_m
        if not FIRST:
            attended += tl.load(attended_ptr, mask=inside, other=0.0)
        tl.store(attended_ptr, attended, mask=inside)
    dq = dq * softmax_scale
    if not FIRST:
        accumulator_ptr += batch * stride_ab + head * stride_ah
        acc = load_rows(accumulator_ptr, start, stride_am, offs_m, query_len, D, EVEN)
        dq += acc.to(tl.float32)
    dq_ptr += batch * stride_dqb + head * stride_dqh
    store_rows(dq_ptr, start, stride_dqm, offs_m, query_len, dq, D, EVEN)


def backward_query(
    inputs: BackwardInputs,
    keys: RoundKeys,
    grad_query: Tensor,
    accumulator: Tensor | None,
    head_range: range,
) -> None:
    """:func:`...attention.backward_query` into ``grad_query``, which may be the accumulator, for some of the
    ``b * h`` heads of all batch entries."""
    query, index = inputs.query, inputs.index
    tile = tile_for("query", query.shape[3], index.block_size, query)
    acc_in = grad_query if accumulator is None else accumulator
    launch(
        _query_kernel,
        (index.local_blocks * (index.block_size // tile.block_m), len(head_range)),
        **query_arguments(inputs),
        accumulator_ptr=acc_in,
        dq_ptr=grad_query,
        attended_ptr=inputs.attended,
        stride_am=acc_in.stride(0),
        stride_ab=acc_in.stride(1),
        stride_ah=acc_in.stride(2),
        stride_dqm=grad_query.stride(0),
        stride_dqb=grad_query.stride(1),
        stride_dqh=grad_query.stride(2),
        first_head=head_range.start,
        **kv_arguments(query, keys, index),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
