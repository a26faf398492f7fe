# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Running estimates by kind of data: they follow what is observed, and nothing that is not a number."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.balance.estimates import (
    PRIOR_DENSITY,
    PRIOR_ELASTICITY,
    RATE,
    DensityEstimates,
    kinds_of,
)

PROSE, CODE = [0, 13], [1, 15]


def kinds(*each) -> np.ndarray:
    """Of micro-batches of one sample, ``[n, 1, 2]``."""
    return np.array(each, np.int32)[:, None]


def test_kinds():
    found = kinds_of([0, 0, 1, 1, 2], [1, 4095, 4096, 131072, 0])
    assert found.tolist() == [[0, 0], [0, 11], [1, 12], [1, 17], [2, 0]] and found.dtype == np.int32


def test_a_moving_average_of_each_kind():
    estimates = DensityEstimates()
    assert estimates.density(np.array([PROSE])).tolist() == [PRIOR_DENSITY]
    assert estimates.elasticity == pytest.approx(PRIOR_ELASTICITY)
    estimates.observe(kinds(PROSE, PROSE, CODE), [0.1, 0.3, 0.5], [0.9, 0.8, 0.7])
    assert estimates.density(np.array([PROSE, CODE])) == pytest.approx([0.2, 0.5])
    assert estimates.recall(np.array([PROSE, CODE])) == pytest.approx([0.85, 0.7])
    estimates.observe(kinds(PROSE), [0.4], [0.9])
    assert estimates.density(np.array([PROSE, CODE])) == pytest.approx([0.3, 0.5]), "mean of two"
    for _ in range(20):
        estimates.observe(kinds(PROSE), [0.4], [0.9])
    before = float(estimates.density(np.array(PROSE)))
    estimates.observe(kinds(PROSE), [0.9], [0.9])
    assert float(estimates.density(np.array(PROSE))) == pytest.approx(
        before + RATE * (0.9 - before)
    )


def test_samples_of_a_micro_batch_share_by_weight():
    estimates = DensityEstimates()
    both = np.array([[PROSE, CODE], [PROSE, PROSE]], np.int32)
    estimates.observe(both, [0.2, 0.5], [0.9, 0.9], weights=[[1, 9], [2, 2]])
    found = estimates.density(np.array([PROSE, CODE]))
    assert found == pytest.approx([(1 * 0.2 + 4 * 0.5) / 5, 0.2])


def test_a_kind_that_was_not_seen():
    estimates = DensityEstimates()
    estimates.observe(kinds([0, 10], [0, 14], [1, 17]), [0.5, 0.2, 0.05], [0.9] * 3)
    asked = np.array([[0, 11], [0, 13], [0, 17], [1, 10], [7, 16], [7, 9]])
    assert estimates.density(asked).tolist() == [0.5, 0.2, 0.2, 0.05, 0.05, 0.5]


NAN, INF = float("nan"), float("inf")
WRONG = [dict(density=[each]) for each in (NAN, INF, 0.0, 1.5)] + [dict(recall=[NAN])]
WRONG += [dict(multipliers=[NAN]), dict(multipliers=[0.0]), dict(weights=[[NAN]])]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_no_number_changes_nothing(wrong):
    estimates = DensityEstimates()
    estimates.observe(kinds(PROSE), [0.1], [0.9])
    before = estimates.state()
    estimates.observe(kinds(PROSE), **{"density": [0.5], "recall": [0.5], **wrong})
    assert estimates.state() == before


@pytest.mark.parametrize("true", [0.4, 0.9])
def test_elasticity_is_learnt_from_tuned_prices(true):
    estimates = DensityEstimates()
    random = np.random.default_rng(0)
    for step in range(60):
        moved = np.exp(random.normal(0, 0.4, 16)) if step else np.ones(16)
        density = 0.2 * moved**-true
        estimates.observe(np.tile(kinds(PROSE), (16, 1, 1)), density, [0.9] * 16, moved)
    assert estimates.elasticity == pytest.approx(true, abs=0.03)
    assert float(estimates.density(np.array(PROSE))) == pytest.approx(0.2, rel=0.03)


def test_the_state_of_a_checkpoint():
    estimates = DensityEstimates()
    estimates.observe(kinds(PROSE, CODE), [0.1, 0.5], [0.9, 0.8])
    estimates.observe(kinds(PROSE, CODE), [0.05, 0.6], [0.9, 0.8], [2.0, 0.7])
    state = json.loads(json.dumps(estimates.state()))
    other = DensityEstimates()
    other.restore(state)
    assert other.state() == estimates.state() and other.elasticity == estimates.elasticity
    for each in (estimates, other):
        each.observe(kinds(PROSE), [0.3], [0.9], [1.2])
    assert other.state() == estimates.state()


DAMAGED = [
    dict(kinds=each) for each in ([[0, 1, NAN, 0.9, 1]], [[0, 1, 0.5]], [[0, 1, 5.0, 0.9, 1]], None)
]
DAMAGED += [dict(version=2), dict(slope=[0.0]), dict(slope=[0.0, -1.0])]


@pytest.mark.parametrize("change", DAMAGED, ids=str)
def test_a_state_that_cannot_be_read(change):
    estimates = DensityEstimates()
    with pytest.raises(ConfigError, match="mtraining_balance_reached"):
        estimates.restore({**DensityEstimates().state(), **change})
    with pytest.raises(ConfigError, match="mtraining_balance_reached"):
        estimates.restore([1])
    assert estimates.state() == DensityEstimates().state()
