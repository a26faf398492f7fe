# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the keys and values of one rank on Hopper GPUs, in Gluon: the same sums as
``portable/backward_key.py``, deterministic.

A program keeps one key block and walks the query tiles that attend to it (:mod:`.key_common`). The gathered
columns have a kernel of their own, ``backward_columns.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init

from ...common.launch import launch
from ...common.tiles import LOG2E, block_at, blocks_before, first_beyond
from ...types import PatternIndex, RingStep
from ..launch_args import MEETINGS, meetings
from ..portable.columns import invert_columns
from .compat import Pointer, Scalar, aggregate
from .key_common import (
    BLOCK_M,
    KeyGradients,
    QueryDescriptors,
    TileLoader,
    allocate_tiles,
    document_arguments,
    key_descriptors,
    key_start,
    key_step,
    line_descriptors,
    make_layouts,
    query_descriptors,
)
from .masks import CAUSAL, CAUSAL_DOCUMENT, DOCUMENT, UNMASKED
from .query_sums import QueryAdder, allocate_sums

CHAIN = 256
"""Query tiles that are summed in registers, at least; see ``_partial_sums``."""


@aggregate
class RankIndex:
    """Which query blocks of this rank attend to each key block of one rank: a pattern index on the device.

    Of slashes, query blocks meet a key block c at local blocks ``c + apart + 2 (e + wrap)``, e being the
    quotients that a head's list has for a residue of distances, apart 0 or 1: see ``RingStep.meetings``. Of
    block lists, each key block has its own list of query blocks.
    """

    slash_ptr: Pointer  # prefix counts of the lists
    slash_list: Pointer
    ptr_len: Scalar
    list_len: Scalar
    # launch_args.meetings: by c % 2 and apart, where a residue's prefix counts start, and wrap. With block
    # lists residue_00 is where those of the keys' rank start.
    residue_00: Scalar
    wrap_00: Scalar
    residue_01: Scalar
    wrap_01: Scalar
    residue_10: Scalar
    wrap_10: Scalar
    residue_11: Scalar
    wrap_11: Scalar
    local_blocks: Scalar
    weights: Pointer  # PatternIndex.weights, at the key block; or None
    num_blocks: Scalar  # of the sequence, read if WEIGHTED
    LISTS: gl.constexpr
    PACKED: gl.constexpr
    WEIGHTED: gl.constexpr
    LISTS_PER_BLOCK: gl.constexpr  # 1 of block lists, 2 of slashes: one for each apart

    @gluon.jit
    def head_ptr(self, batch_head):
        """Prefix counts of a head."""
        if self.LISTS:
            head_len = self.local_blocks
        else:
            head_len = self.ptr_len
        return self.slash_ptr + batch_head.to(gl.int64) * head_len

    @gluon.jit
    def head_list(self, batch_head):
        """The list of a head."""
        return self.slash_list + batch_head.to(gl.int64) * self.list_len

    @gluon.jit
    def log2_weight(self, batch_head, q_block):
        """log2 of the weight of the key block for a query block of a head; 0.0 unless WEIGHTED."""
        if self.WEIGHTED:
            line = batch_head.to(gl.int64) * self.local_blocks + q_block
            log2_weight = gl.load(self.weights + line * self.num_blocks).to(gl.float32) - 1
        else:
            log2_weight = 0.0
        return log2_weight

    @gluon.jit
    def meetings(self, head_ptr, head_list, apart: gl.constexpr, kv_block, end_q_block):
        """The part of a head's list that has the query blocks which attend to ``kv_block``, from ``low`` to
        ``high``, and the query block of the quotient 0. From ``end_q_block`` on, packed documents hide it."""
        if self.LISTS:
            first = 0
            start = self.residue_00 + kv_block
            count = 1
        else:
            odd = (kv_block & 1) == 1
            if apart == 0:
                start = gl.where(odd, self.residue_10, self.residue_00)
                wrap = gl.where(odd, self.wrap_10, self.wrap_00)
            else:
                start = gl.where(odd, self.residue_11, self.residue_01)
                wrap = gl.where(odd, self.wrap_11, self.wrap_01)
            first = kv_block + apart + 2 * wrap
            # Query blocks first, first + 2, and so on, before the end.
            end = end_q_block if self.PACKED else self.local_blocks
            count = gl.maximum(end + 1 - first, 0) // 2
        low = gl.load(head_ptr + start)
        high = gl.load(head_ptr + start + count)
        if self.PACKED and self.LISTS:
            high = first_beyond(head_list, low, high, end_q_block - 1)
        return low, high, first


