# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What each rank of a ring does, in order, as data: pure functions that need no process.

``W = O x I`` ranks, rank ``x * I + y`` is number ``y`` of node ``x``. In round ``o`` a node attends to the
keys of the node ``o`` before it. Each of its ranks receives those of one rank, ``(x - o, y)``, over the
outer ring, sent when the round before starts; then the node's ranks gather them, which is asked for after the
kernels of the round before. One node is one round: keys are gathered, and nothing goes round. Nodes of one
rank are a plain ring, one rank's keys a round.

The keys' gradient is computed one rank's keys at a time, and its sum over a node moves round an inner ring
while parts of the queries' gradient are computed. Then it moves on over the outer ring, which it has a
round for. The gradient of a rank's own keys comes last, on top of what the others send home.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Link(Enum):
    """Which neighbour: in the node, or of the same number in the next node."""

    INNER = "inner"
    OUTER = "outer"


class Do(Enum):
    """What an operation does. *Moving* is the gradient of keys and values that is on its way home."""

    ATTEND = "attend to the keys of a round"
    COLUMNS = "the columns' gradient, and start to sum it over ranks"
    QUERY = "add the queries' gradient of a round's keys, for a part of the heads"
    KEY = "the gradient of one rank's keys, on top of what is moving, is moving"
    OWN_KEY = "the gradient of this rank's own keys, on top of what is moving"
    SEND_VALUES = "start to send keys and values on, and to receive others"
    TAKE_VALUES = "start to gather those in the node, and turn to them"
    SEND_GRADIENTS = "start to send what is moving on, and to receive"
    TAKE_GRADIENTS = "have moving what comes over this link"
    ADD_GRADIENTS = "add to what is moving what comes over this link"
    KEEP = "put what is moving aside: it is home"
    RESUME = "have moving what was put aside"


@dataclass(frozen=True)
class Round:
    """The keys that one rank attends to in one round: those of a node.

    Attributes:
        rank: of the queries.
        round_index: o, of the round, from 0: how many nodes apart. The columns of head h of H are attended
            in round ``h * O // H``.
        inner, outer: I and O.
    """

    rank: int
    round_index: int
    inner: int
    outer: int

    @property
    def world(self) -> int:
        """W."""
        return self.inner * self.outer

    @property
    def first(self) -> bool:
        """Whether there is nothing to carry in."""
        return self.round_index == 0

    @property
    def last(self) -> bool:
        """Whether no round follows."""
        return self.round_index == self.outer - 1

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks whose keys these are, in the order they are gathered in."""
        node = (self.rank // self.inner - self.round_index) % self.outer
        return tuple(node * self.inner + y for y in range(self.inner))

    @property
    def wrap(self) -> int:
        """1 if the keys' node comes after the queries' own in the layout, else 0.

        Blocks of a node are numbered in the order of the sequence: the queries' block n sees the keys'
        blocks up to ``n - wrap``, which is ``o`` blocks of the sequence before it.
        """
        return int(self.round_index > self.rank // self.inner)


@dataclass(frozen=True)
class RingStep:
    """One rank's keys, as another rank's queries meet them.

    Attributes:
        rank, source: of the queries and of the keys.
        inner, outer: I and O.
    """

    rank: int
    source: int
    inner: int
    outer: int

    def meetings(self, turned: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """How the key blocks with ``local % 2 == turned`` meet query blocks: those of the same
        ``local % 2``, and the others.

        Returns:
            for each a (residue, apart, wrap): local key block ``c`` meets local query block ``c + apart
            + 2 (e + wrap)`` at distance ``e * 2W + residue``.
        """

        def number(rank, of_turned):  # in its node's stripe
            y = rank % self.inner
            return self.inner - 1 - y if of_turned else y

        world = self.inner * self.outer
        nodes = self.rank // self.inner - self.source // self.inner
        found = []
        for apart in (0, 1):
            ours = number(self.rank, turned ^ apart)
            least = (apart * self.inner + ours - number(self.source, turned)) * self.outer + nodes
            found.append((least % (2 * world), apart, int(least < 0)))
        return tuple(found)


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        round: of ATTEND and QUERY.
        step, slot: of KEY and OWN_KEY, and where in the gathered keys the source is.
        part: of QUERY: (p, P), heads from ``p / P`` on to ``(p + 1) / P`` of all.
        link: of those that move.
    """

    do: Do
    round: Round | None = None
    step: RingStep | None = None
    slot: int | None = None
    part: tuple[int, int] | None = None
    link: Link | None = None


