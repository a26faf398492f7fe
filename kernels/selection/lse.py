# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Log-sum-exp of the sampled rows' scores.

The scores themselves are not stored: computing them again for each kind of sum takes less time and memory
than storing rows x keys of them. Products of 16-bit operands are exact in float32, so tensor cores give
float32 scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch
from ..common.tiles import LN2, LOG2E, block_at, load_rows, precision_for
from .probabilities import add_to_lse, key_positions, load_sampled_queries


@triton.jit(do_not_specialize=["rank"])
def _lse_kernel(
    # Sampled rows
    q_ptr,  # [R, b, h, D]
    rows_ptr,  # [R]
    starts_ptr,  # [b, R], or None
    # Keys of this rank
    k_ptr,  # [s, b, hk, D]
    # Output
    out_ptr,  # [num_splits, b, h, R]
    stride_kn,
    stride_kb,
    stride_kh,
    num_rows,
    batch_heads,
    key_len,
    # Layout
    rank,
    world,
    inner,
    num_splits,
    softmax_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a tile of rows and split of the keys: every ``num_splits``-th tile of keys."""
    kv_heads: tl.constexpr = HEADS // GROUP
    # The last rows have the most keys: start them first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)  # heads can be 2^30 elements apart
    # The query heads of a KV head side by side: the rows of a tile are near each other and end together.
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    r = m // GROUP  # [BLOCK_M]
    head = batch * HEADS + kv_head * GROUP + m % GROUP  # [BLOCK_M]
    q = load_sampled_queries(q_ptr, r, head, batch_heads, num_rows, D)  # [BLOCK_M, D]
    row = tl.load(rows_ptr + r, mask=r < num_rows, other=-1)  # [BLOCK_M]
    if starts_ptr is not None:
        start = tl.load(starts_ptr + batch * num_rows + r, mask=r < num_rows, other=0)  # [BLOCK_M]
    scale = softmax_scale * LOG2E
    k_ptr += batch * stride_kb + kv_head * stride_kh
    keys = tl.arange(0, BLOCK_N)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Up to the stripe of blocks that the last row is in; this rank's block of it may come after the row.
    num_blocks = tl.max(row, 0) // BLOCK // world + 1
    num_tiles = tl.cdiv(tl.minimum(num_blocks * BLOCK, key_len), BLOCK_N)
    first_row = tl.min(row, 0)
    for i in range(tl.cdiv(num_tiles - split, num_splits)):
        first_key = (split + i * num_splits) * BLOCK_N
        k = load_rows(k_ptr, first_key, stride_kn, keys, key_len, D, EVEN)  # [BLOCK_N, D]
        scores = tl.dot(q, tl.trans(k), input_precision=PREC) * scale  # [BLOCK_M, BLOCK_N]
        # Most tiles come before all rows and need no mask. Keys past the end have positions past every row.
        last_block = block_at((first_key + BLOCK_N - 1) // BLOCK, rank, world, inner)
        if (last_block + 1) * BLOCK > first_row:
            position = key_positions(first_key + keys, rank, world, inner, BLOCK)  # [BLOCK_N]
            scores = tl.where(position[None, :] <= row[:, None], scores, float("-inf"))
        if starts_ptr is not None:
            position = key_positions(first_key + keys, rank, world, inner, BLOCK)
            scores = tl.where(position[None, :] >= start[:, None], scores, float("-inf"))
        row_max, row_sum = add_to_lse(row_max, row_sum, scores, 1)
    out_ptr += split.to(tl.int64) * batch_heads * num_rows
    tl.store(
        out_ptr + head * num_rows + r,
        (row_max + tl.math.log2(row_sum)) * LN2,
        mask=r < num_rows,
    )


def partial_lse(sampled_rows, key):
    rows = sampled_rows
    key_len, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = rows.query.shape
    # Several programs fit a multiprocessor: one's products hide behind the others' exponentials.
    if key.dtype != torch.float32:
        block_m, block_n, num_warps, num_stages = 64, 64, 4, 3
    else:
        block_m, block_n, num_warps, num_stages = 32, 32, 4, 2
    if dim > 128:  # the same bytes of shared memory as with 128
        block_m, block_n = block_m // 2, block_n // 2
    tiles = cdiv(num_rows * (heads // kv_heads), block_m)
    # About 16 programs a multiprocessor.
    splits = max(1, min(128, 2048 // (tiles * batch * kv_heads), cdiv(key_len, block_n)))
    parts = torch.empty(splits, batch, heads, num_rows, dtype=torch.float32, device=key.device)
    launch(
        _lse_kernel,
        (tiles, splits, batch * kv_heads),
        q_ptr=rows.query,
        rows_ptr=rows.rows,
        starts_ptr=rows.starts,
        k_ptr=key,
        out_ptr=parts,
        stride_kn=key.stride(0),
        stride_kb=key.stride(1),
        stride_kh=key.stride(2),
        num_rows=num_rows,
        batch_heads=batch * heads,
        key_len=key_len,
        rank=rows.rank,
        world=rows.world,
        inner=rows.inner,
        num_splits=splits,
        softmax_scale=rows.softmax_scale,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        BLOCK=rows.block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        EVEN=key_len % block_n == 0,
        PREC=precision_for(key),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return parts


@triton.jit
def _merge_kernel(
    parts_ptr,  # [num_parts, num_lines]
    out_ptr,  # [num_lines]
    num_parts,
    num_lines,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a tile of lines."""
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    line_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
    line_sum = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, num_parts, BLOCK_M):
        part = first + tl.arange(0, BLOCK_M)
        mask = (part < num_parts)[:, None] & (line < num_lines)[None, :]
        pointers = parts_ptr + part.to(tl.int64)[:, None] * num_lines + line[None, :]
        lse = tl.load(pointers, mask=mask, other=float("-inf")) * LOG2E  # [BLOCK_M, BLOCK_N]
        line_max, line_sum = add_to_lse(line_max, line_sum, lse, 0)
    tl.store(out_ptr + line, (line_max + tl.math.log2(line_sum)) * LN2, mask=line < num_lines)


def merge_lse(parts):
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    block_n = 16
    launch(
        _merge_kernel,
        (cdiv(out.numel(), block_n),),
        parts_ptr=parts,
        out_ptr=out,
        num_parts=parts.shape[0],
        num_lines=out.numel(),
        BLOCK_M=64,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out
