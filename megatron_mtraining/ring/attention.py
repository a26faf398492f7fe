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

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import attention as kernels
from ..kernels.attention import BackwardInputs, ForwardInputs, RoundKeys, StepKeys
from ..kernels.attention.operands import unit_stride
from ..kernels.types import BackwardPath, Round
from ..labels import BACKWARD, FORWARD, labelled
from ..pattern.vertical_slash_index import PatternIndex
from ..tensors import own_context
from .pruning import BackwardPruning, Marking, PrunedPattern
from .schedule import Action, Link, Op, backward_ops, forward_ops
from .softmax_offset import add_offset, offset_gradient, offset_share
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
            self._current = key.unsqueeze(0), value.unsqueeze(0)  # faster than by [None]
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
            self._gathered = self._ring.wait(self._gathering)
            self._gathering = None
            key, value = self._gathered.unbind(1)
            self._current = key, value
        return self._current

    def _send(self, gathered: Tensor) -> None:
        following, own = torch.empty_like(gathered), self._ring.cp.inner_rank
        hop = self._ring.post(gathered[own], Ring.VALUES, Link.OUTER, received=following[own])
        self._next = following, hop

    def of_round(self, round_: Round) -> RoundKeys:
        """The keys of this round, with the columns of all ranks."""
        key, value = self.current()
        column_kv = None if self._columns is None else self._ring.wait(self._columns)
        return RoundKeys(key, value, column_kv, round_)

    def of_step(self, op: Op) -> StepKeys:
        """The keys of one rank of this round."""
        assert op.ring_step is not None and op.slot is not None
        key, value = self.current()
        return StepKeys(key[op.slot], value[op.slot], op.ring_step)


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
        return self._ring.wait(self._receiving.pop(link))


@labelled(FORWARD)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: PatternIndex,
    ring: Ring,
    softmax_scale: float,
    keys: KeysAndValues | None = None,
    marking: Marking | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if marking is offset is None and (library := kernels.library_for(index, query, key, value)):
        with ring.span("attend", 0):
            return library.forward(query, key, value, softmax_scale)
    length, batch, heads, _ = query.shape
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = torch.empty(batch, heads, length, dtype=lse_dtype, device=query.device)
    keys = keys or KeysAndValues(key, value, ring, index)
    keys.columns(index)
    marks = None if marking is None else marking.marks
    out: Tensor | None = None
    for op in forward_ops(ring.cp.rank, ring.cp.inner, ring.cp.outer):
        keys.transfer(op)
        if op.action is Action.COMPUTE_OUT:
            assert op.round is not None
            of_round = keys.of_round(op.round)
            with ring.span("attend", op.round.round_index):
                out = kernels.forward(
                    ForwardInputs(query, of_round, index, softmax_scale, lse, out, marks)
                )
    assert out is not None, "there is a round"
    if offset is not None:
        add_offset(out, lse, offset)
    return out, lse


