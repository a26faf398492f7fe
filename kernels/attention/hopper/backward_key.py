# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the keys and values of one rank on Hopper GPUs, in Gluon: the same sums as
``portable/backward_key.py``, deterministic.

A program keeps one key block and walks the query tiles that attend to it (:mod:`.key_walk`), with block lists
a segment of these (:mod:`..portable.segments`). Two warpgroups compute (:mod:`.key_gradients`). The gathered
columns have a kernel of their own, ``backward_columns.py``.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.launch import launch, next_power_of_2
from ...common.tiles import block_at, blocks_before
from ...types import PatternOperand
from ..backward_path import chunk_blocks, chunks, gpu_of
from ..launch_args import BLOCK_DISTANCES, block_distances, chain_tiles, partial_sums
from ..operands import BackwardInputs, StepKeys
from ..portable.columns import invert_columns
from ..portable.segments import find_segments
from .descriptors import tile_dim
from .key_common import (
    QueryDescriptors,
    allocate_tiles,
    key_descriptors,
    part_arguments,
    query_arguments,
    range_arguments,
)
from .key_gradients import KeyResults, attend
from .key_walk import RankIndex, Segment, add_sums, load_queries
from .query_sums import new_zero

CHUNK: int | None = None
"""Query blocks of a chunk of the one-pass backward, for tests and benchmarks; 0 for all at once, None for
what :mod:`..backward_path` chooses."""
ONE_LAUNCH: bool | None = None
"""Whether chunks share a launch; None likewise."""


