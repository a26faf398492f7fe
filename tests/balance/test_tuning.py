# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Multipliers of the price: nobody waits longer than before, and the bound is not crossed."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_mtraining.balance.tuning import FARTHEST, NEAR, Group, tune

ELASTICITY, PRICE = 0.7, 0.25


def plan_of(density, recall=None):
    density = np.asarray(density, np.float64)
    recall = np.full_like(density, 0.95) if recall is None else np.asarray(recall, np.float64)
    return SimpleNamespace(density=density, recall=recall)


def linear(pairs, rest=0.0):
    """Attention times of so many visible pairs, and what does not depend on density."""
    pairs = np.asarray(pairs, np.float64)
    return lambda density: rest + pairs * density


def tuned(
    density,
    pairs,
    max_mass=1.0,
    recall=None,
    pipeline=False,
    rest=0.0,
    elasticity=ELASTICITY,
    price=PRICE,
):
    return tune(
        plan_of(density, recall), elasticity, max_mass, price, latency=linear(pairs, rest), pipeline=pipeline
    )  # fmt: skip


@pytest.mark.parametrize("pipeline", [False, True])
def test_random_steps_stay_within_the_bound(pipeline):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        shape = rng.integers(1, 7), rng.integers(1, 9)
        density = np.exp(rng.uniform(np.log(0.005), 0, shape))
        recall = rng.uniform(0.7, 1, shape)
        latency = linear(np.exp(rng.uniform(0, 4, shape)), rng.uniform(0, 2))
        max_mass = float(rng.choice([0, 0.001, 0.01, 0.1, 1.0]))
        elasticity, price = rng.uniform(0.1, 2), np.exp(rng.uniform(-4, 1))
        given = plan_of(density, recall), elasticity, max_mass, price
        found = tune(*given, latency=latency, pipeline=pipeline)
        assert found.multipliers.dtype == np.float32 and found.multipliers.shape == density.shape
        m = found.multipliers.astype(np.float64)
        # What it says follows from the multipliers by the two models.
        after = density * m**-elasticity
        np.testing.assert_allclose(found.predicted_ms, latency(after), rtol=1e-9)
        moved = price * (1 + m) / 2 * (density - after)
        np.testing.assert_allclose(found.mass, moved, atol=1e-9)
        assert np.abs(moved).max() <= max_mass + 1e-6 and after.max() <= 1 + 1e-6
        assert (recall - moved >= -1e-6).all()
        assert m.max() <= FARTHEST * (1 + 1e-6) and m.min() >= (1 - 1e-6) / FARTHEST
        # Nobody waits longer, and nobody crosses the mean but to meet who cannot reach it.
        old, new = latency(density), found.predicted_ms
        if not pipeline:
            old, new = old.sum(0), new.sum(0)
        level = max(old.mean(), new.max())
        assert new.max() / new.mean() <= old.max() / old.mean() * (1 + 1e-5)
        assert np.array_equal(new, old) or (np.abs(old / old.mean() - 1) > NEAR).any()
        assert ((new >= old.mean() * (1 - 1e-5)) | (new >= old * (1 - 1e-6))).all()
        assert ((new <= level * (1 + 1e-5)) | (new <= old * (1 + 1e-6))).all()
        again = tune(*given, latency=latency, pipeline=pipeline)
        assert np.array_equal(again.multipliers, found.multipliers)


def test_equal_costs_and_small_differences_move_nothing():
    found = tuned(np.full((3, 4), 0.1), np.full((3, 4), 7.0))
    assert (found.multipliers == 1).all() and (found.mass == 0).all()
    assert (tuned([[0.1, 0.1]], [[10, 10.15]]).multipliers == 1).all()
    assert (tuned([[0.1, 0.1]], [[10, 10.25]]).multipliers != 1).all()


def test_times_meet_at_the_mean():
    found = tuned([[0.1, 0.1, 0.1]], [[10, 20, 30]])
    np.testing.assert_allclose(found.predicted_ms, 2, rtol=1e-4)
    low, middle, high = found.multipliers[0]
    assert low < 1 and middle == 1 and high > 1, "both directions"
    assert found.mass[0, 0] < 0 < found.mass[0, 2]
    # A rank has one multiplier for its micro-batches, unless a pipeline waits for each of them.
    found = tuned([[0.1, 0.1], [0.4, 0.1], [0.02, 0.1]], [[10, 20], [40, 60], [5, 30]])
    assert len(set(found.multipliers[:, 0].tolist())) == 1
    found = tuned(np.full((2, 2), 0.1), [[10, 30], [25, 15]], pipeline=True)
    np.testing.assert_allclose(found.predicted_ms, 2, rtol=1e-4)


def test_nobody_gives_up_mass_to_be_faster_than_the_slowest():
    """The slowest has no recall left: the others rise to it, instead of going down to the mean."""
    found = tuned([[0.1, 0.1, 0.1]], [[30, 20, 9]], recall=[[0.0, 0.99, 0.99]])
    assert found.multipliers[0, 0] == 1 and (found.multipliers[0, 1:] < 1).all()
    np.testing.assert_allclose(found.predicted_ms, 3, rtol=1e-4)


@pytest.mark.parametrize("cell", [np.nan, np.inf])
def test_what_is_no_number_is_left_alone(cell):
    density = np.full((2, 3), 0.1)
    density[1, 2] = cell
    found = tuned(density, [[10, 20, 30]] * 2)
    assert (found.multipliers[:, 2] == 1).all()
    np.testing.assert_allclose(found.predicted_ms[:, :2].sum(0), 3, rtol=1e-4)
    assert np.isfinite(found.multipliers).all() and np.isfinite(found.mass).all()
    for wrong in (
        dict(elasticity=np.nan),
        dict(elasticity=-1.0),
        dict(price=np.nan),
        dict(price=0.0),
    ):
        assert (tuned([[0.1, 0.2]], [[1, 1]], **wrong).multipliers == 1).all()
    assert tuned([[0.1, 0.1]], [[10, 30]], recall=[[np.nan] * 2]).multipliers[0, 1] > 1


def test_an_empty_rank_does_not_count():
    found = tuned([[0.1, 0.1, 0.1]], [[10, 0, 30]])
    assert found.multipliers[0, 1] == 1
    np.testing.assert_allclose(found.predicted_ms[0, ::2], 2, rtol=1e-4)
    assert (tuned([[0.1, 0.1]], [[0, 0]]).multipliers == 1).all()


def test_max_over_mean_and_the_slowest():
    times = np.array([[1.0, 3.0], [3.0, 1.0]])
    step, pipeline = Group((2, 2)), Group((2, 2), pipeline=True)
    assert (step.max_over_mean(times), step.slowest(times)) == (1, 4)
    assert (pipeline.max_over_mean(times), pipeline.slowest(times)) == (1.5, 6)
    assert step.max_over_mean(np.full((2, 2), np.nan)) == 1
    assert Group((1, 2)).max_over_mean(np.array([[np.nan, 2.0]])) == 2
