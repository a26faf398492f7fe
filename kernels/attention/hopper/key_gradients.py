# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The computing warpgroups of the gradients of keys and values on Hopper GPUs: they add up the query tiles of
a key block, and store its gradients.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.tiles import LOG2E
from .compat import Pointer, Scalar, aggregate, thread_barrier
from .global_rows import of_rows
from .key_common import BLOCK_M, key_start, key_step, make_layouts, no_gradients, put_aside
from .masks import CAUSAL, CAUSAL_RANGE, RANGE, UNMASKED


@aggregate
class KeyResults:
    """Where the gradients go, [s, b, hk, d] each, and the columns' gradients, which are added to them."""

    dk: Pointer
    dv: Pointer
    partial: Pointer  # float32, of keys and then of values: sums that are put aside
    column_dk: Pointer  # [b, h, SPLITS, column_len, d]
    column_dv: Pointer
    column_entries: Pointer  # [b, h, s]: which of its head's columns each key is, or -1
    turns: Pointer  # [b * hk, nb, 2]: of each half of a key block, how many programs have added; or None
    turn: Scalar  # how many add before this one
    stride_n: Scalar
    stride_b: Scalar
    stride_h: Scalar


@gluon.jit
def _wait_for(ptr, turn):
    """Wait until so many programs have added to the same gradients. They were started earlier."""
    while gl.atomic_add(ptr, 0, sem="acquire") < turn:
        pass


