# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the keys and values of one rank.

    dv = sum over queries of p dout        dk = scale * sum over queries of ds q

Two kernels, both deterministic, without atomics. The column kernel walks all later queries of this rank
for a tile of one head's columns, of whatever rank, and writes their gradients to a buffer; the key kernel
holds one key block, walks the slash list of every query head of its group the other way round
(``RingStep.meetings``), and adds, where it is given them, the columns' rows that lie in its block, in a
fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.launch import launch
from ...common.tiles import (
    LOG2E,
    block_at,
    blocks_before,
    document_keys,
    first_beyond,
    load_line,
    load_rows,
    precision_for,
    store_rows,
    tile_for,
)
from ..launch_args import MEETINGS, column_splits, meetings  # noqa: F401


@triton.jit
def _add_tile(
    q, k, v, do, keep, dk, dv, lse, delta, scale, MASKED: tl.constexpr, PREC: tl.constexpr
):
    """Scores transposed, keys in rows, so that no operand has to be turned in registers."""
    scores = tl.dot(k, tl.trans(q), input_precision=PREC)
    # Both products are under way before the exponentials, which hide behind the second.
    dp = tl.dot(v, tl.trans(do), input_precision=PREC)
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    p = tl.math.exp2(scores * scale - lse[None, :])
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PREC)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC)
    return dk, dv


