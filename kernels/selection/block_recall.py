# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention of held-out rows in the key blocks that their own query blocks attend to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launch import cdiv, launch, next_power_of_2
from ..common.tiles import LOG2E, block_at, load_rows, of_rows, precision_for, row_dims
from .probabilities import clamp_probability, key_positions


@triton.jit(do_not_specialize=["rank"])
def _block_recall_kernel(
    # Sampled rows
    q_ptr,  # [R, b, h, D]
    rows_ptr,  # [R]
    starts_ptr,  # [b, R], or None
    lse_ptr,  # [b, h, R]
    # Held-out rows
    held_ptr,  # [M], their numbers
    seen_ptr,  # [b, h, M, NB]
    # Keys of this rank
    k_ptr,  # [s, b, hk, D]
    # Output
    kept_ptr,  # [num_splits, b, h, M]
    stride_kn,
    stride_kb,
    stride_kh,
    num_rows,
    num_held,
    batch_heads,
    key_len,
    num_blocks,
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
    BLOCK_M: tl.constexpr,  # GROUP, rounded up
    BLOCK_N: tl.constexpr,
    PREC: tl.constexpr,
):
    """One program a row and split of the key blocks, for the query heads of a KV head: every
    ``num_splits``-th block."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    m = tl.program_id(0)
    split = tl.program_id(1)
    batch = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(2) % KV_HEADS).to(tl.int64)  # heads can be 2^30 elements apart
    r = tl.load(held_ptr + m)
    row = tl.load(rows_ptr + r)
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + batch * num_rows + r)
    of_group = tl.arange(0, BLOCK_M)
    there = of_group < GROUP
    head = batch * HEADS + kv_head * GROUP + of_group  # [BLOCK_M]
    pointers = q_ptr + (r.to(tl.int64) * batch_heads + head)[:, None] * D + row_dims(D)[None, :]
    q = tl.load(pointers, mask=of_rows(there[:, None], D), other=0.0)  # [BLOCK_M, D]
    lse = tl.load(lse_ptr + head * num_rows + r, mask=there, other=0.0) * LOG2E
    scale = softmax_scale * LOG2E
    k_ptr += batch * stride_kb + kv_head * stride_kh
    seen_ptr += (head * num_held + m) * num_blocks
    keys = tl.arange(0, BLOCK_N)
    kept = tl.zeros([BLOCK_M], tl.float32)
    for i in range(tl.cdiv(tl.cdiv(key_len, BLOCK) - split, num_splits)):
        local = split + i * num_splits
        seen = tl.load(seen_ptr + block_at(local, rank, world, inner), mask=there, other=0) != 0
        if tl.max(seen.to(tl.int32), 0) != 0:
            for part in range(BLOCK // BLOCK_N):
                first = local * BLOCK + part * BLOCK_N
                k = load_rows(k_ptr, first, stride_kn, keys, key_len, D, False)  # [BLOCK_N, D]
                scores = tl.dot(q, tl.trans(k), input_precision=PREC) * scale
                p = clamp_probability(tl.math.exp2(scores - lse[:, None]))  # [BLOCK_M, BLOCK_N]
                position = key_positions(first + keys, rank, world, inner, BLOCK)
                inside = (position <= row) & (position >= start) & (first + keys < key_len)
                kept += tl.sum(tl.where(seen[:, None] & inside[None, :], p, 0.0), 1)
    out = (split * batch_heads + head) * num_held + m
    tl.store(kept_ptr + out, kept, mask=there)


def attention_in_blocks(sampled_rows, key, lse, held, seen):
    rows = sampled_rows
    key_len, batch, kv_heads, dim = key.shape
    num_rows, _, heads, _ = rows.query.shape
    num_held, num_blocks = seen.shape[2:]
    group = heads // kv_heads
    block_n = 64 if dim <= 128 else 32
    # About 16 programs a multiprocessor.
    splits = max(1, min(64, 2048 // (num_held * batch * kv_heads), cdiv(key_len, rows.block_size)))
    kept = torch.empty(splits, batch, heads, num_held, dtype=torch.float32, device=key.device)
    launch(
        _block_recall_kernel,
        (num_held, splits, batch * kv_heads),
        q_ptr=rows.query,
        rows_ptr=rows.rows,
        starts_ptr=rows.starts,
        lse_ptr=lse,
        held_ptr=held.contiguous(),  # one row of each stratum is a view with steps
        seen_ptr=seen.contiguous(),
        k_ptr=key,
        kept_ptr=kept,
        stride_kn=key.stride(0),
        stride_kb=key.stride(1),
        stride_kh=key.stride(2),
        num_rows=num_rows,
        num_held=num_held,
        batch_heads=batch * heads,
        key_len=key_len,
        num_blocks=num_blocks,
        rank=rows.rank,
        world=rows.world,
        inner=rows.inner,
        num_splits=splits,
        softmax_scale=rows.softmax_scale,
        HEADS=heads,
        GROUP=group,
        D=dim,
        BLOCK=rows.block_size,
        BLOCK_M=max(16, next_power_of_2(group)),
        BLOCK_N=block_n,
        PREC=precision_for(key),
        num_warps=4,
        num_stages=2,
    )
    return kept.sum((0, -1))
