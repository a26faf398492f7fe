# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reference implementation of cross entropy over one rank's part of the vocabulary, in PyTorch.

With logits ``z = scale * logits`` of a row and its label ``y``, each rank computes of its own entries

    max = max_j z_j        sum_exp = sum_j exp(z_j - max)        z_y

from which, reduced over ranks, the loss is ``log(sum_exp) + max - z_y``. The gradient of the logits is
``grad * scale * (exp(z_j - lse) - [j = y])``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    vocab_start: int,
    scale: float,
    max_logit: Tensor,
    sum_exp: Tensor,
    label_logit: Tensor,
) -> None:
    """Statistics of each row for its cross entropy, over this rank's part of the vocabulary.

    Args:
        logits: ``[n, V]``, contiguous, before the factor ``scale``.
        labels: int64 ``[n]``, entries of the whole vocabulary.
        vocab_start: entry of the vocabulary that the first column of the logits is of.
        scale: factor of the logits.
        max_logit, sum_exp, label_logit: float32 ``[n]`` (float64 for float64 logits), written: the maximum of
            the scaled logits, the sum of ``exp(logit - max_logit)``, and the label's logit (0 if another rank
            has it).
    """
    value = logits.to(sum_exp.dtype) * scale
    torch.amax(value, 1, out=max_logit)
    column, owned = _own_labels(labels, vocab_start, logits.shape[1])
    label_logit.copy_(torch.where(owned, value.gather(1, column[:, None])[:, 0], 0))
    # A row of -inf alone, which another rank's part need not be, has sum 0 and not NaN.
    base = torch.where(max_logit == float("-inf"), 0, max_logit)
    torch.sum(value.sub_(base[:, None]).exp_(), 1, out=sum_exp)


def cross_entropy_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, vocab_start: int, scale: float
) -> None:
    """Replace the logits by their gradient.

    Args:
        logits, labels, vocab_start, scale: as for :func:`cross_entropy_rows`.
        lse: log-sum-exp of the scaled logits over the whole vocabulary, ``[n]``, float32 (float64 for float64
            logits).
        grad: gradient of each row's cross entropy, like ``lse``.
    """
    p = (logits.to(lse.dtype) * scale).sub_(lse[:, None]).exp_()
    column, owned = _own_labels(labels, vocab_start, logits.shape[1])
    p.scatter_add_(1, column[:, None], -owned[:, None].to(p.dtype))
    logits.copy_(p.mul_(grad[:, None] * scale))


def _own_labels(labels: Tensor, vocab_start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Columns of the labels (0 for other ranks' labels), and which labels this rank has."""
    column = labels - vocab_start
    owned = (column >= 0) & (column < num_columns)
    return torch.where(owned, column, 0), owned
