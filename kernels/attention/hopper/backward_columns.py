# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of the gathered columns on Hopper GPUs, in Gluon: what ``backward_key.py`` does for a key block,
for a tile of one head's columns."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.launch import cdiv, launch
from ...common.tiles import LOG2E, block_at, blocks_before
from ..launch_args import chain_tiles, column_arguments, column_splits
from ..operands import BackwardInputs
from .compat import Pointer, Scalar, Value, aggregate
from .descriptors import descriptor_heads_first, tile_dim
from .global_rows import of_rows
from .key_common import (
    BLOCK_M,
    QueryDescriptors,
    TileLoader,
    allocate_tiles,
    key_descriptors,
    key_start,
    key_step,
    make_layouts,
    no_gradients,
    part_arguments,
    put_aside,
    query_arguments,
    range_arguments,
)
from .masks import PER_KEY, RANGE
from .query_sums import QueryAdder


@aggregate
class ColumnTile:
    """The columns of a warpgroup, and which query blocks attend to them as columns."""

    member: Pointer  # [blocks]: whether a block distance is among the head's slashes
    position: Value  # [HALF_N]
    block: Value  # [HALF_N]
    inside: Value  # [HALF_N]: not past the last column
    rank: Scalar  # of the queries
    world: Scalar
    inner: Scalar
    RANGES: gl.constexpr

    @gluon.jit
    def mask(self, inside, q_block):
        """0 for the columns that local query block ``q_block`` attends to as columns, -inf for the others. Of
        visible ranges their positions, and -1."""
        distance = block_at(q_block, self.rank, self.world, self.inner) - self.block
        seen = inside & (distance > 0)
        covered = gl.load(self.member + distance, mask=seen, other=1)
        if self.RANGES:
            mask = gl.where(covered == 0, self.position, -1).to(gl.float32)
        else:
            mask = gl.where(covered == 0, 0.0, float("-inf"))
        return mask


