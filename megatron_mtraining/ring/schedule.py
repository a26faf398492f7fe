# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What each rank of a ring does, in order, as data: pure functions that need no process.

``W = O x I`` ranks, rank ``x * I + y`` is number ``y`` of node ``x``. In round ``o`` a node holds the keys
of the node ``o`` before it, and passes them round its inner ring: rank ``(x, y)`` attends to those of
``(x - o, y - i)`` in inner step ``i``. The keys a rank starts the next round with come over the outer ring,
from ``(x - 1, y)``, sent when this round starts: they have all of it to arrive. One node, or one rank a
node, is one flat ring.

The backward computes the queries' gradient of a rank's own keys first, while the first keys travel, and
the gradient of its own keys last, on top of what the others send home, so that neither waits. In between,
the gradient of the keys at hand is computed first in each step, and travels while the queries' is. What
other nodes compute for a node's keys is summed in each inner ring, then over the outer one, a round later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from ..layout import place_of


class Link(Enum):
    """Which neighbour: in the node, or of the same number in the next node."""

    INNER = "inner"
    OUTER = "outer"


class Do(Enum):
    """What an operation does. *Moving* is the gradient of keys and values that is on its way home."""

    ATTEND = "attend to the keys at hand"
    QUERY = "add the queries' gradient of the keys at hand"
    KEY = "the gradient of the keys at hand, on top of what is moving, is moving"
    OWN_KEY = "the gradient of this rank's own keys, on top of what is moving"
    SEND_VALUES = "start to send the keys and values at hand on, and to receive others"
    TAKE_VALUES = "have at hand what comes over this link"
    SEND_GRADIENTS = "start to send what is moving on, and to receive"
    TAKE_GRADIENTS = "have moving what comes over this link"
    ADD_GRADIENTS = "add to what is moving what comes over this link"
    KEEP = "put what is moving aside: it is home"
    RESUME = "have moving what was put aside"


@dataclass(frozen=True)
class RingStep:
    """What one rank computes in one step.

    Attributes:
        place: of the queries in the layout (:func:`~megatron_mtraining.layout.place_of`).
        source: the place of the keys at hand.
        distance: t, how many places apart: ``(place - source) % world``.
        wrap: 1 if ``source > place``, which moves the block distances on by one stripe, else 0.
        number: of the step, from 0. The columns of head h of H are attended in step ``h * W // H``.
        world: W.
    """

    place: int
    source: int
    distance: int
    wrap: int
    number: int
    world: int

    @property
    def first(self) -> bool:
        """Whether there is nothing to carry in."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether no step follows."""
        return self.number == self.world - 1


@dataclass(frozen=True)
class Op:
    """One operation: ``step`` of those that compute, ``link`` of those that move."""

    do: Do
    step: RingStep | None = None
    link: Link | None = None


def ring_steps(rank: int, inner: int, outer: int = 1) -> list[RingStep]:
    """The steps of one rank: its own keys first, then those of ``(x - o, y - i)``, i changing fastest."""
    world = inner * outer
    x, y = divmod(rank, inner)
    rounds, turns = range(outer), range(inner)
    ranks = [(x - o) % outer * inner + (y - i) % inner for o in rounds for i in turns]
    place, *_ = sources = [place_of(source, world, inner) for source in ranks]
    return [
        RingStep(
            place=place,
            source=source,
            distance=(place - source) % world,
            wrap=int(source > place),
            number=number,
            world=world,
        )
        for number, source in enumerate(sources)
    ]


def flat_ring(rank: int, world: int) -> list[RingStep]:
    """The steps of one rank in a ring over all ``world`` ranks: its own keys first, then those of the
    rank before, and so on. Keys always move to the next higher rank."""
    return ring_steps(rank, world)


@lru_cache(maxsize=64)
def forward_ops(rank: int, inner: int, outer: int = 1) -> tuple[Op, ...]:
    """A rank's forward; the same in every layer and step, so made once."""
    link, inner, outer = _as_rounds(inner, outer)
    ops = []
    for o, steps in enumerate(_rounds(rank, inner, outer)):
        if o < outer - 1:
            ops.append(Op(Do.SEND_VALUES, link=Link.OUTER))
        for step in steps:
            if step is not steps[-1]:
                ops.append(Op(Do.SEND_VALUES, link=link))
            ops.append(Op(Do.ATTEND, step))
            if step is not steps[-1]:
                ops.append(Op(Do.TAKE_VALUES, link=link))
        if o < outer - 1:
            ops.append(Op(Do.TAKE_VALUES, link=Link.OUTER))
    return tuple(ops)


@lru_cache(maxsize=64)
def backward_ops(rank: int, inner: int, outer: int = 1) -> tuple[Op, ...]:
    """A rank's backward."""
    link, inner, outer = _as_rounds(inner, outer)
    ops = []
    for o, steps in enumerate(_rounds(rank, inner, outer)):
        ops += _backward_round(o, steps, link, outer)
    own = Op(Do.OWN_KEY, ring_steps(rank, inner, outer)[0])
    if outer == 1:
        return (*ops, own)
    return (*ops, Op(Do.RESUME), own, Op(Do.ADD_GRADIENTS, link=Link.OUTER))


def _as_rounds(inner: int, outer: int) -> tuple[Link, int, int]:
    """The link of the ring inside a round, and its size; one rank a node makes one round of all nodes."""
    if inner == 1:
        return Link.OUTER, outer, 1
    return Link.INNER, inner, outer


def _rounds(rank: int, inner: int, outer: int) -> list[list[RingStep]]:
    steps = ring_steps(rank, inner, outer)
    return [steps[o * inner : (o + 1) * inner] for o in range(outer)]


def _backward_round(o: int, steps: list[RingStep], link: Link, outer: int) -> list[Op]:
    ops = []
    if o < outer - 1:
        ops.append(Op(Do.SEND_VALUES, link=Link.OUTER))
    travelling = False
    for step in steps:
        if step is not steps[-1]:
            ops.append(Op(Do.SEND_VALUES, link=link))
        if travelling:
            ops.append(Op(Do.TAKE_GRADIENTS, link=link))
        if not step.first:  # own keys come at the very end
            ops += [Op(Do.KEY, step), Op(Do.SEND_GRADIENTS, link=link)]
            travelling = True
        ops.append(Op(Do.QUERY, step))
        if step is not steps[-1]:
            ops.append(Op(Do.TAKE_VALUES, link=link))
    if travelling:
        # The last hop brings them to where they entered the round.
        ops.append(Op(Do.TAKE_GRADIENTS, link=link))
    if o == 0 and outer > 1:
        ops.append(Op(Do.KEEP))
    elif o > 0:
        if o > 1:
            ops.append(Op(Do.ADD_GRADIENTS, link=Link.OUTER))
        ops.append(Op(Do.SEND_GRADIENTS, link=Link.OUTER))
    if o < outer - 1:
        ops.append(Op(Do.TAKE_VALUES, link=Link.OUTER))
    return ops
