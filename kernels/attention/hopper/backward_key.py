# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the keys and values of one rank on Hopper GPUs, in Gluon: the same sums as
``backward_key.py``, deterministic and without atomics.

A program holds 128 keys, 64 for each of two warpgroups, with their gradients in registers, and walks query
tiles of 64 rows. Scores are computed transposed, keys in rows, so that probabilities and their gradients are
operands in place. The keys are a key block here, and a tile of one head's gathered columns in
``hopper_backward_columns.py``.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.launch import launch
from ...common.tiles import LOG2E, block_at, blocks_before, first_beyond
from ..launch_args import MEETINGS, meetings
from ..portable.columns import invert_columns
from .common import descriptor
from .key_common import (
    QROWS,
    documents_of,
    key_buffers,
    key_start,
    key_step,
    load_held,
    load_moving,
    moving_queries,
)

CHAIN = 256
"""Query tiles that are summed in registers, at least; see ``_partial``."""


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
    load_held(k_desc, v_desc, held, batch, kv_head, c * BLOCK, ROWS, D)
    n = 0
    if DIAGONAL:
        # The diagonal block of every head first, then all that needs no mask.
        for g in range(GROUP):
            head = kv_head * GROUP + g
            bh = batch * HEADS + head
            for i in gl.static_range(BLOCK // QROWS):
                at = c * BLOCK + i * QROWS
                load_moving(n, descs, moving, batch, head, bh, at, D, STAGES, DOCS)
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
                    load_moving(n, descs, moving, batch, head, bh, at + i * QROWS, D, STAGES, DOCS)
                    n += 1
    if n == 0:
        # No query sees this block: a tile of zeros past the end.
        load_moving(
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
    k, v, dk, dv, p_operand, ds_operand = key_start(held, moving, HALF, o_layout, a_layout, ROWS, D)
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
        dk, dv, p_operand, ds_operand = key_step(
            HALF, -1, HALF + 1 < total, dk, dv, p_operand, ds_operand, k, v, moving, scale,
            bias, position, s_layout, a_layout, ROWS, D, STAGES, 4 if DOCS else 1,
        )  # fmt: skip
        for g in range(1, GROUP):
            n = 2 * g
            if HALF == 0:
                dk, dv, p_operand, ds_operand = key_step(
                    n - 1, n - 2, True, dk, dv, p_operand, ds_operand, k, v, moving, scale,
                    0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
                )  # fmt: skip
            else:
                mbarrier.arrive(free.index(n % STAGES), count=1)
                mbarrier.wait(q_ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1)
            dk, dv, p_operand, ds_operand = key_step(
                n + HALF, n - 1, n + HALF + 1 < total, dk, dv, p_operand, ds_operand, k, v,
                moving, scale, bias, position, s_layout, a_layout, ROWS, D, STAGES, 4 if DOCS else 1,
            )  # fmt: skip
        first = 2 * GROUP - 1 + HALF
    else:
        dk, dv, p_operand, ds_operand = key_step(
            0, -1, total > 1, dk, dv, p_operand, ds_operand, k, v, moving, scale,
            0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
        )  # fmt: skip
    end = gl.minimum(total, CHAIN) if CHAIN > 0 else total
    for n in range(first, end):
        dk, dv, p_operand, ds_operand = key_step(
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
            dk, dv, p_operand, ds_operand = key_step(
                start, start - 1, start + 1 < total, warpgroup_mma_init(zero),
                warpgroup_mma_init(zero), none, none, k, v, moving, scale,
                0.0, position, s_layout, a_layout, ROWS, D, STAGES, PLAIN,
            )  # fmt: skip
            for n in range(start + 1, gl.minimum(start + CHAIN, total)):
                dk, dv, p_operand, ds_operand = key_step(
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

    held, moving = key_buffers(
        q_desc, do_desc, k_desc, v_desc, lse_desc, BLOCK // 2, D, STAGES, DOCS
    )
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


def backward_key(
    query, key, value, grad_out, lse, delta, index, step, softmax_scale, carry, column_gradients,
    gradients,
):  # fmt: skip
    """Launch the keys' and values' gradients; see :func:`kernels.attention_backward_key`.

    ``gradients``, which may be ``carry``, is overwritten.
    """
    _, batch, heads, dim = query.shape
    kv_heads, nb, block = key.shape[2], index.local_blocks, index.block_size
    queries, lines = moving_queries(query, grad_out, lse, delta)
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
        *documents_of(index, step.rank), *where,
        *gradients.stride()[1:4],
        index.rank_ptr.shape[-1], index.list_strides[1], num_columns, key.shape[0], nb,
        softmax_scale, *meetings(index, step),
        HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block, STAGES=3, SPLITS=splits,
        DIAGONAL=step.source == step.rank, COLUMNS=column_gradients is not None,
        CARRY=carry is not None, CHAIN=chain, LISTS=index.has_block_lists,
        DOCS=index.documents is not None, num_warps=4, maxnreg=168,
    )  # fmt: skip
