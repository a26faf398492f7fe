# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The counts of ``benchmarks/layer/balance.py`` against masks written out, and waits by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.layer import balance
from megatron_mtraining.pattern import build_index
from megatron_mtraining.ring import rounds

BLOCK = 128
SEQ = 16 * BLOCK
# inner, outer: one node, a plain ring, and nodes of several ranks
SHAPES = [(4, 1), (1, 4), (2, 4)]


@pytest.fixture(scope="module")
def chosen():
    """Distances and columns of three heads."""
    torch.manual_seed(3)
    distances, picked = balance.workloads.draw_pattern(SEQ, 3, 0.3, 40)
    picked[0, 1, 7:] = SEQ  # a head with fewer columns
    return distances, picked


@pytest.fixture(scope="module")
def drawn(chosen):
    """A pattern, and its mask: bool ``[heads, N, N]``."""
    index = build_index(*chosen, SEQ, BLOCK, 1)
    mask = torch.stack([index.token_mask(0, h) for h in range(3)]).numpy()
    return balance.pattern_of("drawn", SEQ, *chosen), mask


def pairs_between(mask, owner, world):
    """Kept pairs by (query rank, key rank), token by token."""
    kept = mask.sum(0)
    by_query = np.stack([kept[owner == rank].sum(0) for rank in range(world)])
    return np.stack([by_query[:, owner == rank].sum(1) for rank in range(world)], 1)


def owners(layout, world):
    """The rank of each token."""
    token = np.arange(SEQ)
    if layout == "contiguous":
        return token // (SEQ // world)
    chunk = token // (SEQ // (2 * world))
    return np.minimum(chunk, 2 * world - 1 - chunk)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_pairs_are_those_of_the_mask(drawn, layout):
    pattern, mask = drawn
    pairs = getattr(balance, layout)(pattern, 8)
    assert np.array_equal(pairs, pairs_between(mask, owners(layout, 8), 8))


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_striped_is_the_index_s_own_count(drawn, chosen, inner, outer):
    world = inner * outer
    index = build_index(*chosen, SEQ, BLOCK, world, inner)
    work = balance.striped_work(drawn[0], world, inner)["striped"]
    assert np.array_equal(work, index.work().sum((0, 1)).numpy())
    assert drawn[0].density() == pytest.approx(index.density().mean().item())
    for row in balance.count(drawn[0], world, [inner]):
        assert 1 <= row["worker_imbalance"] <= row["exposed"] <= row["step_imbalance"]


@pytest.mark.parametrize(("world", "inner"), [(8, 8), (256, 8)])
def test_no_pair_is_lost_at_512k(world, inner):
    """Sums of products by FFT are exact at the size they are made for: all layouts have as many pairs."""
    torch.manual_seed(0)
    drawn = balance.workloads.draw_unequal(balance.SEQ, 16, 0.03, 3500)
    pattern = balance.pattern_of("unequal", balance.SEQ, *drawn)
    pairs = balance.chunk_pairs(pattern, 1).sum()
    for name, work in balance.striped_work(pattern, world, inner).items():
        assert work.sum() == pairs, name


def test_makespan_by_hand():
    assert balance.makespan(np.full((4, 4), 5)) == 20
    # One node: nothing is waited for.
    assert balance.makespan(np.array([[3], [9]])) == 9
    # Rank 1 is late in its first round; the ranks beside it run a round ahead, then wait until 9.
    late = np.array([[1, 1, 1], [9, 1, 1], [1, 1, 1]])
    assert balance.makespan(late) == 9 + 1 + 1
    # Rank 2 needs in its round 1 what rank 1 has at its start: nothing to wait for. In its round 2, what
    # rank 1 has in its round 1, which starts at 9.
    slow_after = np.array([[1, 1, 1], [9, 1, 1], [1, 1, 4]])
    assert balance.makespan(slow_after) == 9 + 4
    # Nodes of 2: the next round's keys are sent when a round starts, so nodes of unlike rounds do not wait.
    nodes = np.array([[7, 1], [7, 1], [1, 7], [1, 7]])
    assert balance.makespan(nodes) == 8 < nodes.max(0).sum()


@pytest.mark.parametrize(("inner", "outer"), [*SHAPES, (3, 2)])
def test_sources_are_the_schedule_s(inner, outer):
    found = balance.sources(inner * outer, inner)
    for rank in range(inner * outer):
        for this in rounds(rank, inner, outer):
            assert found[rank, this.round_index].tolist() == list(this.sources)


def test_dense_attention_s_known_figures():
    """All pairs: zigzag is even to the pair, and so are nodes' blocks dealt there and back, of an even
    number of stripes; contiguous nearly twice the mean; dealt in one direction, off by a block a stripe."""
    distances = torch.ones(1, 1, 64, dtype=torch.bool)
    none = torch.zeros(1, 1, 0, dtype=torch.int64)
    pattern = balance.pattern_of("dense", 64 * BLOCK, distances, none)
    node, plain = (
        {row["layout"]: row["worker_imbalance"] for row in balance.count(pattern, 8, [inner])}
        for inner in (8, 1)
    )
    assert plain["zigzag"] == 1 == node["zigzag"] == node["striped"]
    assert plain["contiguous"] == pytest.approx(2 - 1 / 8, abs=1e-3)
    assert node["one direction"] == plain["striped"] == pytest.approx(1 + 7 / 64, abs=2e-3)


def test_drawn_patterns_are_as_they_say():
    torch.manual_seed(0)
    drawn = balance.workloads.draw_unequal(524288, 16, 0.03, 1000)
    assert balance.pattern_of("unequal", 524288, *drawn).density() == pytest.approx(0.03, rel=0.1)
    by_head = np.sort(drawn[0][0].sum(-1).numpy())
    assert by_head[-1] > 5 * by_head[0]
    local = balance.workloads.draw_local(65536, 2, 100, 10)[0]
    # Diagonals 256 to 355 cross block distances 2 and 3; the window has 0 and 1.
    assert local[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3]
