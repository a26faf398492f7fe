# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Schedules of rings, run on sets in place of tensors: what they do, and that no rank waits for ever."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import partial

import pytest

from megatron_mtraining.kernels.types import BackwardPath
from megatron_mtraining.layout import GATHERED, block_at, inner_size
from megatron_mtraining.ring.schedule import (
    Action,
    Link,
    RingStep,
    backward_ops,
    forward_ops,
    rounds,
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
two_kernels = partial(backward_ops, path=BackwardPath.TWO_KERNELS, columns=True)
one_pass = partial(backward_ops, path=BackwardPath.ONE_PASS, columns=False)
MOVES = {Action.SEND_KV, Action.GATHER_KV, Action.SEND_DKV, Action.RECEIVE_DKV, Action.ADD_DKV}


class Rank:
    """One rank that runs a schedule on names: keys are their rank, gradients count who has added.

    A round's keys are what the ranks of the node have of their own in it, which they gather.
    """

    def __init__(self, rank, ops):
        self.rank, self.ops = rank, deque(ops)
        self.own = [rank]  # in each round so far, and in the next when it has come
        self.turn = 0
        self.moving, self.home = None, None
        self.attended, self.queries, self.parts = [], [], []
        self.columns, self.finished = 0, False
        self.sent = {}

    def neighbour(self, inner, outer, link):
        x, y = divmod(self.rank, inner)
        if link is Link.INNER:
            return x * inner + (y + 1) % inner
        return (x + 1) % outer * inner + y

    def keys(self, ranks, inner):
        """What is gathered in this round: None until every rank of the node has its own."""
        node = self.rank // inner * inner
        owns = [ranks[rank].own for rank in range(node, node + inner)]
        return (
            None if any(len(own) <= self.turn for own in owns) else [own[self.turn] for own in owns]
        )

    def step(self, mail, ranks, inner, outer):
        """Run the next operation, unless it waits for something: then False."""
        op = self.ops[0]
        values = op.action in (Action.SEND_KV, Action.GATHER_KV)
        box = mail[self.rank, values, op.link]
        if op.action in (Action.GATHER_KV, Action.RECEIVE_DKV, Action.ADD_DKV):
            # A rank takes from a link what it has posted for: as often as it has sent itself.
            self.sent[values, op.link] -= 1
            assert self.sent[values, op.link] == 0, "one transfer of a kind and link at a time"
            if not box:
                self.sent[values, op.link] += 1
                return False
        if op.action in (Action.COMPUTE_OUT, Action.COMPUTE_DQ, Action.COMPUTE_DKV):
            keys = self.keys(ranks, inner)
            if keys is None:
                return False
        self.ops.popleft()
        if op.action in (Action.SEND_KV, Action.SEND_DKV):
            what = self.own[self.turn] if values else self.moving
            assert what is not None
            mail[self.neighbour(inner, outer, op.link), values, op.link].append(what)
            self.sent[values, op.link] = self.sent.get((values, op.link), 0) + 1
            assert self.sent[values, op.link] == 1, "the transfer before has not been taken"
            if not values:
                self.moving = None
        elif op.action is Action.GATHER_KV:
            self.own.append(box.popleft())
            self.turn += 1
        elif op.action is Action.RECEIVE_DKV:
            assert self.moving is None, "a gradient would be lost"
            self.moving = box.popleft()
        elif op.action is Action.ADD_DKV:
            source, more = box.popleft()
            assert self.moving[0] == source
            self.moving = (source, self.moving[1] + more)
        elif op.action is Action.STASH_DKV:
            assert self.home is None
            self.home, self.moving = self.moving, None
        elif op.action is Action.RESTORE_DKV:
            assert self.moving is None
            self.home, self.moving = None, self.home
        elif op.action is Action.COMPUTE_COLUMN_GRADS:
            self.columns += 1
        elif op.action is Action.FINISH_DQ:
            assert not self.ops, "all gradients have been added"
            self.finished = True
        elif op.action is Action.COMPUTE_OWN_DKV:
            self.add(op.ring_step, self.rank)
        elif op.action is Action.COMPUTE_DKV:
            self.add(op.ring_step, keys[op.slot])
        else:
            assert list(op.round.sources) == keys, "the schedule says other keys than there are"
            if op.action is Action.COMPUTE_OUT:
                self.attended.append(op.round)
            else:
                part, parts = op.head_part
                self.parts = [*self.parts, part] if part else [part]
                if part == parts - 1:
                    assert self.parts == list(range(parts))
                    self.queries.append(op.round)
        return True

    def add(self, step, keys):
        assert step.source == keys and step.rank == self.rank
        source, count = self.moving or (keys, Counter())
        assert source == keys, "carries the gradient of other keys"
        self.moving = (keys, count + Counter([self.rank]))


def run(ops, inner, outer):
    """All ranks of a schedule, to their end."""
    world = inner * outer
    ranks = [Rank(rank, ops(rank, inner, outer)) for rank in range(world)]
    mail = defaultdict(deque)
    while any(rank.ops for rank in ranks):
        moved = [rank.step(mail, ranks, inner, outer) for rank in ranks if rank.ops]
        assert any(moved), "every rank waits"
    assert not any(mail.values()), "something was sent that nobody took"
    assert not any(left for rank in ranks for left in rank.sent.values())
    return ranks


def check_rounds(found, rank, inner, outer):
    assert [this.round_index for this in found] == list(range(outer))
    assert rank in found[0].sources
    assert sorted(source for this in found for source in this.sources) == list(range(inner * outer))
    assert [this.first for this in found] == [True] + [False] * (outer - 1)
    assert [this.last for this in found] == [False] * (outer - 1) + [True]
    assert all(this.rank == rank for this in found)


@every_shape
def test_forward_meets_every_key_once(inner, outer):
    for rank in run(forward_ops, inner, outer):
        check_rounds(rank.attended, rank.rank, inner, outer)


@every_shape
def test_backward_brings_every_gradient_home(inner, outer):
    world = inner * outer
    for rank in run(two_kernels, inner, outer):
        check_rounds(rank.queries, rank.rank, inner, outer)
        assert rank.columns == 1 and not rank.finished
        source, count = rank.moving
        assert source == rank.rank and count == Counter(range(world))


@every_shape
def test_one_pass_lists_no_kernel_of_the_queries(inner, outer):
    """All else is as in two kernels."""
    for rank in run(one_pass, inner, outer):
        assert not rank.queries and not rank.columns and rank.finished
        source, count = rank.moving
        assert source == rank.rank and count == Counter(range(inner * outer))


@every_shape
def test_keys_of_a_round_are_found_by_their_distance(inner, outer):
    """Of 4 blocks a rank: which key blocks a query block meets in each round, and where they lie."""
    world = inner * outer
    for rank in range(world):
        for this in rounds(rank, inner, outer):
            keys = {
                block_at(c, source, world, inner): (c, source)
                for c in range(4)
                for source in this.sources
            }
            numbered = sorted(keys)  # of a node, in the order of the sequence
            for a in range(4):
                block = block_at(a, rank, world, inner)
                last = block_at(a, rank % inner, inner, inner) - this.wrap
                for e in range(last + 1):
                    assert block - numbered[last - e] == e * outer + this.round_index
                # Nothing of this residue is left out.
                assert block - (last + 1) * outer < this.round_index


@every_shape
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_query_blocks_of_a_key_block_are_found_by_their_distance(inner, outer, blocks):
    world = inner * outer
    for rank in range(world):
        for source in range(world):
            step = RingStep(rank, source, inner, outer)
            for c in range(blocks):
                key, found = block_at(c, source, world, inner), {}
                for residue, apart, wrap in step.block_distances(c % 2):
                    first = c + apart + 2 * wrap
                    for e, a in enumerate(range(first, blocks, 2)):
                        found[a] = e * 2 * world + residue
                seen = {a: block_at(a, rank, world, inner) - key for a in range(blocks)}
                assert found == {a: distance for a, distance in seen.items() if distance >= 0}


@pytest.mark.parametrize(("inner", "outer"), [shape for shape in SHAPES if 1 not in shape])
def test_the_outer_ring_has_a_whole_round(inner, outer):
    """What goes over the outer link is computed upon for a round, before it is waited for."""
    computing = {Action.COMPUTE_OUT, Action.COMPUTE_DQ, Action.COMPUTE_DKV}
    for ops in (forward_ops, two_kernels):
        for rank in range(inner * outer):
            sent = {}
            for op in ops(rank, inner, outer):
                kind = op.action.name.split("_")[-1]
                if op.action is Action.RESTORE_DKV:
                    break  # the last hop of gradients has only the own keys' gradient
                if op.link is Link.OUTER and op.action in (Action.SEND_KV, Action.SEND_DKV):
                    sent[kind] = 0
                elif op.link is Link.OUTER:
                    assert sent[kind] >= (1 if ops is forward_ops else 2 * inner - 2)
                elif op.action in computing:
                    sent = {kind: count + 1 for kind, count in sent.items()}


@pytest.mark.parametrize("inner", [2, 3, 8])
def test_each_hop_in_a_node_has_a_part_of_the_queries(inner):
    ops = two_kernels(0, inner, 1)
    for i, op in enumerate(ops):
        if op.action is Action.SEND_DKV:
            assert [later.action for later in ops[i + 1 : i + 3]] == [
                Action.COMPUTE_DQ,
                Action.RECEIVE_DKV,
            ]


def test_few_ranks_are_one_node():
    assert [inner_size(size) for size in range(1, GATHERED + 1)] == list(range(1, GATHERED + 1))
    assert [inner_size(size) for size in (9, 11, 12, 16, 32, 64)] == [3, 1, 6, 8, 8, 8]
    assert inner_size(12, 4) == 4


@every_shape
def test_all_moves_name_their_link(inner, outer):
    for ops in (forward_ops, two_kernels):
        for op in ops(0, inner, outer):
            assert (op.link is not None) == (op.action in MOVES)


@every_shape
def test_the_ranks_of_a_node_have_the_same_keys_in_each_round(inner, outer):
    """So they have the same work. Nodes may differ by a node: those that have gone round."""
    found = [rounds(rank, inner, outer) for rank in range(inner * outer)]
    for together in zip(*found):
        for x in range(outer):
            node = together[x * inner : (x + 1) * inner]
            assert len({(this.sources, this.wrap) for this in node}) == 1
