# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a run costs of dense attention, from made-up times of layers on real operands."""

from __future__ import annotations

import pytest

from benchmarks.model import mean_cost
from tests.support.frontier_cases import layer_row

ROWS = [
    layer_row(0.1, 99.0), layer_row(0.1, 30.0), layer_row(0.1, 10.0, number=1),
    layer_row(0.4, 10.0), layer_row(1.6, 5.0), layer_row(0.3, 1.0, text="speech"),
    layer_row(0.4, 8.0, threshold=3.0), layer_row(0.0, 45.0, threshold=3.0),
]  # fmt: skip
COSTS = mean_cost.costs_of(ROWS)


def price(value, **more):
    return dict(policy="price", price=value, **more)


def schedule(points, threshold=0.0):
    return dict(policy="price", schedule=points, backward_threshold=threshold)


def test_costs_are_of_the_newest_row_of_each_layer():
    plain, pruned = COSTS[0.0], COSTS[3.0]
    assert plain == {
        0.0: 1.0,
        0.1: pytest.approx(0.2),
        0.4: pytest.approx(0.1),
        1.6: pytest.approx(0.05),
    }
    assert pruned == {0.4: pytest.approx(0.08), 0.0: pytest.approx(0.45)}
    again = mean_cost.costs_of([*ROWS, layer_row(0.4, 20.0, gpu="another")])
    assert again[0.0][0.4] == pytest.approx(0.2)


def test_between_measured_prices_a_cost_is_geometric():
    assert mean_cost.at(0.2, COSTS[0.0]) == pytest.approx(0.2 / 2**0.5)
    assert mean_cost.at(0.0, COSTS[0.0]) == 1
    assert mean_cost.at(0.09, COSTS[0.0]) is None and mean_cost.at(1.7, COSTS[0.0]) is None
    assert mean_cost.at(0.3, COSTS[3.0]) is None, "a dense step is no measured price"


RUNS = [
    (None, 1.0),
    (price(0.4), 0.1),
    (price(0.4, backward_threshold=3.0), 0.08),
    (price(0.01), None),
    (price(0.4, backward_threshold=1.0), None),
    (price(0.4, estimator="last"), None),
    (dict(policy="price", target_recall=0.95), None),
    (dict(policy="fixed", vertical=1000, slash=100), None),
    (schedule("0:0.4"), 0.1),
    (schedule("0:0.4,0.9:0"), 0.9 * 0.1 + 0.1 * 1.0),
    (schedule("0:0.4,0.9:0", 3.0), 0.9 * 0.08 + 0.1 * 0.45),
    # A fourth of the price has twice the cost here.
    (schedule("0:1.6,0.5:0.4"), (sum(0.05 * 2 ** (s / 5) for s in range(5)) + 5 * 0.1) / 10),
    (schedule("0:0.4,0.95:0.01"), None),
]  # fmt: skip
"""Settings, and what ten steps with them cost."""


def test_a_run_costs_the_mean_of_its_steps():
    for setting, cost in RUNS:
        found = mean_cost.mean_cost(setting, 10, COSTS)
        expected = None if cost is None else pytest.approx(cost, abs=1e-5)
        assert found == expected, setting


def test_without_measurements_only_dense_runs_have_a_cost():
    assert mean_cost.mean_cost(price(0.4), 10, mean_cost.costs_of([])) is None
    assert mean_cost.mean_cost(None, 10, mean_cost.costs_of([])) == 1