def rounds(rank: int, inner: int, outer: int) -> list[Round]:
    """The rounds of one rank: first its own node, then the one before, and so on."""
    return [Round(rank, number, inner, outer) for number in range(outer)]


@lru_cache(maxsize=64)
def forward_ops(rank: int, inner: int, outer: int) -> tuple[Op, ...]:
    """A rank's forward; the same in every layer and step, so made once."""
    ops = []
    for this in rounds(rank, inner, outer):
        if not this.last:
            ops.append(Op(Do.SEND_VALUES, link=Link.OUTER))
        ops.append(Op(Do.ATTEND, this))
        if not this.last:
            ops.append(Op(Do.TAKE_VALUES, link=Link.OUTER))
    return tuple(ops)


@lru_cache(maxsize=64)
def backward_ops(rank: int, inner: int, outer: int) -> tuple[Op, ...]:
    """A rank's backward."""
    ops = []
    of_round = _round_of_single_ranks if inner == 1 else _round_of_nodes
    for this in rounds(rank, inner, outer):
        if not this.last:
            ops.append(Op(Do.SEND_VALUES, link=Link.OUTER))
        if this.first:
            ops.append(Op(Do.COLUMNS))
        ops += of_round(rank, this)
        if not this.last:
            ops.append(Op(Do.TAKE_VALUES, link=Link.OUTER))
    own = Op(Do.OWN_KEY, step=RingStep(rank, rank, inner, outer), slot=rank % inner)
    if outer == 1:
        return (*ops, own)
    if inner == 1:
        return (*ops, Op(Do.TAKE_GRADIENTS, link=Link.OUTER), own)
    return (*ops, Op(Do.RESUME), own, Op(Do.ADD_GRADIENTS, link=Link.OUTER))


def _key(this: Round, slot: int) -> Op:
    step = RingStep(this.rank, this.sources[slot], this.inner, this.outer)
    return Op(Do.KEY, step=step, slot=slot)


def _round_of_single_ranks(rank: int, this: Round) -> list[Op]:
    """Each rank adds to what the rank before has sent, and sends it on."""
    ops = []
    if this.round_index > 1:
        ops.append(Op(Do.TAKE_GRADIENTS, link=Link.OUTER))
    if not this.first:  # own keys come at the very end
        ops += [_key(this, 0), Op(Do.SEND_GRADIENTS, link=Link.OUTER)]
    return [*ops, Op(Do.QUERY, this, part=(0, 1))]


def _round_of_nodes(rank: int, this: Round) -> list[Op]:
    """In a node, each rank begins with the keys of the rank before it in the place it has in its own
    node, and ends with those in its own place, the sum of which it then has. In the last round that sum's way
    home has no other round to hide behind: a part of the queries' gradient is left for it."""
    ops, hops = [], this.inner - 1
    way_home = this.last and not this.first
    parts = hops + way_home
    y = rank % this.inner
    for i in range(hops):
        if i:
            ops.append(Op(Do.TAKE_GRADIENTS, link=Link.INNER))
        ops += [
            _key(this, (y - 1 - i) % this.inner),
            Op(Do.SEND_GRADIENTS, link=Link.INNER),
            Op(Do.QUERY, this, part=(i, parts)),
        ]
    ops.append(Op(Do.TAKE_GRADIENTS, link=Link.INNER))
    if not this.first:
        ops.append(_key(this, y))
        if this.round_index > 1:
            ops.append(Op(Do.ADD_GRADIENTS, link=Link.OUTER))
        ops.append(Op(Do.SEND_GRADIENTS, link=Link.OUTER))
    elif not this.last:
        ops.append(Op(Do.KEEP))
    if way_home:
        ops.append(Op(Do.QUERY, this, part=(hops, parts)))
    return ops
