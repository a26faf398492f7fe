# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Files of settings: what is read from them, and how each kind of mistake is named."""

from __future__ import annotations

import json

import pytest

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.pattern import check_files, heads_of_layer, settings_of_run

LAYERS, HEADS = 3, 4


def written(tmp_path, content, name="file.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def overrides(tmp_path, content, **others):
    return MTrainingConfig(overrides=written(tmp_path, content), **others)


def budgets(tmp_path, content, **others):
    return MTrainingConfig(budgets=written(tmp_path, content), **others)


def test_layers_and_heads_differ(tmp_path):
    config = overrides(
        tmp_path,
        {
            "layers": {
                "0": {"dense": True},
                "2": {
                    "price": 0.2,
                    "vertical_cap": 99,
                    "heads": {"1": {"dense": True}, "3": {"vertical": 50}, "0": {"coverage": 0.7}},
                },
            }
        },
        price=0.5,
        window=256,
    )
    assert heads_of_layer(config, 1, LAYERS, HEADS) is None
    assert all(head.keeps_all(4096) for head in heads_of_layer(config, 0, LAYERS, HEADS))
    coverage, dense, usual, fixed = heads_of_layer(config, 2, LAYERS, HEADS)
    assert (usual.policy, usual.price, usual.vertical_cap) == ("price", 0.2, 99)
    assert dense.keeps_all(4096)
    assert (fixed.policy, fixed.vertical, fixed.slash) == ("fixed", 50, 100)
    assert (coverage.policy, coverage.coverage) == ("coverage", 0.7)
    assert {head.window for head in (coverage, dense, usual, fixed)} == {256}


def test_yaml(tmp_path):
    pytest.importorskip("yaml")
    path = written(tmp_path, "layers:\n  1:\n    heads:\n      2: {dense: true}\n", "file.yaml")
    heads = heads_of_layer(MTrainingConfig(overrides=path), 1, LAYERS, HEADS)
    assert [head.keeps_all(999) for head in heads] == [False, False, True, False]
    path = written(tmp_path, "layers: [", "bad.yml")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        check_files(MTrainingConfig(overrides=path), LAYERS, HEADS)


@pytest.mark.parametrize("layers", [{"layers": {}}, {}])
def test_settings_of_the_run_must_be_the_runs(layers, tmp_path):
    """In Megatron-LM they are taken for options that are not given."""
    content = {"policy": "price", "price": 0.31, **layers}
    config = overrides(tmp_path, content, price=0.31)
    check_files(config, LAYERS, HEADS)
    assert heads_of_layer(config, 0, LAYERS, HEADS) is None
    assert settings_of_run(config.overrides) == {"policy": "price", "price": 0.31}
    with pytest.raises(ConfigError, match="has price 0.31, but the run 0.25"):
        check_files(overrides(tmp_path, content), LAYERS, HEADS)


def test_published_budgets(tmp_path):
    fixed = ["vertical_and_slash", 1000, 6096, 0.98]
    flexible = ["flex_vertical_and_slash", [0.95, 4096], [0.95, 2048], 0.0]
    layer = {"0": fixed, "1": flexible, "2": fixed, "3": ["vertical_and_slash", 30, 800, 1.0]}
    config = budgets(tmp_path, [layer] * LAYERS)
    for number in range(LAYERS):
        heads = heads_of_layer(config, number, LAYERS, HEADS)
        assert [head.policy for head in heads] == ["fixed", "coverage", "fixed", "fixed"]
        assert (heads[0].vertical, heads[0].slash) == (1000, 6096)
        assert (heads[3].vertical, heads[3].slash) == (30, 800)
        assert (heads[1].coverage, heads[1].vertical_cap, heads[1].slash_cap) == (0.95, 4096, 2048)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "is not valid JSON"),
        ([], '"layers", an object by layer number'),
        ({}, "is empty: give settings"),
        ({"layers": [1]}, '"layers", an object by layer number'),
        ({"layers": {}, "cost": 1}, "'cost', which is no setting"),
        ({"layers": {"3": {}}}, "layer 3: the model has 3 layers"),
        ({"layers": {"one": {}}}, "layer one: 'one' is no number"),
        ({"layers": {"1": 5}}, "layer 1 must be an object"),
        ({"layers": {"1": {"heads": [1]}}}, 'layer 1 has "heads"'),
        ({"layers": {"1": {"heads": {"4": {}}}}}, "layer 1, head 4: the model has 4 query heads"),
        ({"layers": {"1": {"heads": {"0": {"window": 9}}}}}, "layer 1, head 0 has 'window'"),
        ({"layers": {"1": {"price": -1}}}, "layer 1: --mtraining-price is -1"),
        ({"layers": {"1": {"price": "low"}}}, "--mtraining-price must be a number"),
        ({"layers": {"1": {"dense": "yes"}}}, "layer 1 has dense 'yes'"),
        ({"layers": {"1": {"policy": "best"}}}, "layer 1: --mtraining-policy is best"),
        ({"layers": {"1": {"vertical": 9, "coverage": 0.5}}}, "--mtraining-coverage is 0.5, but"),
    ],
)
def test_mistakes_in_overrides(tmp_path, content, named):
    config = overrides(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        check_files(config, LAYERS, HEADS)
    assert "--mtraining-overrides" in str(raised.value) and "file.json" in str(raised.value)
    assert named in str(raised.value)


FIXED = ["vertical_and_slash", 1000, 6096, 0.98]


def layer_of(count=HEADS, **changed):
    return {str(head): FIXED for head in range(count)} | {
        k.strip("h"): v for k, v in changed.items()
    }


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({}, "must be a list of layers"),
        ([layer_of()] * 2, "has 2 layers, but the model 3"),
        (
            [layer_of(), layer_of(3), layer_of()],
            "layer 1 has 3 heads (0, 1, 2, ...), but the model 4",
        ),
        ([layer_of(h2=["block_sparse", 100, 9])] * 3, "layer 0, head 2 is 'block_sparse': only"),
        ([layer_of(h2="all")] * 3, "layer 0, head 2 is 'all': expected a pattern's name"),
        ([layer_of(h1=["flex_vertical_and_slash", 0.9, 0.9])] * 3, "expected pairs of a coverage"),
        (
            [layer_of(h1=["flex_vertical_and_slash", [0.9, 9], [0.8, 9]])] * 3,
            "has coverage 0.9 of columns and 0.8 of diagonals",
        ),
        (
            [layer_of(h1=["vertical_and_slash", -5, 9])] * 3,
            "layer 0, head 1: --mtraining-vertical is -5",
        ),
        (
            [layer_of(h1=["vertical_and_slash", 2.5, 9])] * 3,
            "--mtraining-vertical must be a whole number",
        ),
    ],
)
def test_mistakes_in_budgets(tmp_path, content, named):
    config = budgets(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        check_files(config, LAYERS, HEADS)
    assert named in str(raised.value) and "file.json" in str(raised.value)


def test_no_file():
    for name in ("overrides", "budgets"):
        with pytest.raises(ConfigError, match=f"--mtraining-{name} /no/such.json cannot be read"):
            check_files(MTrainingConfig(**{name: "/no/such.json"}), LAYERS, HEADS)
