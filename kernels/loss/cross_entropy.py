# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Cross entropy over a chunk of logits: each row's statistics in one pass, and the gradient in place.

Each is one pass over ``[n, V]``, in the logits' dtype in memory and float32 in registers. PyTorch would write
several float32 copies of the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import cdiv, launch
from ..common.tiles import LOG2E

BLOCK_V = 4096
"""Entries of the vocabulary in a tile."""


@triton.jit
def _rows_kernel(
    logits_ptr,  # [n, V]
    labels_ptr,  # [n] int64
    max_logit_ptr,  # [n]
    sum_exp_ptr,  # [n]
    label_logit_ptr,  # [n]
    num_columns,  # V
    vocab_start,
    scale,
    BLOCK_V: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * num_columns
    offs_v = tl.arange(0, BLOCK_V)
    max_logit = tl.full([], float("-inf"), tl.float32)
    sum_exp = tl.full([], 0.0, tl.float32)
    for start in range(0, num_columns, BLOCK_V):
        inside = start + offs_v < num_columns
        z = tl.load(logits_ptr + start + offs_v, mask=inside, other=0.0).to(tl.float32) * scale
        z = tl.where(inside, z, float("-inf"))  # [BLOCK_V]
        max_before = max_logit
        max_logit = tl.maximum(max_before, tl.max(z, 0))
        # A row of -inf alone, which another rank's part need not be, has sum 0 and not NaN.
        base = tl.where(max_logit == float("-inf"), 0.0, max_logit)
        sum_exp = sum_exp * tl.exp2((max_before - base) * LOG2E) + tl.sum(
            tl.exp2((z - base) * LOG2E), 0
        )
    label = tl.load(labels_ptr + row) - vocab_start
    owned = (label >= 0) & (label < num_columns)
    label_logit = tl.load(logits_ptr + label, mask=owned, other=0.0).to(tl.float32) * scale
    tl.store(max_logit_ptr + row, max_logit)
    tl.store(sum_exp_ptr + row, sum_exp)
    tl.store(label_logit_ptr + row, label_logit)


@triton.jit
def _gradient_kernel(
    logits_ptr,  # [n, V], replaced by the gradient
    labels_ptr,  # [n] int64
    lse_ptr,  # [n]
    grad_ptr,  # [n]
    num_columns,  # V
    vocab_start,
    scale,
    BLOCK_V: tl.constexpr,
):
    """One program for each tile of a row."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * num_columns
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = offs_v < num_columns
    z = tl.load(logits_ptr + offs_v, mask=inside, other=0.0).to(tl.float32) * scale  # [BLOCK_V]
    p = tl.exp2((z - tl.load(lse_ptr + row)) * LOG2E)
    label = tl.load(labels_ptr + row) - vocab_start
    gradient = tl.load(grad_ptr + row) * scale * tl.where(offs_v == label, p - 1.0, p)
    tl.store(logits_ptr + offs_v, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    vocab_start: int,
    scale: float,
    max_logit: Tensor,
    sum_exp: Tensor,
    label_logit: Tensor,
) -> None:
    """See :func:`.reference.cross_entropy_rows`."""
    rows, num_columns = logits.shape
    launch(
        _rows_kernel,
        (rows,),
        logits_ptr=logits,
        labels_ptr=labels,
        max_logit_ptr=max_logit,
        sum_exp_ptr=sum_exp,
        label_logit_ptr=label_logit,
        num_columns=num_columns,
        vocab_start=vocab_start,
        scale=scale,
        BLOCK_V=BLOCK_V,
        num_warps=8,
    )


def cross_entropy_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, vocab_start: int, scale: float
) -> None:
    """See :func:`.reference.cross_entropy_gradient`."""
    rows, num_columns = logits.shape
    launch(
        _gradient_kernel,
        (rows, cdiv(num_columns, BLOCK_V)),
        logits_ptr=logits,
        labels_ptr=labels,
        lse_ptr=lse,
        grad_ptr=grad,
        num_columns=num_columns,
        vocab_start=vocab_start,
        scale=scale,
        BLOCK_V=BLOCK_V,
        num_warps=8,
    )
