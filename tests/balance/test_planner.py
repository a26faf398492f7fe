# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plans of steps, made ahead: what they place, which estimates they use whatever the timing, and when."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.balance.plan import PlanSizes, Samples, plan_step
from megatron_mtraining.balance.planner import Planner, lag_of

SIZES = PlanSizes(2, 2, 2)
SAMPLES = 8 * 20 + 5


def look_up(numbers: np.ndarray) -> Samples:
    """Every other sample is of dataset 1; lengths repeat."""
    longest = 1000 + 700 * (numbers % 5)
    return Samples(numbers, (numbers % 2).astype(np.int32), longest, longest * (longest + 1) / 2)


def predict(pairs, density):
    return pairs * density


def make(batching="cost", lag=3, first=(0, 0), look_up=look_up, **others) -> Planner:
    return Planner(*first, SAMPLES, SIZES, batching, look_up, predict, lag=lag, **others)


def observed(plan) -> tuple[np.ndarray, np.ndarray]:
    """Dataset 1 is denser; densities drift with the step, so that each step's estimates differ."""
    density = np.where(plan.kinds[..., 0] == 1, 0.5, 0.05).mean(-1) * (1 + 0.01 * plan.step)
    return density, np.full(density.shape, 0.9)


def run(planner: Planner, steps: int) -> list:
    """Steps as a data loader that reads nothing ahead takes them, and their observations one step later."""
    plans = []
    for step in range(steps):
        plans.append(planner.plan_of(step))
        if step:
            planner.observe(step - 1, *observed(plans[-2]))
    return plans


def orders(plans) -> list:
    return [plan.order.tolist() for plan in plans]


def test_each_mode_evens_out_its_own_cost():
    """Dataset 1 is ten times as dense as dataset 0."""
    random, sizes = np.random.default_rng(0), PlanSizes(4, 4, 2)
    longest = np.exp(random.normal(9, 1, 32)).clip(3000, 12000).astype(np.int64)
    pairs = longest * (longest + 1) / 2
    samples = Samples(
        np.arange(100, 132), random.integers(0, 2, 32).astype(np.int32), longest, pairs
    )
    estimates = DensityEstimates()
    estimates.observe(np.array([[[0, 13]], [[1, 13]]]), [0.05, 0.5], [0.99, 0.9])
    uneven = {}
    for mode in ("off", "length", "cost"):
        plan = plan_step(7, samples, sizes, mode, estimates, predict)
        assert plan.step == 7 and sorted(plan.order.ravel()) == samples.numbers.tolist()
        at = plan.order - 100
        assert mode != "off" or (plan.order.ravel() == samples.numbers).all()
        assert np.array_equal(plan.pairs, pairs[at])
        assert np.array_equal(plan.kinds[..., 0], samples.datasets[at])
        density = np.where(samples.datasets == 1, 0.5, 0.05)[at]
        assert plan.predicted_ms == pytest.approx(predict(plan.pairs, density).sum(-1))
        assert plan.density == pytest.approx((density * plan.pairs).sum(-1) / plan.pairs.sum(-1))
        sums = plan.pairs.sum((0, 2)), plan.predicted_ms.sum(0)
        uneven[mode] = [each.max() / each.mean() for each in sums]
    assert min(uneven, key=lambda mode: uneven[mode][0]) == "length"
    assert uneven["cost"][1] < 1.1 < uneven["length"][1] < uneven["off"][1]
    alone = plan_step(7, samples, sizes, "length", estimates, None)
    assert np.isnan(alone.predicted_ms).all() and np.isfinite(alone.density).all()
    with pytest.raises(
        ConfigError, match="there are 32 samples: a global batch has 16 = 4 x 2 x 2"
    ):
        plan_step(7, samples, PlanSizes(2, 4, 2), "cost", estimates, predict)


def test_lag():
    """With no workers step n is asked for in step n; its thread began in step n - 1, after the observation
    of step n - 3."""
    assert lag_of(0, 0, 4) == lag_of(0, 2, 1) == 3
    assert lag_of(2, 2, 4) == 4 and lag_of(2, 2, 3) == 5 and lag_of(2, 2, 1) == 7