@gluon.jit
def attend(
    results, shared, segment, column_len, num_tiles, key_len, softmax_scale, first_position,
    HEAD_DIM: gl.constexpr, HALF: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr,
    SPLITS: gl.constexpr, DIAGONAL: gl.constexpr, COLUMNS: gl.constexpr, ACCUMULATE: gl.constexpr,
    CHAIN: gl.constexpr, RANGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: the gradients of half of the keys."""
    HALF_N: gl.constexpr = BLOCK // 2
    resident = shared.resident
    tiles = shared.queries
    sums = shared.sums_of_half(HALF)
    D: gl.constexpr = resident.D
    layouts = make_layouts(D)
    scale = softmax_scale * LOG2E
    # A tile that ranges cut is rare, but where it is in the walk differs: all are masked.
    MASK: gl.constexpr = RANGE if RANGES else UNMASKED
    DIAGONAL_MASK: gl.constexpr = CAUSAL_RANGE if RANGES else CAUSAL
    position = 0.0
    if RANGES:
        position = first_position + HALF * HALF_N
        position += gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.scores))
        position = position.to(gl.float32)  # [HALF_N]
    k, v, gradients = key_start(resident, tiles, layouts, HALF)
    # The first tile is not in a loop, so that the compiler finds the loops' operands in place.
    first = 1
    if DIAGONAL:
        # Each head's diagonal block is two tiles: of the first, only the first 64 keys see anything, and
        # of the second these see everything. A skipped tile is released two ahead of the one in use, where
        # there are three.
        cols = gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.scores))
        rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layouts.scores))
        causal = gl.where(cols[:, None] <= rows[None, :], 0.0, float("-inf"))  # [HALF_N, BLOCK_M]
        if HALF == 1:
            if sums is not None:
                sums.put_ds(0, gl.zeros([HALF_N, BLOCK_M], k.dtype, layouts.scores))
            tiles.skip(0)
            tiles.q_full.wait(1)
        gradients = key_step(
            HALF, -1, HALF + 1 < num_tiles, gradients, k, v, tiles, scale, causal, position, layouts, sums,
            DIAGONAL_MASK, HALF == 1,
        )  # fmt: skip
        blocks = segment.diagonal_blocks(GROUP)
        for g in range(1, blocks):
            n = 2 * g
            previous = n - 1
            if HALF == 0:
                gradients = key_step(
                    n - 1, n - 2, True, gradients, k, v, tiles, scale, 0.0, position, layouts, sums, MASK
                )  # fmt: skip
            else:
                if sums is not None:
                    sums.put_ds(n, gl.zeros([HALF_N, BLOCK_M], k.dtype, layouts.scores))
                    gradients = gradients.wait(0)
                    sums.finish(n - 1)
                if tiles.STAGES == 2:
                    gradients = gradients.wait(0)
                    tiles.empty.arrive(n - 1)
                    previous = -1
                tiles.skip(n)
                tiles.q_full.wait(n + 1)
            gradients = key_step(
                n + HALF, previous, n + HALF + 1 < num_tiles, gradients, k, v, tiles, scale, causal,
                position, layouts, sums, DIAGONAL_MASK,
            )  # fmt: skip
        first = 2 * blocks - 1 + HALF
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
    kv_block = segment.kv_block()
    line = segment.line()
    batch = line // (HEADS // GROUP)
    kv_head = line % (HEADS // GROUP)
    rows = kv_block * BLOCK + HALF * HALF_N
    rows += gl.arange(0, HALF_N, layout=gl.SliceLayout(1, layouts.gradients))  # [HALF_N]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layouts.gradients))  # [D]
    inside = rows < key_len
    row = rows.to(gl.int64)[:, None]
    head = batch * results.stride_b + kv_head * results.stride_h
    dk_ptr = results.dk + head
    dv_ptr = results.dv + head
    if TURNS:
        key_block = line.to(gl.int64) * ((key_len + BLOCK - 1) // BLOCK) + kv_block
        turns = results.turns + 2 * key_block + HALF
        _wait_for(turns, results.turn)
    partial_dk = results.partial + head + row * results.stride_n + d[None, :]  # [HALF_N, D]
    partial_dv = partial_dk + key_len.to(gl.int64) * results.stride_n
    if CHAIN > 0:
        for start in range(CHAIN, num_tiles, CHAIN):
            mask = of_rows(inside, d, HEAD_DIM)
            if gradients.dk is not None:
                put_aside(
                    partial_dk, gradients.dk * softmax_scale, mask, start == CHAIN, ACCUMULATE
                )
            if gradients.dv is not None:
                put_aside(partial_dv, gradients.dv, mask, start == CHAIN, ACCUMULATE)
            none = no_gradients(HALF_N, D, k.dtype, layouts, resident.PART)
            chain = key_step(
                start, start - 1, start + 1 < num_tiles, none,
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
    SEGMENTS: gl.constexpr = segment.BLOCKS > 0
    finished = inside
    if SEGMENTS:
        finished = inside & segment.is_last()
    if COLUMNS:
        for g in range(GROUP):
            batch_head = (batch * HEADS + kv_head * GROUP + g).to(gl.int64)
            entry = gl.load(
                results.column_entries + batch_head * key_len + rows, mask=finished, other=-1
            )
            for split in range(SPLITS):
                at = (batch_head * SPLITS + split) * column_len + entry
                at = at[:, None] * HEAD_DIM + d[None, :]
                if dk is not None:
                    dk += gl.load(
                        results.column_dk + at, mask=of_rows(entry >= 0, d, HEAD_DIM), other=0.0
                    )
                if dv is not None:
                    dv += gl.load(
                        results.column_dv + at, mask=of_rows(entry >= 0, d, HEAD_DIM), other=0.0
                    )
    partial = of_rows(inside, d, HEAD_DIM)
    if not ACCUMULATE:
        partial = partial & (results.turn > 0 if SEGMENTS else num_tiles > CHAIN)
    stored = of_rows(finished, d, HEAD_DIM)
    if SEGMENTS:
        handed_on = of_rows(inside & (segment.is_last() == 0), d, HEAD_DIM)
    PARTIAL: gl.constexpr = ACCUMULATE or CHAIN > 0 or SEGMENTS
    if dk is not None:
        dk = dk * softmax_scale
        if PARTIAL:
            dk += gl.load(partial_dk, mask=partial, other=0.0, cache_modifier=".cg")
        if SEGMENTS:
            gl.store(partial_dk, dk, mask=handed_on)
        dk = dk.to(dk_ptr.dtype.element_ty)
        gl.store(dk_ptr + row * results.stride_n + d[None, :], dk, mask=stored)
    if dv is not None:
        if PARTIAL:
            dv += gl.load(partial_dv, mask=partial, other=0.0, cache_modifier=".cg")
        if SEGMENTS:
            gl.store(partial_dv, dv, mask=handed_on)
        dv = dv.to(dv_ptr.dtype.element_ty)
        gl.store(dv_ptr + row * results.stride_n + d[None, :], dv, mask=stored)
    if TURNS:
        thread_barrier()  # all threads have stored
        gl.atomic_add(turns, 1, sem="release")