@gluon.jit
def _count_tiles(
    index, kv_block, batch, kv_head, end_q_block,
    HEADS: gl.constexpr, GROUP: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Query tiles that attend to a key block, of all heads of a group at once: one head after the other waits
    for memory each time."""
    zero = new_zero(kv_block)
    kv_block += zero
    kv_head += zero
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    g = gl.arange(0, SIZE, layout=layout)
    batch_head = batch * HEADS + kv_head * GROUP + gl.minimum(g, GROUP - 1)
    blocks = gl.zeros([SIZE], gl.int32, layout)
    for apart in gl.static_range(index.LISTS_PER_BLOCK):
        head_ptr, head_list = index.head_ptr(batch_head), index.head_list(batch_head)
        low, high, first = index.block_distances(head_ptr, head_list, apart, kv_block, end_q_block)
        blocks += gl.where(g < GROUP, high - low, 0)
    return 2 * gl.sum(blocks, axis=0)


@gluon.jit(
    do_not_specialize=[
        "kv_rank", "query_rank", "world", "inner", "first_q_block", "chunk_blocks", "kv_ahead",
        *BLOCK_DISTANCES,
    ]
)  # fmt: skip
def _key_kernel(
    # Operands
    q_desc, grad_out_desc, k_desc, v_desc, lse_desc, delta_desc,
    # The queries' gradient, to add to; or None
    dq_desc,
    # Results, and the columns' gradients: see KeyResults
    dk_ptr, dv_ptr, partial_ptr, column_dk, column_dv, column_entries, turns_ptr,
    # What each program has (Segments.programs), or None
    programs_ptr,
    # The index, and visible ranges: the ranks of the keys and of the queries
    block_ptr, block_list, starts_desc, q_block_bounds, kv_rank, query_rank, world, inner,
    stride_n, stride_b, stride_h,
    ptr_len, list_len, column_len, key_len, local_blocks, softmax_scale,
    # The chunk of query blocks, with CHUNKS: of the diagonal blocks, up to the end of each one's own chunk.
    # In one launch the first of several, each with the key blocks up to its own place and kv_ahead.
    first_q_block, chunk_blocks, kv_ahead,
    residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, GRAD_OUT_STAGES: gl.constexpr, PART: gl.constexpr,
    SPLITS: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr,
    ACCUMULATE: gl.constexpr, CHAIN: gl.constexpr, LISTS: gl.constexpr, RANGES: gl.constexpr,
    CHUNKS: gl.constexpr, ONE_LAUNCH: gl.constexpr, GROUP_SIZE: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    # The first key blocks are seen by the most queries: start them first.
    segment = Segment(programs_ptr, SEGMENT)
    kv_block = segment.kv_block()
    turn = segment.number()
    if SEGMENT > 0:
        if kv_block < 0:  # there are fewer programs than the host has started
            return
    if ONE_LAUNCH:
        first_q_block += gl.program_id(2) * chunk_blocks
        end_kv_block = first_q_block + kv_ahead
        if kv_block >= end_kv_block:
            return
        # Programs of earlier chunks that add to the same gradients.
        turn = (end_kv_block - 1) // chunk_blocks - kv_block // chunk_blocks
    line = segment.line()
    batch = line // (HEADS // GROUP)
    kv_head = line % (HEADS // GROUP)
    results = KeyResults(
        dk_ptr,
        dv_ptr,
        partial_ptr,
        column_dk,
        column_dv,
        column_entries,
        turns_ptr,
        turn,
        stride_n,
        stride_b,
        stride_h,
    )
    index = RankIndex(
        block_ptr, block_list, ptr_len, list_len,
        residue_00, wrap_00, residue_01, wrap_01, residue_10, wrap_10, residue_11, wrap_11,
        local_blocks, first_q_block if CHUNKS else 0, LISTS, RANGES, CHUNKS, 1 if LISTS else 2,
    )  # fmt: skip
    num_tiles = 0
    end_q_block = local_blocks
    first_position = 0
    if RANGES:
        block = block_at(kv_block, kv_rank, world, inner)
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
    if LISTS and (RANGES or CHUNKS):  # where a list ends is searched
        for g in range(GROUP):
            batch_head = batch * HEADS + kv_head * GROUP + g
            low, high, first = index.block_distances(
                index.head_ptr(batch_head), index.head_list(batch_head), 0, kv_block, end_q_block
            )
            num_tiles += 2 * (high - low)
    else:
        num_tiles = _count_tiles(
            index, kv_block, batch, kv_head, end_q_block, HEADS, GROUP, GROUP_SIZE
        )
    if SEGMENT > 0:
        listed = num_tiles // 2
        first_blocks = 0
        if DIAGONAL:
            listed -= GROUP
            first_blocks = segment.diagonal_blocks(GROUP)
        listed = gl.minimum(gl.maximum(listed - segment.number() * SEGMENT, 0), SEGMENT)
        num_tiles = 2 * (first_blocks + listed)
    num_tiles = gl.maximum(num_tiles, 1)

    shared = allocate_tiles(
        q_desc, grad_out_desc, k_desc, v_desc, lse_desc, dq_desc, BLOCK // 2, D, STAGES, GRAD_OUT_STAGES,
        RANGES, PART,
    )  # fmt: skip
    descs = QueryDescriptors(q_desc, grad_out_desc, lse_desc, delta_desc, starts_desc)
    # Without the queries' gradient there are no warps that add to it.
    WORKERS: gl.constexpr = 2 if dq_desc is None else 4
    gl.warp_specialize(
        [
            (attend, (
                results, shared, segment, column_len, num_tiles, key_len, softmax_scale, first_position,
                HEAD_DIM, 0, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, RANGES,
                ONE_LAUNCH or SEGMENT > 0,
            )),
            (attend, (
                results, shared, segment, column_len, num_tiles, key_len, softmax_scale, first_position,
                HEAD_DIM, 1, HEADS, GROUP, BLOCK, SPLITS, DIAGONAL, COLUMNS, ACCUMULATE, CHAIN, RANGES,
                ONE_LAUNCH or SEGMENT > 0,
            )),
            (load_queries, (
                descs, k_desc, v_desc, shared, index, segment, end_q_block, HEADS, GROUP, BLOCK, DIAGONAL,
            )),
            (add_sums, (dq_desc, shared, index, segment, end_q_block, 0, HEADS, GROUP, BLOCK, DIAGONAL)),
            (add_sums, (dq_desc, shared, index, segment, end_q_block, 1, HEADS, GROUP, BLOCK, DIAGONAL)),
        ][: WORKERS + 1],
        [4, 1, 1, 1][:WORKERS],
        [240, 24, 24, 24][:WORKERS],
    )  # fmt: skip


class Launch(NamedTuple):
    """A launch of the gradients of one rank's keys.

    Attributes:
        first_q_block: of the first chunk of query blocks; None for all query blocks.
        chunks: how many, each after the other.
        kv_ahead: key blocks that the queries of a chunk see from its first query block on, beside those
            before it. They are up to the end of a chunk, or none. Read unless diagonal.
        diagonal: whether key blocks meet the query block at their own place. Then all key blocks are in it,
            each with its own chunk, from its own place on.
    """

    first_q_block: int | None
    chunks: int
    kv_ahead: int
    diagonal: bool

    def kv_blocks(self, local_blocks: int, chunk: int) -> int:
        """Key blocks of the launch, from the first on."""
        if self.diagonal or self.first_q_block is None:
            return local_blocks
        last = self.first_q_block + (self.chunks - 1) * chunk
        return min(last + self.kv_ahead, local_blocks)


def _launches(local_blocks: int, chunk: int, own: bool, one_launch: bool) -> list[Launch]:
    """Launches by chunks of query blocks. The last one has all key blocks, and makes the result."""
    firsts = [*range(chunk if own else 0, local_blocks, chunk)]
    ahead = 0 if own else chunk
    # Apart, as the result's dtype may not be that of the sums.
    last = Launch(0, 1, 0, True) if own else Launch(firsts.pop(), 1, ahead, False)
    if one_launch and firsts:
        return [Launch(firsts[0], len(firsts), ahead, False), last]
    return [*(Launch(first, 1, ahead, False) for first in firsts), last]


def _chunks(index: PatternOperand, group: int, dim: int, device: torch.device) -> tuple[int, bool]:
    """Query blocks of a chunk, 0 for all at once, and whether the chunks share a launch."""
    chunked, one_launch = chunks(index.local_blocks, index.is_dense, dim, gpu_of(device))
    chunk = chunk_blocks(group, dim, index.block_size) if chunked else 0
    return (
        chunk if CHUNK is None else CHUNK,
        one_launch if ONE_LAUNCH is None else ONE_LAUNCH,
    )


def backward_key(
    inputs: BackwardInputs,
    keys: StepKeys,
    grad_kv: Tensor,
    accumulator: Tensor | None,
    column_gradients: Tensor | None,
) -> None:
    """:func:`...attention.backward_key` into ``grad_kv``, which may be the accumulator."""
    query, index, query_sums = inputs.query, inputs.index, inputs.query_sums
    key, ring_step = keys.key, keys.ring_step
    _, batch, heads, dim = query.shape
    kv_heads, block = key.shape[2], index.block_size
    group = heads // kv_heads
    half = [1, 1, block // 2, tile_dim(dim)]
    column_dk, column_dv, column_entries = inputs.lse, inputs.lse, index.columns  # not read
    splits, num_columns = 1, 0
    if column_gradients is not None:
        column_dk, column_dv = column_gradients.unbind()
        splits, num_columns = column_gradients.shape[3:5]
        column_entries = invert_columns(index, ring_step.source, key.shape[0])
    own = ring_step.source == ring_step.rank
    launches, turns = [Launch(None, 1, 0, own)], None
    chunk, one_launch = 0, False
    if query_sums is not None:
        chunk, one_launch = _chunks(index, group, dim, query.device)
    if 0 < chunk < index.local_blocks:
        launches = _launches(index.local_blocks, chunk, own, one_launch)
        if accumulator is None:
            accumulator = (
                grad_kv.zero_()
                if grad_kv.dtype == torch.float32
                else torch.zeros_like(grad_kv, dtype=torch.float32)
            )
        if one_launch:
            shape = (batch * kv_heads, index.local_blocks, 2)
            turns = torch.zeros(shape, dtype=torch.int32, device=query.device)
    # The programs of a chunk have few query blocks anyway.
    segments = find_segments(index, kv_heads, ring_step) if len(launches) == 1 else None
    packed = index.visible is not None
    # A chain ends past the diagonal tiles.
    chain = chain_tiles(2 * index.local_blocks * group, 4 * group)
    if segments is not None:
        chain = 0  # a segment is shorter
    for each, part in itertools.product(launches, part_arguments(dim)):
        is_last = each is launches[-1]
        shared = turns is not None and not is_last
        result = grad_kv if is_last or accumulator is None else accumulator
        grid = (each.kv_blocks(index.local_blocks, chunk), batch * kv_heads, each.chunks)
        launch_turns = turns if shared else None
        if segments is not None:
            grid, launch_turns = (len(segments.programs), 1, 1), segments.new_turns(2)
        launch(
            _key_kernel,
            grid,
            **query_arguments(inputs),
            **key_descriptors(key, keys.value, half, query_sums),
            dk_ptr=result[0],
            dv_ptr=result[1],
            partial_ptr=partial_sums(result, accumulator, chain, segments is not None),
            column_dk=column_dk,
            column_dv=column_dv,
            column_entries=column_entries,
            turns_ptr=launch_turns,
            programs_ptr=None if segments is None else segments.programs,
            block_ptr=index.rank_ptr,
            block_list=index.rank_list,
            **range_arguments(index, ring_step.rank),
            kv_rank=ring_step.source if packed else None,
            query_rank=ring_step.rank if packed else None,
            world=index.world if packed else None,
            inner=index.inner if packed else None,
            stride_n=grad_kv.stride(1),
            stride_b=grad_kv.stride(2),
            stride_h=grad_kv.stride(3),
            ptr_len=index.rank_ptr.shape[-1],
            list_len=index.list_strides[1],
            column_len=num_columns,
            key_len=key.shape[0],
            local_blocks=index.local_blocks,
            first_q_block=each.first_q_block,
            chunk_blocks=None if each.first_q_block is None else chunk,
            kv_ahead=each.kv_ahead if shared else None,
            **dict(zip(BLOCK_DISTANCES, block_distances(index, ring_step), strict=True)),
            HEADS=heads,
            GROUP=group,
            HEAD_DIM=dim,
            D=tile_dim(dim),
            BLOCK=block,
            **part,
            SPLITS=splits,
            DIAGONAL=each.diagonal,
            COLUMNS=column_gradients is not None and is_last,
            ACCUMULATE=accumulator is not None,
            CHAIN=chain,
            LISTS=index.has_block_lists,
            RANGES=packed,
            CHUNKS=each.first_q_block is not None,
            ONE_LAUNCH=shared,
            GROUP_SIZE=max(32, next_power_of_2(group)),
            SEGMENT=0 if segments is None else segments.blocks,
            num_warps=4,
            maxnreg=168,
        )
