# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Coefficients from measurements that are made up, so that they are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_mtraining.balance import AttentionShape, Latency, LatencyModel, visible_pairs
from megatron_mtraining.balance.terms import PARTS, PROCESSORS, Entry
from megatron_mtraining.tools.profile.cases import cases
from megatron_mtraining.tools.profile.fit import (
    errors,
    fit,
    least_relative_squares,
    relative_errors,
)
from megatron_mtraining.tools.profile.measure import (
    COLUMNS,
    Measurement,
    measurement_of,
    row_of,
)
from megatron_mtraining.tools.profile.timing import Time
from megatron_mtraining.tools.profile.workload import lengths

SHAPE = AttentionShape(16, 2, 128)
TRUE = {
    "search": {"launch": 0.4, "rows": 0.3},
    "forward": {"launch": 0.05, "rows": 0.3, "pairs": 0.8, "query_path": 0.01},
    "backward": {"launch": 0.1, "key_rows": 1.0, "pairs": 1.5, "key_span": 1.0},
}
LISTS = {
    "search": {"launch": 1.0, "square": 0.04},
    "forward": {"launch": 0.05, "rows": 0.3, "packed_rows": 0.1, "pairs": 0.8},
    "backward": {"launch": 0.1, "rows": 0.4, "pairs": 1.5, "key_span": 1.0},
}


def measured(noise: float = 0.0, processors: int = PROCESSORS) -> list[Measurement]:
    """All cases of a shape, as a GPU with those coefficients would take them."""
    entries = [Entry(kind, 128, TRUE, Latency(1, 1, 1)) for kind in ("vertical_slash", "dense")]
    entries.append(Entry("block_lists", 128, LISTS, Latency(1, 1, 1)))
    gpu, numbers = (
        LatencyModel("made up", tuple(entries), processors=processors),
        np.random.default_rng(0),
    )
    found = []
    for case in cases([SHAPE]):
        pairs = visible_pairs(lengths(case))
        times = gpu.predict(case.tokens, pairs, case.density, case.shape, kind=case.kind)
        factors = 1 + noise * numbers.uniform(-1, 1, 3)
        search, forward, backward = (Time(float(t) * f, 0.5) for t, f in zip(times, factors))
        found.append(Measurement(case, pairs, case.density, search, forward, backward))
    return found


def test_exact_times_give_their_coefficients():
    points = measured()
    for entry in fit(points):
        expected = LISTS if entry.kind == "block_lists" else TRUE
        assert entry.head_dim == 128 and entry.host == (0.5, 0.5, 0.5)
        if entry.kind == "vertical_slash":  # the others have too few shapes to tell all terms apart
            for part in PARTS:
                assert entry.coefficients[part] == pytest.approx(expected[part], rel=1e-3)
    model = LatencyModel("made up", fit(points))
    figures = errors(model, points)
    assert {"total", "search", "forward", "backward", "vertical_slash", "dense"} <= figures.keys()
    assert all(figure.worst < 1e-3 for figure in figures.values())


def test_columns_are_in_the_entry_of_patterns_that_have_them():
    points, shares = [], []
    for each in measured():
        case, rows = each.case, each.case.shape.num_heads * each.case.tokens / 1e6
        if case.columns and not case.held_out:
            shares.append(case.columns)
        path = case.columns * each.pairs * each.density / case.tokens / 1e3
        more = 0.2 * rows * (case.columns > 0) + 0.05 * path
        points.append(replace(each, forward=Time(each.forward.gpu + more, 0.5)))
    entries = {entry.kind: entry.coefficients for entry in fit(points)}
    assert entries["dense"]["forward"] == pytest.approx(TRUE["forward"], rel=1e-3)
    having = dict(TRUE["forward"], rows=0.5)
    having["query_path"] += 0.05 * np.mean(shares)
    assert entries["vertical_slash"]["forward"] == pytest.approx(having, rel=1e-3)
    assert entries["vertical_slash"]["search"] == pytest.approx(TRUE["search"], rel=1e-3)


def test_a_gpu_of_fewer_multiprocessors():
    points = measured(processors=40)
    entry = fit(points, processors=40)[0]
    assert entry.coefficients["backward"] == pytest.approx(TRUE["backward"], rel=1e-3)
    assert fit(points)[0].coefficients["backward"] != pytest.approx(TRUE["backward"], rel=1e-3)


def test_a_measurement_as_a_row():
    for each in measured():
        case = replace(each.case, density=round(each.density, 5))
        found = measurement_of(dict(zip(COLUMNS, row_of(each))))
        assert found.case == case and found.pairs == each.pairs and found.density == case.density
        for part in PARTS:
            assert getattr(found, part) == pytest.approx(getattr(each, part), rel=1e-3)


@pytest.mark.parametrize(
    "changes", [{"kind": "x"}, {"tokens": 0}, {"forward_ms": 0}, {"pairs": None}]
)
def test_a_row_that_is_no_measurement(changes):
    values = dict(zip(COLUMNS, row_of(measured()[0])))
    with pytest.raises((ValueError, TypeError)):
        measurement_of({**values, **changes})


def test_noise_is_averaged_and_told():
    points = measured(noise=0.04)
    model = LatencyModel("made up", fit(points))
    total = errors(model, points)["total"]
    assert total.shapes == sum(each.case.held_out for each in points)
    assert 0.001 < total.median < 0.04 and total.median < total.worst < 0.1
    one = relative_errors(model, points[-1])
    assert set(one) == {"total", *PARTS} and all(abs(error) < 0.15 for error in one.values())


def test_errors_are_those_of_held_out_shapes():
    points = measured()
    model = LatencyModel("made up", fit(points))
    wrong = [
        replace(each, forward=Time(2 * each.forward.gpu, 0)) if each.case.held_out else each
        for each in points
    ]
    assert errors(model, wrong)["forward"].median == pytest.approx(0.5, abs=1e-3)
    assert fit(wrong)[0] == fit(points)[0]  # fitted to the others


def test_least_squares_of_coefficients_that_are_not_negative():
    numbers = np.random.default_rng(1)
    columns = numbers.uniform(0.1, 1, (40, 3))
    times = columns @ np.array([2.0, 0.0, 0.5])
    assert least_relative_squares(columns, times) == pytest.approx([2.0, 0.0, 0.5], abs=1e-8)
    # A term that would need a negative coefficient is left out, and the others make up for it.
    times = columns @ np.array([2.0, -0.3, 0.5])
    found = least_relative_squares(columns, times)
    assert found[1] == 0 and (found >= 0).all()
    slightly = [found + step for step in 0.01 * np.eye(3)] + [found * 0.99]
    squares = [(((columns @ x) / times - 1) ** 2).sum() for x in [found, *slightly]]
    assert min(squares) == squares[0]
