# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention over the context-parallel group, as an autograd function.

A node's keys and values are gathered, node after node; in the backward the gradients of keys and values go
round in float32. out and the queries' gradient stay, and are accumulated in float32 if there are
several rounds. The columns that the pattern keeps, of all ranks, are gathered at the start, a few MB,
and attended in one round of each head; their gradients are summed over ranks while the ring runs, and
added where the columns live.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import attention as kernels
from ..kernels.attention.operands import check_operands, unit_stride
from ..pattern.index import PatternIndex
from .schedule import Do, Link, backward_ops, forward_ops
from .transport import Ring, Transfer


class KeysAndValues:
    """The keys and values at hand, ``[I, s, b, hk, d]``, and those on their way.

    Made before the pattern is chosen, their transfer hides behind the choice. With the pattern, its
    columns are sent first: they are few, and needed first.
    """

    @torch.no_grad()
    def __init__(self, key: Tensor, value: Tensor, ring: Ring, index: PatternIndex | None = None):
        self._ring, self._following = ring, None
        self._own, self._columns = (key.detach(), value.detach()), None
        if index is not None:
            self.columns(index)
        if ring.world == 1:
            self._here, self._coming = (key[None], value[None]), None
            return
        gathered = key.new_empty(ring.inner, 2, *key.shape)
        kernels.pack_kv(key, value, gathered[ring.number])
        if ring.outer > 1:
            self._send(gathered)
        self._coming = ring.gather(gathered)

    def columns(self, index: PatternIndex) -> Transfer | None:
        """The columns of all ranks (:func:`~megatron_mtraining.kernels.gather_columns`), on their way; None
        if there are none. Sent when first asked for: always with the same index."""
        if self._columns is None and index.columns.shape[-1]:
            with self._ring.span("columns"):
                own = kernels.gather_columns(*self._own, index, self._ring.rank)
                self._columns = self._ring.sum_columns(own)
        return self._columns

    def move(self, op) -> None:
        if op.do is Do.SEND_VALUES and self._following is None:
            self.at_hand()  # what is sent on must be there
            self._send(self._gathered)
        elif op.do is Do.TAKE_VALUES:
            # Not sooner: gathers of a node run one after the other, and where all streams have one queue
            # (CUDA_DEVICE_MAX_CONNECTIONS=1) what waits for another node holds up all that is launched later.
            following, hop = self._following
            self._coming, self._following = self._ring.gather(following, after=hop), None

    def at_hand(self) -> tuple[Tensor, Tensor]:
        """Keys and values of this round; later work of the current stream waits for them."""
        if self._coming is not None:
            with self._ring.span("wait"):
                self._gathered = self._coming.wait()
            self._coming, self._here = None, self._gathered.unbind(1)
        return self._here

    def _send(self, gathered: Tensor) -> None:
        following, number = torch.empty_like(gathered), self._ring.number
        hop = self._ring.post(gathered[number], Ring.VALUES, Link.OUTER, received=following[number])
        self._following = following, hop


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


def _forward(query, key, value, index, ring, softmax_scale, keys):
    length, batch, heads, _ = query.shape
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = torch.empty(batch, heads, length, dtype=lse_dtype, device=query.device)
    keys = keys or KeysAndValues(key, value, ring, index)
    out, columns = None, keys.columns(index)
    for op in forward_ops(ring.rank, ring.inner, ring.outer):
        keys.move(op)
        if op.do is Do.ATTEND:
            at_hand = keys.at_hand()
            with_columns = columns.wait() if columns else None
            with ring.span("attend", op.round.round_index):
                out = kernels.forward(
                    query,
                    *at_hand,
                    column_kv=with_columns,
                    index=index,
                    round_=op.round,
                    softmax_scale=softmax_scale,
                    accumulator=out,
                    lse=lse,
                )
    return out, lse


