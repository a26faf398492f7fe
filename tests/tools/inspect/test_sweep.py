# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The settings that are tried, and those between two of them."""

from __future__ import annotations

import pytest

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.tools.inspect import sweep


@pytest.mark.parametrize(
    ("name", "values", "middle"),
    [
        ("price", (4.0, 1.0), 2.0),
        ("block_threshold", (0.9, 0.999), 0.99),
        ("vertical", (10, 1000), 100),
    ],
    ids=["geometric", "share", "whole-numbers"],
)
def test_settings_between_two(name, values, middle):
    settings = tuple({name: value} for value in values)
    series = sweep.Series("a", (name,), settings)
    assert series.between(0, 0.5) == {name: pytest.approx(middle)}
    assert type(series.between(0, 0.5)[name]) is type(values[0])
    assert series.between(1, 0) == settings[1]


def test_sweeps_are_settings_from_sparse_to_dense():
    found = sweep.series_for(8192, {"block_size": 64})
    assert [series.policy for series in found] == ["price", "fixed", "xattention", "moba"]
    for series in found:
        configs = [MTrainingConfig.from_options(**setting) for setting in series.settings]
        assert len(configs) > 3 and all(config.block_size == 64 for config in configs)
    budgets = [(s["vertical"], s["slash"]) for s in found[1].settings]
    assert budgets == sorted(set(budgets))
    top = [setting["block_top_k"] for setting in found[-1].settings]
    assert top == sorted(set(top)) and top[-1] == 64  # half of the blocks
    with pytest.raises(ConfigError, match="--policy is dear: use .*fixed"):
        sweep.series_for(8192, {}, ["dear"])


def test_short_sequences_have_sweeps_too():
    for length in (128, 256, 512):
        (series,) = sweep.series_for(length, {}, ["fixed"])
        assert len(series.settings) > 1
