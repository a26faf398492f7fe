# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Log-sum-exp of scores summed along antidiagonals, by key block.

As in XAttention (arXiv 2503.16428, section 3): of every ``S x S`` square of scores the main antidiagonal is
summed, which passes through each of its queries and keys once. Square (m, n) of a head has

    score(m, n) = sum over t of  q[m S + S - 1 - t] . k[n S + t]

so that all of them are one product of vectors S times as long, and cost 1 / S of all scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, block_at, of_rows, owner_of, precision_for, row_dims, tile_for
from .probabilities import add_to_lse

ONE = tl.constexpr(2**23)
"""A probability of 1, in block_masses."""


@triton.jit(do_not_specialize=["first_block", "rank"])
def _antidiagonal_kernel(
    q_ptr,  # [s', b, h, D]
    k_ptr,  # [W, s, b, hk, D]
    seen_from_ptr,  # [b, nb], or None
    # Outputs
    parts_ptr,  # [b, h, s' / STRIDE, NB]
    lse_ptr,  # [b, h, s' / STRIDE]
    stride_qm,
    stride_qb,
    stride_qh,
    stride_kr,
    stride_kn,
    stride_kb,
    stride_kh,
    num_rows,  # of squares
    first_block,
    num_blocks,
    local_blocks,
    scale_log2,
    # Layout
    rank,
    world,
    inner,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a tile of rows of squares of a head."""
    SQUARES: tl.constexpr = BLOCK // STRIDE  # of a block
    BLOCKS: tl.constexpr = BLOCK_N // SQUARES  # of a tile
    bh = tl.program_id(1).to(tl.int64)
    q_ptr += bh // HEADS * stride_qb + bh % HEADS * stride_qh
    k_ptr += bh // HEADS * stride_kb + bh % HEADS // GROUP * stride_kh
    # The last rows have the most keys: start them first.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = row < num_rows
    # The row's number over all ranks.
    own = block_at(first_block + row // SQUARES, rank, world, inner) * SQUARES + row % SQUARES
    last = tl.max(tl.where(row_mask, own, 0), 0)
    begin = 0
    if seen_from_ptr is not None:
        q_block = bh // HEADS * local_blocks + first_block + row // SQUARES
        seen_from = tl.load(seen_from_ptr + q_block, mask=row_mask, other=0) * SQUARES  # [BLOCK_M]
        begin = tl.min(tl.where(row_mask, seen_from, last), 0) // BLOCK_N * BLOCK_N
    d = row_dims(D)
    q_ptr = q_ptr + row.to(tl.int64)[:, None] * STRIDE * stride_qm + d[None, :]
    parts_ptr += (bh * num_rows + row)[:, None] * num_blocks
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Tiles begin at the same keys for all rows of all ranks: sums are the same on any number of ranks.
    for first in range(begin, last + 1, BLOCK_N):
        square = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        square_mask = square < num_blocks * SQUARES
        source, local_block = owner_of(square // SQUARES, world, inner)
        at = (local_block * BLOCK + square % SQUARES * STRIDE).to(tl.int64) * stride_kn
        keys = k_ptr + (source.to(tl.int64) * stride_kr + at)[:, None] + d[None, :]
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for t in range(STRIDE):
            q = tl.load(
                q_ptr + (STRIDE - 1 - t) * stride_qm, mask=of_rows(row_mask[:, None], D), other=0.0
            )
            k = tl.load(keys + t * stride_kn, mask=of_rows(square_mask[:, None], D), other=0.0)
            # [BLOCK_M, D] x [D, BLOCK_N]
            scores = tl.dot(q, tl.trans(k), scores, input_precision=PREC)
        mask = (own[:, None] >= square[None, :]) & square_mask[None, :]
        if seen_from_ptr is not None:
            mask &= square[None, :] >= seen_from[:, None]
        scores = tl.where(mask, scores * scale_log2, float("-inf"))
        scores = tl.reshape(scores, [BLOCK_M, BLOCKS, SQUARES])
        part_max = tl.max(scores, 2)
        part_max = tl.where(part_max == float("-inf"), 0.0, part_max)
        part = part_max + tl.math.log2(tl.sum(tl.math.exp2(scores - part_max[:, :, None]), 2))
        block = first // SQUARES + tl.arange(0, BLOCKS)
        mask = row_mask[:, None] & (block < num_blocks)[None, :]
        tl.store(parts_ptr + block[None, :], part, mask=mask)  # [BLOCK_M, BLOCKS]
        row_max, row_sum = add_to_lse(row_max, row_sum, part, 1)
    tl.store(lse_ptr + bh * num_rows + row, row_max + tl.math.log2(row_sum), mask=row_mask)


def antidiagonal_lse(
    query, keys, stride, block_size, first_block, rank, inner, softmax_scale, seen_from=None
):
    query_len, batch, heads, dim = query.shape
    world, num_blocks = keys.shape[0], keys.shape[0] * keys.shape[1] // block_size
    num_rows = query_len // stride
    shape, device = (batch, heads, num_rows), query.device
    parts = torch.full((*shape, num_blocks), float("-inf"), dtype=torch.float32, device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    tile = tile_for("antidiagonal", dim, block_size, query)
    launch(
        _antidiagonal_kernel,
        (cdiv(num_rows, tile.block_m), batch * heads),
        q_ptr=query,
        k_ptr=keys,
        seen_from_ptr=seen_from,
        parts_ptr=parts,
        lse_ptr=lse,
        stride_qm=query.stride(0),
        stride_qb=query.stride(1),
        stride_qh=query.stride(2),
        stride_kr=keys.stride(0),
        stride_kn=keys.stride(1),
        stride_kb=keys.stride(2),
        stride_kh=keys.stride(3),
        num_rows=num_rows,
        first_block=first_block,
        num_blocks=num_blocks,
        local_blocks=num_blocks // world,
        scale_log2=softmax_scale * LOG2E.value / stride,
        rank=rank,
        world=world,
        inner=inner,
        HEADS=heads,
        GROUP=heads // keys.shape[3],
        D=dim,
        BLOCK=block_size,
        STRIDE=stride,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PREC=precision_for(query),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return parts, lse


@triton.jit
def _block_mass_kernel(
    parts_ptr,  # [b, h, rows, NB]
    lse_ptr,  # [b, h, rows]
    mass_ptr,  # [b, h, rows / SQUARES, NB]
    rows,
    num_rows,  # that count
    num_blocks,
    SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a query block and tile of key blocks of a head."""
    bh = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row = tl.program_id(0) * SQUARES + tl.arange(0, SQUARES)  # [SQUARES]
    mask = (row < num_rows)[:, None] & (block < num_blocks)[None, :]
    at = (bh * rows + row)[:, None] * num_blocks + block[None, :]
    part = tl.load(parts_ptr + at, mask=mask, other=float("-inf"))
    lse = tl.load(lse_ptr + bh * rows + row, mask=row < num_rows, other=0.0)
    share = tl.math.exp2(part - lse[:, None]) * ONE
    share = tl.where((share >= 0) & (share < 2 * ONE), share, 0.0)  # what is not a number has none
    mass = tl.sum((share + 0.5).to(tl.int32), 0)
    q_blocks = tl.num_programs(0)
    out = (bh * q_blocks + tl.program_id(0)) * num_blocks + block
    tl.store(mass_ptr + out, mass, mask=block < num_blocks)


def block_masses(parts, lse, squares, num_rows):
    batch, heads, rows, num_blocks = parts.shape
    shape = (batch, heads, rows // squares, num_blocks)
    mass = torch.empty(shape, dtype=torch.int32, device=parts.device)
    block_n = min(next_power_of_2(num_blocks), max(16, 4096 // squares))
    launch(
        _block_mass_kernel,
        (rows // squares, batch * heads, cdiv(num_blocks, block_n)),
        parts_ptr=parts,
        lse_ptr=lse,
        mass_ptr=mass,
        rows=rows,
        num_rows=num_rows,
        num_blocks=num_blocks,
        SQUARES=squares,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return mass
