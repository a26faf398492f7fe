# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient of the queries of one round, and the row sums that both gradients need.

With ``p = exp(scale q.k - lse)`` and ``delta = sum(out * dout)``,

    ds = p * (dout.v - delta)        dq = carried + scale * sum_k ds k
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.launch import launch
from ...common.tiles import (
    LOG2E,
    block_at,
    column_tile,
    document_rows,
    gather_rows,
    list_start,
    load_rows,
    owner_of,
    precision_for,
    seen_from,
    store_rows,
    tile_for,
)


@triton.jit
def _add_tile(q, k, v, do, keep, acc, lse, delta, scale, MASKED: tl.constexpr, PREC: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision=PREC)
    dp = tl.dot(do, tl.trans(v), input_precision=PREC)
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    p = tl.math.exp2(scores * scale - lse[:, None])
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=PREC)


@triton.jit(do_not_specialize=["residue", "wrap", "rank", "number", "first_head"])
def _query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, carry_ptr, dq_ptr, lse_ptr, delta_ptr,
    slash_ptr, slash_list, member, columns, column_ptr, column_k, column_v, start_ptr, reach_ptr,
    q_ss, q_sb, q_sh, k_sc, k_ss, k_sb, k_sh, v_sc, v_ss, v_sb, v_sh,
    do_ss, do_sb, do_sh, c_ss, c_sb, c_sh, dq_ss, dq_sb, dq_sh,
    ptr_len, list_len, column_len, query_len, key_len, nb, softmax_scale,
    residue, wrap, rank, world, number, outer, first_head,
    INNER: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, WALK: tl.constexpr, DIAGONAL: tl.constexpr, CARRY: tl.constexpr,
    COLUMNS: tl.constexpr, LISTS: tl.constexpr, DOCS: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = BLOCK // KEEP
    walks: tl.constexpr = BLOCK // WALK
    program = nb * parts - 1 - tl.program_id(0)
    a = program // parts
    part = program % parts
    bh = (first_head + tl.program_id(1)).to(tl.int64)
    batch = bh // HEADS
    head = bh % HEADS
    kv_head = head // GROUP
    q_ptr += batch * q_sb + head * q_sh
    k_ptr += batch * k_sb + kv_head * k_sh
    v_ptr += batch * v_sb + kv_head * v_sh
    do_ptr += batch * do_sb + head * do_sh
    slash_ptr += list_start(bh, a, ptr_len, nb, residue, LISTS)
    slash_list += bh * list_len
    member += bh * (ptr_len - 1)
    columns += bh * column_len
    column_ptr += bh * ptr_len
    column_k += bh * column_len * D
    column_v += bh * column_len * D

    rows = tl.arange(0, KEEP)
    keys = tl.arange(0, WALK)
    start = a * BLOCK + part * KEEP
    inside = start + rows < query_len
    q = load_rows(q_ptr, start, q_ss, rows, query_len, D, EVEN)
    do = load_rows(do_ptr, start, do_ss, rows, query_len, D, EVEN)
    # A row past the end gets lse = inf, hence p = 0.
    lse = tl.load(lse_ptr + bh * query_len + start + rows, mask=inside, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + bh * query_len + start + rows, mask=inside, other=0.0)
    scale = softmax_scale * LOG2E
    acc = tl.zeros([KEEP, D], tl.float32)

    low = tl.load(slash_ptr)
    # Among the blocks of the round's ranks, the last that this query block may see.
    last = block_at(a, rank % INNER, INNER, INNER) - wrap
    high = tl.load(slash_ptr + 1 if LISTS else slash_ptr + last + 1)
    whole = high
    if DOCS:
        begins = tl.load(start_ptr + batch * query_len + start + rows, mask=inside, other=0)
        reach_ptr += batch * 2 * nb + a
        first_block = tl.load(reach_ptr)
        node = rank // INNER - number + wrap * outer
        whole = seen_from(
            tl.load(reach_ptr + nb), slash_ptr, slash_list, low, high, last, node, outer, LISTS
        )
        high = seen_from(first_block, slash_ptr, slash_list, low, high, last, node, outer, LISTS)
    if DIAGONAL:
        low += 1
        own_k = k_ptr + rank % INNER * k_sc.to(tl.int64)
        own_v = v_ptr + rank % INNER * v_sc.to(tl.int64)
        for walk in range(tl.cdiv((part + 1) * KEEP, WALK)):
            at = a * BLOCK + walk * WALK
            k = load_rows(own_k, at, k_ss, keys, key_len, D, EVEN)
            v = load_rows(own_v, at, v_ss, keys, key_len, D, EVEN)
            keep = (start + rows)[:, None] >= (at + keys)[None, :]
            if DOCS:
                position = block_at(a, rank, world, INNER) * BLOCK + walk * WALK + keys
                keep &= position[None, :] >= begins[:, None]
            acc = _add_tile(q, k, v, do, keep, acc, lse, delta, scale, True, PREC)
    for j in range(low * walks, whole * walks):
        block = last - tl.load(slash_list + j // walks).to(tl.int32)
        chunk, c = owner_of(block, INNER, INNER)
        at = c * BLOCK + j % walks * WALK
        chunk = chunk.to(tl.int64)
        k = load_rows(k_ptr + chunk * k_sc, at, k_ss, keys, key_len, D, True)
        v = load_rows(v_ptr + chunk * v_sc, at, v_ss, keys, key_len, D, True)
        acc = _add_tile(q, k, v, do, None, acc, lse, delta, scale, False, PREC)
    if DOCS:  # key blocks of which some rows see a part, or nothing
        for j in range(tl.maximum(low, whole) * walks, high * walks):
            block = last - tl.load(slash_list + j // walks).to(tl.int32)
            chunk, c = owner_of(block, INNER, INNER)
            at = c * BLOCK + j % walks * WALK
            chunk = chunk.to(tl.int64)
            k = load_rows(k_ptr + chunk * k_sc, at, k_ss, keys, key_len, D, True)
            v = load_rows(v_ptr + chunk * v_sc, at, v_ss, keys, key_len, D, True)
            position = (block * outer + node) * BLOCK + j % walks * WALK + keys
            keep = position[None, :] >= begins[:, None]
            acc = _add_tile(q, k, v, do, keep, acc, lse, delta, scale, True, PREC)
    if COLUMNS:
        block = block_at(a, rank, world, INNER)
        # Each head has its columns in one of the rounds, so that rounds are alike.
        high = tl.load(column_ptr + block)
        high = tl.where(head * outer // HEADS == number, high, 0)
        low = 0
        if DOCS:
            low = tl.load(column_ptr + first_block)
        for first in range(low, high, WALK):
            entry, keep = column_tile(columns, member, first, high, block, BLOCK, WALK)
            k = gather_rows(column_k, entry, D)
            v = gather_rows(column_v, entry, D)
            keep = keep[None, :]
            if DOCS:
                keep &= tl.load(columns + entry)[None, :] >= begins[:, None]
            acc = _add_tile(q, k, v, do, keep, acc, lse, delta, scale, True, PREC)

    acc = acc * softmax_scale
    if CARRY:
        carry_ptr += batch * c_sb + head * c_sh
        acc += load_rows(carry_ptr, start, c_ss, rows, query_len, D, EVEN).to(tl.float32)
    store_rows(dq_ptr + batch * dq_sb + head * dq_sh, start, dq_ss, rows, query_len, acc, D, EVEN)


def backward_query(
    query, key, value, columns, grad_out, lse, delta, index, this, softmax_scale, carry, grad_query,
    line_range,
):  # fmt: skip
    """Launch the queries' gradient of one round, for a range of the heads of all batch entries; ``carry``
    is read unless ``this.first``."""
    length, batch, heads, dim = query.shape
    kv_heads, nb, block = key.shape[3], index.local_blocks, index.block_size
    tile = tile_for("query", dim, block, query)
    carried = grad_query if carry is None else carry
    launch(
        _query_kernel, (nb * (block // tile.keep), len(line_range)),
        query, key, value, grad_out, carried, grad_query, lse, delta,
        index.round_ptr, index.round_list, index.member, index.columns, index.column_ptr,
        *((key, value) if columns is None else columns), *document_rows(index, this.rank),
        *query.stride()[:3], *key.stride()[:4], *value.stride()[:4], *grad_out.stride()[:3],
        *carried.stride()[:3], *grad_query.stride()[:3],
        index.column_ptr.shape[-1], index.list_strides[0], index.columns.shape[-1],
        length, key.shape[1], nb, softmax_scale,
        index.round_start(this.round_index), this.wrap, this.rank, index.world, this.round_index,
        index.outer, line_range.start,
        INNER=index.inner, HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block,
        KEEP=tile.keep, WALK=tile.walk, DIAGONAL=this.first, CARRY=not this.first,
        COLUMNS=columns is not None, LISTS=index.has_block_lists, DOCS=index.documents is not None,
        EVEN=length % block == 0, PREC=precision_for(query),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
