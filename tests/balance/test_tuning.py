# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Multipliers of the price: nobody waits longer than before, and no bound is crossed."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.balance.tuning import FARTHEST, NEAR, Groups, TuningBounds, tune

GROUPS = {
    "step": dict(per_microbatch=False),
    "microbatch": dict(per_microbatch=True),
    "pipeline": dict(per_microbatch=True, pipeline=True),
}
ELASTICITY, PRICE = 0.7, 0.25


def plan_of(density, recall=None):
    density = np.asarray(density, np.float64)
    recall = np.full_like(density, 0.95) if recall is None else np.asarray(recall, np.float64)
    return SimpleNamespace(density=density, recall=recall)


def linear(pairs, rest=0.0):
    """Attention times of so many visible pairs, and what does not depend on density."""
    pairs = np.asarray(pairs, np.float64)
    return lambda density: rest + pairs * density


def tuned(density, pairs, bounds=None, recall=None, group="step", rest=0.0, price=PRICE):
    return tune(
        plan_of(density, recall), ELASTICITY, bounds or TuningBounds(max_mass=1.0), price,
        latency=linear(pairs, rest), **GROUPS[group],
    )  # fmt: skip


def by_group(times, group):
    """``[G, members]``: the times that wait for each other."""
    if group == "step":
        return times.sum(0)[None]
    return times.reshape(1, -1) if group == "pipeline" else times


def drawn(seed):
    """A step of random shape, costs and bounds."""
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 7), rng.integers(1, 9)
    density = np.exp(rng.uniform(np.log(0.005), 0, shape))
    recall = rng.uniform(0.7, 1, shape)
    pairs = np.exp(rng.uniform(0, 4, shape))
    rest = rng.uniform(0, 2)
    bounds = TuningBounds(
        ["mean", "min", "max"][rng.integers(3)],
        float(rng.choice([0, 0.001, 0.01, 0.1, 1.0])),
        float(rng.choice([0, 0.8, 0.95])),
        float(rng.choice([0.1, 0.5, 1])),
    )
    elasticity, price = rng.uniform(0.1, 2), np.exp(rng.uniform(-4, 1))
    return density, recall, pairs, rest, bounds, elasticity, price


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("part", range(10))
def test_random_steps_stay_within_every_bound(part, group):
    for seed in range(30 * part, 30 * part + 30):
        density, recall, pairs, rest, bounds, elasticity, price = drawn(seed)
        latency = linear(pairs, rest)
        given = plan_of(density, recall), elasticity, bounds, price
        found = tune(*given, latency=latency, **GROUPS[group])
        assert found.multipliers.dtype == np.float32 and found.multipliers.shape == density.shape
        m = found.multipliers.astype(np.float64)
        # What it says follows from the multipliers by the two models.
        np.testing.assert_allclose(found.density, density * m**-elasticity, rtol=1e-9)
        np.testing.assert_allclose(found.predicted_ms, latency(found.density), rtol=1e-12)
        moved = price * (1 + m) / 2 * (density - found.density)
        np.testing.assert_allclose(found.mass, moved, atol=1e-9)
        np.testing.assert_allclose(found.recall, np.minimum(recall - moved, 1), atol=1e-9)
        # Bounds: only what moves is held to them.
        assert np.abs(moved).max() <= bounds.max_mass + 1e-6
        sparser, denser = m > 1, m < 1
        assert (found.recall[sparser] >= bounds.min_recall - 1e-6).all()
        assert (found.density[denser] <= bounds.max_density + 1e-6).all()
        assert m.max() <= FARTHEST * (1 + 1e-6) and m.min() >= (1 - 1e-6) / FARTHEST
        # Nobody waits longer, and nobody crosses the level.
        before, after = by_group(latency(density), group), by_group(found.predicted_ms, group)
        for old, new, level in zip(before, after, found.level_ms):
            assert new.max() / new.mean() <= old.max() / old.mean() * (1 + 1e-5)
            assert new.max() <= max(old.max(), level) * (1 + 1e-6)
            assert np.array_equal(new, old) or (np.abs(old / level - 1) > NEAR).any()
            assert ((new >= level * (1 - 1e-5)) | (new >= old * (1 - 1e-6))).all()
            assert ((new <= level * (1 + 1e-5)) | (new <= old * (1 + 1e-6))).all()
        again = tune(*given, latency=latency, **GROUPS[group])
        assert np.array_equal(again.multipliers, found.multipliers)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("anchor", ["mean", "min", "max"])
