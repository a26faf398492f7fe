# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Cross entropy of vocabulary-parallel logits: the statistics of each row, and the gradient."""

from __future__ import annotations

from torch import Tensor

from ..common.dispatch import uses_triton
from . import reference

__all__ = ["cross_entropy_gradient", "cross_entropy_rows"]


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
        reference.cross_entropy_rows(*operands)
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
        reference.cross_entropy_gradient(logits, labels, lse, grad, first_word, scale)
        return
    from .cross_entropy import cross_entropy_gradient as launch

    launch(logits, labels, lse, grad, first_word, scale)
