# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plans made ahead: which estimates they use, whatever the timing, and what they wait for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.balance.plan import PlanSizes, Samples
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


def run(planner: Planner, steps: int, first: int = 0) -> list:
    """Steps as a data loader that reads nothing ahead takes them, and their observations one step later."""
    plans = []
    for step in range(first, first + steps):
        plans.append(planner.plan_of(step))
        if step > first:
            planner.observe(step - 1, *observed(plans[-2]))
    return plans


def test_lag():
    """With no workers step n is asked for in step n; its thread began in step n - 1, after the observation
    of step n - 3."""
    assert lag_of(0, 0, 4) == lag_of(0, 2, 1) == 3
    assert lag_of(2, 2, 4) == 4 and lag_of(2, 2, 3) == 5 and lag_of(2, 2, 1) == 7


def test_each_plan_uses_the_estimates_of_a_given_earlier_step():
    planner = make()
    plans = run(planner, 12)
    estimates, known = DensityEstimates(), []
    for step, plan in enumerate(plans):
        known.append(estimates.density(plan.kinds))
        estimates.observe(plan.kinds, *observed(plan), None, plan.pairs)
        used = DensityEstimates().density(plan.kinds) if step < 3 else None
        if step >= 3:
            again = DensityEstimates()
            for each in plans[: step - 2]:
                again.observe(each.kinds, *observed(each), None, each.pairs)
            used = again.density(plan.kinds)
        weights = plan.pairs / plan.pairs.sum(-1, keepdims=True)
        assert plan.density == pytest.approx((used * weights).sum(-1), rel=1e-12)
    assert plans[11].density != pytest.approx(plans[1].density, rel=0.1)


def test_timing_changes_no_plan():
    """A slow thread, and a loader that asks early, on other ranks."""
    gate = threading.Event()

    def slow(numbers):
        gate.wait(5)
        return look_up(numbers)

    expected = [plan.fingerprint for plan in run(make(), 12)]
    planner = make(look_up=slow)
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    assert [plan.fingerprint for plan in run(planner, 12)] == expected
    early = make()
    for step in range(3):
        early.plan_of(step)
    assert [plan.fingerprint for plan in run(early, 12)] == expected
    timer.join()


def test_batches_have_the_samples_of_megatrons_order():
    for batching in ("off", "length", "cost"):
        for step, plan in enumerate(run(make(batching, first=(0, 0)), 6)):
            assert sorted(plan.order.ravel()) == list(range(8 * step, 8 * step + 8))
    plan = make(first=(7, 19)).plan_of(8)
    assert sorted(plan.order.ravel()) == list(range(27, 35)) and plan.step == 8


def test_the_end_of_the_data():
    planner = make()
    assert planner.end_step == 20 and planner.samples_from(20) == 160
    assert planner.plan_of(19) is not None and planner.plan_of(20) is None
    planner.observe(20, [[0.5]], [[0.5]])
    assert planner.state()["kinds"] == []
    few = Planner(0, 0, 5, SIZES, "cost", look_up, predict)
    assert few.end_step == 0 and few.plan_of(0) is None


def test_a_run_goes_on_from_the_state_of_its_estimates():
    planner = make()
    plans = run(planner, 8)
    estimates = DensityEstimates()
    estimates.restore(planner.state())
    sizes = PlanSizes(4, 2, 1)
    on = Planner(8, 64, SAMPLES, sizes, "cost", look_up, predict, estimates)
    plan = on.plan_of(8)
    assert plan.order.shape == (2, 4, 1) and sorted(plan.order.ravel()) == list(range(64, 72))
    kinds = plans[7].kinds
    assert np.array_equal(on.estimates.density(kinds), planner.estimates.density(kinds))


def test_steps_without_observations_are_planned_by_the_latest():
    """Megatron skips some on request."""
    planner = make()
    plans = [planner.plan_of(step) for step in range(12)]
    assert len({plan.fingerprint for plan in plans}) == 12
    planner.observe(11, *observed(plans[11]))
    assert planner.plan_of(12).density != pytest.approx(plans[11].density, rel=0.1)
    with pytest.raises(ConfigError, match="the plan of step 3 is not kept any more"):
        planner.plan_of(3)


@pytest.mark.parametrize("lag, ahead", [(3, 0), (4, 1)], ids=["no workers", "workers"])
@pytest.mark.parametrize("skipped", [1, 2, 3, 10, 11, 40])
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
        of_ranks.append([plans[step].order.tolist() for step in range(70)])
    assert of_ranks[0] == of_ranks[1]


def test_no_number_is_told_once():
    said = []
    planner = make(warn=said.append)
    for step in range(3):
        density, recall = observed(planner.plan_of(step))
        density[0, 1] = np.nan
        planner.observe(step, density, recall)
    assert planner.estimates.ignored == 3 and len(said) == 1
    assert "density or recall of 1 of 4 micro-batches of step 1 is not finite" in said[0]
    assert np.isfinite(planner.plan_of(5).predicted_ms).all()


def test_what_fails_in_the_thread_is_raised_where_the_plan_is_asked_for():
    def broken(numbers):
        raise ConfigError("the index is damaged")

    with pytest.raises(ConfigError, match="the index is damaged"):
        make(look_up=broken).plan_of(0)


def test_what_is_planned_from_priors_alone():
    assert [make().knows(step) for step in (0, 2, 3)] == [False, False, True]
    assert [make(first=(5, 40)).knows(step) for step in (7, 8)] == [False, True]
    before = make()
    run(before, 3)
    restored = DensityEstimates()
    restored.restore(before.state())
    assert make(first=(5, 40), estimates=restored).knows(5)