@gluon.jit
def _walk(
    visitor, batch, head, batch_head, first_q_block, num_tiles, BLOCK: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """Visit the query tiles of a tile of columns, in order."""
    block_tiles: gl.constexpr = BLOCK // BLOCK_M
    for n in range(num_tiles):
        row = (first_q_block + n // block_tiles * SPLITS) * BLOCK + n % block_tiles * BLOCK_M
        visitor.visit(n, batch, head, batch_head, row)


@gluon.jit
def _load(
    descs, k_desc, v_desc, shared, batch, head, batch_head, first, first_q_block, num_tiles,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    shared.resident.load(k_desc, v_desc, batch, head, first)
    loader = TileLoader(shared.queries, descs)
    _walk(loader, batch, head, batch_head, first_q_block, num_tiles, BLOCK, SPLITS)


@gluon.jit
def _add(
    dq_desc, shared, batch, head, batch_head, first_q_block, num_tiles,
    HALF: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """A warp that adds to the queries' gradient."""
    adder = QueryAdder(shared.sums_of_half(HALF), dq_desc)
    _walk(adder, batch, head, batch_head, first_q_block, num_tiles, BLOCK, SPLITS)


@gluon.jit
def _step(
    n, num_tiles, gradients, mask, k, v, tile, tiles, scale, layouts, sums, inside, first_q_block,
    MASK: gl.constexpr, BLOCK_TILES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Add query tile n to the gradients. Returns them, and the mask of the next tile, loaded meanwhile."""
    next_mask = tile.mask(
        inside & (n + 1 < num_tiles), first_q_block + (n + 1) // BLOCK_TILES * SPLITS
    )
    gradients = key_step(
        n, n - 1, n + 1 < num_tiles, gradients, k, v, tiles, scale, mask, mask, layouts, sums, MASK
    )  # fmt: skip
    return gradients, next_mask


@gluon.jit
def _attend(
    # Operands and results of a head
    dk_ptr, dv_ptr, columns, member, shared,
    # Where in the results, in the head's columns, and in the queries; rows in the results
    line, first, end, first_q_block, rank, world, inner, num_tiles, softmax_scale,
    HEAD_DIM: gl.constexpr, HALF: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr,
    RANGES: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: the gradients of half of the columns."""
    HALF_N: gl.constexpr = BLOCK // 2
    resident = shared.resident
    tiles = shared.queries
    sums = shared.sums_of_half(HALF)
    D: gl.constexpr = resident.D
    block_tiles: gl.constexpr = BLOCK // BLOCK_M
    layouts = make_layouts(D)
    scale = softmax_scale * LOG2E
    entry = first + HALF * HALF_N + gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.scores))
    inside = entry < end
    position = gl.load(columns + entry, mask=inside, other=0)
    block = position // BLOCK
    tile = ColumnTile(member, position, block, inside, rank, world, inner, RANGES)
    MASK: gl.constexpr = RANGE if RANGES else PER_KEY
    k, v, gradients = key_start(resident, tiles, layouts, HALF)
    mask = tile.mask(inside, first_q_block)
    gradients = key_step(
        0, -1, num_tiles > 1, gradients, k, v, tiles, scale, mask, mask, layouts, sums, MASK,
        False,
    )  # fmt: skip
    mask = tile.mask(inside, first_q_block + 1 // block_tiles * SPLITS)
    chain_end = gl.minimum(num_tiles, CHAIN) if CHAIN > 0 else num_tiles
    for n in range(1, chain_end):
        gradients, mask = _step(
            n, num_tiles, gradients, mask, k, v, tile, tiles, scale, layouts, sums, inside,
            first_q_block, MASK, block_tiles, SPLITS,
        )  # fmt: skip
    gradients = gradients.wait(0)
    rows = HALF * HALF_N + gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.gradients))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layouts.gradients))
    offsets = (line + rows)[:, None] * HEAD_DIM + d[None, :]  # [HALF_N, D]
    stored = of_rows(first + rows < end, d, HEAD_DIM)
    if CHAIN > 0:
        for start in range(CHAIN, num_tiles, CHAIN):
            if gradients.dk is not None:
                put_aside(dk_ptr + offsets, gradients.dk, stored, start == CHAIN, False)
            if gradients.dv is not None:
                put_aside(dv_ptr + offsets, gradients.dv, stored, start == CHAIN, False)
            none = no_gradients(HALF_N, D, k.dtype, layouts, resident.PART)
            chain, mask = _step(
                start, num_tiles, none, mask, k, v, tile, tiles,
                scale, layouts, sums, inside, first_q_block, MASK, block_tiles, SPLITS,
            )  # fmt: skip
            for n in range(start + 1, gl.minimum(start + CHAIN, num_tiles)):
                chain, mask = _step(
                    n, num_tiles, chain, mask, k, v, tile, tiles, scale, layouts, sums, inside,
                    first_q_block, MASK, block_tiles, SPLITS,
                )  # fmt: skip
            gradients = chain.wait(0)
    if sums is not None:
        sums.finish(num_tiles - 1)
    dk = gradients.dk
    dv = gradients.dv
    aside = stored & (num_tiles > CHAIN)
    if dk is not None:
        if CHAIN > 0:
            dk += gl.load(dk_ptr + offsets, mask=aside, other=0.0, cache_modifier=".cg")
        gl.store(dk_ptr + offsets, dk, mask=stored)
    if dv is not None:
        if CHAIN > 0:
            dv += gl.load(dv_ptr + offsets, mask=aside, other=0.0, cache_modifier=".cg")
        gl.store(dv_ptr + offsets, dv, mask=stored)


