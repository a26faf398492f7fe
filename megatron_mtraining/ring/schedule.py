# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What each rank does in ring attention, in order, as data: pure functions that need no process.

``W = O x I`` context-parallel ranks make ``O`` inner groups of ``I`` ranks (:mod:`..cp_group`): rank ``x *
I + y`` has inner rank ``y`` in inner group ``x``. In round ``o`` the queries of group ``x`` attend to the
keys of group ``x - o`` (modulo O):

- Rank ``(x, y)`` receives keys and values of rank ``(x - o, y)`` over the outer ring, sent when the round
  before starts. Then the inner group gathers them, after the kernels of the round before are launched.
- ``O = 1`` is a single round: keys are gathered once. ``I = 1`` is a plain ring, one rank's keys a round.

In the backward, dKV (the gradient of keys and values) is computed for one rank's keys at a time, on top of
the accumulator in flight. Its sum over an inner group moves round an inner ring, while parts of dQ are
computed; then it moves on over the outer ring, which takes a round. A rank computes the gradient of its own
keys last, on top of what the others send.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from ..kernels.types import BackwardPath, RingStep, Round


class Link(Enum):
    """Which ring: over the inner group, or over the ranks with the same inner rank."""

    INNER = "inner"
    OUTER = "outer"


class Action(Enum):
    """What an operation does. The *accumulator* is the dKV in flight, ``[2, s, b, hk, d]``: a partial sum
    for the keys of one rank, which moves to the rank that owns them."""

    COMPUTE_OUT = auto()
    """Attend to the keys of a round: out and its log-sum-exp."""
    COMPUTE_COLUMN_GRADS = auto()
    """Compute the gradient of the columns, and start to sum it over all ranks."""
    COMPUTE_DQ = auto()
    """Add the gradient of the queries from the keys of a round, for a part of the heads."""
    FINISH_DQ = auto()
    """In one pass: make the gradient of the queries of what the gradients of columns and keys have added."""
    COMPUTE_DKV = auto()
    """Add dKV of one other rank's keys to the accumulator."""
    COMPUTE_OWN_DKV = auto()
    """Add dKV of this rank's own keys, and the columns' gradient, to the accumulator."""
    SEND_KV = auto()
    """Start to send keys and values to the next inner group, and to receive the previous group's."""
    GATHER_KV = auto()
    """Start to gather the keys and values received over the inner group; the next round uses them."""
    SEND_DKV = auto()
    """Start to send the accumulator to the next rank, and to receive another."""
    RECEIVE_DKV = auto()
    """Wait for an accumulator; it replaces the one sent."""
    ADD_DKV = auto()
    """Wait for an accumulator, and add it."""
    STASH_DKV = auto()
    """Put the accumulator aside: its keys are this rank's own."""
    RESTORE_DKV = auto()
    """Take the accumulator that was put aside."""


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        round: of COMPUTE_OUT, COMPUTE_DQ and COMPUTE_DKV.
        ring_step, slot: of COMPUTE_DKV and COMPUTE_OWN_DKV; ``slot`` is the inner rank of its source, where
            the keys are in ``[I, s, b, hk, d]``.
        head_part: of COMPUTE_DQ: (p, P), the heads from ``p / P`` to ``(p + 1) / P`` of all.
        link: of transfers.
    """

    action: Action
    round: Round | None = None
    ring_step: RingStep | None = None
    slot: int | None = None
    head_part: tuple[int, int] | None = None
    link: Link | None = None


def rounds(rank: int, inner: int, outer: int) -> list[Round]:
    """The rounds of one rank: first the keys of its own inner group, then of the previous group, and so
    on."""
    return [Round(rank, number, inner, outer) for number in range(outer)]


@lru_cache(maxsize=64)
def forward_ops(rank: int, inner: int, outer: int) -> tuple[Op, ...]:
    """The operations of a rank's forward; the same in every layer and step, so made once."""
    ops = []
    for round_ in rounds(rank, inner, outer):
        if not round_.last:
            ops.append(Op(Action.SEND_KV, link=Link.OUTER))
        ops.append(Op(Action.COMPUTE_OUT, round_))
        if not round_.last:
            ops.append(Op(Action.GATHER_KV, link=Link.OUTER))
    return tuple(ops)


