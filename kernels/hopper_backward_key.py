# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the keys and values of one rank on Hopper GPUs, in Gluon: the same sums as
``backward_key.py``, in the same two kernels, deterministic and without atomics.

A program holds 128 keys (a key block, or a tile of one head's gathered columns), 64 for each of two
warpgroups, with their gradients in registers, and walks query tiles of 64 rows. Scores are computed
transposed, keys in rows, so that probabilities and their gradients are operands in place.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .backward_key import MEETINGS, column_splits, meetings
from .columns import invert_columns
from .hopper import descriptor, descriptor_heads_first, line_descriptor, load_tile
from .launch import cdiv, launch
from .tiles import LOG2E, block_at, blocks_before, first_beyond

QROWS = gl.constexpr(64)
CHAIN = 256
"""Query tiles that are summed in registers, at least; see ``_partial``."""


@gluon.jit
def _buffers(
    q_desc, do_desc, k_desc, v_desc, lse_desc, ROWS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """Shared memory and barriers of a program: its keys, and the query tiles under way."""
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QROWS, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QROWS], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QROWS], lse_desc.layout)
    start_smem = delta_smem
    if DOCS:
        start_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QROWS], lse_desc.layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    tiles = (q_smem, do_smem, lse_smem, delta_smem, q_ready, do_ready, free, start_smem)
    return (k_smem, v_smem, kv_ready), tiles