def test_equal_costs_change_nothing(anchor, group):
    bounds = TuningBounds(anchor)
    found = tuned(np.full((3, 4), 0.1), np.full((3, 4), 7.0), bounds, group=group)
    assert (found.multipliers == 1).all() and found.met
    assert (found.mass == 0).all() and (found.density == 0.1).all()


def test_a_small_difference_moves_nothing():
    found = tuned([[0.1, 0.1]], [[10, 10.15]])
    assert (found.multipliers == 1).all() and found.met
    assert (tuned([[0.1, 0.1]], [[10, 10.25]]).multipliers != 1).all()


def test_with_anchor_min_nobody_becomes_denser():
    """Also where the bound on mass keeps the slowest above the time of the others."""
    density, cost = [[0.2, 0.2, 0.2]], [[10, 20, 80]]
    found = tuned(density, cost, TuningBounds("min", max_mass=0.01))
    assert found.multipliers.min() == 1 and found.multipliers[0, 2] > 1
    assert tuned(density, cost, TuningBounds("mean", max_mass=0.01)).multipliers.min() < 1


@pytest.mark.parametrize("anchor, at", [("mean", 2.0), ("min", 1.0), ("max", 3.0)])
def test_times_meet_at_the_anchor(anchor, at):
    found = tuned([[0.1, 0.1, 0.1]], [[10, 20, 30]], TuningBounds(anchor, max_mass=1))
    np.testing.assert_allclose(found.predicted_ms, at, rtol=1e-4)
    assert found.met and found.target_ms == pytest.approx(at)
    low, middle, high = found.multipliers[0]
    assert (low < 1) == (anchor != "min") and (high > 1) == (anchor != "max")
    if anchor == "mean":
        assert low < 1 and middle == 1 and high > 1, "both directions"
        assert found.mass[0, 0] < 0 < found.mass[0, 2]


def test_a_rank_has_one_multiplier_for_its_microbatches():
    density, pairs = [[0.1, 0.1], [0.4, 0.1], [0.02, 0.1]], [[10, 20], [40, 60], [5, 30]]
    found = tuned(density, pairs)
    assert found.met and len(set(found.multipliers[:, 0].tolist())) == 1
    # Where one of them is at a bound, the others go on.
    recall = [[0.95, 0.95], [0.95, 0.9], [0.95, 0.95]]
    pairs = [[10, 90], [10, 100], [10, 90]]
    bounds = TuningBounds("min", max_mass=1, min_recall=0.899)
    found = tuned(np.full((3, 2), 0.1), pairs, bounds, recall)
    held = found.multipliers[:, 1]
    assert held[1] < held[0] == held[2]
    assert found.recall[1, 1] == pytest.approx(0.899, abs=1e-5)


def test_microbatches_meet_one_by_one():
    density, pairs = np.full((2, 2), 0.1), [[10, 30], [300, 100]]
    rows = tuned(density, pairs, group="microbatch")
    np.testing.assert_allclose(rows.predicted_ms, [[2, 2], [20, 20]], rtol=1e-4)
    everything = tuned(density, pairs, TuningBounds("max", max_mass=1), group="pipeline")
    assert everything.target_ms == pytest.approx(30)