@lru_cache(maxsize=64)
def backward_ops(
    rank: int, inner: int, outer: int, path: BackwardPath, columns: bool
) -> tuple[Op, ...]:
    """The operations of a rank's backward, computed by ``path``, and whether there are columns."""
    ops = []
    of_round = _round_of_single_ranks if inner == 1 else _round_of_inner_groups
    for round_ in rounds(rank, inner, outer):
        if not round_.last:
            ops.append(Op(Action.SEND_KV, link=Link.OUTER))
        if round_.first and columns:
            ops.append(Op(Action.COMPUTE_COLUMN_GRADS))
        ops += of_round(round_)
        if not round_.last:
            ops.append(Op(Action.GATHER_KV, link=Link.OUTER))
    own = Op(
        Action.COMPUTE_OWN_DKV, ring_step=RingStep(rank, rank, inner, outer), slot=rank % inner
    )
    if outer == 1:
        ops.append(own)
    elif inner == 1:
        ops += [Op(Action.RECEIVE_DKV, link=Link.OUTER), own]
    else:
        ops += [Op(Action.RESTORE_DKV), own, Op(Action.ADD_DKV, link=Link.OUTER)]
    if path is BackwardPath.ONE_PASS:
        # No transfer has a part of dQ to hide it.
        ops = [op for op in ops if op.action is not Action.COMPUTE_DQ] + [Op(Action.FINISH_DQ)]
    return tuple(ops)


def _compute_dkv(round_: Round, slot: int) -> Op:
    ring_step = RingStep(round_.rank, round_.sources[slot], round_.inner, round_.outer)
    return Op(Action.COMPUTE_DKV, round_, ring_step=ring_step, slot=slot)


def _round_of_single_ranks(round_: Round) -> list[Op]:
    """Each rank adds its part to the accumulator of the rank before, and sends it on."""
    ops = []
    if round_.round_index > 1:
        ops.append(Op(Action.RECEIVE_DKV, link=Link.OUTER))
    if not round_.first:  # own keys come at the very end
        ops += [_compute_dkv(round_, 0), Op(Action.SEND_DKV, link=Link.OUTER)]
    return [*ops, Op(Action.COMPUTE_DQ, round_, head_part=(0, 1))]


def _round_of_inner_groups(round_: Round) -> list[Op]:
    """A rank begins with the keys whose inner rank is one before its own, and ends with the keys of its own
    inner rank, whose sum over the group it then has. That sum's transfer over the outer ring in the last
    round has no other round to hide it: a part of dQ is left for it."""
    ops, hops = [], round_.inner - 1
    sends_last = round_.last and not round_.first
    parts = hops + sends_last
    y = round_.rank % round_.inner
    for i in range(hops):
        if i:
            ops.append(Op(Action.RECEIVE_DKV, link=Link.INNER))
        ops += [
            _compute_dkv(round_, (y - 1 - i) % round_.inner),
            Op(Action.SEND_DKV, link=Link.INNER),
            Op(Action.COMPUTE_DQ, round_, head_part=(i, parts)),
        ]
    ops.append(Op(Action.RECEIVE_DKV, link=Link.INNER))
    if not round_.first:
        ops.append(_compute_dkv(round_, y))
        if round_.round_index > 1:
            ops.append(Op(Action.ADD_DKV, link=Link.OUTER))
        ops.append(Op(Action.SEND_DKV, link=Link.OUTER))
    elif not round_.last:
        ops.append(Op(Action.STASH_DKV))
    if sends_last:
        ops.append(Op(Action.COMPUTE_DQ, round_, head_part=(hops, parts)))
    return ops
