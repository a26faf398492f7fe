# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Joined rows of benchmarks/model/frontier.py, from made-up rows."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from benchmarks.model import frontier_rows
from megatron_mtraining.config.schedule import NAMED
from tests.support.frontier_cases import layer_row, time_row, train_row, zero_row

ANNEAL = NAMED["schedule"]["anneal"]


@pytest.fixture
def made_up():
    rows = [
        zero_row("dense", None, 0.0),
        zero_row("price", 0.15, 0.02),
        zero_row("window", 0.15, 0.2),
    ]
    rows += [train_row("dense", None, seed, base, base) for seed, base in ((1, 2.0), (2, 3.0))]
    rows += [train_row("price", 0.15, 1, 2.02, 2.01), train_row("price", 0.15, 2, 3.06, 3.03)]
    rows += [train_row("target", 0.95, 1, 2.04, 2.0)]
    # Without a dense run of the same seed there is nothing to compare with.
    rows += [train_row("price", 0.15, 9, 99.0, 99.0)]
    rows += [time_row("price", 0.15, 131072, 20.0), time_row("price", 0.3, 131072, 40.0)]
    rows += [time_row("window", 0.15, 131072, 1.0) | dict(forward_ms=None, why="out of memory")]
    return [*rows, time_row("price", 0.95, 131072, 90.0)]


def test_joined_rows(made_up):
    rows = {row["policy"]: row for row in frontier_rows.joined(made_up)}
    price = rows["price"]
    assert price["seeds"] == 2 and price["steps"] == 300 and price["zero_over_dense"] == 0.02
    assert price["trained_own_over_dense"] == pytest.approx(0.015)
    assert price["trained_own_spread"] == pytest.approx(0.005)
    assert price["trained_dense_over_dense"] == pytest.approx(0.0075)
    assert (price["layer_ms_128k"], price["search_ms_128k"], price["dense_ms_128k"]) == (60, 1, 300)
    assert price["layer_ms_512k"] is None and price["commit"] == "abc, def"
    assert rows["dense"]["trained_dense_over_dense"] == 0 and rows["dense"]["layer_ms_128k"] == 300
    assert rows["window"]["steps"] is None and rows["window"]["layer_ms_128k"] is None
    # A target has no density of its own: its time lies between those of price.
    assert rows["target"]["density_trained"] == pytest.approx(0.855)
    assert rows["target"]["layer_ms_128k"] == pytest.approx(
        120 + (0.855 - 0.3) / 0.65 * 150, rel=1e-3
    )


def test_runs_of_two_learning_rates_are_two_rows(made_up):
    other = [train_row("dense", None, 1, 2.5, 2.5), train_row("price", 0.15, 1, 2.75, 2.5)]
    rows = frontier_rows.joined([*made_up, *({**row, "lr": 1e-4} for row in other)])
    rows = {row["lr"]: row for row in rows if row["policy"] == "price"}
    assert rows[3e-5]["trained_own_over_dense"] == pytest.approx(0.015) and rows[3e-5]["seeds"] == 2
    assert rows[1e-4]["trained_own_over_dense"] == pytest.approx(0.1) and rows[1e-4]["seeds"] == 1


def scheduled_rows():
    """A dense run with a cosine decay, and schedules with and without one."""
    cosine = [
        train_row("dense", None, 1, 4.0, 4.0),
        schedule_row(ANNEAL, 4.08, 4.04),
        schedule_row("0:0.31/3", 4.4, 4.2),
    ]
    return [*({**row, "decay": "cosine"} for row in cosine), schedule_row("0:1.2,0.9:0", 2.2, 2.1)]


def schedule_row(wanted, own, dense):
    points, _, threshold = wanted.partition("/")
    setting = dict(policy="price", schedule=points, backward_threshold=float(threshold or 0))
    row = train_row("schedule", None, 1, own, dense)
    return row | dict(wanted=wanted, setting=setting, density=0.2)


