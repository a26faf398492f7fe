# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention over the context-parallel group, as an autograd function.

Keys and values are gathered over one inner group after the other; in the backward their gradients move
round in float32. out and the gradient of the queries stay on their rank, and are accumulated in float32 if
there are several rounds. The columns that the pattern selects, of all ranks, are gathered at the start, a
few MB, and attended to in one round of each head; their gradients are summed over ranks while the ring
runs, and added where the columns live.

Operands are validated by :func:`megatron_mtraining.attention.attend`, the public entry. Sizes in shapes:
``s`` tokens on a rank, ``b`` batch, ``h`` query heads, ``hk`` key and value heads, ``d`` head dim, ``I``
ranks of an inner group, ``C`` columns.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import attention as kernels
from ..kernels.attention.operands import unit_stride
from ..pattern.vertical_slash_index import PatternIndex
from ..tensors import own_context
from .pruning import BackwardPruning, Marking, PrunedPattern
from .schedule import Action, Link, Op, backward_ops, forward_ops
from .transport import Ring, Transfer


class KeysAndValues:
    """Keys and values of this round, ``[I, s, b, hk, d]`` each, and those in flight.

    Made before the pattern search, so that their transfer hides behind it. With the pattern given, its
    columns are sent first: they are few, and needed first.
    """

    def __init__(self, key: Tensor, value: Tensor, ring: Ring, index: PatternIndex | None = None):
        self._ring = ring
        key, value = key.detach(), value.detach()
        self._own = key, value
        self._columns: Transfer | None = None
        self._gathering: Transfer | None = None
        self._next: tuple[Tensor, Transfer] | None = None  # memory for the next round, and the hop
        if index is not None:
            self.columns(index)
        if ring.cp.world == 1:
            self._current = key[None], value[None]
            return
        gathered = key.new_empty(ring.cp.inner, 2, *key.shape)
        kernels.pack_kv(key, value, gathered[ring.cp.inner_rank])
        if ring.cp.outer > 1:
            self._send(gathered)
        self._gathering = ring.gather(gathered)

    def columns(self, index: PatternIndex) -> Transfer | None:
        """The transfer of the columns of all ranks, ``[2, b, h, C, d]``; None if there are none. It starts
        with the first call: all calls have the same index."""
        if self._columns is None and index.columns.shape[-1]:
            with self._ring.span("columns"):
                own = kernels.gather_columns(*self._own, index, self._ring.cp.rank)
                self._columns = self._ring.sum_columns(own)
        return self._columns

    def gather_column_keys(self, index: PatternIndex) -> Tensor:
        """The keys of an index's columns, of all ranks: ``[b, h, C, d]``."""
        columns = self.columns(index)
        assert columns is not None, "the index has columns"
        return columns.wait()[0]

    def transfer(self, op: Op) -> None:
        """Do what an operation of the schedule says of keys and values."""
        if op.action is Action.SEND_KV and self._next is None:
            self.current()  # what is sent on must have been received
            self._send(self._gathered)
        elif op.action is Action.GATHER_KV:
            # Not sooner: gathers of an inner group run one after the other, and where all streams have one
            # queue (CUDA_DEVICE_MAX_CONNECTIONS=1) what waits for another group holds up all that is
            # launched later.
            assert self._next is not None, "they have been sent before"
            following, hop = self._next
            self._gathering, self._next = self._ring.gather(following, after=hop), None

    def current(self) -> tuple[Tensor, Tensor]:
        """Keys and values of this round; later work of the current stream waits for them."""
        if self._gathering is not None:
            with self._ring.span("wait"):
                self._gathered = self._gathering.wait()
            self._gathering = None
            key, value = self._gathered.unbind(1)
            self._current = key, value
        return self._current

    def _send(self, gathered: Tensor) -> None:
        following, own = torch.empty_like(gathered), self._ring.cp.inner_rank
        hop = self._ring.post(gathered[own], Ring.VALUES, Link.OUTER, received=following[own])
        self._next = following, hop