@gluon.jit(do_not_specialize=["rank"])
def _column_kernel(
    # Operands and results
    q_desc, grad_out_desc, k_desc, v_desc, lse_desc, delta_desc, dk_ptr, dv_ptr,
    # The queries' gradient, to add to; or None
    dq_desc,
    # The index, and visible ranges
    member, columns, column_ptr, starts_desc, q_block_bounds,
    ptr_len, column_len, local_blocks, softmax_scale, rank, world, inner,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    GRAD_OUT_STAGES: gl.constexpr, PART: gl.constexpr,
    SPLITS: gl.constexpr, RANGES: gl.constexpr, BY_HEAD: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    # The first columns are seen by the most queries: start them first, of all heads. In one pass, of each
    # head: programs at work at one time then add to the same rows of the queries' gradient.
    split = gl.program_id(0)
    line_of_head = gl.program_id(2 if BY_HEAD else 1)
    batch = line_of_head // HEADS
    head = line_of_head % HEADS
    batch_head = line_of_head.to(gl.int64)
    first = gl.program_id(1 if BY_HEAD else 2) * BLOCK
    end = gl.load(column_ptr + batch_head * ptr_len + ptr_len - 1)
    member += batch_head * (ptr_len - 1)
    columns += batch_head * column_len
    # Columns are sorted: no query block up to the first one's sees any of this tile. Query blocks
    # go round the splits, so that each split has as many near and far ones.
    block_tiles: gl.constexpr = BLOCK // BLOCK_M
    first_q_block = gl.load(columns + first, mask=first < end, other=0) // BLOCK
    first_q_block = first_q_block // world + split
    end_q_block = local_blocks
    if RANGES:
        # Nor does one after the last that sees the last one.
        last = (
            gl.load(columns + gl.minimum(first + BLOCK, end) - 1, mask=first < end, other=0)
            // BLOCK
        )
        end_block = gl.load(
            q_block_bounds + (2 * (batch_head // HEADS) + 1) * local_blocks * world + last
        )
        end_q_block = blocks_before(end_block, rank, world, inner)
    num_tiles = (gl.maximum(end_q_block - first_q_block, 0) + SPLITS - 1) // SPLITS * block_tiles
    # Columns that no query sees get one tile of zeros, past the end.
    first_q_block = gl.where((first < end) & (num_tiles > 0), first_q_block, local_blocks)
    num_tiles = gl.where(first_q_block < local_blocks, num_tiles, 1)
    line = (batch_head * SPLITS + split) * column_len + first

    shared = allocate_tiles(
        q_desc, grad_out_desc, k_desc, v_desc, lse_desc, dq_desc, BLOCK // 2, D, STAGES, GRAD_OUT_STAGES,
        RANGES, PART,
    )  # fmt: skip
    descs = QueryDescriptors(q_desc, grad_out_desc, lse_desc, delta_desc, starts_desc)
    # Without the queries' gradient there are no warps that add to it.
    WORKERS: gl.constexpr = 2 if dq_desc is None else 4
    gl.warp_specialize(
        [
            (_attend, (
                dk_ptr, dv_ptr, columns, member, shared,
                line, first, end, first_q_block, rank, world, inner, num_tiles, softmax_scale,
                HEAD_DIM, 0, BLOCK, SPLITS, RANGES, CHAIN,
            )),
            (_attend, (
                dk_ptr, dv_ptr, columns, member, shared,
                line, first, end, first_q_block, rank, world, inner, num_tiles, softmax_scale,
                HEAD_DIM, 1, BLOCK, SPLITS, RANGES, CHAIN,
            )),
            (_load, (
                descs, k_desc, v_desc, shared, batch, head, line_of_head,
                first, first_q_block, num_tiles, BLOCK, SPLITS,
            )),
            (_add, (
                dq_desc, shared, batch, head, line_of_head, first_q_block, num_tiles, 0, BLOCK, SPLITS,
            )),
            (_add, (
                dq_desc, shared, batch, head, line_of_head, first_q_block, num_tiles, 1, BLOCK, SPLITS,
            )),
        ][: WORKERS + 1],
        [4, 1, 1, 1][:WORKERS],
        [240, 24, 24, 24][:WORKERS],
    )  # fmt: skip


def backward_columns(inputs: BackwardInputs, column_kv: Tensor, rank: int) -> Tensor:
    """See :func:`...attention.backward_columns`."""
    query, index, query_sums = inputs.query, inputs.index, inputs.query_sums
    _, batch, heads, dim = query.shape
    block, num_columns = index.block_size, column_kv.shape[-2]
    splits = column_splits(index, batch * heads, block)
    shape = (2, batch, heads, splits, num_columns, dim)
    gradients = torch.empty(shape, dtype=torch.float32, device=query.device)
    half = [1, 1, block // 2, tile_dim(dim)]
    by_head = query_sums is not None
    tiles, lines = cdiv(num_columns, block), batch * heads
    for part in part_arguments(dim):
        launch(
            _column_kernel,
            (splits, tiles, lines) if by_head else (splits, lines, tiles),
            **query_arguments(inputs),
            **key_descriptors(*column_kv.unbind(), half, query_sums, descriptor_heads_first),
            dk_ptr=gradients[0],
            dv_ptr=gradients[1],
            **column_arguments(index, rank, splits),
            **range_arguments(index, rank),
            column_len=num_columns,
            HEAD_DIM=dim,
            D=tile_dim(dim),
            **part,
            BY_HEAD=by_head,
            CHAIN=chain_tiles(cdiv(index.local_blocks, splits) * (block // BLOCK_M)),
            num_warps=4,
            maxnreg=168,
        )
    return gradients
