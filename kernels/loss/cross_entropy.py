# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Cross entropy over a chunk of logits: what its loss needs in one pass, its gradient in place of the logits.

One pass each over ``[n, V]``, in the logits' dtype in memory and float32 in registers: PyTorch's operations
would write float32 copies of the chunk, several of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import cdiv, launch
from ..common.tiles import LOG2E

COLUMNS = 4096
"""Words that a program looks at at once."""


@triton.jit
def _rows_kernel(
    logits_ptr, labels_ptr, largest_ptr, total_ptr, label_ptr, words, first_word, scale,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row; one program each."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * words
    column = tl.arange(0, COLUMNS)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, words, COLUMNS):
        inside = start + column < words
        value = tl.load(logits_ptr + start + column, mask=inside, other=0.0).to(tl.float32) * scale
        value = tl.where(inside, value, float("-inf"))
        seen = largest
        largest = tl.maximum(seen, tl.max(value, 0))
        # Words of -inf alone, as another rank's may not be: 0, not the NaN of their difference.
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp2((seen - base) * LOG2E) + tl.sum(tl.exp2((value - base) * LOG2E), 0)
    label = tl.load(labels_ptr + row) - first_word
    owned = (label >= 0) & (label < words)
    logit = tl.load(logits_ptr + label, mask=owned, other=0.0).to(tl.float32) * scale
    tl.store(largest_ptr + row, largest)
    tl.store(total_ptr + row, total)
    tl.store(label_ptr + row, logit)


@triton.jit
def _gradient_kernel(
    logits_ptr, labels_ptr, lse_ptr, grad_ptr, words, first_word, scale, COLUMNS: tl.constexpr
):  # fmt: skip
    """Some words of a row; one program each."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * words
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < words
    value = tl.load(logits_ptr + column, mask=inside, other=0.0).to(tl.float32) * scale
    p = tl.exp2((value - tl.load(lse_ptr + row)) * LOG2E)
    label = tl.load(labels_ptr + row) - first_word
    gradient = tl.load(grad_ptr + row) * scale * tl.where(column == label, p - 1.0, p)
    tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def cross_entropy_rows(logits, labels, first_word, scale, largest, total, label_logits):
    """Launch the forward; see :func:`kernels.cross_entropy_rows`."""
    rows, words = logits.shape
    launch(
        _rows_kernel, (rows,), logits, labels, largest, total, label_logits, words, first_word, scale,
        COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip


def cross_entropy_gradient(logits, labels, lse, grad, first_word, scale):
    """Launch the backward; see :func:`kernels.cross_entropy_gradient`."""
    rows, words = logits.shape
    launch(
        _gradient_kernel, (rows, cdiv(words, COLUMNS)), logits, labels, lse, grad, words, first_word, scale,
        COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip
