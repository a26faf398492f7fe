# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Device functions: attention probabilities of sampled rows, computed again from their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2E, block_at, of_rows, row_dims

NO_ROW = tl.constexpr(-1073741824)
"""Position of a missing row: far before every key."""


@triton.jit
def key_positions(local, rank, world, inner, BLOCK: tl.constexpr):
    """Global positions of a rank's keys."""
    return block_at(local // BLOCK, rank, world, inner) * BLOCK + local % BLOCK


@triton.jit
def load_sampled_queries(q_ptr, r, head, batch_heads, num_rows, D: tl.constexpr):
    """Queries of the sampled rows ``r`` of one head, or of a head for each row: [BLOCK_M, D]. Heads are
    counted over the batch. Zeros past the last row."""
    line = r.to(tl.int64) * batch_heads + head
    pointers = q_ptr + line[:, None] * D + row_dims(D)[None, :]
    return tl.load(pointers, mask=of_rows((r < num_rows)[:, None], D), other=0.0)


@triton.jit
def add_to_lse(m, l, x, AXIS: tl.constexpr):
    """Add base-2 logits ``x`` along an axis to a running maximum ``m`` and sum ``l`` of their
    exponentials."""
    m_new = tl.maximum(m, tl.max(x, AXIS))
    # A line with no logit but -inf so far has no maximum to subtract yet.
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    l = l * tl.math.exp2(m - finite) + tl.sum(tl.math.exp2(x - tl.expand_dims(finite, AXIS)), AXIS)
    return m_new, l


@triton.jit
def clamp_probability(p):
    """At most 1, and 0 for NaN: in this order of operands, each line is one instruction."""
    p = tl.where(p > 0.0, p, 0.0)
    return tl.where(p < 1.0, p, 1.0)


@triton.jit
def add_three(ptr, distance, before, here, after, num_blocks):
    """Add integers [BLOCK_M] to the sums at the distances before, at and after ``distance`` [BLOCK_M]. The
    three lie side by side, so that the compiler adds them with one instruction."""
    addend = tl.join(tl.join(before, after), tl.join(here, tl.zeros_like(here)))  # [BLOCK_M, 2, 2]
    addend = tl.reshape(addend, [addend.shape[0], 4])
    to = (distance - 1)[:, None] + tl.arange(0, 4)[None, :]
    mask = (addend > 0) & (to >= 0) & (to < num_blocks)
    tl.atomic_add(ptr + to, addend, mask=mask, sem="relaxed")


@triton.jit
def probabilities_by_key(
    k,  # [BLOCK_N, D]
    position,  # [BLOCK_N], of the keys
    r,  # [BLOCK_M], numbers of the sampled rows
    head,  # counted over the batch
    q_ptr,
    rows_ptr,
    starts_ptr,
    lse_ptr,
    num_rows,
    batch_heads,
    softmax_scale_log2,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PREC: tl.constexpr,
):
    """Probabilities [BLOCK_N, BLOCK_M] that sampled rows of a head give to keys, 0 where a key is after the
    row or before the first that it sees; and the rows' positions [BLOCK_M]."""
    row = tl.load(rows_ptr + r, mask=r < num_rows, other=NO_ROW)
    lse = tl.load(lse_ptr + head * num_rows + r, mask=r < num_rows, other=0.0) * LOG2E
    q = load_sampled_queries(q_ptr, r, head, batch_heads, num_rows, D)  # [BLOCK_M, D]
    scores = tl.dot(k, tl.trans(q), input_precision=PREC) * softmax_scale_log2
    p = clamp_probability(tl.math.exp2(scores - lse[None, :]))
    p = tl.where(position[:, None] <= row[None, :], p, 0.0)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + head // HEADS * num_rows + r, mask=r < num_rows, other=0)
        p = tl.where(position[:, None] >= start[None, :], p, 0.0)
    return p, row


@triton.jit
def probabilities_by_row(
    q_ptr,  # [BLOCK_M, D] pointers
    lse_ptr,  # [BLOCK_M] pointers
    rows_ptr,  # [BLOCK_M] pointers
    mask,  # [BLOCK_M], rows to load
    all_visible,
    k,  # [BLOCK_N, D]
    key_block,
    key_part,
    softmax_scale_log2,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PREC: tl.constexpr,
):
    """Probabilities [BLOCK_M, BLOCK_N] that sampled rows of a head give to keys of one block, 0 where a key
    is after the row; and the rows' positions [BLOCK_M].

    Args:
        all_visible: whether all rows come after all of the keys.
        key_part: [BLOCK_N], the keys' offsets in the block as fractions of the block.
    """
    row = tl.load(rows_ptr, mask=mask, other=NO_ROW)
    lse = tl.load(lse_ptr, mask=mask, other=float("inf")) * LOG2E
    q = tl.load(q_ptr, mask=of_rows(mask[:, None], D), other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PREC)
    p = clamp_probability(tl.math.exp2(scores * softmax_scale_log2 - lse[:, None]))
    if not all_visible:
        # Exact: the numerators are at most BLOCK, a power of 2.
        row_part = tl.minimum(tl.maximum(row - key_block * BLOCK, -1), BLOCK).to(tl.float32) / BLOCK
        p = tl.where(key_part[None, :] <= row_part[:, None], p, 0.0)
    return p, row
