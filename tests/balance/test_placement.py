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


def every(costs: np.ndarray, dp: int, m: int, mbs: int) -> np.ndarray:
    """The costs of all placements."""
    return costs[np.array(list(permutations(range(len(costs))))).reshape(-1, m, dp, mbs)]


@pytest.mark.parametrize("sizes", [*SIZES, (64, 16, 4), (8, 128, 1), (128, 1, 8), (5, 7, 3)])
def test_each_sample_is_placed_once(sizes):
    dp, m, mbs = sizes
    costs = long_tailed(dp * m * mbs, 1)
    placed = place(costs, *sizes)
    assert placed.shape == (m, dp, mbs) and placed.dtype == np.int64
    assert sorted(placed.ravel()) == list(range(len(costs)))
    # The last bits, which differ from one processor to the next, decide nothing.
    noise = 1 + 1e-15 * np.random.default_rng(0).integers(-1, 2, len(costs))
    assert np.array_equal(placed, place(costs * noise, *sizes))
    sums = costs[placed].sum(2)
    assert (sums[:-1] + 2 * mbs * costs.max() / LEVELS >= sums[1:]).all(), "they descend"
    # So micro-batches that run at the same time cost about the same.
    by_microbatch = [costs[each].sum(-1).max(-1).sum() for each in (placed, megatron_order(*sizes))]
    assert by_microbatch[0] <= 1.1 * by_microbatch[1]


@pytest.mark.parametrize("sizes", SIZES[:5])
def test_near_the_best_of_all_placements(sizes):
    ratios = []
    for seed in range(6):
        costs = long_tailed(int(np.prod(sizes)), seed)
        found = by_rank(costs[place(costs, *sizes)])
        ratios.append(found / by_rank(every(costs, *sizes)).min())
    assert max(ratios) <= 1.1 and np.mean(ratios) <= 1.02


def test_swaps_mend_what_the_longest_first_leaves():
    """A rank is full when the last two samples come: 3 + 2 + 2 and 3 + 2 + 0 before a swap."""
    costs = np.array([3.0, 3, 2, 2, 2, 0])
    assert costs[place(costs, 2, 3, 1)].sum((0, 2)) == pytest.approx([6, 6])
    for dp, m in ((4, 80), (4, 40)):  # more and fewer samples than swaps compare at once
        costs = np.exp(np.random.default_rng(0).normal(0, 0.5, dp * m))
        sums = costs[place(costs, dp, m, 1)].sum((0, 2))
        assert sums.max() / sums.mean() < 1 + 1e-4


def test_equal_costs_and_no_costs():
    for costs in (np.ones(24), np.zeros(24)):
        assert sorted(place(costs, 4, 3, 2).ravel()) == list(range(24))


def test_megatron_order():
    """Micro-batch k of rank r begins at k * dp * mbs + r * mbs, as in MegatronPretrainingSampler."""
    assert megatron_order(3, 2, 2).tolist() == [
        [[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("costs", "sizes", "named"),
    [
        ([1.0, float("nan")], (2, 1, 1), "the cost of sample 1 of the global batch is nan"),
        ([1.0, -1.0], (2, 1, 1), "the cost of sample 1 of the global batch is -1.0"),
        ([1.0], (2, 1, 1), "give one for each of the 2 = 1 x 2 x 1 samples"),
    ],
)
def test_what_cannot_be_placed(costs, sizes, named):
    with pytest.raises(ConfigError, match=named):
        place(costs, *sizes)
