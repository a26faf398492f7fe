# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Schedules of rings, run on sets in place of tensors: what they do, and that no rank waits for ever."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest

from megatron_mtraining.layout import place_of
from megatron_mtraining.ring.schedule import (
    Do,
    Link,
    backward_ops,
    flat_ring,
    forward_ops,
    ring_steps,
)

# inner, outer: one rank, flat, one rank a node, and both, also of sizes that are no powers of two
SHAPES = [
    (1, 1),
    (2, 1),
    (5, 1),
    (8, 1),
    (1, 2),
    (1, 3),
    (1, 6),
    (2, 2),
    (2, 3),
    (3, 2),
    (4, 2),
    (3, 5),
    (8, 4),
]
every_shape = pytest.mark.parametrize(("inner", "outer"), SHAPES)
MOVES = {Do.SEND_VALUES, Do.TAKE_VALUES, Do.SEND_GRADIENTS, Do.TAKE_GRADIENTS, Do.ADD_GRADIENTS}


class Rank:
    """One rank that runs a schedule on names: keys are their place, gradients count who has added."""

    def __init__(self, rank, place, ops):
        self.rank, self.place, self.ops = rank, place, deque(ops)
        self.keys, self.moving, self.home = place, None, None
        self.attended, self.queries, self.final = [], [], None
        self.sent = {}

    def neighbour(self, inner, outer, link):
        x, y = divmod(self.rank, inner)
        if link is Link.INNER:
            return x * inner + (y + 1) % inner
        return (x + 1) % outer * inner + y

    def step(self, mail, inner, outer):
        """Run the next operation, unless it waits for something: then False."""
        op = self.ops[0]
        values = op.do in (Do.SEND_VALUES, Do.TAKE_VALUES)
        box = mail[self.rank, values, op.link]
        if op.do in (Do.TAKE_VALUES, Do.TAKE_GRADIENTS, Do.ADD_GRADIENTS):
            # A rank takes from a link what it has posted for: as often as it has sent itself.
            self.sent[values, op.link] -= 1
            assert self.sent[values, op.link] == 0, "one transfer of a kind and link at a time"
            if not box:
                self.sent[values, op.link] += 1
                return False
        self.ops.popleft()
        if op.do in (Do.SEND_VALUES, Do.SEND_GRADIENTS):
            what = self.keys if values else self.moving
            assert what is not None
            mail[self.neighbour(inner, outer, op.link), values, op.link].append(what)
            self.sent[values, op.link] = self.sent.get((values, op.link), 0) + 1
            assert self.sent[values, op.link] == 1, "the transfer before has not been taken"
            if not values:
                self.moving = None
        elif op.do is Do.TAKE_VALUES:
            self.keys = box.popleft()
        elif op.do is Do.TAKE_GRADIENTS:
            assert self.moving is None, "a gradient would be lost"
            self.moving = box.popleft()
        elif op.do is Do.ADD_GRADIENTS:
            source, more = box.popleft()
            assert self.moving[0] == source
            self.moving = (source, self.moving[1] + more)
        elif op.do is Do.KEEP:
            assert self.home is None
            self.home, self.moving = self.moving, None
        elif op.do is Do.RESUME:
            assert self.moving is None
            self.home, self.moving = None, self.home
        elif op.do is Do.OWN_KEY:
            self.add(op.step, self.place)
        else:
            assert op.step.source == self.keys, "the schedule says other keys than there are"
            if op.do is Do.KEY:
                self.add(op.step, self.keys)
            else:
                (self.attended if op.do is Do.ATTEND else self.queries).append(op.step)
        return True

    def add(self, step, keys):
        assert step.source == keys and step.place == self.place
        source, count = self.moving or (keys, Counter())
        assert source == keys, "carries the gradient of other keys"
        self.moving = (keys, count + Counter([self.place]))


def run(ops, inner, outer):
    """All ranks of a schedule, to their end."""
    world = inner * outer
    places = [place_of(rank, world, inner) for rank in range(world)]
    assert sorted(places) == list(range(world))
    ranks = [Rank(rank, places[rank], ops(rank, inner, outer)) for rank in range(world)]
    mail = defaultdict(deque)
    while any(rank.ops for rank in ranks):
        moved = [rank.step(mail, inner, outer) for rank in ranks if rank.ops]
        assert any(moved), "every rank waits"
    assert not any(mail.values()), "something was sent that nobody took"
    assert not any(left for rank in ranks for left in rank.sent.values())
    return ranks


def check_steps(steps, place, world):
    assert [step.source for step in steps][0] == place
    assert sorted(step.source for step in steps) == list(range(world))
    assert [step.first for step in steps] == [True] + [False] * (world - 1)
    assert [step.last for step in steps] == [False] * (world - 1) + [True]
    for step in steps:
        assert step.place == place
        assert (step.source + step.distance) % world == place
        assert step.wrap == (step.source > place)


@every_shape
def test_forward_meets_every_key_once(inner, outer):
    for rank in run(forward_ops, inner, outer):
        check_steps(rank.attended, rank.place, inner * outer)


@every_shape
def test_backward_brings_every_gradient_home(inner, outer):
    world = inner * outer
    for rank in run(backward_ops, inner, outer):
        check_steps(rank.queries, rank.place, world)
        source, count = rank.moving
        assert source == rank.place and count == Counter(range(world))


@pytest.mark.parametrize(("inner", "outer"), [shape for shape in SHAPES if 1 not in shape])
def test_the_outer_ring_has_a_whole_round(inner, outer):
    """What goes over the outer link is computed upon for a round, before it is waited for."""
    computing = {Do.ATTEND, Do.QUERY, Do.KEY, Do.OWN_KEY}
    for ops in (forward_ops, backward_ops):
        for rank in range(inner * outer):
            sent = {}
            for op in ops(rank, inner, outer):
                if op.link is Link.OUTER and op.do in (Do.SEND_VALUES, Do.SEND_GRADIENTS):
                    sent[op.do.name.split("_")[1]] = 0
                elif op.link is Link.OUTER:
                    least = inner
                    if op.do is Do.ADD_GRADIENTS and not any(
                        later.do in computing for later in list_after(ops(rank, inner, outer), op)
                    ):
                        least = 1  # the last hop has only the own keys' gradient
                    assert sent[op.do.name.split("_")[1]] >= least
                elif op.do in computing:
                    sent = {kind: count + 1 for kind, count in sent.items()}


def list_after(ops, op):
    """The operations after the last that equals ``op``."""
    place = max(i for i, other in enumerate(ops) if other == op)
    return ops[place + 1 :]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_a_flat_ring_is_a_ring_of_one_node(world):
    for rank in range(world):
        assert flat_ring(rank, world) == ring_steps(rank, world, 1) == ring_steps(rank, 1, world)
        for earlier, later in zip(flat_ring(rank, world), flat_ring(rank, world)[1:]):
            # What a rank has now, the next rank has one step later.
            following = flat_ring((rank + 1) % world, world)
            assert following[later.distance].source == earlier.source


@every_shape
def test_all_moves_name_their_link(inner, outer):
    for ops in (forward_ops, backward_ops):
        for op in ops(0, inner, outer):
            assert (op.link is not None) == (op.do in MOVES)


@every_shape
def test_the_ranks_of_a_node_have_keys_of_one_distance_in_each_step(inner, outer):
    """So they have the same work. Nodes may differ by a node: those that have gone round."""
    steps = [ring_steps(rank, inner, outer) for rank in range(inner * outer)]
    for together in zip(*steps):
        for x in range(outer):
            node = together[x * inner : (x + 1) * inner]
            assert len({step.distance for step in node}) == 1