@labelled(BACKWARD)
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
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of queries, ``[s, b, h, d]``, of keys and of values, ``[s, b, hk, d]``, and of the
    softmax offset, ``[h]``; None without.

    Args:
        packed: the marks of blocks, if pruned.
    """
    if pruning is offset is None and (library := kernels.library_for(index, query, key, value)):
        with ring.span("key", 1):
            found = library.backward(grad_out, query, key, value, out, lse, softmax_scale)
            return *found, None
    keys, dkv = KeysAndValues(key, value, ring, index), _DkvAccumulator(ring)
    columns = keys.columns(index)
    pruned, attended = None, None
    if pruning is not None:
        assert packed is not None, "the forward has marked the blocks"
        with ring.span("prune"):
            pruned = PrunedPattern(index, packed, ring.cp.rank, pruning)
        index, attended = pruned.index, pruned.new_attended(lse)
    path = kernels.choose_backward(index, query, key, value, grad_out, attended=attended)
    query_sums: Tensor | None = None
    if path is BackwardPath.ONE_PASS:
        query_sums = kernels.new_query_sums(query, key, value, index)
    delta = kernels.delta(out, grad_out)
    inputs = BackwardInputs(query, grad_out, lse, delta, index, softmax_scale, attended, query_sums)
    # The accumulator of a round's dQ is read by the kernel that writes the next one's.
    dq_before: Tensor | None = None
    dq: Tensor | None = None
    column_grads: Transfer | None = None
    more_to_add = ring.cp.inner > 1 and ring.cp.outer > 1
    kernel = 0
    for op in backward_ops(ring.cp.rank, ring.cp.inner, ring.cp.outer, path, columns is not None):
        keys.transfer(op)
        dkv.transfer(op)
        if op.action is Action.COMPUTE_COLUMN_GRADS:
            assert columns is not None, "the schedule knows whether there are any"
            column_grads = _start_column_grads(inputs, columns, ring)
        elif op.action is Action.COMPUTE_DQ:
            assert op.round is not None and op.head_part is not None
            if op.head_part[0] == 0:
                dq_before, dq = dq, None
            of_round = keys.of_round(op.round)
            with ring.span("query", kernel := kernel + 1):
                dq = kernels.backward_query(
                    inputs,
                    of_round,
                    accumulator=dq_before,
                    grad_query=dq,
                    head_part=op.head_part,
                )
        elif op.action is Action.COMPUTE_DKV:
            of_step = keys.of_step(op)
            with ring.span("key", kernel := kernel + 1):
                dkv.value = kernels.backward_key(inputs, of_step, accumulator=dkv.value)
        elif op.action is Action.COMPUTE_OWN_DKV:
            assert op.ring_step is not None
            added = None if column_grads is None else ring.wait(column_grads)
            with ring.span("key", kernel := kernel + 1):
                dkv.value = kernels.backward_key(
                    inputs,
                    StepKeys(key, value, op.ring_step),
                    accumulator=dkv.value,
                    column_gradients=added,
                    # In float32 where another accumulator is to be added.
                    dtype=torch.float32 if more_to_add else key.dtype,
                )
        elif op.action is Action.FINISH_DQ:
            dq = kernels.finish_query_sums(inputs, key, value)
    if pruned is not None:
        if attended is not None and offset is not None:
            attended += offset_share(lse, offset)  # is not left out
        pruned.tell(attended)
    assert dq is not None and dkv.value is not None, "the schedule computes both"
    grad_offset = None if offset is None else offset_gradient(lse, delta, offset)
    dk, dv = dkv.value.to(key.dtype).unbind()
    return dq, dk, dv, grad_offset


def _start_column_grads(inputs: BackwardInputs, columns: Transfer, ring: Ring) -> Transfer:
    column_kv = ring.wait(columns)
    with ring.span("columns"):
        parts = kernels.backward_columns(inputs, column_kv, ring.cp.rank)
        if ring.cp.world > 1 and parts.shape[3] > 1:
            parts = parts.sum(3, keepdim=True)
        return ring.sum_columns(parts)


class RingResult(NamedTuple):
    """The result of :func:`ring_attention`: all that its backward needs beside the operands."""

    out: Tensor
    """``[s, b, h, d]``, in the query's dtype, contiguous."""
    lse: Tensor
    """Log-sum-exp of the rows' scores, and of the softmax offset, ``[b, h, s]``, float32 (float64 for
    float64); no gradient."""
    packed: Tensor | None
    """The marks of the blocks of a pruned backward (:class:`.pruning.Marking`); None if it is not pruned."""


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, offset, index, ring, softmax_scale, saved, keys, pruning):
        packed: Tensor | None = None
        if saved is None:
            marking = None if pruning is None else Marking(index, pruning)
            out, lse = _forward(
                query, key, value, index, ring, softmax_scale, keys, marking, offset
            )
            if marking is not None:
                packed = marking.packed()
        else:
            out, lse = (each.detach() for each in saved[:2])
            if saved.packed is not None:
                packed = saved.packed.detach()
        ctx.save_for_backward(query, key, value, offset, out, lse, packed)
        ctx.rest, ctx.device = (index, ring, softmax_scale, pruning), query.device
        # Else each backward would make zeros, in place of the gradients that lse and packed have not.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[each for each in (lse, packed) if each is not None])
        return out, lse, packed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, *_):
        if (within := own_context(ctx.device)) is not None:
            with within:
                return _RingAttention.backward(ctx, grad_out)
        query, key, value, offset, out, lse, packed = ctx.saved_tensors
        if grad_out is None:  # other ranks may have one, and wait for this one
            grad_out = torch.zeros_like(out)
        (grad_out,) = unit_stride(grad_out)
        gradients = _backward(
            query, key, value, grad_out, out, lse, *ctx.rest, packed=packed, offset=offset
        )
        return *gradients, *[None] * 6


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
    softmax_offset: Tensor | None = None,
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
        softmax_offset: ``[h]`` (:mod:`.softmax_offset`); None for none.
    """
    found = _RingAttention.apply(
        query, key, value, softmax_offset, index, ring, softmax_scale, saved, keys, pruning
    )
    return RingResult(*found)