def test_a_run_is_compared_with_the_dense_one_of_its_decay(made_up):
    rows = frontier_rows.joined(
        [*made_up, *scheduled_rows()], [layer_row(0.31, 10.0, threshold=3.0)]
    )
    found = {row["wanted"]: row for row in rows if row["policy"] == "schedule"}
    falls, fixed, constant = (found[key] for key in (ANNEAL, "0:0.31/3", "0:1.2,0.9:0"))
    assert falls["trained_dense_over_dense"] == pytest.approx(0.01) and falls["decay"] == "cosine"
    # Rows that say no decay are of a constant rate.
    assert constant["trained_dense_over_dense"] == pytest.approx(0.05)
    assert constant["decay"] == "constant" and constant["seeds"] == 1
    assert (fixed["schedule"], fixed["backward_threshold"]) == ("0:0.31", 3.0)
    assert fixed["mean_cost"] == pytest.approx(0.1) and falls["mean_cost"] is None
    dense = {row["decay"]: row for row in rows if row["policy"] == "dense"}
    assert dense["cosine"]["seeds"] == 1 and dense["constant"]["seeds"] == 2
    price = next(row for row in rows if row["policy"] == "price")
    assert price["trained_dense_over_dense"] == pytest.approx(0.0075), "as without the others"
    alone = frontier_rows.joined(
        [*made_up, *(row for row in scheduled_rows() if row["policy"] != "dense")]
    )
    assert next(row for row in alone if row["wanted"] == "0:0.31/3")["seeds"] == 0


def test_runs_on_the_newest_text_are_compared_with_its_dense_run(made_up):
    other = [train_row("dense", None, 1, 2.5, 2.5), train_row("price", 0.15, 1, 2.75, 2.55)]
    rows = frontier_rows.joined([*made_up, *({**row, "data": "abc"} for row in other)])
    rows = {row["policy"]: row for row in rows}
    assert (rows["price"]["seeds"], rows["price"]["data"]) == (1, "abc")
    assert rows["price"]["trained_own_over_dense"] == pytest.approx(0.1)
    assert rows["price"]["trained_dense_over_dense"] == pytest.approx(0.02)
    assert (rows["target"]["seeds"], rows["target"]["data"]) == (1, None), "it has no other run"


def test_losses_by_text():
    def runs(code, book):
        return dict(dense_by_text=dict(all=9.0, code=code, book=book))

    pairs = [(runs(1.01, 2.0), runs(1.0, 2.0)), (runs(3.09, 4.0), runs(3.0, 4.0))]
    found = frontier_rows._by_text(pairs, "dense_by_text")
    assert found == dict(code=pytest.approx(0.02), book=0.0)
    assert frontier_rows._by_text(pairs, "own_by_text") is None


def test_ruler_of_the_runs_that_have_it(made_up):
    def judged(losses, right):
        return {
            "vt": dict(loss=losses[:2], right=right[:2]),
            "cwe": dict(loss=losses[2:], right=right[2:]),
        }

    def with_ruler(row, own, dense):
        return row | dict(ruler_own=own, ruler_dense=dense)

    base = judged([1.0, 2.0, 3.0], [1.0, 0.0, 1.0])
    own, dense = judged([3.0, 3.0, 3.0], [0.0, 0.0, 0.0]), judged([1.5, 2.5, 3.5], [1.0, 0.0, 0.0])
    rows = [
        *made_up,
        with_ruler(train_row("dense", None, 3, 4.0, 4.0), base, base),
        with_ruler(train_row("price", 0.15, 3, 4.04, 4.02), own, dense),
    ]
    row = next(row for row in frontier_rows.joined(rows) if row["policy"] == "price")
    assert row["seeds"] == 3 and row["ruler_samples"] == 3
    assert (row["ruler"], row["ruler_dense"], row["ruler_of_dense"]) == (0, 0.333333, 0.666667)
    assert (row["ruler_loss"], row["ruler_loss_dense"], row["ruler_loss_of_dense"]) == (3, 2.5, 2)
    assert row["ruler_loss_more"] == [0.5, 0.5, 0.5]  # each sample has half a nat more
    more, low, high = row["ruler_more"]
    assert low <= more <= high and more == pytest.approx(-1 / 3, abs=1e-4)
