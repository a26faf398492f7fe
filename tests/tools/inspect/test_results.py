# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What follows from recall and density: densities that heads need, recommended settings, numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_mtraining.tools.inspect import results, sweep


def test_reach_interpolates_from_sparse_to_dense():
    recall = np.array([0.5, 0.9, 1.0])
    point = results.reach(recall, 0.95)
    assert point.reached and point.before == 1 and point.fraction == pytest.approx(0.5)
    assert point.of(np.array([0.1, 0.2, 0.4])) == pytest.approx(0.3)
    assert results.reach(recall, 0.4) == results.Point(0, 0.0, True)
    assert results.reach(recall[:2], 0.95) == results.Point(1, 0.0, False)


def measured(recall, density, target=0.9):
    """Of one layer: recall and density are [settings][heads]."""
    series = sweep.Series("fixed", ("slash",), tuple({"slash": 2**i} for i in range(2)))
    recall, density = (np.array(values, dtype=float)[:, None] for values in (recall, density))
    return results.Measured(series, recall, density, target)


def test_recommendation_names_heads_that_stay_dense():
    # Head 0 is easy, head 1 takes nearly everything, head 2 never gets there.
    one = measured([[0.8, 0.5, 0.1], [1.0, 0.95, 0.2]], [[0.1] * 3, [0.9, 0.9, 0.9]])
    assert one.needed[0] == pytest.approx([0.5, 0.1 + 0.8 * 0.4 / 0.45, np.inf])
    assert one.dense_heads().tolist() == [[False, True, True]]
    recommended = results.Recommendation([one])
    # With two of three at 1, the third is left at its sparsest.
    assert recommended.recall == pytest.approx(2.8 / 3)
    assert recommended.density == pytest.approx(2.1 / 3)
    assert recommended.settings_file() == {
        "slash": 1,
        "layers": {"0": {"heads": {"1": {"dense": True}, "2": {"dense": True}}}},
    }


def test_recommendation_of_a_layer_that_stays_dense_and_of_none():
    hopeless = measured([[0.1, 0.1], [0.2, 0.2]], [[0.1] * 2, [0.5] * 2])
    file = results.Recommendation([hopeless]).settings_file()
    assert file["layers"] == {"0": {"dense": True}}
    easy = measured([[0.8, 0.8], [1.0, 1.0]], [[0.1] * 2, [0.3] * 2])
    assert results.Recommendation([easy]).settings_file() == {"slash": 1}
    best = results.Recommendation([hopeless, easy])
    assert best.measured is easy and best.density == pytest.approx(0.2)


def test_heads_out_of_reach_are_ordered_by_recall():
    needed = np.array([np.inf, 0.3, np.inf, 0.1, 0.3])
    recall = np.array([0.2, 0.5, 0.6, 0.1, 0.4])
    assert results.by_difficulty(needed, recall).tolist() == [3, 1, 4, 2, 0]


def test_numbers_are_json_and_out_of_reach_is_null():
    one = measured([[0.8, 0.2], [1.0, 0.3]], [[0.1] * 2, [0.3] * 2])
    best = results.Recommendation([one])
    recall, density = np.array([[0.9, 1.0]]), np.array([[0.2, 1.0]])
    found = results.numbers([one], best, recall, density, {"model": "m"})
    found = json.loads(json.dumps(found, allow_nan=False))
    assert found["series"][0]["density_needed"] == [[pytest.approx(0.2), None]]
    assert found["series"][0]["settings"][1]["recall"] == [[1.0, 0.3]]
    assert found["series"][0]["at_target"]["reached"] is False
    assert found["measured"]["density"] == [[0.2, 1.0]] and found["measured"]["mean_recall"] == 0.95
    assert found["measured"]["settings"] == best.settings_file()
    assert "not reached" in results.summary([one], best, 0.9)


def test_sampled_layers_have_their_own_numbers():
    recall, density = (np.array(v)[:, None] for v in ([[0.1, 0.8], [0.2, 1.0]], [[0.1] * 2] * 2))
    series = sweep.Series("fixed", ("slash",), ({"slash": 1}, {"slash": 2}))
    one = results.Measured(series, recall, density, 0.9, layers=[7])
    best = results.Recommendation([one])
    assert best.settings_file()["layers"] == {"7": {"heads": {"0": {"dense": True}}}}
    assert best.setting_of(0, 0) is None and best.setting_of(0, 1) == best.setting
    ones = np.ones((1, 2))
    assert results.numbers([one], best, ones, ones, {})["measured_layers"] == [7]
    rows = results.summary([one], best, 0.9).splitlines()
    assert [row.split()[0] for row in rows if row.strip()[:1].isdigit()] == ["7"]
    said = results.recommendation(best, np.ones((1, 2)), np.full((1, 2), 0.2), total_layers=9)
    assert "1 of 9 layers were measured" in said and "--layers all" in said
    whole = results.recommendation(best, np.ones((1, 2)), np.full((1, 2), 0.2), total_layers=1)
    assert "layers were measured" not in whole


@pytest.mark.parametrize(
    ("sparsest", "reason"),
    [
        ((0.3, 0.4), "sequence is short: the local window and the sink columns alone"),
        ((0.06, 0.05), "nearly even, as with untrained weights: 5.0% of the pairs have 6.0%"),
        ((0.6, 0.05), "spread widely: the sparsest setting has 60.0% of it in 5.0%"),
    ],
    ids=["short", "even", "spread"],
)
def test_a_model_that_gains_little_is_told_why(sparsest, reason):
    recall, density = sparsest
    one = measured([[recall] * 2, [0.95] * 2], [[density] * 2, [0.9] * 2])
    best = results.Recommendation([one])
    assert best.dense.all()
    said = results.recommendation(best, np.ones((1, 2)), np.ones((1, 2)), total_layers=1)
    assert "gains little" in said and "100% of the heads need more than 70%" in said
    assert reason in said
    few = results.recommendation(best, np.ones((1, 2)), np.full((1, 2), 0.3), total_layers=1)
    assert "gains little" not in few