def test_nobody_gives_up_mass_to_be_faster_than_the_slowest():
    """The slowest is held by its recall: the others rise to it, or stay with anchor min, instead of going
    down to the anchor."""
    recall = [[0.9, 0.99, 0.99]]
    bounds = TuningBounds("mean", max_mass=1, min_recall=0.9)
    found = tuned([[0.1, 0.1, 0.1]], [[30, 20, 9]], bounds, recall)
    assert not found.met and found.level_ms == pytest.approx(3) and found.target_ms < 2
    assert found.multipliers[0, 0] == 1 and (found.multipliers[0, 1:] < 1).all()
    np.testing.assert_allclose(found.predicted_ms, 3, rtol=1e-4)
    found = tuned([[0.1, 0.1, 0.1]], [[30, 20, 9]], replace(bounds, anchor="min"), recall)
    assert not found.met and (found.multipliers == 1).all()


@pytest.mark.parametrize("cell", [np.nan, np.inf])
def test_what_is_no_number_is_left_alone(cell):
    density = np.full((2, 3), 0.1)
    density[1, 2] = cell
    found = tuned(density, [[10, 20, 30]] * 2)
    assert (found.multipliers[:, 2] == 1).all()
    np.testing.assert_allclose(found.predicted_ms[:, :2].sum(0), 3, rtol=1e-4)
    assert np.isfinite(found.multipliers).all() and np.isfinite(found.mass).all()
    for elasticity, price in ((np.nan, 0.2), (0.0, 0.2), (-1.0, 0.2), (0.7, np.nan), (0.7, 0.0)):
        found = tune(
            plan_of([[0.1, 0.2]]), elasticity, TuningBounds(), price, per_microbatch=False,
            latency=linear([[1, 1]]),
        )  # fmt: skip
        assert (found.multipliers == 1).all() and not found.met


def test_an_unknown_recall_is_not_lowered_below_a_bound():
    recall = [[np.nan, np.nan]]
    found = tuned([[0.1, 0.1]], [[10, 30]], TuningBounds(min_recall=0.5), recall)
    assert found.multipliers[0, 1] == 1 and found.multipliers[0, 0] < 1
    assert tuned([[0.1, 0.1]], [[10, 30]], recall=recall).multipliers[0, 1] > 1


def test_an_empty_rank_does_not_count():
    found = tuned([[0.1, 0.1, 0.1]], [[10, 0, 30]], TuningBounds("min", max_mass=1))
    assert found.multipliers[0, 1] == 1 and found.target_ms == pytest.approx(1)
    nothing = tuned([[0.1, 0.1]], [[0, 0]])
    assert (nothing.multipliers == 1).all() and nothing.met


def test_what_does_not_depend_on_density_stays():
    found = tuned([[0.1, 0.1]], [[1, 1]], rest=np.array([[50.0, 10.0]]))
    assert not found.met and found.level_ms > found.target_ms


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(anchor="median"), "'median': use one of"),
        (dict(max_mass=1.5), "max_mass of tuning is 1.5"),
        (dict(min_recall=-0.1), "min_recall"),
        (dict(max_density=float("nan")), "max_density of tuning is nan"),
    ],
)
def test_bounds_that_are_none(given, said):
    with pytest.raises(ConfigError, match=said):
        TuningBounds(**given)


def test_max_over_mean_of_groups():
    times = np.array([[1.0, 3.0], [3.0, 1.0]])
    assert Groups((2, 2)).max_over_mean(times) == 1
    assert Groups((2, 2), per_microbatch=True).max_over_mean(times) == 1.5
    assert Groups((2, 2), per_microbatch=True, pipeline=True).max_over_mean(times) == 1.5
    assert Groups((2, 2)).max_over_mean(np.full((2, 2), np.nan)) == 1
    assert [Groups((2, 2), *given).slowest(times) for given in ((), (True,), (True, True))] == [
        4,
        6,
        6,
    ]
    assert Groups((1, 2)).max_over_mean(np.array([[np.nan, 2.0]])) == 2