class _DkvAccumulator:
    """The dKV accumulator in flight, ``[2, s, b, hk, d]``, the one put aside, and transfers by link."""

    def __init__(self, ring: Ring):
        self.value: Tensor | None = None
        self._stashed: Tensor | None = None
        self._ring = ring
        self._receiving: dict[Link, Transfer] = {}

    def transfer(self, op: Op) -> None:
        """Do what an operation of the schedule says of the accumulator."""
        if op.action is Action.SEND_DKV:
            assert self.value is not None and op.link is not None
            self._receiving[op.link] = self._ring.post(self.value, Ring.GRADIENTS, op.link)
            self.value = None
        elif op.action is Action.RECEIVE_DKV:
            self.value = self._receive(op.link)
        elif op.action is Action.ADD_DKV:
            assert self.value is not None
            self.value += self._receive(op.link)
        elif op.action is Action.STASH_DKV:
            self._stashed, self.value = self.value, None
        elif op.action is Action.RESTORE_DKV:
            self._stashed, self.value = None, self._stashed

    def _receive(self, link: Link | None) -> Tensor:
        assert link is not None, "transfers have one"
        with self._ring.span("wait"):
            return self._receiving.pop(link).wait()


class _Operands(TypedDict):
    """What all kernels of the backward take."""

    grad_out: Tensor
    lse: Tensor
    delta: Tensor
    index: PatternIndex
    softmax_scale: float


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: PatternIndex,
    ring: Ring,
    softmax_scale: float,
    keys: KeysAndValues | None = None,
    marking: Marking | None = None,
) -> tuple[Tensor, Tensor]:
    length, batch, heads, _ = query.shape
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = torch.empty(batch, heads, length, dtype=lse_dtype, device=query.device)
    keys = keys or KeysAndValues(key, value, ring, index)
    columns = keys.columns(index)
    out: Tensor | None = None
    for op in forward_ops(ring.cp.rank, ring.cp.inner, ring.cp.outer):
        keys.transfer(op)
        if op.action is Action.COMPUTE_OUT:
            assert op.round is not None
            current = keys.current()
            column_kv = columns.wait() if columns else None
            with ring.span("attend", op.round.round_index):
                out = kernels.forward(
                    query,
                    *current,
                    column_kv=column_kv,
                    index=index,
                    round_=op.round,
                    softmax_scale=softmax_scale,
                    accumulator=out,
                    lse=lse,
                    marks=None if marking is None else marking.marks,
                )
    assert out is not None, "there is a round"
    return out, lse


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    index: PatternIndex,
    ring: Ring,
    softmax_scale: float,
    pruning: BackwardPruning | None = None,
    *,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of queries, ``[s, b, h, d]``, and of keys and values, ``[2, s, b, hk, d]``.

    Args:
        packed: the marks of blocks, if pruned.
    """
    keys, dkv = KeysAndValues(key, value, ring, index), _DkvAccumulator(ring)
    columns = keys.columns(index)
    delta = kernels.delta(out, grad_out)
    rest = _Operands(
        grad_out=grad_out, lse=lse, delta=delta, index=index, softmax_scale=softmax_scale
    )
    pruned, attended = None, None
    if pruning is not None:
        assert packed is not None, "the forward has marked the blocks"
        with ring.span("prune"):
            pruned = PrunedPattern(index, packed, ring.cp.rank, pruning)
        rest["index"], attended = pruned.index, pruned.new_attended(lse)
    # The accumulator of a round's dQ is read by the kernel that writes the next one's.
    dq_before: Tensor | None = None
    dq: Tensor | None = None
    column_grads: Transfer | None = None
    more_to_add = ring.cp.inner > 1 and ring.cp.outer > 1
    kernel = 0
    query_sums: Tensor | None = None
    if attended is None and kernels.one_pass(rest["index"], query, key, value, grad_out):
        query_sums = kernels.new_query_sums(query, key, value, rest["index"])
    for op in backward_ops(ring.cp.rank, ring.cp.inner, ring.cp.outer):
        keys.transfer(op)
        dkv.transfer(op)
        if op.action is Action.COMPUTE_COLUMN_GRADS and columns:
            column_grads = _start_column_grads(query, columns, ring, rest, query_sums)
        elif op.action is Action.COMPUTE_DQ:
            assert op.round is not None and op.head_part is not None
            if op.head_part[0] == 0:
                dq_before, dq = dq, None
            current_kv = keys.current()
            if query_sums is not None:
                continue  # the other kernels add to it
            column_kv = columns.wait() if columns else None
            with ring.span("query", kernel := kernel + 1):
                dq = kernels.backward_query(
                    query,
                    *current_kv,
                    **rest,
                    column_kv=column_kv,
                    round_=op.round,
                    accumulator=dq_before,
                    grad_query=dq,
                    head_part=op.head_part,
                    attended=attended,
                )
        elif op.action is Action.COMPUTE_DKV:
            assert op.ring_step is not None
            source = (tensor[op.slot] for tensor in keys.current())
            with ring.span("key", kernel := kernel + 1):
                dkv.value = kernels.backward_key(
                    query,
                    *source,
                    **rest,
                    ring_step=op.ring_step,
                    accumulator=dkv.value,
                    query_sums=query_sums,
                )
        elif op.action is Action.COMPUTE_OWN_DKV:
            assert op.ring_step is not None
            added = None
            if columns:
                assert column_grads is not None, "the first round has started them"
                added = column_grads.wait()
            # In float32 where another accumulator is to be added.
            dtype = torch.float32 if more_to_add else key.dtype
            with ring.span("key", kernel := kernel + 1):
                dkv.value = kernels.backward_key(
                    query,
                    key,
                    value,
                    **rest,
                    ring_step=op.ring_step,
                    accumulator=dkv.value,
                    column_gradients=added,
                    dtype=dtype,
                    query_sums=query_sums,
                )
    if query_sums is not None:
        dq = kernels.finish_query_sums(
            query_sums, query, key, value, rest["index"], softmax_scale=softmax_scale
        )
    if pruned is not None:
        pruned.tell(attended)
    assert dq is not None and dkv.value is not None, "the schedule computes both"
    return dq, dkv.value.to(key.dtype)


def _start_column_grads(
    query: Tensor, columns: Transfer, ring: Ring, operands: _Operands, query_sums: Tensor | None
) -> Transfer:
    column_kv = columns.wait()
    with ring.span("columns"):
        parts = kernels.backward_columns(
            query, column_kv=column_kv, rank=ring.cp.rank, **operands, query_sums=query_sums
        )
        if ring.cp.world > 1 and parts.shape[3] > 1:
            parts = parts.sum(3, keepdim=True)
        return ring.sum_columns(parts)


class RingResult(NamedTuple):
    """The result of :func:`ring_attention`: all that its backward needs beside the operands."""

    out: Tensor
    """``[s, b, h, d]``, in the query's dtype, contiguous."""
    lse: Tensor
    """Log-sum-exp of the rows' scores, ``[b, h, s]``, float32 (float64 for float64); no gradient."""
    packed: Tensor | None
    """The marks of the blocks of a pruned backward (:class:`.pruning.Marking`); None if it is not pruned."""


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, index, ring, softmax_scale, saved, keys, pruning):
        packed: Tensor | None = None
        if saved is None:
            marking = None if pruning is None else Marking(index, pruning)
            out, lse = _forward(query, key, value, index, ring, softmax_scale, keys, marking)
            if marking is not None:
                packed = marking.packed()
        else:
            out, lse = (each.detach() for each in saved[:2])
            if saved.packed is not None:
                packed = saved.packed.detach()
        ctx.save_for_backward(query, key, value, out, lse, packed)
        ctx.rest = index, ring, softmax_scale, pruning
        ctx.mark_non_differentiable(*[each for each in (lse, packed) if each is not None])
        return out, lse, packed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, *_):
        if (within := own_context(grad_out.device)) is not None:
            with within:
                return _RingAttention.backward(ctx, grad_out)
        query, key, value, out, lse, packed = ctx.saved_tensors
        (grad_out,) = unit_stride(grad_out)
        dq, dkv = _backward(query, key, value, grad_out, out, lse, *ctx.rest, packed=packed)
        return dq, dkv[0], dkv[1], *[None] * 6


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: PatternIndex,
    ring: Ring,
    softmax_scale: float,
    saved: RingResult | None = None,
    keys: KeysAndValues | None = None,
    pruning: BackwardPruning | None = None,
) -> RingResult:
    """Sparse causal attention over a block-striped sequence, for operands that have been validated.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence (see :mod:`..layout`).
        key, value: ``[s, b, hk, d]``; ``h`` a multiple of ``hk``. All of one dtype, and of unit stride in
        ``d``.
        index: the pattern, the same on all ranks; or this rank's block lists of it.
        ring: transfers over the context-parallel group.
        saved: the result of the first pass, in a replay under activation recomputation: no forward is
            run then, and nothing is sent.
        keys: the same key and value, if they are in flight already. Used up.
        pruning: of the backward's blocks (:mod:`.pruning`); None for the gradient of all.
    """
    found = _RingAttention.apply(
        query, key, value, index, ring, softmax_scale, saved, keys, pruning
    )
    return RingResult(*found)
