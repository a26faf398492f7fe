# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Placement of samples: complete, deterministic, near the optimum that all placements of small cases have."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.balance.placement import LEVELS, megatron_order, place

SIZES = [(2, 2, 1), (2, 3, 1), (3, 2, 1), (2, 1, 3), (2, 2, 2), (4, 2, 1), (1, 4, 2), (6, 1, 1)]
"""dp, M, mbs: at most 8 samples."""


def long_tailed(number: int, seed: int) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(seed).normal(8, 1.5, number)).clip(16, 131072)
    return lengths * (lengths + 1) / 2


def by_rank(placed: np.ndarray) -> np.ndarray:
    """The slowest rank's cost, of placed costs ``[..., M, dp, mbs]``."""
    return placed.sum((-3, -1)).max(-1)


def by_microbatch(placed: np.ndarray) -> np.ndarray:
    """The costs of the slowest rank of each micro-batch."""
    return placed.sum(-1).max(-1).sum(-1)


def best(costs: np.ndarray, shape: tuple[int, int, int], measure) -> float:
    """The least of all placements."""
    every = np.array(list(permutations(range(len(costs)))))
    return measure(costs[every.reshape(-1, *shape)]).min()


@pytest.mark.parametrize("per_microbatch", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (64, 16, 4), (8, 128, 1), (128, 1, 8), (5, 7, 3)])
def test_each_sample_is_placed_once(sizes, per_microbatch):
    dp, m, mbs = sizes
    costs = long_tailed(dp * m * mbs, 1)
    placed = place(costs, *sizes, per_microbatch=per_microbatch)
    assert placed.shape == (m, dp, mbs) and placed.dtype == np.int64
    assert sorted(placed.ravel()) == list(range(len(costs)))
    again = place(list(costs), *sizes, per_microbatch=per_microbatch)
    assert np.array_equal(placed, again)
    sums = costs[placed].sum(2)
    rounding = 2 * mbs * costs.max() / LEVELS
    if not per_microbatch:
        assert (sums[:-1] + rounding >= sums[1:]).all(), "micro-batches descend"


@pytest.mark.parametrize("sizes", SIZES[:5])
def test_near_the_best_of_all_placements(sizes):
    dp, m, mbs = sizes
    shape = m, dp, mbs
    ratios = []
    for seed in range(6):
        costs = long_tailed(dp * m * mbs, seed)
        found = by_rank(costs[place(costs, *sizes, per_microbatch=False)])
        ratios.append(found / best(costs, shape, by_rank))
    assert max(ratios) <= 1.1 and np.mean(ratios) <= 1.02


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 3, 1), (3, 2, 1)])
def test_micro_batches_of_one_sample_have_the_least_maxima(sizes):
    dp, m, mbs = sizes
    for seed in range(6):
        costs = long_tailed(dp * m * mbs, seed)
        found = by_microbatch(costs[place(costs, *sizes, per_microbatch=True)])
        least = best(costs, (m, dp, mbs), by_microbatch)
        assert found == pytest.approx(least, rel=len(costs) / LEVELS)


@pytest.mark.parametrize("sizes", [(2, 3, 1), (2, 4, 1), (2, 2, 2)])
def test_micro_batches_that_wait_for_each_other(sizes):
    """Near the least sum of maxima; and of the placements with that, near the one with the least sums."""
    dp, m, mbs = sizes
    shape = m, dp, mbs
    maxima, sums = [], []
    for seed in range(6):
        costs = long_tailed(dp * m * mbs, seed)
        every = costs[np.array(list(permutations(range(len(costs))))).reshape(-1, *shape)]
        each = by_microbatch(every)
        placed = costs[place(costs, *sizes, per_microbatch=True)]
        maxima.append(by_microbatch(placed) / each.min())
        sums.append(
            by_rank(placed) / by_rank(every[each <= by_microbatch(placed) * (1 + 1e-3)]).min()
        )
    assert max(maxima) <= 1.03 and np.mean(sums) <= 1.02 and max(sums) <= 1.05


def test_swaps_mend_what_the_longest_first_leaves():
    """A rank is full when the last two samples come: 3 + 2 + 2 and 3 + 2 + 0 before a swap."""
    costs = np.array([3.0, 3, 2, 2, 2, 0])
    assert costs[place(costs, 2, 3, 1, per_microbatch=False)].sum((0, 2)) == pytest.approx([6, 6])
    for dp, m in ((4, 80), (4, 40)):  # more and fewer samples than swaps compare at once
        costs = np.exp(np.random.default_rng(0).normal(0, 0.5, dp * m))
        sums = costs[place(costs, dp, m, 1, per_microbatch=False)].sum((0, 2))
        assert sums.max() / sums.mean() < 1 + 1e-4


def test_sums_meet_where_samples_are_many():
    costs = long_tailed(1024, 3).clip(None, 1e8)
    for per_microbatch in (False, True):
        sums = costs[place(costs, 8, 128, 1, per_microbatch=per_microbatch)].sum((0, 2))
        assert sums.max() / sums.mean() < 1.001
    off = costs[megatron_order(8, 128, 1)].sum((0, 2))
    assert off.max() / off.mean() > 1.02


def test_a_rank_with_one_giant_gets_the_smallest():
    costs = np.array([100.0, 1, 2, 3, 4, 5, 6, 7])
    placed = place(costs, 2, 4, 1, per_microbatch=False)
    giant = [rank for rank in range(2) if 0 in placed[:, rank]][0]
    assert sorted(costs[placed[:, giant, 0]]) == [1, 2, 3, 100]


def test_the_last_bits_of_costs_decide_nothing():
    """Logarithms differ in the last bit from one processor to the next."""
    costs = np.repeat(long_tailed(64, 5), 2)
    noise = 1 + 1e-15 * np.random.default_rng(0).integers(-1, 2, 128)
    for per_microbatch in (False, True):
        ours = place(costs, 8, 8, 2, per_microbatch=per_microbatch)
        assert np.array_equal(ours, place(costs * noise, 8, 8, 2, per_microbatch=per_microbatch))


def test_equal_costs_and_no_costs():
    for costs in (np.ones(24), np.zeros(24)):
        placed = place(costs, 4, 3, 2, per_microbatch=False)
        assert sorted(placed.ravel()) == list(range(24))


def test_megatron_order():
    """Micro-batch k of rank r begins at k * dp * mbs + r * mbs, as in MegatronPretrainingSampler."""
    order = megatron_order(3, 2, 2)
    assert order.shape == (2, 3, 2)
    assert all(
        order[k, r, j] == k * 6 + r * 2 + j for k in range(2) for r in range(3) for j in range(2)
    )


@pytest.mark.parametrize(
    ("costs", "sizes", "named"),
    [
        ([1.0, float("nan")], (2, 1, 1), "the cost of sample 1 of the global batch is nan"),
        ([float("inf"), 1.0], (2, 1, 1), "the cost of sample 0 of the global batch is inf"),
        ([1.0, -1.0], (2, 1, 1), "the cost of sample 1 of the global batch is -1.0"),
        ([1.0], (2, 1, 1), "give one for each of the 2 = 1 x 2 x 1 samples"),
        ([1.0], (0, 1, 1), "dp_size is 0: use 1 or more"),
        ([1.0], (1, 1.0, 1), "num_microbatches is 1.0"),
    ],
)
def test_what_cannot_be_placed(costs, sizes, named):
    with pytest.raises(ConfigError) as raised:
        place(costs, *sizes, per_microbatch=False)
    assert named in str(raised.value)
