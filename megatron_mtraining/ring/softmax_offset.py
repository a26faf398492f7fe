# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Softmax offsets: one more logit in the softmax of each row, one for each head, without a value.

Known as attention sinks (gpt-oss) and as Transformer Engine's and Megatron's ``softmax_type``: 0 is
"off-by-one", a parameter of each head "learnable". With the log-sum-exp of a row's scores ``lse`` and the
offset ``a`` of its head,

    lse' = log( exp(lse) + exp(a) )        out' = out exp(lse - lse')

which is attention to one more key, whose score is ``a`` and whose value is 0. So with ``lse'`` and ``out'``
in place of ``lse`` and ``out`` the backward's kernels give the gradients of query, key and value, and

    da = sum over rows of -exp(a - lse') delta,        delta = sum(out' * dout)
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_offset(out: Tensor, lse: Tensor, offset: Tensor) -> None:
    """Put ``out'`` and ``lse'`` into ``out``, ``[s, b, h, d]``, and ``lse``, ``[b, h, s]``, after the last
    round. ``offset`` is ``[h]``."""
    with_offset = torch.logaddexp(lse, _as(offset, lse))
    out.mul_(torch.exp(lse - with_offset).permute(2, 0, 1)[..., None])
    lse.copy_(with_offset)


def offset_share(lse: Tensor, offset: Tensor) -> Tensor:
    """The share of each row's attention that the offset takes, ``[b, h, rows]``, of ``lse'``."""
    return torch.exp(_as(offset, lse) - lse)


def offset_gradient(lse: Tensor, delta: Tensor, offset: Tensor) -> Tensor:
    """The gradient of the offset, ``[h]``, through the rows of this rank alone, as gradients of parameters
    are: what reduces those over context-parallel ranks reduces it, too.

    Args:
        lse, delta: ``[b, h, s]``, of ``out'``.
    """
    return -(offset_share(lse, offset) * delta).sum((0, 2)).to(offset.dtype)


def _as(offset: Tensor, lse: Tensor) -> Tensor:
    return offset.detach().to(lse.dtype)[:, None]
