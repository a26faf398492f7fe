# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The plan of a step: the same samples as Megatron's, placed by the costs that the mode looks at."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.balance.placement import megatron_order
from megatron_mtraining.balance.plan import PlanSizes, Samples, plan_step

SIZES = PlanSizes(4, 4, 2)


def predict(pairs, density):
    return 1.0 + pairs * density * 1e-6


@pytest.fixture
def samples() -> Samples:
    random = np.random.default_rng(0)
    longest = np.exp(random.normal(9, 1, SIZES.samples)).clip(3000, 12000).astype(np.int64)
    datasets = random.integers(0, 2, SIZES.samples).astype(np.int32)
    pairs = longest * (longest + 1) / 2
    return Samples(np.arange(100, 100 + SIZES.samples), datasets, longest, pairs)


@pytest.fixture
def estimates() -> DensityEstimates:
    """Dataset 1 is ten times as dense as dataset 0."""
    found = DensityEstimates()
    kinds = np.array([[[0, 13]], [[1, 13]]])
    found.observe(kinds, [0.05, 0.5], [0.99, 0.9])
    return found


def make(samples, estimates, batching, sizes=SIZES):
    return plan_step(7, samples, sizes, batching, estimates, predict)


@pytest.mark.parametrize("batching", ["off", "length", "cost"])
def test_a_plan(samples, estimates, batching):
    plan = make(samples, estimates, batching)
    assert plan.step == 7 and sorted(plan.order.ravel()) == samples.numbers.tolist()
    at = plan.order - 100
    assert np.array_equal(plan.pairs, samples.pairs[at])
    assert np.array_equal(plan.kinds[..., 0], samples.datasets[at])
    density = np.where(samples.datasets == 1, 0.5, 0.05)[at]
    assert plan.predicted_ms == pytest.approx(predict(plan.pairs, density).sum(-1))
    assert plan.density == pytest.approx((density * plan.pairs).sum(-1) / plan.pairs.sum(-1))
    assert plan.recall.min() >= 0.899 and plan.recall.shape == (4, 4)
    assert plan.fingerprint == make(samples, estimates, batching).fingerprint < 2**24


def test_each_mode_evens_out_its_own_cost(samples, estimates):
    def uneven(sums):
        return sums.max() / sums.mean()

    plans = {mode: make(samples, estimates, mode) for mode in ("off", "length", "cost")}
    pairs = {mode: uneven(plan.pairs.sum((0, 2))) for mode, plan in plans.items()}
    times = {mode: uneven(plan.predicted_ms.sum(0)) for mode, plan in plans.items()}
    assert min(pairs, key=pairs.get) == "length" and min(times, key=times.get) == "cost"
    assert times["cost"] < 1.1 < times["length"]
    assert np.array_equal(plans["off"].order, megatron_order(4, 4, 2) + 100)
    assert len({plan.fingerprint for plan in plans.values()}) == 3


def test_what_cannot_be_planned(samples, estimates):
    with pytest.raises(ConfigError, match="batching is 'time'"):
        make(samples, estimates, "time")
    with pytest.raises(
        ConfigError, match="there are 32 samples: a global batch has 16 = 4 x 2 x 2"
    ):
        make(samples, estimates, "cost", PlanSizes(2, 4, 2))
