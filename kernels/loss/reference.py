# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plain PyTorch twins of ``cross_entropy.py``."""

from __future__ import annotations

import torch


def _owned(labels, first_word, words):
    """Labels as columns of these logits, and which of them are among these."""
    label = labels - first_word
    owned = (label >= 0) & (label < words)
    return torch.where(owned, label, 0), owned


def cross_entropy_rows(logits, labels, first_word, scale, largest, total, label_logits):
    value = logits.to(total.dtype) * scale
    torch.amax(value, 1, out=largest)
    column, owned = _owned(labels, first_word, logits.shape[1])
    label_logits.copy_(torch.where(owned, value.gather(1, column[:, None])[:, 0], 0))
    base = torch.where(largest == float("-inf"), 0, largest)
    torch.sum(value.sub_(base[:, None]).exp_(), 1, out=total)


def cross_entropy_gradient(logits, labels, lse, grad, first_word, scale):
    p = (logits.to(lse.dtype) * scale).sub_(lse[:, None]).exp_()
    column, owned = _owned(labels, first_word, logits.shape[1])
    p.scatter_add_(1, column[:, None], -owned[:, None].to(p.dtype))
    logits.copy_(p.mul_(grad[:, None] * scale))