@aggregate
class KeyResults:
    """Where the gradients go, [s, b, hk, d] each, and the columns' gradients, which are added to them."""

    dk: Pointer
    dv: Pointer
    partial: Pointer  # float32, of keys and then of values: sums that are put aside
    column_dk: Pointer  # [b, h, SPLITS, column_len, d]
    column_dv: Pointer
    column_entries: Pointer  # [b, h, s]: which of its head's columns each key is, or -1
    stride_n: Scalar
    stride_b: Scalar
    stride_h: Scalar


@gluon.jit
def _put_aside(ptr, total, mask, first, ACCUMULATE: gl.constexpr):
    """Add a sum to what is there, or store it if it is the first. No other program writes there."""
    # Decided here, not by the caller: with a condition that is false at compile time Triton 3.6 fails.
    if ACCUMULATE:
        gl.atomic_add(ptr, total, mask=mask, sem="relaxed")
    elif first:
        gl.store(ptr, total, mask=mask)
    else:
        gl.atomic_add(ptr, total, mask=mask, sem="relaxed")


@gluon.jit
def _walk(
    visitor, index, end_q_block,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """Visit the query tiles of a key block, in order."""
    kv_block = gl.program_id(0)
    batch = gl.program_id(1) // (HEADS // GROUP)
    kv_head = gl.program_id(1) % (HEADS // GROUP)
    n = 0
    if DIAGONAL:
        # The diagonal block of every head first, then all that needs no mask.
        for g in range(GROUP):
            head = kv_head * GROUP + g
            batch_head = batch * HEADS + head
            for i in gl.static_range(BLOCK // BLOCK_M):
                row = kv_block * BLOCK + i * BLOCK_M
                visitor.visit(n, batch, head, batch_head, row, 0.0)
                n += 1
    for g in range(GROUP):
        head = kv_head * GROUP + g
        batch_head = batch * HEADS + head
        head_list = index.head_list(batch_head)
        head_ptr = index.head_ptr(batch_head)
        for apart in gl.static_range(index.LISTS_PER_BLOCK):
            low, high, first = index.meetings(head_ptr, head_list, apart, kv_block, end_q_block)
            if DIAGONAL and apart == 0:
                low += 1
            for j in range(low, high):
                quotient = gl.load(head_list + j).to(gl.int32)
                row = (first + index.LISTS_PER_BLOCK * quotient) * BLOCK
                log2_weight = index.log2_weight(batch_head, quotient)
                for i in gl.static_range(BLOCK // BLOCK_M):
                    visitor.visit(n, batch, head, batch_head, row + i * BLOCK_M, log2_weight)
                    n += 1
    if n == 0:
        # No query sees this block: a tile of zeros past the end.
        visitor.visit(0, batch, kv_head * GROUP, batch * HEADS, index.local_blocks * BLOCK, 0.0)


@gluon.jit
def _load(
    descs, k_desc, v_desc, kept, tiles, index, end_q_block,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    batch = gl.program_id(1) // (HEADS // GROUP)
    kv_head = gl.program_id(1) % (HEADS // GROUP)
    kept.load(k_desc, v_desc, batch, kv_head, gl.program_id(0) * BLOCK)
    loader = TileLoader(tiles, descs)
    _walk(loader, index, end_q_block, HEADS, GROUP, BLOCK, DIAGONAL)


@gluon.jit
def _add(
    dq_desc, sums, index, end_q_block, HALF: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """A warp that adds to the queries' gradient."""
    adder = QueryAdder(sums.of_half(HALF), dq_desc)
    _walk(adder, index, end_q_block, HEADS, GROUP, BLOCK, DIAGONAL)


@gluon.jit
def _attend(
    results, kept, tiles, shared_sums, column_len, num_tiles, key_len, softmax_scale, first_position,
    HALF: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr,
    SPLITS: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr, ACCUMULATE: gl.constexpr,
    CHAIN: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: the gradients of half of the keys."""
    HALF_N: gl.constexpr = BLOCK // 2
    D: gl.constexpr = kept.D
    layouts = make_layouts(D)
    scale = softmax_scale * LOG2E
    # A tile that documents cut is rare, but where it is in the walk differs: all are masked.
    MASK: gl.constexpr = DOCUMENT if PACKED else UNMASKED
    DIAGONAL_MASK: gl.constexpr = CAUSAL_DOCUMENT if PACKED else CAUSAL
    position = 0.0
    if PACKED:
        position = first_position + HALF * HALF_N
        position += gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.scores))
        position = position.to(gl.float32)  # [HALF_N]
    sums = None
    if shared_sums is not None:
        sums = shared_sums.of_half(HALF)
    k, v, gradients = key_start(kept, tiles, layouts, HALF)
    # The first tile is not in a loop, so that the compiler finds the loops' operands in place.
    first = 1
    if DIAGONAL:
        # Each head's diagonal block is two tiles: of the first, only the first 64 keys see anything, and
        # of the second these see everything. A skipped tile is released two ahead of the one in use.
        cols = gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.scores))
        rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layouts.scores))
        causal = gl.where(cols[:, None] <= rows[None, :], 0.0, float("-inf"))  # [HALF_N, BLOCK_M]
        if HALF == 1:
            if sums is not None:
                sums.put_ds(0, gl.zeros([HALF_N, BLOCK_M], k.dtype, layouts.scores))
            tiles.empty.arrive(0)
            tiles.q_full.wait(1)
        gradients = key_step(
            HALF, -1, HALF + 1 < num_tiles, gradients, k, v, tiles, scale, causal, position, layouts, sums,
            DIAGONAL_MASK, HALF == 1,
        )  # fmt: skip
        for g in range(1, GROUP):
            n = 2 * g
            if HALF == 0:
                gradients = key_step(
                    n - 1, n - 2, True, gradients, k, v, tiles, scale, 0.0, position, layouts, sums, MASK
                )  # fmt: skip
            else:
                if sums is not None:
                    sums.put_ds(n, gl.zeros([HALF_N, BLOCK_M], k.dtype, layouts.scores))
                    gradients = gradients.wait(0)
                    sums.finish(n - 1)
                tiles.empty.arrive(n)
                tiles.q_full.wait(n + 1)
            gradients = key_step(
                n + HALF, n - 1, n + HALF + 1 < num_tiles, gradients, k, v, tiles, scale, causal, position,
                layouts, sums, DIAGONAL_MASK,
            )  # fmt: skip
        first = 2 * GROUP - 1 + HALF
    else:
        gradients = key_step(
            0, -1, num_tiles > 1, gradients, k, v, tiles, scale, 0.0, position, layouts, sums, MASK,
            False,
        )  # fmt: skip
    end = gl.minimum(num_tiles, CHAIN) if CHAIN > 0 else num_tiles
    for n in range(first, end):
        gradients = key_step(
            n, n - 1, n + 1 < num_tiles, gradients, k, v, tiles, scale, 0.0, position, layouts, sums, MASK
        )  # fmt: skip
    gradients = gradients.wait(0)
    # Only now: registers are full until here.
    batch = gl.program_id(1) // (HEADS // GROUP)
    kv_head = gl.program_id(1) % (HEADS // GROUP)
    rows = gl.program_id(0) * BLOCK + HALF * HALF_N
    rows += gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.gradients))  # [HALF_N]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layouts.gradients))  # [D]
    inside = rows < key_len
    row = rows.to(gl.int64)[:, None]
    head = batch * results.stride_b + kv_head * results.stride_h
    dk_ptr = results.dk + head
    dv_ptr = results.dv + head
    partial_dk = results.partial + head + row * results.stride_n + d[None, :]  # [HALF_N, D]
    partial_dv = partial_dk + key_len.to(gl.int64) * results.stride_n
    if CHAIN > 0:
        zero = gl.zeros([HALF_N, D], gl.float32, layouts.gradients)
        none = gl.zeros([HALF_N, BLOCK_M], k.dtype, layouts.operand)
        for start in range(CHAIN, num_tiles, CHAIN):
            mask = inside[:, None]
            _put_aside(partial_dk, gradients.dk * softmax_scale, mask, start == CHAIN, ACCUMULATE)
            _put_aside(partial_dv, gradients.dv, mask, start == CHAIN, ACCUMULATE)
            chain = key_step(
                start, start - 1, start + 1 < num_tiles,
                KeyGradients(warpgroup_mma_init(zero), warpgroup_mma_init(zero), none, none),
                k, v, tiles, scale, 0.0, position, layouts, sums, MASK,
            )  # fmt: skip
            for n in range(start + 1, gl.minimum(start + CHAIN, num_tiles)):
                chain = key_step(
                    n, n - 1, n + 1 < num_tiles, chain, k, v, tiles, scale, 0.0, position, layouts, sums, MASK
                )  # fmt: skip
            gradients = chain.wait(0)
    if sums is not None:
        sums.finish(num_tiles - 1)
    dk = gradients.dk
    dv = gradients.dv
    if COLUMNS:
        for g in range(GROUP):
            batch_head = (batch * HEADS + kv_head * GROUP + g).to(gl.int64)
            entry = gl.load(
                results.column_entries + batch_head * key_len + rows, mask=inside, other=-1
            )
            for split in range(SPLITS):
                line = ((batch_head * SPLITS + split) * column_len + entry)[:, None] * D + d[
                    None, :
                ]
                dk += gl.load(results.column_dk + line, mask=(entry >= 0)[:, None], other=0.0)
                dv += gl.load(results.column_dv + line, mask=(entry >= 0)[:, None], other=0.0)
    dk = dk * softmax_scale
    if ACCUMULATE or CHAIN > 0:
        mask = inside[:, None]
        if not ACCUMULATE:
            mask = mask & (num_tiles > CHAIN)
        dk += gl.load(partial_dk, mask=mask, other=0.0, cache_modifier=".cg")
        dv += gl.load(partial_dv, mask=mask, other=0.0, cache_modifier=".cg")
    dk = dk.to(dk_ptr.dtype.element_ty)
    gl.store(dk_ptr + row * results.stride_n + d[None, :], dk, mask=inside[:, None])
    dv = dv.to(dv_ptr.dtype.element_ty)
    gl.store(dv_ptr + row * results.stride_n + d[None, :], dv, mask=inside[:, None])


@gluon.jit(do_not_specialize=["kv_rank", "query_rank", "world", "inner", *MEETINGS])
def _key_kernel(
    # Operands
    q_desc, grad_out_desc, k_desc, v_desc, lse_desc, delta_desc,
    # The queries' gradient, to add to; or None
    dq_desc,
    # Results, and the columns' gradients: see KeyResults
    dk_ptr, dv_ptr, partial_ptr, column_dk, column_dv, column_entries,
    # The index, and packed documents: the ranks of the keys and of the queries
    slash_ptr, slash_list, weights, starts_desc, q_block_bounds, kv_rank, query_rank, world, inner,
    stride_n, stride_b, stride_h,
    ptr_len, list_len, column_len, key_len, local_blocks, softmax_scale,
    residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr,
    ACCUMULATE: gl.constexpr, CHAIN: gl.constexpr, LISTS: gl.constexpr, PACKED: gl.constexpr,
    WEIGHTED: gl.constexpr,
):  # fmt: skip
    # The first key blocks are seen by the most queries: start them first.
    kv_block = gl.program_id(0)
    batch = gl.program_id(1) // (HEADS // GROUP)
    kv_head = gl.program_id(1) % (HEADS // GROUP)
    results = KeyResults(
        dk_ptr,
        dv_ptr,
        partial_ptr,
        column_dk,
        column_dv,
        column_entries,
        stride_n,
        stride_b,
        stride_h,
    )
    if PACKED or WEIGHTED:
        block = block_at(kv_block, kv_rank, world, inner)
    num_blocks = 0
    if WEIGHTED:
        weights += block
        num_blocks = local_blocks * world
    index = RankIndex(
        slash_ptr, slash_list, ptr_len, list_len,
        residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
        local_blocks, weights, num_blocks, LISTS, PACKED, WEIGHTED, 1 if LISTS else 2,
    )  # fmt: skip
    num_tiles = 0
    end_q_block = local_blocks
    first_position = 0
    if PACKED:
        first_position = block * BLOCK
        # From this block of the sequence on, queries see nothing of it.
        end_block = gl.load(
            q_block_bounds + (2 * batch.to(gl.int64) + 1) * local_blocks * world + block
        )
        end_q_block = blocks_before(end_block, query_rank, world, inner)
    for g in range(GROUP):
        batch_head = batch * HEADS + kv_head * GROUP + g
        head_ptr = index.head_ptr(batch_head)
        for apart in gl.static_range(index.LISTS_PER_BLOCK):
            head_list = index.head_list(batch_head)
            low, high, first = index.meetings(head_ptr, head_list, apart, kv_block, end_q_block)
            num_tiles += 2 * (high - low)
    num_tiles = gl.maximum(num_tiles, 1)

    kept, tiles = allocate_tiles(
        q_desc, grad_out_desc, k_desc, v_desc, lse_desc, BLOCK // 2, D, STAGES, PACKED, WEIGHTED
    )
    descs = QueryDescriptors(q_desc, grad_out_desc, lse_desc, delta_desc, starts_desc)
    if dq_desc is None:
        gl.warp_specialize(
            [
                (_attend, (
                    results, kept, tiles, None, column_len, num_tiles, key_len, softmax_scale, first_position,
                    0, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, PACKED,
                )),
                (_attend, (
                    results, kept, tiles, None, column_len, num_tiles, key_len, softmax_scale, first_position,
                    1, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, PACKED,
                )),
                (_load, (
                    descs, k_desc, v_desc, kept, tiles, index, end_q_block,
                    HEADS, GROUP, BLOCK, DIAGONAL,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        sums = allocate_sums(kept, dq_desc)
        gl.warp_specialize(
            [
                (_attend, (
                    results, kept, tiles, sums, column_len, num_tiles, key_len, softmax_scale, first_position,
                    0, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, PACKED,
                )),
                (_attend, (
                    results, kept, tiles, sums, column_len, num_tiles, key_len, softmax_scale, first_position,
                    1, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, PACKED,
                )),
                (_load, (
                    descs, k_desc, v_desc, kept, tiles, index, end_q_block,
                    HEADS, GROUP, BLOCK, DIAGONAL,
                )),
                (_add, (
                    dq_desc, sums, index, end_q_block, 0, HEADS, GROUP, BLOCK, DIAGONAL,
                )),
                (_add, (
                    dq_desc, sums, index, end_q_block, 1, HEADS, GROUP, BLOCK, DIAGONAL,
                )),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip


def _partial_sums(
    grad_kv: Tensor, accumulator: Tensor | None, local_blocks: int, group: int
) -> tuple[int, Tensor]:
    """After how many query tiles sums are put aside, 0 for never; and where to, float32 ``[2, s, b, hk, d]``.

    Tensor cores round towards zero as they add: after 500 thousand rows, all that a key block sees of 8 heads
    of 64K tokens, 0.1% of the sum is gone.
    """
    chain = max(CHAIN, 4 * group)  # past the diagonal tiles
    if 2 * local_blocks * group <= chain:
        chain = 0
    if accumulator is not None:
        return chain, accumulator
    if chain == 0 or grad_kv.dtype == torch.float32:
        return chain, grad_kv
    # Not touched unless a key block has more tiles to add.
    return chain, torch.empty_like(grad_kv, dtype=torch.float32)


def backward_key(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index: PatternIndex,
    ring_step: RingStep,
    softmax_scale: float,
    accumulator: Tensor | None,
    column_gradients: Tensor | None,
    grad_kv: Tensor,
    query_sums: Tensor | None = None,
) -> None:
    """:func:`...attention.backward_key` into ``grad_kv``, which may be the accumulator."""
    _, batch, heads, dim = query.shape
    kv_heads, block = key.shape[2], index.block_size
    group = heads // kv_heads
    half = [1, 1, block // 2, dim]
    column_dk, column_dv, column_entries, splits, num_columns = (
        lse,
        lse,
        index.columns,
        1,
        0,
    )  # not read
    if column_gradients is not None:
        column_dk, column_dv = column_gradients.unbind()
        splits, num_columns = column_gradients.shape[3:5]
        column_entries = invert_columns(index, ring_step.source, key.shape[0])
    chain, partial = _partial_sums(grad_kv, accumulator, index.local_blocks, group)
    packed, weighted = index.documents is not None, index.weights is not None
    locates = packed or weighted
    launch(
        _key_kernel,
        (index.local_blocks, batch * kv_heads),
        **query_descriptors(query, grad_out, dim),
        **key_descriptors(key, value, half, query_sums),
        **line_descriptors(lse, delta),
        dk_ptr=grad_kv[0],
        dv_ptr=grad_kv[1],
        partial_ptr=partial,
        column_dk=column_dk,
        column_dv=column_dv,
        column_entries=column_entries,
        slash_ptr=index.rank_ptr,
        slash_list=index.rank_list,
        weights=index.weights,
        **document_arguments(index, ring_step.rank),
        kv_rank=ring_step.source if locates else None,
        query_rank=ring_step.rank if packed else None,
        world=index.world if locates else None,
        inner=index.inner if locates else None,
        stride_n=grad_kv.stride(1),
        stride_b=grad_kv.stride(2),
        stride_h=grad_kv.stride(3),
        ptr_len=index.rank_ptr.shape[-1],
        list_len=index.list_strides[1],
        column_len=num_columns,
        key_len=key.shape[0],
        local_blocks=index.local_blocks,
        softmax_scale=softmax_scale,
        **dict(zip(MEETINGS, meetings(index, ring_step), strict=True)),
        HEADS=heads,
        GROUP=group,
        D=dim,
        BLOCK=block,
        STAGES=3,
        SPLITS=splits,
        DIAGONAL=ring_step.source == ring_step.rank,
        COLUMNS=column_gradients is not None,
        ACCUMULATE=accumulator is not None,
        CHAIN=chain,
        LISTS=index.has_block_lists,
        PACKED=packed,
        WEIGHTED=weighted,
        num_warps=4,
        maxnreg=168,
    )
