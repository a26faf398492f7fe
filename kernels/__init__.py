# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels of sparse attention, in Triton, with plain PyTorch twins.

CUDA tensors take the Triton kernels; CPU tensors take the twins, or the kernels too under Triton's
interpreter (``TRITON_INTERPRET=1``). Nothing here knows of process groups or of Megatron.

Shapes, throughout: query, out and their gradients ``[s, b, h, d]``, key, value and theirs
``[s, b, hk, d]`` with ``h`` a multiple of ``hk``, those of the I ranks of a round ``[I, s, b, hk, d]``; any
strides with unit stride in ``d``; softmax_lse and delta ``[b, h, s]``. ``s`` is a rank's part of the
sequence. ``index`` is a :class:`~megatron_mtraining.pattern.index.VerticalSlashIndex` or a
:class:`~megatron_mtraining.pattern.block_index.BlockListIndex`, ``this`` a
:class:`~megatron_mtraining.ring.schedule.Round`, ``step`` a
:class:`~megatron_mtraining.ring.schedule.RingStep`.
"""

from __future__ import annotations

from torch import Tensor

from . import reference_cross_entropy
from .attention import (
    DTYPES,
    attention_backward_columns,
    attention_backward_key,
    attention_backward_query,
    attention_delta,
    attention_forward,
    check_operands,
    gather_columns,
    pack,
    unit_stride,
)
from .choice import (
    block_counts,
    block_lists,
    candidate_slashes,
    diagonal_mass,
    held_columns,
    index_lists,
    lse_parts,
    merge_lse,
    merge_selections,
    price_columns,
    price_slashes,
    recall_of,
    row_masses,
    select_largest,
    strided_lse,
    take_blocks,
)
from .dispatch import uses_triton
from .reference_choice import fixed_point_one

__all__ = [
    "DTYPES",
    "attention_backward_columns",
    "attention_backward_key",
    "attention_backward_query",
    "attention_delta",
    "attention_forward",
    "block_counts",
    "block_lists",
    "candidate_slashes",
    "check_operands",
    "cross_entropy_gradient",
    "cross_entropy_rows",
    "diagonal_mass",
    "fixed_point_one",
    "gather_columns",
    "held_columns",
    "index_lists",
    "lse_parts",
    "merge_lse",
    "merge_selections",
    "pack",
    "price_columns",
    "price_slashes",
    "recall_of",
    "row_masses",
    "select_largest",
    "strided_lse",
    "take_blocks",
    "unit_stride",
]


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, first_word: int, scale: float, largest: Tensor, total: Tensor,
    label_logits: Tensor,
) -> None:  # fmt: skip
    """What the cross entropy of each row takes, of the words that this rank has.

    Args:
        logits: ``[n, V]`` contiguous; ``scale`` times these are the logits.
        labels: int64 ``[n]``, of all words; ``first_word`` is the first that these logits are of.
        largest, total, label_logits: float32 ``[n]`` (float64 for float64 logits), written: the largest
            logit, the sum of ``exp(logit - largest)``, the label's logit, 0 if it is another rank's.
    """
    operands = (logits, labels, first_word, scale, largest, total, label_logits)
    if not uses_triton(logits):
        reference_cross_entropy.cross_entropy_rows(*operands)
        return
    from .cross_entropy import cross_entropy_rows as launch

    launch(*operands)


def cross_entropy_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, first_word: int, scale: float
) -> None:
    """Replace logits, as for :func:`cross_entropy_rows`, by their gradient: ``grad * scale * (p - onehot)``.

    Args:
        lse: log-sum-exp over all ranks' words, ``[n]``, float32 (float64 for float64 logits).
        grad: gradient of each row's cross entropy, like ``lse``.
    """
    if not uses_triton(logits):
        reference_cross_entropy.cross_entropy_gradient(logits, labels, lse, grad, first_word, scale)
        return
    from .cross_entropy import cross_entropy_gradient as launch

    launch(logits, labels, lse, grad, first_word, scale)