def test_each_plan_uses_the_estimates_of_a_given_earlier_step():
    plans = run(make(), 12)
    for step, plan in enumerate(plans):
        again = DensityEstimates()
        for each in plans[: max(step - 2, 0)]:
            again.observe(each.kinds, *observed(each), None, each.pairs)
        weights = plan.pairs / plan.pairs.sum(-1, keepdims=True)
        expected = (again.density(plan.kinds) * weights).sum(-1)
        assert plan.density == pytest.approx(expected, rel=1e-12)
        assert sorted(plan.order.ravel()) == list(range(8 * step, 8 * step + 8))
    assert plans[11].density != pytest.approx(plans[1].density, rel=0.1)
    plan = make(first=(7, 19)).plan_of(8)
    assert sorted(plan.order.ravel()) == list(range(27, 35)) and plan.step == 8


def test_timing_changes_no_plan():
    """A slow thread, and a loader that asks early, on other ranks."""
    gate = threading.Event()

    def slow(numbers):
        gate.wait(5)
        return look_up(numbers)

    expected = orders(run(make(), 12))
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    assert orders(run(make(look_up=slow), 12)) == expected
    early = make()
    for step in range(3):
        early.plan_of(step)
    assert orders(run(early, 12)) == expected
    timer.join()


def test_the_end_of_the_data():
    planner = make()
    assert planner.end_step == 20 and planner.samples_from(20) == 160
    assert planner.plan_of(19) is not None and planner.plan_of(20) is None
    planner.observe(20, [[0.5]], [[0.5]])
    assert planner.state()["kinds"] == []
    assert Planner(0, 0, 5, SIZES, "cost", look_up, predict).plan_of(0) is None


def test_a_run_goes_on_from_the_state_of_its_estimates():
    planner = make()
    run(planner, 8)
    estimates = DensityEstimates()
    estimates.restore(planner.state())
    on = Planner(8, 64, SAMPLES, PlanSizes(4, 2, 1), "cost", look_up, predict, estimates)
    assert on.state() == planner.state() and on.knows(8)
    assert sorted(on.plan_of(8).order.ravel()) == list(range(64, 72))
    # What is planned from priors alone is known as such.
    assert [make(first=(5, 40)).knows(step) for step in (7, 8)] == [False, True]


@pytest.mark.parametrize("lag, ahead", [(3, 0), (4, 1)], ids=["no workers", "workers"])
@pytest.mark.parametrize("skipped", [1, 3, 10, 40])
def test_all_ranks_have_one_plan_after_skipped_steps(lag, ahead, skipped):
    """Megatron reads the samples of skipped steps, and ends none of them. The first rank asks for the plan of
    the next step at the end of a step, before it reads what a logged step has observed."""

    def observe(planner, step, plan):
        by_kind = np.random.default_rng(step).uniform(0.05, 0.9, (2, 20))
        density = by_kind[plan.kinds[..., 0], plan.kinds[..., 1]].mean(-1)
        planner.observe(step, density, np.full(density.shape, 0.9))

    of_ranks = []
    for is_first in (True, False):
        planner = Planner(0, 0, 8 * 80, SIZES, "cost", look_up, predict, lag=lag)
        plans = {step: planner.plan_of(step) for step in range(ahead)}
        unread = None
        for step in range(70):
            plans[step + ahead] = planner.plan_of(step + ahead)
            if 20 <= step < 20 + skipped:
                continue
            if unread is not None:
                observe(planner, unread, plans[unread])
            if is_first:
                planner.begun(step + 1)
            unread = step
            if step == 20 + skipped:  # logged
                observe(planner, step, plans[step])
                unread = None
        of_ranks.append(orders(plans[step] for step in range(70)))
    assert of_ranks[0] == of_ranks[1]
    with pytest.raises(ConfigError, match="the plan of step 3 is not kept any more"):
        planner.plan_of(3)


def test_what_goes_wrong_is_told():
    planner = make()
    for step in range(3):
        density, recall = observed(planner.plan_of(step))
        density[0, 1] = np.nan
        planner.observe(step, density, recall)
    assert np.isfinite(planner.plan_of(5).predicted_ms).all()

    def broken(numbers):
        raise ConfigError("the index is damaged")

    with pytest.raises(ConfigError, match="the index is damaged"):
        make(look_up=broken).plan_of(0)
