# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention over the context-parallel group, as an autograd function.

Keys and values go round the ring, one rank a step; in the backward the gradients of keys and values
follow them a step behind, in float32, and come home with the last transfer. out, its log-sum-exp and
the queries' gradient stay and are accumulated in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import attention_backward, attention_delta, attention_forward, check_operands
from ..pattern.index import VerticalSlashIndex
from .schedule import flat_ring
from .transport import Ring


def _forward(query, key, value, index, ring, softmax_scale):
    length, batch, heads, _ = query.shape
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = torch.empty(batch, heads, length, dtype=lse_dtype, device=query.device)
    keys_values = torch.stack((key, value)) if ring.world > 1 else (key, value)
    out = None
    for step in flat_ring(ring.rank, ring.world):
        transfer = None if step.last else ring.post(keys_values, Ring.VALUES)
        out = attention_forward(query, *keys_values, index, step, softmax_scale, out, lse)
        if transfer:
            keys_values = transfer.wait()
    return out, lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, index, ring, softmax_scale, attended):
        if attended is None:
            out, lse = _forward(query, key, value, index, ring, softmax_scale)
        else:
            out, lse = (t.detach() for t in attended)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.index, ctx.ring, ctx.softmax_scale = index, ring, softmax_scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, _):
        query, key, value, out, lse = ctx.saved_tensors
        ring, scale = ctx.ring, ctx.softmax_scale
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        delta = attention_delta(out, grad_out)
        keys_values = torch.stack((key, value)) if ring.world > 1 else (key, value)
        dq = gradients = None
        for step in flat_ring(ring.rank, ring.world):
            transfer = None if step.last else ring.post(keys_values, Ring.VALUES)
            dq, dkv = attention_backward(
                query, *keys_values, grad_out, lse, delta, ctx.index, step, scale, dq
            )
            if not step.first:
                dkv += gradients.wait()
            if transfer:
                keys_values = transfer.wait()
            if ring.world > 1:
                gradients = ring.post(dkv, Ring.GRADIENTS)
        if ring.world > 1:
            dkv = gradients.wait().to(key.dtype)
        return dq, dkv[0], dkv[1], None, None, None, None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: VerticalSlashIndex,
    ring: Ring,
    softmax_scale: float,
    attended: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse causal attention over a block-striped sequence.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence (see :mod:`..layout`).
        key, value: ``[s, b, hk, d]``; ``h`` a multiple of ``hk``. All of one dtype, any strides.
        index: the pattern, the same on all ranks.
        ring: the context-parallel ranks.
        attended: what this function has returned for the same operands and index before, as in a
            replay under activation recomputation: no forward is run then, and no ring.

    Returns:
        out ``[s, b, h, d]``, in the query's dtype, contiguous; the log-sum-exp of its rows, ``[b, h, s]``,
        float32 (float64 for float64), which has no gradient.

    Raises:
        ValueError: shapes, dtypes or the index do not fit, before anything is sent.
    """
    check_operands(query, key, value)
    if index.world != ring.world:
        raise ValueError(f"the index is for {index.world} ranks, but the ring has {ring.world}")
    if index.seq_length != query.shape[0] * ring.world:
        raise ValueError(
            f"the index is for {index.seq_length} tokens, but {ring.world} ranks with "
            f"{query.shape[0]} each have {query.shape[0] * ring.world}"
        )
    if tuple(index.slash_member.shape[:2]) != tuple(query.shape[1:3]):
        raise ValueError(
            f"the index is for {tuple(index.slash_member.shape[:2])} (batch, heads), "
            f"but the query has {tuple(query.shape[1:3])}"
        )
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}: it must be positive")
    # Megatron's projections give unit stride in the head dim; anything else is copied once.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return _RingAttention.apply(query, key, value, index, ring, softmax_scale, attended)