@triton.jit(do_not_specialize=["rank", "asking", *MEETINGS])
def _key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, carry_dk, carry_dv,
    column_dk, column_dv,
    slash_ptr, slash_list, columns, column_ptr, start_ptr, extent_ptr, asking,
    q_ss, q_sb, q_sh, k_ss, k_sb, k_sh, v_ss, v_sb, v_sh,
    do_ss, do_sb, do_sh, g_ss, g_sb, g_sh,
    ptr_len, list_len, column_ptr_len, column_len, query_len, key_len, nb, softmax_scale,
    rank, world, inner,
    residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEEP: tl.constexpr, WALK: tl.constexpr, SPLITS: tl.constexpr, DIAGONAL: tl.constexpr,
    CARRY: tl.constexpr, COLUMNS: tl.constexpr, LISTS: tl.constexpr, DOCS: tl.constexpr,
    EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = BLOCK // KEEP
    walks: tl.constexpr = BLOCK // WALK
    c = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    kv_heads: tl.constexpr = HEADS // GROUP
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    rows = tl.arange(0, KEEP)
    queries = tl.arange(0, WALK)
    start = c * BLOCK + part * KEEP
    k = load_rows(k_ptr + batch * k_sb + kv_head * k_sh, start, k_ss, rows, key_len, D, EVEN)
    v = load_rows(v_ptr + batch * v_sb + kv_head * v_sh, start, v_ss, rows, key_len, D, EVEN)
    dk = tl.zeros([KEEP, D], tl.float32)
    dv = tl.zeros([KEEP, D], tl.float32)
    scale = softmax_scale * LOG2E
    # How this key block meets query blocks: see RingStep.meetings.
    turned = (c & 1) == 1
    same = tl.where(turned, residue_10, residue_00)
    same_wrap = tl.where(turned, wrap_10, wrap_00)
    other = tl.where(turned, residue_11, residue_01)
    other_wrap = tl.where(turned, wrap_11, wrap_01)
    if DOCS:
        block = block_at(c, rank, world, inner)
        position = block * BLOCK + part * KEEP + rows
        start_ptr += batch * query_len
        extent_ptr += 2 * batch * nb * world + block
        # Query blocks of rank ``asking``: those before a_whole see all of these keys, if they are later at
        # all; from a_end on they see nothing.
        a_whole = blocks_before(tl.load(extent_ptr), asking, world, inner)
        a_end = blocks_before(tl.load(extent_ptr + nb * world), asking, world, inner)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        bh = batch * HEADS + head
        q_head = q_ptr + batch * q_sb + head * q_sh
        do_head = do_ptr + batch * do_sb + head * do_sh
        lse_head = lse_ptr + bh * query_len
        delta_head = delta_ptr + bh * query_len
        if DIAGONAL:
            for walk in range(part * KEEP // WALK, walks):
                at = c * BLOCK + walk * WALK
                q = load_rows(q_head, at, q_ss, queries, query_len, D, EVEN)
                do = load_rows(do_head, at, do_ss, queries, query_len, D, EVEN)
                lse = load_line(lse_head, at, queries, query_len, float("inf"), EVEN) * LOG2E
                delta = load_line(delta_head, at, queries, query_len, 0.0, EVEN)
                keep = (start + rows)[:, None] <= (at + queries)[None, :]
                if DOCS:
                    begins = load_line(start_ptr, at, queries, query_len, 0, EVEN)
                    keep &= position[:, None] >= begins[None, :]
                dk, dv = _add_tile(q, k, v, do, keep, dk, dv, lse, delta, scale, True, PREC)
        for apart in tl.static_range(1 if LISTS else 2):
            if LISTS:  # entries are query blocks
                first = 0
                low = tl.load(slash_ptr + residue_00 + bh * nb + c)
                high = tl.load(slash_ptr + residue_00 + bh * nb + c + 1)
                whole = high
                if DOCS:
                    own = slash_list + bh * list_len
                    whole = first_beyond(own, low, high, a_whole - 1)
                    high = first_beyond(own, low, high, a_end - 1)
            else:
                residue = same if apart == 0 else other
                first = c + apart + 2 * (same_wrap if apart == 0 else other_wrap)
                low = tl.load(slash_ptr + bh * ptr_len + residue)
                # Query blocks first, first + 2, and so on, below nb.
                count = tl.maximum((a_end if DOCS else nb) + 1 - first, 0) // 2
                high = tl.load(slash_ptr + bh * ptr_len + residue + count)
                whole = high
                if DOCS:
                    count = tl.maximum(a_whole + 1 - first, 0) // 2
                    whole = tl.load(slash_ptr + bh * ptr_len + residue + count)
            if DIAGONAL and apart == 0:
                low += 1
            for j in range(low * walks, whole * walks):
                e = tl.load(slash_list + bh * list_len + j // walks).to(tl.int32)
                at = (first + (1 if LISTS else 2) * e) * BLOCK + j % walks * WALK
                q = load_rows(q_head, at, q_ss, queries, query_len, D, EVEN)
                do = load_rows(do_head, at, do_ss, queries, query_len, D, EVEN)
                lse = load_line(lse_head, at, queries, query_len, float("inf"), EVEN) * LOG2E
                delta = load_line(delta_head, at, queries, query_len, 0.0, EVEN)
                dk, dv = _add_tile(q, k, v, do, None, dk, dv, lse, delta, scale, False, PREC)
            if DOCS:
                for j in range(tl.maximum(low, whole) * walks, high * walks):
                    e = tl.load(slash_list + bh * list_len + j // walks).to(tl.int32)
                    at = (first + (1 if LISTS else 2) * e) * BLOCK + j % walks * WALK
                    q = load_rows(q_head, at, q_ss, queries, query_len, D, EVEN)
                    do = load_rows(do_head, at, do_ss, queries, query_len, D, EVEN)
                    lse = load_line(lse_head, at, queries, query_len, float("inf"), EVEN) * LOG2E
                    delta = load_line(delta_head, at, queries, query_len, 0.0, EVEN)
                    begins = load_line(start_ptr, at, queries, query_len, 0, EVEN)
                    keep = position[:, None] >= begins[None, :]
                    dk, dv = _add_tile(q, k, v, do, keep, dk, dv, lse, delta, scale, True, PREC)
        if COLUMNS:
            own = column_ptr + bh * column_ptr_len + block_at(c, rank, world, inner)
            dims = tl.arange(0, D)
            for j in range(tl.load(own), tl.load(own + 1)):
                row = tl.load(columns + bh * column_len + j) % BLOCK - part * KEEP
                for split in range(SPLITS):
                    line = ((bh * SPLITS + split) * column_len + j) * D
                    here = (rows == row)[:, None]
                    dk += tl.where(here, tl.load(column_dk + line + dims)[None, :], 0.0)
                    dv += tl.where(here, tl.load(column_dv + line + dims)[None, :], 0.0)
    dk = dk * softmax_scale
    head = batch * g_sb + kv_head * g_sh
    if CARRY:
        dk += load_rows(carry_dk + head, start, g_ss, rows, key_len, D, EVEN)
        dv += load_rows(carry_dv + head, start, g_ss, rows, key_len, D, EVEN)
    store_rows(dk_ptr + head, start, g_ss, rows, key_len, dk, D, EVEN)
    store_rows(dv_ptr + head, start, g_ss, rows, key_len, dv, D, EVEN)


def backward_key(
    query, key, value, grad_out, lse, delta, index, step, softmax_scale, carry, column_gradients,
    gradients,
):  # fmt: skip
    """Launch the keys' and values' gradients; see :func:`kernels.attention_backward_key`.

    ``gradients``, which may be ``carry``, is overwritten.
    """
    length, batch, heads, dim = query.shape
    kv_heads, nb, block = key.shape[2], index.local_blocks, index.block_size
    tile = tile_for("key", dim, block, query)
    columns = column_gradients
    splits, num_columns = (1, 0) if columns is None else columns.shape[3:5]
    launch(
        _key_kernel, (nb * (block // tile.keep), batch * kv_heads),
        query, key, value, grad_out, lse, delta, *gradients,
        *(gradients if carry is None else carry), *((lse, lse) if columns is None else columns),
        index.rank_ptr, index.rank_list, index.columns, index.column_ptr, *document_keys(index, step.rank),
        None if index.documents is None else step.rank,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3],
        *gradients.stride()[1:4],
        index.rank_ptr.shape[-1], index.list_strides[1], index.column_ptr.shape[-1], num_columns,
        length, key.shape[0], nb, softmax_scale,
        step.source, index.world, index.inner, *meetings(index, step),
        HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block, KEEP=tile.keep, WALK=tile.walk,
        SPLITS=splits, DIAGONAL=step.source == step.rank, CARRY=carry is not None,
        COLUMNS=columns is not None, LISTS=index.has_block_lists, DOCS=index.documents is not None,
        EVEN=length % block == 0, PREC=precision_for(query),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
