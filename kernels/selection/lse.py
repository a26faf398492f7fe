# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Scores of sampled query rows, kept as sums only: log-sum-exp of each row, mass of each column.

Products of 16-bit operands are exact in float32, so tensor cores give float32 scores; to compute them
again for every kind of sum takes less time and memory than to keep rows x keys of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch
from ..common.tiles import LN2, LOG2E, block_at, load_rows, precision_for


@triton.jit
def key_positions(local, rank, world, inner, BLOCK: tl.constexpr):
    """Global positions of a rank's keys."""
    return block_at(local // BLOCK, rank, world, inner) * BLOCK + local % BLOCK


@triton.jit
def load_sampled(q_ptr, r, head, lines, num_rows, D: tl.constexpr):
    """Sampled rows ``r`` of head(s) ``head`` (batch entries counted in), zeros past the last row."""
    line = r.to(tl.int64) * lines + head
    pointers = q_ptr + line[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(r < num_rows)[:, None], other=0.0)


@triton.jit(do_not_specialize=["rank"])
def _lse_kernel(
    q_ptr, rows_ptr, starts_ptr, k_ptr, out_ptr,
    k_ss, k_sb, k_sh, num_rows, batch_heads, length, rank, world, inner, splits, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    kv_heads: tl.constexpr = HEADS // GROUP
    # The last rows have the most keys: start them first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(2) % kv_heads
    # Heads of a group side by side, so that a tile's rows are near each other and end together.
    m = tile * ROWS + tl.arange(0, ROWS)
    r = m // GROUP
    head = batch * HEADS + kv_head * GROUP + m % GROUP
    q = load_sampled(q_ptr, r, head, batch_heads, num_rows, D)
    row = tl.load(rows_ptr + r, mask=r < num_rows, other=-1)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + batch * num_rows + r, mask=r < num_rows, other=0)
    scale = scale * LOG2E
    k_ptr += batch * k_sb + kv_head * k_sh
    keys = tl.arange(0, KEYS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # In a stripe of blocks, some of which may come later.
    blocks = tl.max(row, 0) // BLOCK // world + 1
    # The splits take turns, so that each has as many tiles to do.
    seen = tl.cdiv(tl.minimum(blocks * BLOCK, length), KEYS)
    earliest = tl.min(row, 0)
    for turn in range(tl.cdiv(seen - split, splits)):
        at = (split + turn * splits) * KEYS
        k = load_rows(k_ptr, at, k_ss, keys, length, D, EVEN)
        scores = tl.dot(q, tl.trans(k), input_precision=PREC) * scale
        # Most tiles come before all rows and need no mask. Keys past the end have positions past every row.
        last = block_at((at + KEYS - 1) // BLOCK, rank, world, inner)
        if (last + 1) * BLOCK > earliest:
            position = key_positions(at + keys, rank, world, inner, BLOCK)
            scores = tl.where(position[None, :] <= row[:, None], scores, float("-inf"))
        if starts_ptr is not None:
            position = key_positions(at + keys, rank, world, inner, BLOCK)
            scores = tl.where(position[None, :] >= start[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2(top - base) + tl.sum(tl.math.exp2(scores - base[:, None]), 1)
        top = higher
    out_ptr += split.to(tl.int64) * batch_heads * num_rows
    tl.store(out_ptr + head * num_rows + r, (top + tl.math.log2(total)) * LN2, mask=r < num_rows)


def partial_lse(sampled_rows, key):
    """Launch the log-sum-exps; see the reference."""
    sample = sampled_rows
    length, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = sample.query.shape
    wide = key.dtype != torch.float32
    # Several programs fit a multiprocessor: one's products hide behind the others' exponentials.
    rows, keys, warps, stages = (64, 64, 4, 3) if wide else (32, 32, 4, 2)
    tiles = cdiv(num_rows * (heads // kv_heads), rows)
    # About 16 programs a multiprocessor.
    splits = max(1, min(128, 2048 // (tiles * batch * kv_heads), cdiv(length, keys)))
    shape = (splits, batch, heads, num_rows)
    parts = torch.empty(shape, dtype=torch.float32, device=key.device)
    launch(
        _lse_kernel, (tiles, splits, batch * kv_heads),
        sample.query, sample.rows, sample.starts, key, parts,
        *key.stride()[:3], num_rows, batch * heads, length, sample.rank, sample.world, sample.inner, splits,
        sample.softmax_scale,
        HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=sample.block_size,
        ROWS=rows, KEYS=keys, EVEN=length % keys == 0, PREC=precision_for(key),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return parts


@triton.jit
def _merge_kernel(parts_ptr, out_ptr, parts, lines, PARTS: tl.constexpr, LINES: tl.constexpr):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (line < lines)[None, :]
        at = parts_ptr + part.to(tl.int64)[:, None] * lines + line[None, :]
        lse = tl.load(at, mask=inside, other=float("-inf")) * LOG2E
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2(top - base) + tl.sum(tl.math.exp2(lse - base[None, :]), 0)
        top = higher
    tl.store(out_ptr + line, (top + tl.math.log2(total)) * LN2, mask=line < lines)


def merge_lse(parts):
    """Launch the merge; see the reference."""
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    width = 16
    launch(
        _merge_kernel,
        (cdiv(out.numel(), width),),
        parts,
        out,
        parts.shape[0],
        out.numel(),
        PARTS=64,
        LINES=width,
        num_warps=4,
    )
    return out
