# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention over the context-parallel group, as an autograd function.

Keys and values go round, one rank a step; in the backward the gradients of keys and values follow them, in
float32. out, its log-sum-exp and the queries' gradient stay and are accumulated in float32. The columns
that the pattern keeps, of all ranks, are gathered at the start, a few MB, and attended in one step of each
head; their gradients are summed over ranks while the ring runs, and added where the columns live.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import (
    attention_backward_columns,
    attention_backward_key,
    attention_backward_query,
    attention_delta,
    attention_forward,
    check_operands,
    gather_columns,
)
from ..pattern.index import VerticalSlashIndex
from .schedule import Do, backward_ops, forward_ops
from .transport import Ring


def _post_columns(key, value, index, ring):
    """The columns of all ranks, on their way; None if there are none."""
    if not index.columns.shape[-1]:
        return None
    with ring.span("columns"):
        return ring.sum_columns(gather_columns(key, value, index, ring.place))


class _Values:
    """The keys and values at hand, and those on their way."""

    def __init__(self, key, value, ring):
        self.at_hand = torch.stack((key, value)) if ring.world > 1 else (key, value)
        self._ring, self._coming = ring, {}

    def move(self, op) -> None:
        if op.do is Do.SEND_VALUES:
            self._coming[op.link] = self._ring.post(self.at_hand, Ring.VALUES, op.link)
        elif op.do is Do.TAKE_VALUES:
            with self._ring.span("wait"):
                self.at_hand = self._coming.pop(op.link).wait()


class _Gradients:
    """The gradient of keys and values that is moving, what is home, and what is on its way: in ``wire``,
    or as it is if that is None."""

    def __init__(self, ring, wire: torch.dtype | None):
        self.moving = self._home = None
        self._ring, self._wire, self._coming = ring, wire, {}

    def move(self, op) -> None:
        if op.do is Do.SEND_GRADIENTS:
            sent = self.moving if self._wire is None else self.moving.to(self._wire)
            self._coming[op.link] = self._ring.post(sent, Ring.GRADIENTS, op.link)
            self.moving = None
        elif op.do is Do.TAKE_GRADIENTS:
            self.moving = self._take(op.link)
        elif op.do is Do.ADD_GRADIENTS:
            self.moving += self._take(op.link)
        elif op.do is Do.KEEP:
            self._home, self.moving = self.moving, None
        elif op.do is Do.RESUME:
            self._home, self.moving = None, self._home

    def _take(self, link) -> Tensor:
        with self._ring.span("wait"):
            received = self._coming.pop(link).wait()
        return received if self._wire is None else received.float()


def _forward(query, key, value, index, ring, softmax_scale):
    length, batch, heads, _ = query.shape
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = torch.empty(batch, heads, length, dtype=lse_dtype, device=query.device)
    out, columns = None, _post_columns(key, value, index, ring)
    values = _Values(key, value, ring)
    for op in forward_ops(ring.rank, ring.inner, ring.outer):
        values.move(op)
        if op.do is Do.ATTEND:
            step = op.step
            with_columns = columns.wait() if columns else None
            with ring.span("attend", step):
                out = attention_forward(
                    query, *values.at_hand, with_columns, index, step, softmax_scale, out, lse
                )
    return out, lse


def _backward(query, key, value, grad_out, out, lse, index, ring, softmax_scale, wire):
    columns = _post_columns(key, value, index, ring)
    values, gradients = _Values(key, value, ring), _Gradients(ring, wire)
    delta = attention_delta(out, grad_out)
    rest = (grad_out, lse, delta, index)
    dq = column_gradients = None
    for op in backward_ops(ring.rank, ring.inner, ring.outer):
        step = op.step
        values.move(op)
        gradients.move(op)
        if op.do is Do.QUERY:
            with_columns = columns.wait() if columns else None
            with ring.span("query", step):
                dq = attention_backward_query(
                    query, *values.at_hand, with_columns, *rest, step, softmax_scale, dq
                )
            if columns and step.first:
                column_gradients = _post_column_gradients(
                    query, columns, *rest, ring, softmax_scale
                )
        elif op.do is Do.KEY:
            with ring.span("key", step):
                gradients.moving = attention_backward_key(
                    query, *values.at_hand, *rest, step, softmax_scale, gradients.moving
                )
        elif op.do is Do.OWN_KEY:
            added = column_gradients.wait() if columns else None
            dtype = key.dtype if ring.inner == 1 or ring.outer == 1 else torch.float32
            with ring.span("key", step):
                gradients.moving = attention_backward_key(
                    query, key, value, *rest, step, softmax_scale, gradients.moving, added, dtype
                )
    return dq, gradients.moving.to(key.dtype)


def _post_column_gradients(query, columns, grad_out, lse, delta, index, ring, softmax_scale):
    operands = (query, columns.wait(), grad_out, lse, delta, index, ring.place, softmax_scale)
    with ring.span("columns"):
        parts = attention_backward_columns(*operands)
        if ring.world > 1 and parts.shape[3] > 1:
            parts = parts.sum(3, keepdim=True)
        return ring.sum_columns(parts)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, index, ring, softmax_scale, attended, wire):
        if attended is None:
            out, lse = _forward(query, key, value, index, ring, softmax_scale)
        else:
            out, lse = (t.detach() for t in attended)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = index, ring, softmax_scale, wire
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, _):
        query, key, value, out, lse = ctx.saved_tensors
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        dq, dkv = _backward(query, key, value, grad_out, out, lse, *ctx.rest)
        return dq, dkv[0], dkv[1], None, None, None, None, None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: VerticalSlashIndex,
    ring: Ring,
    softmax_scale: float,
    attended: tuple[Tensor, Tensor] | None = None,
    bf16_gradients: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sparse causal attention over a block-striped sequence.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence (see :mod:`..layout`).
        key, value: ``[s, b, hk, d]``; ``h`` a multiple of ``hk``. All of one dtype, any strides.
        index: the pattern, the same on all ranks.
        ring: the context-parallel ranks.
        attended: what this function has returned for the same operands and index before, as in a
            replay under activation recomputation: no forward is run then, and no ring.
        bf16_gradients: send the gradients of keys and values from rank to rank in bfloat16: half the
            bytes, and a rounding to 8 bits at each of ``world - 1`` hops.

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
    wire = torch.bfloat16 if bf16_gradients else None
    return _RingAttention.apply(query, key, value, index, ring, softmax_scale, attended, wire)
