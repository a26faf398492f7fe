# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Log-sum-exps of scores that are summed along antidiagonals, by key block.

As in XAttention (arXiv 2503.16428, section 3): of every ``S x S`` square of scores its main antidiagonal is
summed, which passes through each of its queries and keys once. Square (m, n) of a head has

    score(m, n) = sum over t of  q[m S + S - 1 - t] . k[n S + t]

so that all of them are one product of vectors S times as long, and cost 1 / S of all scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch
from ..common.tiles import LOG2E, block_at, owner_of, precision_for, tile_for


@triton.jit(do_not_specialize=["first_block", "rank"])
def _strided_kernel(
    q_ptr, k_ptr, parts_ptr, lse_ptr, q_ss, q_sb, q_sh, k_sr, k_ss, k_sb, k_sh,
    rows, first_block, num_blocks, scale, rank, world, inner,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, KEEP: tl.constexpr, WALK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    squares: tl.constexpr = BLOCK // STRIDE  # of a block
    blocks: tl.constexpr = WALK // squares  # of a tile
    bh = tl.program_id(1).to(tl.int64)
    q_ptr += bh // HEADS * q_sb + bh % HEADS * q_sh
    k_ptr += bh // HEADS * k_sb + bh % HEADS // GROUP * k_sh
    # The last rows see the most: start them first.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * KEEP + tl.arange(0, KEEP)
    inside = row < rows
    own = block_at(first_block + row // squares, rank, world, inner) * squares + row % squares
    last = tl.max(tl.where(inside, own, 0), 0)
    d = tl.arange(0, D)
    q_ptr = q_ptr + row.to(tl.int64)[:, None] * STRIDE * q_ss + d[None, :]
    parts_ptr += (bh * rows + row)[:, None] * num_blocks
    m = tl.full([KEEP], float("-inf"), tl.float32)
    l = tl.zeros([KEEP], tl.float32)
    # Tiles begin at the same keys for all rows of all ranks: sums are the same however many there are.
    for first in range(0, last + 1, WALK):
        square = first + tl.arange(0, WALK)
        there = square < num_blocks * squares
        source, c = owner_of(square // squares, world, inner)
        at = (c * BLOCK + square % squares * STRIDE).to(tl.int64) * k_ss
        keys = k_ptr + (source.to(tl.int64) * k_sr + at)[:, None] + d[None, :]
        scores = tl.zeros([KEEP, WALK], tl.float32)
        for t in range(STRIDE):
            q = tl.load(q_ptr + (STRIDE - 1 - t) * q_ss, mask=inside[:, None], other=0.0)
            k = tl.load(keys + t * k_ss, mask=there[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), scores, input_precision=PREC)
        seen = (own[:, None] >= square[None, :]) & there[None, :]
        scores = tl.where(seen, scores * scale, float("-inf"))
        scores = tl.reshape(scores, [KEEP, blocks, squares])
        top = tl.max(scores, 2)
        top = tl.where(top == float("-inf"), 0.0, top)
        part = top + tl.math.log2(tl.sum(tl.math.exp2(scores - top[:, :, None]), 2))
        block = first // squares + tl.arange(0, blocks)
        stored = inside[:, None] & (block < num_blocks)[None, :]
        tl.store(parts_ptr + block[None, :], part, mask=stored)
        m_new = tl.maximum(m, tl.max(part, 1))
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.math.exp2(m - finite) + tl.sum(tl.math.exp2(part - finite[:, None]), 1)
        m = m_new
    tl.store(lse_ptr + bh * rows + row, m + tl.math.log2(l), mask=inside)


def antidiagonal_lse(query, keys, stride, block_size, first_block, rank, inner, softmax_scale):
    """Launch the scoring; see the reference."""
    length, batch, heads, dim = query.shape
    world, num_blocks = keys.shape[0], keys.shape[0] * keys.shape[1] // block_size
    rows = length // stride
    shape, device = (batch, heads, rows), query.device
    parts = torch.full((*shape, num_blocks), float("-inf"), dtype=torch.float32, device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    tile = tile_for("antidiagonal", dim, block_size, query)
    launch(
        _strided_kernel, (cdiv(rows, tile.block_m), batch * heads),
        query, keys, parts, lse, *query.stride()[:3], *keys.stride()[:4],
        rows, first_block, num_blocks, softmax_scale * LOG2E.value / stride, rank, world, inner,
        HEADS=heads, GROUP=heads // keys.shape[3], D=dim, BLOCK=block_size, STRIDE=stride,
        KEEP=tile.block_m, WALK=tile.block_n, PREC=precision_for(query),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return parts, lse
