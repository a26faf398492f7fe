# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect --mixed``: which heads are block-sparse, what is expected of them, settings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import head_policies, settings_of_run
from megatron_mtraining.tools.inspect import results, sweep
from megatron_mtraining.tools.inspect.mixed import mixed_of
from tests.support.inspect_cases import HEADS, LAYERS, inspect, quick


def measured(policy, settings, recall, density, target=0.9, estimator=None):
    """Of one layer: recall and density are [settings][heads]."""
    name = {"price": "price", "xattention": "block_threshold", "moba": "block_top_k"}[policy]
    fields = tuple({"policy": policy, name: value} for value in settings)
    series = sweep.Series(policy, estimator, (name,), fields)
    recall, density = (np.array(values, dtype=float)[:, None] for values in (recall, density))
    return results.Measured(series, recall, density, target)


# Head 1 is all lists', head 0 none, head 2 takes nearly everything either way.
SLASHES = measured(
    "price", (0.5, 0.1), [[0.9, 0.5, 0.3], [0.98, 0.7, 0.95]], [[0.1, 0.3, 0.3], [0.2, 0.6, 0.9]],
    estimator="strata",
)  # fmt: skip
LISTS = measured(
    "xattention", (0.6, 0.9), [[0.5, 0.8, 0.3], [0.9, 0.96, 0.96]], [[0.2, 0.05, 0.3], [0.4, 0.1, 0.95]]
)  # fmt: skip


def test_each_head_takes_what_keeps_more_for_its_density():
    mixed = mixed_of([SLASHES, LISTS])
    assert mixed.dense.tolist() == [[False, False, True]]
    assert mixed.block_sparse == {(0, 1): {"policy": "xattention", "block_threshold": 0.9}}
    # Enough at the sparsest price: 0.9 and 0.96 and a dense head.
    assert mixed.recall == pytest.approx((0.9 + 0.96 + 1) / 3) and mixed.point.reached
    assert mixed.density == pytest.approx((0.1 + 0.1 + 1) / 3)
    assert mixed.settings_file() == {
        "policy": "price", "price": 0.5,
        "layers": {"0": {"heads": {"1": mixed.block_sparse[0, 1], "2": {"dense": True}}}},
    }  # fmt: skip
    assert mixed.setting_of(0, 0) == {"policy": "price", "price": 0.5}
    assert mixed.setting_of(0, 1) == mixed.block_sparse[0, 1] and mixed.setting_of(0, 2) is None
    assert "1 of 3 heads block-sparse" in mixed.summary() and "--mixed" in mixed.summary()
    assert "recall 50.0% at density 20.0%" in mixed.summary(0.5, 0.2)
    assert json.loads(json.dumps(mixed.numbers()))["expected_density"] == round(1.2 / 3, 5)


def test_price_goes_on_until_the_target_is_reached():
    mixed = mixed_of([replace_target(SLASHES, 0.955), replace_target(LISTS, 0.955)])
    assert mixed.point.reached and 0.1 < mixed.settings_file()["price"] < 0.5
    # Lists hold at both prices; head 0 goes from 0.9 to 0.98 for it.
    assert set(mixed.block_sparse) == {(0, 1), (0, 2)} and mixed.recall == pytest.approx(0.955)
    assert mixed.density == pytest.approx((0.1 + 0.1 * (0.045 / 0.08) + 0.1 + 0.95) / 3)
    hopeless = mixed_of([replace_target(SLASHES, 0.999), replace_target(LISTS, 0.999)])
    assert not hopeless.point.reached and "densest tried" in hopeless.summary()


def replace_target(one, target):
    return results.Measured(one.series, one.recall, one.density, target)


def test_without_both_kinds_there_is_no_mix():
    last = results.Measured(
        replace(SLASHES.series, estimator="last"), SLASHES.recall, SLASHES.density, 0.9
    )
    assert mixed_of([SLASHES]) is None and mixed_of([LISTS]) is None
    assert mixed_of([last, LISTS]) is None


def test_a_run_writes_settings_that_training_takes(llama, words, tmp_path, capsys, monkeypatch):
    # Between two of fewer prices the density of these heads is no line.
    monkeypatch.setattr(sweep, "POINTS", 25)
    out = tmp_path / "out"
    more = ("--rows", 64, "--policy", "price", "moba", "--block-size", 64, "--target-recall", 0.8)
    assert inspect(llama, *quick(words, out, *more, "--mixed")) == 0
    said = capsys.readouterr().out
    assert "the settings file has these" in said
    assert len(list(out.glob("head_*.png"))) == 3
    file, numbers = out / "settings.json", json.loads((out / "results.json").read_text())
    settings = json.loads(file.read_text())
    assert settings == numbers["mixed"]["settings"] and settings["policy"] == "price"
    assert settings == numbers["measured"]["settings"]
    # Interpolated from the settings that were tried, and measured with its own.
    expected, found = numbers["mixed"]["expected_density"], numbers["measured"]["mean_density"]
    assert found == pytest.approx(expected, abs=0.05)
    own = settings_of_run(str(file))
    config = MTrainingConfig.from_options(**{**own, "settings": str(file)})
    kinds = [
        policy.name
        for layer in range(LAYERS)
        for policy in head_policies(config, layer, LAYERS, HEADS) or [config.policy] * HEADS
    ]
    assert kinds.count("moba") == numbers["mixed"]["heads_with_lists"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--sensitivity", "heads"), "--mixed and --sensitivity"),
        (("--policy", "price"), "--policy is price, but --mixed"),
        (("--policy", "moba", "fixed"), "--policy is moba fixed, but --mixed"),
    ],
    ids=["with-sensitivity", "price-only", "without-price"],
)
def test_options_that_leave_nothing_to_mix(llama, words, tmp_path, capsys, more, message):
    assert inspect(llama, *quick(words, tmp_path / "out", *more, "--mixed")) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
