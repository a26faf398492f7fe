# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the keys and values of one rank on Hopper GPUs, in Gluon: the same sums as
``portable/backward_key.py``, deterministic.

A program keeps one key block and walks the query tiles that attend to it (:mod:`.key_walk`). Two warpgroups
compute (:mod:`.key_gradients`). The gathered columns have a kernel of their own, ``backward_columns.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.launch import launch
from ...common.tiles import block_at, blocks_before
from ...types import PatternIndex, RingStep
from ..launch_args import MEETINGS, meetings
from ..portable.columns import invert_columns
from .key_common import (
    QueryDescriptors,
    allocate_tiles,
    document_arguments,
    key_descriptors,
    line_descriptors,
    query_descriptors,
)
from .key_gradients import KeyResults, attend
from .key_walk import RankIndex, add_sums, load_queries

CHAIN = 256
"""Query tiles that are summed in registers, at least; see ``_partial_sums``."""

CHUNK: int | None = None
"""Query blocks of a launch of the one-pass backward. Programs at work at one time then add to the same rows
of the queries' gradient, which stay in the cache. None: all at once, until chunks are measured. Graphs that
were captured before (``ring.attention_graph``) keep what they had."""


@gluon.jit(
    do_not_specialize=[
        "kv_rank", "query_rank", "world", "inner", "first_q_block", "chunk_blocks", *MEETINGS
    ]
)  # fmt: skip
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
    # The chunk of query blocks, with CHUNKS: of the diagonal blocks, up to the end of each one's own chunk
    first_q_block, chunk_blocks,
    residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr,
    ACCUMULATE: gl.constexpr, CHAIN: gl.constexpr, LISTS: gl.constexpr, PACKED: gl.constexpr,
    WEIGHTED: gl.constexpr, CHUNKS: gl.constexpr,
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
        local_blocks, weights, num_blocks, first_q_block if CHUNKS else 0, LISTS, PACKED, WEIGHTED, CHUNKS,
        1 if LISTS else 2,
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
    if CHUNKS:
        end_of_chunk = first_q_block + chunk_blocks
        if DIAGONAL:
            end_of_chunk = (kv_block // chunk_blocks + 1) * chunk_blocks
        end_q_block = gl.minimum(end_q_block, end_of_chunk)
    for g in range(GROUP):
        batch_head = batch * HEADS + kv_head * GROUP + g
        head_ptr = index.head_ptr(batch_head)
        for apart in gl.static_range(index.LISTS_PER_BLOCK):
            head_list = index.head_list(batch_head)
            low, high, first = index.meetings(head_ptr, head_list, apart, kv_block, end_q_block)
            num_tiles += 2 * (high - low)
    num_tiles = gl.maximum(num_tiles, 1)

    shared = allocate_tiles(
        q_desc, grad_out_desc, k_desc, v_desc, lse_desc, dq_desc,
        BLOCK // 2, D, STAGES, PACKED, WEIGHTED,
    )  # fmt: skip
    descs = QueryDescriptors(q_desc, grad_out_desc, lse_desc, delta_desc, starts_desc)
    # Without the queries' gradient there are no warps that add to it.
    WORKERS: gl.constexpr = 2 if dq_desc is None else 4
    gl.warp_specialize(
        [
            (attend, (
                results, shared, column_len, num_tiles, key_len, softmax_scale, first_position,
                0, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, PACKED,
            )),
            (attend, (
                results, shared, column_len, num_tiles, key_len, softmax_scale, first_position,
                1, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, PACKED,
            )),
            (load_queries, (
                descs, k_desc, v_desc, shared, index, end_q_block, HEADS, GROUP, BLOCK, DIAGONAL,
            )),
            (add_sums, (dq_desc, shared, index, end_q_block, 0, HEADS, GROUP, BLOCK, DIAGONAL)),
            (add_sums, (dq_desc, shared, index, end_q_block, 1, HEADS, GROUP, BLOCK, DIAGONAL)),
        ][: WORKERS + 1],
        [4, 1, 1, 1][:WORKERS],
        [240, 24, 24, 24][:WORKERS],
    )  # fmt: skip


class Chunk(NamedTuple):
    """A launch of the gradients of one rank's keys.

    Attributes:
        first_q_block: of the chunk of query blocks; None for all of them. With diagonal 0: each key block is
            with its own chunk, from its own place on.
        kv_blocks: the first key blocks, which are all that its queries see.
        diagonal: whether key blocks meet the query block at their own place.
    """

    first_q_block: int | None
    kv_blocks: int
    diagonal: bool


def _chunks(local_blocks: int, chunk: int, own: bool) -> list[Chunk]:
    """Launches by chunks of query blocks. The last one has all key blocks, and makes the result."""
    first = range(0, local_blocks, chunk)
    if not own:
        return [Chunk(begin, min(begin + chunk, local_blocks), False) for begin in first]
    return [*(Chunk(begin, begin, False) for begin in first[1:]), Chunk(0, local_blocks, True)]


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
    own = ring_step.source == ring_step.rank
    launches = [Chunk(None, index.local_blocks, own)]
    if query_sums is not None and CHUNK is not None and CHUNK < index.local_blocks:
        launches = _chunks(index.local_blocks, CHUNK, own)
        if accumulator is None:
            accumulator = (
                grad_kv.zero_()
                if grad_kv.dtype == torch.float32
                else torch.zeros_like(grad_kv, dtype=torch.float32)
            )
    packed, weighted = index.documents is not None, index.weights is not None
    locates = packed or weighted
    for chunk in launches:
        is_last = chunk is launches[-1]
        result = grad_kv if is_last or accumulator is None else accumulator
        chain, partial = _partial_sums(result, accumulator, index.local_blocks, group)
        launch(
            _key_kernel,
            (chunk.kv_blocks, batch * kv_heads),
            **query_descriptors(query, grad_out, dim),
            **key_descriptors(key, value, half, query_sums),
            **line_descriptors(lse, delta),
            dk_ptr=result[0],
            dv_ptr=result[1],
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
            first_q_block=chunk.first_q_block,
            chunk_blocks=None if chunk.first_q_block is None else CHUNK,
            **dict(zip(MEETINGS, meetings(index, ring_step), strict=True)),
            HEADS=heads,
            GROUP=group,
            D=dim,
            BLOCK=block,
            STAGES=3,
            SPLITS=splits,
            DIAGONAL=chunk.diagonal,
            COLUMNS=column_gradients is not None and is_last,
            ACCUMULATE=accumulator is not None,
            CHAIN=chain,
            LISTS=index.has_block_lists,
            PACKED=packed,
            WEIGHTED=weighted,
            CHUNKS=chunk.first_q_block is not None,
            num_warps=4,
            maxnreg=168,
        )