def _backward(query, key, value, grad_out, out, lse, index, ring, softmax_scale, wire):
    keys, gradients = KeysAndValues(key, value, ring, index), _Gradients(ring, wire)
    columns = keys.columns(index)
    delta = kernels.delta(out, grad_out)
    rest = dict(grad_out=grad_out, lse=lse, delta=delta, index=index, softmax_scale=softmax_scale)
    # A carry is read by the round that writes its successor.
    carry = dq = column_gradients = None
    several = ring.inner > 1 and ring.outer > 1
    number = 0
    for op in backward_ops(ring.rank, ring.inner, ring.outer):
        keys.move(op)
        gradients.move(op)
        if op.do is Do.COLUMNS and columns:
            column_gradients = _post_column_gradients(query, columns, ring, **rest)
        elif op.do is Do.QUERY:
            if op.part[0] == 0:
                carry, dq = dq, None
            at_hand = keys.at_hand()
            with_columns = columns.wait() if columns else None
            with ring.span("query", number := number + 1):
                dq = kernels.backward_query(
                    query,
                    *at_hand,
                    **rest,
                    column_kv=with_columns,
                    round_=op.round,
                    accumulator=carry,
                    grad_query=dq,
                    head_part=op.part,
                )
        elif op.do is Do.KEY:
            its = (tensor[op.slot] for tensor in keys.at_hand())
            with ring.span("key", number := number + 1):
                gradients.moving = kernels.backward_key(
                    query, *its, **rest, ring_step=op.step, accumulator=gradients.moving
                )
        elif op.do is Do.OWN_KEY:
            added = column_gradients.wait() if columns else None
            # More is to be added only where another hop comes home.
            dtype = torch.float32 if several else key.dtype
            with ring.span("key", number := number + 1):
                gradients.moving = kernels.backward_key(
                    query,
                    key,
                    value,
                    **rest,
                    ring_step=op.step,
                    accumulator=gradients.moving,
                    column_gradients=added,
                    dtype=dtype,
                )
    return dq, gradients.moving.to(key.dtype)


def _post_column_gradients(query, columns, ring, **operands):
    column_kv = columns.wait()
    with ring.span("columns"):
        parts = kernels.backward_columns(query, column_kv=column_kv, rank=ring.rank, **operands)
        if ring.world > 1 and parts.shape[3] > 1:
            parts = parts.sum(3, keepdim=True)
        return ring.sum_columns(parts)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, index, ring, softmax_scale, attended, wire, keys):
        if attended is None:
            out, lse = _forward(query, key, value, index, ring, softmax_scale, keys)
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
        (grad_out,) = unit_stride(grad_out)
        dq, dkv = _backward(query, key, value, grad_out, out, lse, *ctx.rest)
        return dq, dkv[0], dkv[1], None, None, None, None, None, None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: PatternIndex,
    ring: Ring,
    softmax_scale: float,
    attended: tuple[Tensor, Tensor] | None = None,
    bf16_gradients: bool = False,
    keys: KeysAndValues | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse causal attention over a block-striped sequence.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence (see :mod:`..layout`).
        key, value: ``[s, b, hk, d]``; ``h`` a multiple of ``hk``. All of one dtype, any strides.
        index: the pattern, the same on all ranks; or this rank's block lists of it.
        ring: the context-parallel ranks.
        attended: what this function has returned for the same operands and index before, as in a
            replay under activation recomputation: no forward is run then, and no ring.
        bf16_gradients: send the gradients of keys and values from rank to rank in bfloat16: half the
            bytes, and a rounding to 8 bits at each of ``world - 1`` hops.
        keys: the same key and value, if they are on their way already. Used up.

    Operands of other than unit stride in ``d`` are copied.

    Returns:
        out ``[s, b, h, d]``, in the query's dtype, contiguous; the log-sum-exp of its rows, ``[b, h, s]``,
        float32 (float64 for float64), which has no gradient.

    Raises:
        ValueError: shapes, dtypes or the index do not fit, before anything is sent.
    """
    check_operands(query, key, value)
    if (index.world, index.inner) != (ring.world, ring.inner):
        raise ValueError(
            f"the index is for {index.world} ranks in nodes of {index.inner}, but the ring has "
            f"{ring.world} in nodes of {ring.inner}"
        )
    if index.has_block_lists and index.rank != ring.rank:
        raise ValueError(
            f"the index has the lists of rank {index.rank}, but this is rank {ring.rank}"
        )
    if index.seq_length != query.shape[0] * ring.world:
        raise ValueError(
            f"the index is for {index.seq_length} tokens, but {ring.world} ranks with "
            f"{query.shape[0]} each have {query.shape[0] * ring.world}"
        )
    if tuple(index.member.shape[:2]) != tuple(query.shape[1:3]):
        raise ValueError(
            f"the index is for {tuple(index.member.shape[:2])} (batch, heads), "
            f"but the query has {tuple(query.shape[1:3])}"
        )
    if index.documents is not None:
        index.documents.check(query.shape[1], index.seq_length, query.device)
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}: it must be positive")
    query, key, value = unit_stride(query, key, value)
    wire = torch.bfloat16 if bf16_gradients else None
    return _RingAttention.apply(query, key, value, index, ring, softmax_scale, attended, wire, keys)