@gluon.jit
def _load_keys(
    k_desc, v_desc, held, batch, head, start, ROWS: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    k_smem, v_smem, kv_ready = held
    mbarrier.expect(kv_ready, 4 * ROWS * D * 2)
    for i in gl.static_range(2):
        at = [batch, head, start + i * ROWS, 0]
        load_tile(k_desc, at, kv_ready, k_smem.index(i))
        load_tile(v_desc, at, kv_ready, v_smem.index(i))


@gluon.jit
def _load_queries(
    n, descs, moving, batch, head, bh, at, D: gl.constexpr, STAGES: gl.constexpr,
    DOCS: gl.constexpr,
):  # fmt: skip
    """Tile n of queries, rows ``at`` on, with their log-sum-exp and delta, and the starts of their
    documents."""
    q_desc = descs[0]
    do_desc = descs[1]
    lse_desc = descs[2]
    delta_desc = descs[3]
    q_smem, do_smem, lse_smem, delta_smem, q_ready, do_ready, free, start_smem = moving
    slot = n % STAGES
    mbarrier.wait(free.index(slot), ((n // STAGES) & 1) ^ 1)
    ready = q_ready.index(slot)
    mbarrier.expect(ready, QROWS * D * 2 + QROWS * (8 if DOCS else 4))
    load_tile(q_desc, [batch, head, at, 0], ready, q_smem.index(slot))
    load_tile(lse_desc, [bh, at], ready, lse_smem.index(slot))
    if DOCS:
        load_tile(descs[4], [batch, at], ready, start_smem.index(slot))
    ready = do_ready.index(slot)
    mbarrier.expect(ready, QROWS * D * 2 + QROWS * 4)
    load_tile(do_desc, [batch, head, at, 0], ready, do_smem.index(slot))
    load_tile(delta_desc, [bh, at], ready, delta_smem.index(slot))


@gluon.jit
def _put_aside(to, total, inside, first, CARRY: gl.constexpr):
    """Add a sum to what is there, or store it if it is the first; nobody else writes there."""
    # Decided here, not by the caller: with a condition that is false at compile time Triton 3.6 fails.
    if CARRY:
        gl.atomic_add(to, total, mask=inside, sem="relaxed")
    elif first:
        gl.store(to, total, mask=inside)
    else:
        gl.atomic_add(to, total, mask=inside, sem="relaxed")


@gluon.jit
def _step(
    n, before, more, dk, dv, p_operand, ds_operand, k, v, moving, scale, bias, position,
    s_layout: gl.constexpr, a_layout: gl.constexpr,
    ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Add query tile n, the next after tile ``before`` (-1: there is none); ``more``: whether tile n + 1
    is there. ``bias`` is added to the scores (MASK 1), or to the scores of a key each (MASK 2); or the keys'
    ``position`` must not be before the start of the query's document (MASK 3; 4 with MASK 1)."""
    q_smem, do_smem, lse_smem, delta_smem, q_ready, do_ready, free, start_smem = moving
    dtype: gl.constexpr = q_smem.dtype
    slot = n % STAGES
    phase = (n // STAGES) & 1
    q = q_smem.index(slot).reshape([QROWS, D])
    do = do_smem.index(slot).reshape([QROWS, D])
    zero = gl.zeros([ROWS, QROWS], gl.float32, s_layout)
    scores = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dk, dv, p_operand, ds_operand = warpgroup_mma_wait(1, deps=[dk, dv, p_operand, ds_operand])
    mbarrier.arrive(free.index((before + STAGES) % STAGES), pred=before >= 0)
    mbarrier.wait(do_ready.index(slot), phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    lse = lse_smem.index(slot).load(s_layout) * LOG2E
    scores = scores * scale - lse
    if MASK == 1 or MASK == 4:
        scores = scores + bias
    if MASK == 2:
        scores = scores + bias[:, None]
    if MASK > 2:
        starts = start_smem.index(slot).load(s_layout)
        scores = gl.where(position[:, None] >= starts, scores, float("-inf"))
    p = gl.exp2(scores)
    p_operand = gl.convert_layout(p.to(dtype), a_layout)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(slot).load(s_layout)
    ds_operand = gl.convert_layout((p * (dp - delta)).to(dtype), a_layout)
    dk = warpgroup_mma(ds_operand, q, warpgroup_mma_init(dk), is_async=True)
    mbarrier.wait(q_ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=more)
    return dk, dv, p_operand, ds_operand


@gluon.jit
def _start(
    held, moving, HALF: gl.constexpr, o_layout: gl.constexpr, a_layout: gl.constexpr,
    ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Wait for the keys and the first query tile. Returns a warpgroup's keys and values; dk and dv; the
    operands of their products, which are under way from one step to the next."""
    k_smem, v_smem, kv_ready = held
    zero = gl.zeros([ROWS, D], gl.float32, o_layout)
    dk = warpgroup_mma_init(zero)
    dv = warpgroup_mma_init(zero)
    p_operand = gl.zeros([ROWS, QROWS], k_smem.dtype, a_layout)
    ds_operand = gl.zeros([ROWS, QROWS], k_smem.dtype, a_layout)
    mbarrier.wait(kv_ready, 0)
    k = k_smem.index(HALF).reshape([ROWS, D])
    v = v_smem.index(HALF).reshape([ROWS, D])
    mbarrier.wait(moving[4].index(0), 0)
    return k, v, dk, dv, p_operand, ds_operand


@gluon.jit
def _meeting(
    bounds, entries, apart: gl.constexpr, meetings, c, nb, a_end, LISTS: gl.constexpr,
    DOCS: gl.constexpr,
):  # fmt: skip
    """The part of a head's list that has the query blocks ``c + apart``, counted modulo 2, which see key
    block c, and the query block of its quotient 0: see ``RingStep.meetings``. Of block lists it is c's own,
    of all query blocks that see it. With packed documents, from ``a_end`` on they see nothing."""
    if LISTS:
        first = 0
        residue = meetings[0] + c
        count = 1
    else:
        turned = (c & 1) == 1
        residue = gl.where(turned, meetings[4 + 2 * apart], meetings[2 * apart])
        wrap = gl.where(turned, meetings[5 + 2 * apart], meetings[1 + 2 * apart])
        first = c + apart + 2 * wrap
        # Query blocks first, first + 2, and so on, below nb.
        count = gl.maximum((a_end if DOCS else nb) + 1 - first, 0) // 2
    low = gl.load(bounds + residue)
    high = gl.load(bounds + residue + count)
    if DOCS and LISTS:
        high = first_beyond(entries, low, high, a_end - 1)
    return low, high, first


@gluon.jit
def _load_slashes(
    descs, k_desc, v_desc, held, moving, slash_ptr, slash_list,
    ptr_len, list_len, meetings, batch, kv_head, c, nb, a_end,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, DIAGONAL: gl.constexpr, LISTS: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK // 2
    _load_keys(k_desc, v_desc, held, batch, kv_head, c * BLOCK, ROWS, D)
    n = 0
    if DIAGONAL:
        # The diagonal block of every head first, then all that needs no mask.
        for g in range(GROUP):
            head = kv_head * GROUP + g
            bh = batch * HEADS + head
            for i in gl.static_range(BLOCK // QROWS):
                at = c * BLOCK + i * QROWS
                _load_queries(n, descs, moving, batch, head, bh, at, D, STAGES, DOCS)
                n += 1
    for g in range(GROUP):
        head = kv_head * GROUP + g
        bh = batch * HEADS + head
        entries = slash_list + bh.to(gl.int64) * list_len
        bounds = slash_ptr + bh.to(gl.int64) * (nb if LISTS else ptr_len)
        for apart in gl.static_range(1 if LISTS else 2):
            low, high, first = _meeting(bounds, entries, apart, meetings, c, nb, a_end, LISTS, DOCS)
            if DIAGONAL and apart == 0:
                low += 1
            for j in range(low, high):
                step: gl.constexpr = 1 if LISTS else 2
                at = (first + step * gl.load(entries + j).to(gl.int32)) * BLOCK
                for i in gl.static_range(BLOCK // QROWS):
                    _load_queries(
                        n, descs, moving, batch, head, bh, at + i * QROWS, D, STAGES, DOCS
                    )
                    n += 1
    if n == 0:
        # No query sees this block: a tile of zeros past the end.
        _load_queries(
            0, descs, moving, batch, kv_head * GROUP, batch * HEADS, nb * BLOCK, D, STAGES, DOCS
        )


@gluon.jit
def _attend_slashes(
    pointers, strides, held, moving, column_len, total, key_len, softmax_scale, first_position,
    HALF: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, DIAGONAL: gl.constexpr,
    COLUMNS: gl.constexpr, CARRY: gl.constexpr, CHAIN: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    scale = softmax_scale * LOG2E
    # A tile that documents cut is rare, but where it is in the walk differs: all are masked.
    PLAIN: gl.constexpr = 3 if DOCS else 0
    position = 0.0
    if DOCS:
        position = first_position + HALF * ROWS
        position += gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
        position = position.to(gl.float32)
    k, v, dk, dv, p_operand, ds_operand = _start(held, moving, HALF, o_layout, a_layout, ROWS, D)
    # The first tile is not in a loop, so that the compiler finds the loops' operands in place.
    first = 1
    if DIAGONAL:
        # Each head's diagonal block is two tiles: of the first, only the first 64 keys see anything, and
        # of the second these see everything. A skipped tile is freed two ahead of the one in use.
        gl.static_assert(STAGES > 2)
        q_ready = moving[4]
        free = moving[6]
        keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
        queries = gl.arange(0, QROWS, layout=gl.SliceLayout(0, s_layout))
        bias = gl.where(keys[:, None] <= queries[None, :], 0.0, float("-inf"))
        if HALF == 1:
            mbarrier.arrive(free.index(0), count=1)
            mbarrier.wait(q_ready.index(1), 0)
        dk, dv, p_operand, ds_operand = _step(
            HALF, -1, HALF + 1 < total, dk, dv, p_operand, ds_operand, k, v, moving, scale,
            bias, position, s_layout, a_layout, ROWS, D, STAGES, 4 if DOCS else 1,
        )  # fmt: skip
        for g in range(1, GROUP):
            n = 2 * g
            if HALF == 0:
                dk, dv, p_operand, ds_operand = _step(
                    n - 1, n - 2, True, dk, dv, p_operand, ds_operand, k, v, moving, scale,
                    0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
                )  # fmt: skip
            else:
                mbarrier.arrive(free.index(n % STAGES), count=1)
                mbarrier.wait(q_ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1)
            dk, dv, p_operand, ds_operand = _step(
                n + HALF, n - 1, n + HALF + 1 < total, dk, dv, p_operand, ds_operand, k, v,
                moving, scale, bias, position, s_layout, a_layout, ROWS, D, STAGES, 4 if DOCS else 1,
            )  # fmt: skip
        first = 2 * GROUP - 1 + HALF
    else:
        dk, dv, p_operand, ds_operand = _step(
            0, -1, total > 1, dk, dv, p_operand, ds_operand, k, v, moving, scale,
            0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
        )  # fmt: skip
    end = gl.minimum(total, CHAIN) if CHAIN > 0 else total
    for n in range(first, end):
        dk, dv, p_operand, ds_operand = _step(
            n, n - 1, n + 1 < total, dk, dv, p_operand, ds_operand, k, v, moving, scale,
            0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
        )  # fmt: skip
    dk, dv, p_operand, ds_operand = warpgroup_mma_wait(0, deps=[dk, dv, p_operand, ds_operand])
    # Only now: registers are full until here.
    dk_ptr, dv_ptr, partial_ptr, column_dk, column_dv, entry_ptr = pointers
    grad_ss, grad_sb, grad_sh = strides
    partial_ss = grad_ss
    batch = gl.program_id(1) // (HEADS // GROUP)
    kv_head = gl.program_id(1) % (HEADS // GROUP)
    rows = gl.program_id(0) * BLOCK + HALF * ROWS
    rows += gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    inside = rows < key_len
    at = rows.to(gl.int64)[:, None]
    here = batch * grad_sb + kv_head * grad_sh
    dk_ptr += here
    dv_ptr += here
    partial_ptr += here
    dk_aside = partial_ptr + at * partial_ss + d[None, :]
    dv_aside = dk_aside + key_len.to(gl.int64) * partial_ss
    if CHAIN > 0:
        zero = gl.zeros([ROWS, D], gl.float32, o_layout)
        none = gl.zeros([ROWS, QROWS], k.dtype, a_layout)
        for start in range(CHAIN, total, CHAIN):
            there = inside[:, None]
            _put_aside(dk_aside, dk * softmax_scale, there, start == CHAIN, CARRY)
            _put_aside(dv_aside, dv, there, start == CHAIN, CARRY)
            dk, dv, p_operand, ds_operand = _step(
                start, start - 1, start + 1 < total, warpgroup_mma_init(zero),
                warpgroup_mma_init(zero), none, none, k, v, moving, scale,
                0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
            )  # fmt: skip
            for n in range(start + 1, gl.minimum(start + CHAIN, total)):
                dk, dv, p_operand, ds_operand = _step(
                    n, n - 1, n + 1 < total, dk, dv, p_operand, ds_operand, k, v, moving, scale,
                    0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
                )  # fmt: skip
            dk, dv, p_operand, ds_operand = warpgroup_mma_wait(
                0, deps=[dk, dv, p_operand, ds_operand]
            )
    if COLUMNS:
        for g in range(GROUP):
            bh = (batch * HEADS + kv_head * GROUP + g).to(gl.int64)
            entry = gl.load(entry_ptr + bh * key_len + rows, mask=inside, other=-1)
            for split in range(SPLITS):
                line = ((bh * SPLITS + split) * column_len + entry)[:, None] * D + d[None, :]
                dk += gl.load(column_dk + line, mask=(entry >= 0)[:, None], other=0.0)
                dv += gl.load(column_dv + line, mask=(entry >= 0)[:, None], other=0.0)
    dk = dk * softmax_scale
    if CARRY or CHAIN > 0:
        there = inside[:, None]
        if not CARRY:
            there = there & (total > CHAIN)
        dk += gl.load(dk_aside, mask=there, other=0.0, cache_modifier=".cg")
        dv += gl.load(dv_aside, mask=there, other=0.0, cache_modifier=".cg")
    dk = dk.to(dk_ptr.dtype.element_ty)
    gl.store(dk_ptr + at * grad_ss + d[None, :], dk, mask=inside[:, None])
    gl.store(
        dv_ptr + at * grad_ss + d[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside[:, None]
    )


@gluon.jit(do_not_specialize=["rank", "asking", "world", "inner", *MEETINGS])
def _key_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
    dk_ptr, dv_ptr, partial_ptr, column_dk, column_dv, entry_ptr, slash_ptr, slash_list,
    start_desc, extent_ptr, rank, asking, world, inner,
    grad_ss, grad_sb, grad_sh,
    ptr_len, list_len, column_len, key_len, nb, softmax_scale,
    residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr,
    CARRY: gl.constexpr, CHAIN: gl.constexpr, LISTS: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    # The first key blocks are seen by the most queries: start them first.
    c = gl.program_id(0)
    batch = gl.program_id(1) // (HEADS // GROUP)
    kv_head = gl.program_id(1) % (HEADS // GROUP)
    pointers = (dk_ptr, dv_ptr, partial_ptr, column_dk, column_dv, entry_ptr)
    strides = (grad_ss, grad_sb, grad_sh)
    meetings = (
        residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
    )  # fmt: skip
    total = 0
    a_end = nb
    first_position = 0
    if DOCS:
        block = block_at(c, rank, world, inner)
        first_position = block * BLOCK
        # After this block of the sequence queries see nothing of it.
        seen_to = gl.load(extent_ptr + (2 * batch.to(gl.int64) + 1) * nb * world + block)
        a_end = blocks_before(seen_to, asking, world, inner)
    for g in range(GROUP):
        bh = batch * HEADS + kv_head * GROUP + g
        bounds = slash_ptr + bh.to(gl.int64) * (nb if LISTS else ptr_len)
        for apart in gl.static_range(1 if LISTS else 2):
            entries = slash_list + bh.to(gl.int64) * list_len
            low, high, first = _meeting(bounds, entries, apart, meetings, c, nb, a_end, LISTS, DOCS)
            total += 2 * (high - low)
    total = gl.maximum(total, 1)

    held, moving = _buffers(q_desc, do_desc, k_desc, v_desc, lse_desc, BLOCK // 2, D, STAGES, DOCS)
    descs = (q_desc, do_desc, lse_desc, delta_desc)
    if DOCS:
        descs = (q_desc, do_desc, lse_desc, delta_desc, start_desc)
    gl.warp_specialize(
        [
            (_attend_slashes, (
                pointers, strides, held, moving, column_len, total, key_len, softmax_scale, first_position,
                0, HEADS, GROUP, BLOCK, D, STAGES, SPLITS, DIAGONAL, COLUMNS, CARRY, CHAIN,
                DOCS,
            )),
            (_attend_slashes, (
                pointers, strides, held, moving, column_len, total, key_len, softmax_scale, first_position,
                1, HEADS, GROUP, BLOCK, D, STAGES, SPLITS, DIAGONAL, COLUMNS, CARRY, CHAIN,
                DOCS,
            )),
            (_load_slashes, (
                descs, k_desc, v_desc, held, moving, slash_ptr, slash_list,
                ptr_len, list_len, meetings, batch, kv_head, c, nb, a_end,
                HEADS, GROUP, BLOCK, D, STAGES, DIAGONAL, LISTS, DOCS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _load_columns(
    descs, k_desc, v_desc, held, moving,
    batch, head, bh, first, a_first, total,
    BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    DOCS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK // 2
    tiles: gl.constexpr = BLOCK // QROWS
    _load_keys(k_desc, v_desc, held, batch, head, first, ROWS, D)
    for n in range(total):
        at = (a_first + n // tiles * SPLITS) * BLOCK + n % tiles * QROWS
        _load_queries(n, descs, moving, batch, head, bh, at, D, STAGES, DOCS)


@gluon.jit
def _column_keep(member, block, position, listed, a, rank, world, inner, DOCS: gl.constexpr):
    """0 for the columns that local query block ``a`` attends to as columns, -inf for the others. With packed
    documents their positions, and -1."""
    distance = block_at(a, rank, world, inner) - block
    seen = listed & (distance > 0)
    covered = gl.load(member + distance, mask=seen, other=1)
    if DOCS:
        keep = gl.where(covered == 0, position, -1).to(gl.float32)
    else:
        keep = gl.where(covered == 0, 0.0, float("-inf"))
    return keep


@gluon.jit
def _attend_columns(
    dk_ptr, dv_ptr, columns, member,
    held, moving,
    line, first, end, a_first, rank, world, inner, nb, total, softmax_scale,
    HALF: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK // 2
    tiles: gl.constexpr = BLOCK // QROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QROWS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    scale = softmax_scale * LOG2E
    entry = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    listed = entry < end
    position = gl.load(columns + entry, mask=listed, other=0)
    block = position // BLOCK
    MASK: gl.constexpr = 3 if DOCS else 2
    k, v, dk, dv, p_operand, ds_operand = _start(held, moving, HALF, o_layout, a_layout, ROWS, D)
    bias = _column_keep(member, block, position, listed, a_first, rank, world, inner, DOCS)
    dk, dv, p_operand, ds_operand = _step(
        0, -1, total > 1, dk, dv, p_operand, ds_operand, k, v, moving, scale,
        bias, bias, s_layout, a_layout, ROWS, D, STAGES, MASK,
    )  # fmt: skip
    bias = _column_keep(
        member, block, position, listed, a_first + 1 // tiles * SPLITS, rank, world, inner, DOCS
    )
    for n in range(1, total):
        # The next tile's are on their way while this one is computed.
        following = _column_keep(
            member,
            block,
            position,
            listed & (n + 1 < total),
            a_first + (n + 1) // tiles * SPLITS,
            rank,
            world,
            inner,
            DOCS,
        )
        dk, dv, p_operand, ds_operand = _step(
            n, n - 1, n + 1 < total, dk, dv, p_operand, ds_operand, k, v, moving, scale,
            bias, bias, s_layout, a_layout, ROWS, D, STAGES, MASK,
        )  # fmt: skip
        bias = following
    dk, dv, p_operand, ds_operand = warpgroup_mma_wait(0, deps=[dk, dv, p_operand, ds_operand])
    rows = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    at = (line + rows)[:, None] * D + d[None, :]
    inside = (first + rows < end)[:, None]
    gl.store(dk_ptr + at, dk, mask=inside)
    gl.store(dv_ptr + at, dv, mask=inside)


@gluon.jit(do_not_specialize=["rank"])
def _column_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
    dk_ptr, dv_ptr, member, columns, column_ptr, start_desc, extent_ptr,
    ptr_len, column_len, nb, softmax_scale, rank, world, inner,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    # The first columns are seen by the most queries: start them first, of all heads.
    split = gl.program_id(0)
    batch = gl.program_id(1) // HEADS
    head = gl.program_id(1) % HEADS
    bh = gl.program_id(1).to(gl.int64)
    first = gl.program_id(2) * BLOCK
    end = gl.load(column_ptr + bh * ptr_len + ptr_len - 1)
    member += bh * (ptr_len - 1)
    columns += bh * column_len
    # Columns are sorted: no query block up to the first one's sees any of this tile. Query blocks
    # go round the splits, so that each split has as many near and far ones.
    tiles: gl.constexpr = BLOCK // QROWS
    a_first = gl.load(columns + first, mask=first < end, other=0) // BLOCK
    a_first = a_first // world + split
    a_end = nb
    if DOCS:
        # Nor one after the last one's document.
        final = (
            gl.load(columns + gl.minimum(first + BLOCK, end) - 1, mask=first < end, other=0)
            // BLOCK
        )
        seen_to = gl.load(extent_ptr + (2 * (bh // HEADS) + 1) * nb * world + final)
        a_end = blocks_before(seen_to, rank, world, inner)
    total = (gl.maximum(a_end - a_first, 0) + SPLITS - 1) // SPLITS * tiles
    # No query sees a tile of these: one tile of zeros past the end.
    a_first = gl.where((first < end) & (total > 0), a_first, nb)
    total = gl.where(a_first < nb, total, 1)
    line = (bh * SPLITS + split) * column_len + first

    held, moving = _buffers(q_desc, do_desc, k_desc, v_desc, lse_desc, BLOCK // 2, D, STAGES, DOCS)
    descs = (q_desc, do_desc, lse_desc, delta_desc)
    if DOCS:
        descs = (q_desc, do_desc, lse_desc, delta_desc, start_desc)
    gl.warp_specialize(
        [
            (_attend_columns, (
                dk_ptr, dv_ptr, columns, member,
                held, moving,
                line, first, end, a_first, rank, world, inner, nb, total, softmax_scale,
                0, BLOCK, D, STAGES, SPLITS, DOCS,
            )),
            (_attend_columns, (
                dk_ptr, dv_ptr, columns, member,
                held, moving,
                line, first, end, a_first, rank, world, inner, nb, total, softmax_scale,
                1, BLOCK, D, STAGES, SPLITS, DOCS,
            )),
            (_load_columns, (
                descs, k_desc, v_desc, held, moving,
                batch, head, gl.program_id(1), first, a_first, total, BLOCK, D, STAGES, SPLITS,
                DOCS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _partial(gradients, carry, blocks, group):
    """After how many query tiles sums are put aside, 0 for never; and where to, float32 ``[2, s, b, hk, d]``.

    Tensor cores cut off what does not fit as they add, always towards zero: after 500 thousand rows, all
    a key block sees of 8 heads of 64K tokens, 0.1% of the sum is gone.
    """
    chain = max(CHAIN, 4 * group)  # past the diagonal tiles
    if 2 * blocks * group <= chain:
        chain = 0
    if carry is not None:
        return chain, carry
    if chain == 0 or gradients.dtype == torch.float32:
        return chain, gradients
    # Not touched unless a key block has so much to add.
    return chain, torch.empty_like(gradients, dtype=torch.float32)


def _moving(query, grad_out, lse, delta):
    """Descriptors of what moves past the keys: query tiles, with their log-sum-exp and delta."""
    rows = [1, 1, QROWS.value, query.shape[3]]
    queries = [descriptor(t, rows) for t in (query, grad_out)]
    return queries, [line_descriptor(t, QROWS.value) for t in (lse, delta)]


def _documents(index, rank):
    """``tiles.document_keys``, with a descriptor of the starts."""
    if index.documents is None:
        return None, None
    local = index.documents.on(rank, index.world, index.inner, index.block_size)
    return line_descriptor(local.line[:, None], QROWS.value), local.extent


def backward_columns(query, columns, grad_out, lse, delta, index, rank, softmax_scale):
    """Launch the columns' gradients; see :func:`kernels.attention_backward_columns`."""
    _, batch, heads, dim = query.shape
    block, num_columns = index.block_size, columns.shape[-2]
    splits = column_splits(index, batch * heads, block)
    shape = (2, batch, heads, splits, num_columns, dim)
    gradients = torch.empty(shape, dtype=torch.float32, device=query.device)
    queries, lines = _moving(query, grad_out, lse, delta)
    half = [1, 1, block // 2, dim]
    launch(
        _column_kernel, (splits, batch * heads, cdiv(num_columns, block)),
        *queries, *(descriptor_heads_first(t, half) for t in columns), *lines, *gradients,
        index.member, index.columns, index.column_ptr, *_documents(index, rank),
        index.column_ptr.shape[-1], num_columns, index.local_blocks, softmax_scale,
        rank, index.world, index.inner,
        HEADS=heads, D=dim, BLOCK=block, STAGES=3, SPLITS=splits,
        DOCS=index.documents is not None, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return gradients


def backward_key(
    query, key, value, grad_out, lse, delta, index, step, softmax_scale, carry, column_gradients,
    gradients,
):  # fmt: skip
    """Launch the keys' and values' gradients; see :func:`kernels.attention_backward_key`.

    ``gradients``, which may be ``carry``, is overwritten.
    """
    _, batch, heads, dim = query.shape
    kv_heads, nb, block = key.shape[2], index.local_blocks, index.block_size
    queries, lines = _moving(query, grad_out, lse, delta)
    half = [1, 1, block // 2, dim]
    columns, entries, splits, num_columns = (lse, lse), index.columns, 1, 0
    if column_gradients is not None:
        columns, (splits, num_columns) = column_gradients, column_gradients.shape[3:5]
        entries = invert_columns(index, step.source, key.shape[0])
    chain, partial = _partial(gradients, carry, nb, heads // kv_heads)
    where = (step.source, step.rank, index.world, index.inner)
    if index.documents is None:
        where = (None,) * 4
    launch(
        _key_kernel, (nb, batch * kv_heads),
        *queries, descriptor(key, half), descriptor(value, half), *lines,
        *gradients, partial, *columns, entries, index.rank_ptr, index.rank_list,
        *_documents(index, step.rank), *where,
        *gradients.stride()[1:4],
        index.rank_ptr.shape[-1], index.list_strides[1], num_columns, key.shape[0], nb,
        softmax_scale, *meetings(index, step),
        HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block, STAGES=3, SPLITS=splits,
        DIAGONAL=step.source == step.rank, COLUMNS=column_gradients is not None,
        CARRY=carry is not None, CHAIN=chain, LISTS=index.LISTS,
        DOCS=index.documents is not None, num_warps=4, maxnreg=168,
    )  # fmt: skip
