# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Forward of one round: slash blocks and columns in one online softmax.

For a query row ``i`` over the keys ``k`` of the round that its head attends to,

    lse_i = log( exp(lse_i carried) + sum_k exp(scale q_i.k_k) )
    out_i = exp(lse_i carried - lse_i) out_i carried + sum_k exp(scale q_i.k_k - lse_i) v_k

with the sums in float32. Each program holds one query block of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.launch import launch
from ...common.tiles import (
    LN2,
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
def _online_softmax(q, k, v, keep, acc, m, l, scale, MASKED: tl.constexpr, PREC: tl.constexpr):
    """Add one tile of keys to the running (acc, max, sum); base-2 logits."""
    scores = tl.dot(q, tl.trans(k), input_precision=PREC)
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    # A row that has seen nothing but scores of -inf has a maximum to subtract only later.
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(scores * scale - finite[:, None])
    alpha = tl.math.exp2(m - finite)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PREC)
    return acc, m_new, l


@triton.jit(do_not_specialize=["residue", "wrap", "rank", "number", "first_head"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, carry_ptr, out_ptr, lse_ptr,
    slash_ptr, slash_list, member, columns, column_ptr, column_k, column_v, start_ptr, reach_ptr,
    q_ss, q_sb, q_sh, k_sc, k_ss, k_sb, k_sh, v_sc, v_ss, v_sb, v_sh,
    c_ss, c_sb, c_sh, o_ss, o_sb, o_sh,
    ptr_len, list_len, column_len, query_len, key_len, nb, scale,
    residue, wrap, rank, world, number, outer, first_head,
    INNER: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, WALK: tl.constexpr, DIAGONAL: tl.constexpr, CARRY: tl.constexpr,
    LAST: tl.constexpr, COLUMNS: tl.constexpr, LISTS: tl.constexpr, DOCS: tl.constexpr, EVEN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = BLOCK // KEEP
    walks: tl.constexpr = BLOCK // WALK
    # The last query blocks have the most keys: start them first.
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
    q = load_rows(q_ptr, start, q_ss, rows, query_len, D, EVEN)
    scale = scale * LOG2E
    lse_ptr += bh * query_len + start + rows
    inside = start + rows < query_len
    if CARRY:
        carry_ptr += batch * c_sb + head * c_sh
        acc = load_rows(carry_ptr, start, c_ss, rows, query_len, D, EVEN).to(tl.float32)
        m = tl.load(lse_ptr, mask=inside, other=0.0) * LOG2E
        # A row without weight so far may meet no tile here either.
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([KEEP, D], tl.float32)
        m = tl.full([KEEP], float("-inf"), tl.float32)
        l = tl.zeros([KEEP], tl.float32)

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
        # Distance 0 is first in the list of residue 0, and the only block that needs a token mask.
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
            acc, m, l = _online_softmax(q, k, v, keep, acc, m, l, scale, True, PREC)
    for j in range(low * walks, whole * walks):
        block = last - tl.load(slash_list + j // walks).to(tl.int32)
        chunk, c = owner_of(block, INNER, INNER)
        at = c * BLOCK + j % walks * WALK
        chunk = chunk.to(tl.int64)
        k = load_rows(k_ptr + chunk * k_sc, at, k_ss, keys, key_len, D, True)
        v = load_rows(v_ptr + chunk * v_sc, at, v_ss, keys, key_len, D, True)
        acc, m, l = _online_softmax(q, k, v, None, acc, m, l, scale, False, PREC)
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
            acc, m, l = _online_softmax(q, k, v, keep, acc, m, l, scale, True, PREC)
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
            acc, m, l = _online_softmax(q, k, v, keep, acc, m, l, scale, True, PREC)

    out_ptr += batch * o_sb + head * o_sh
    # What has no weight yet is carried as 0, and is NaN only if it has none at the end.
    weight = l if LAST else tl.where(l == 0.0, 1.0, l)
    store_rows(out_ptr, start, o_ss, rows, query_len, acc / weight[:, None], D, EVEN)
    tl.store(lse_ptr, (m + tl.math.log2(l)) * LN2, mask=inside)


def forward(query, key, value, columns, index, this, softmax_scale, carry, out, lse):
    """Launch the forward of one round; see :func:`kernels.attention_forward` for the operands.

    ``carry`` is read unless ``this.first``, and may be ``out`` itself.
    """
    length, batch, heads, dim = query.shape
    kv_heads, nb, block = key.shape[3], index.local_blocks, index.block_size
    tile = tile_for("forward", dim, block, query)
    carried = out if carry is None else carry
    launch(
        _forward_kernel, (nb * (block // tile.keep), batch * heads),
        query, key, value, carried, out, lse,
        index.round_ptr, index.round_list, index.member, index.columns, index.column_ptr,
        *((key, value) if columns is None else columns), *document_rows(index, this.rank),
        *query.stride()[:3], *key.stride()[:4], *value.stride()[:4],
        *carried.stride()[:3], *out.stride()[:3],
        index.column_ptr.shape[-1], index.list_strides[0], index.columns.shape[-1],
        length, key.shape[1], nb, softmax_scale,
        index.round_start(this.round_index), this.wrap, this.rank, index.world, this.round_index,
        index.outer, 0, INNER=index.inner, HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block,
        KEEP=tile.keep, WALK=tile.walk, DIAGONAL=this.first, CARRY=not this.first,
        LAST=this.last,
        COLUMNS=columns is not None, LISTS=index.has_block_lists, DOCS=index.documents is not None,
        EVEN=length % block == 0, PREC=precision_for(query),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
