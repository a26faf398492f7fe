# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The settings file: what is read from its two formats, and how each kind of mistake is named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import (
    DENSE,
    FixedPolicy,
    MobaPolicy,
    PricePolicy,
    check_settings_file,
    head_policies,
    sets_every_head,
    settings_content,
    settings_of_run,
)
from megatron_mtraining.tools.inspect import results, sweep

LAYERS, HEADS = 3, 4


def written(tmp_path, content, name="file.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def with_file(tmp_path, content, **others):
    return MTrainingConfig.from_options(settings=written(tmp_path, content), **others)


FIXED = ["vertical_and_slash", 1000, 6096, 0.98]


def layer_of(count=HEADS, **changed):
    return {str(head): FIXED for head in range(count)} | {
        k.strip("h"): v for k, v in changed.items()
    }


def test_layers_and_heads_differ(tmp_path):
    config = with_file(
        tmp_path,
        {
            "layers": {
                "0": {"dense": True},
                "2": {
                    "price": 0.2,
                    "vertical_cap": 99,
                    "heads": {"1": {"dense": True}, "3": {"vertical": 50}, "0": {"policy": "moba"}},
                },
            }
        },
        price=0.5,
        window=256,
    )
    assert head_policies(config, 1, LAYERS, HEADS) is None
    assert head_policies(config, 0, LAYERS, HEADS) == (DENSE,) * HEADS
    moba, dense, usual, fixed = head_policies(config, 2, LAYERS, HEADS)
    assert usual == PricePolicy(price=0.2, vertical_cap=99)
    assert dense == DENSE
    assert fixed == FixedPolicy(vertical=50, slash=100)
    assert moba == MobaPolicy()


def test_yaml(tmp_path):
    pytest.importorskip("yaml")
    path = written(tmp_path, "layers:\n  1:\n    heads:\n      2: {dense: true}\n", "file.yaml")
    heads = head_policies(MTrainingConfig.from_options(settings=path), 1, LAYERS, HEADS)
    assert [head == DENSE for head in heads] == [False, False, True, False]
    path = written(tmp_path, "layers: [", "bad.yml")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        check_settings_file(MTrainingConfig.from_options(settings=path), LAYERS, HEADS)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ("1.5: {dense: true}", "layer 1.5: 1.5 is not a number"),
        ("true: {dense: true}", "layer True: True is not a number"),
        ('1: {dense: true}\n  "1": {price: 2}', "layer 1 is there twice"),
        ("1: {dense: true}\n  1: {price: 2}", "has 1 twice in one object"),
        ("0: {vertical_cap: 010}", "has 010 in line 2, which YAML does not read"),
        ("0: {price: 1:30}", "has 1:30 in line 2, which YAML does not read"),
        ("0: {price: !!bool x}", "is not valid YAML: a value is not of the type"),
        ("0: {price: !!timestamp x}", "is not valid YAML: a value is not of the type"),
        ("0: !!python/object/apply:os.system ['false']", "is not valid YAML"),
    ],
)
def test_mistakes_in_yaml(tmp_path, layers, named):
    pytest.importorskip("yaml")
    path = written(tmp_path, f"layers:\n  {layers}\n", "file.yaml")
    with pytest.raises(ConfigError) as raised:
        check_settings_file(MTrainingConfig.from_options(settings=path), LAYERS, HEADS)
    assert "--mtraining-settings" in str(raised.value) and named in str(raised.value)
    with pytest.raises(ConfigError, match="has 1, which is not a setting"):
        path = written(tmp_path, "1: 2\ncost: 3\n", "file.yaml")
        check_settings_file(MTrainingConfig.from_options(settings=path), LAYERS, HEADS)


def test_a_decimal_number_in_yaml_may_be_written_in_other_ways(tmp_path):
    pytest.importorskip("yaml")
    text = "price: 2.5e-1\nsink: 1_0\nwindow: +64\nslash_cap: 0\n"
    found = settings_of_run(written(tmp_path, text, "file.yaml"))
    assert found == dict(price=0.25, sink=10, window=64, slash_cap=0)


def test_yaml_merges_what_it_refers_to(tmp_path):
    pytest.importorskip("yaml")
    text = (
        "layers:\n  0: &usual {price: 0.2, vertical_cap: 9}\n  1: &more {<<: *usual, price: 0.3}\n"
    )
    text += "  2: {<<: *more}\n"
    config = MTrainingConfig.from_options(settings=written(tmp_path, text, "file.yaml"))
    for layer in (1, 2):
        settings = head_policies(config, layer, LAYERS, HEADS)[0]
        assert (settings.price, settings.vertical_cap) == (0.3, 9)


def test_what_a_head_says_wins_over_a_dense_layer(tmp_path):
    heads = {"0": {}, "1": {"dense": False}, "2": {"price": 0.2}, "3": {"dense": True}}
    config = with_file(
        tmp_path, {"layers": {"1": {"dense": True, "heads": heads}}}, price=0.5, vertical_cap=99
    )
    found = head_policies(config, 1, LAYERS, HEADS)
    assert [head.price for head in found] == [0, 0.5, 0.2, 0]
    assert [head == DENSE for head in found] == [True, False, False, True]
    assert found[1].vertical_cap == found[2].vertical_cap == 99
    content = {"layers": {"1": {"price": 0, "heads": heads}}}
    config = MTrainingConfig.from_options(
        settings=written(tmp_path, content, "other.json"), price=0.5
    )
    found = head_policies(config, 1, LAYERS, HEADS)
    assert [head.price for head in found] == [0, 0.5, 0.2, 0]


def test_a_price_of_0_is_dense_whatever_the_run_caps_and_aims_at(tmp_path):
    content = {"layers": {"1": {"price": 0}, "2": {"heads": {"1": {"price": 0}}}}}
    for run in (dict(slash_cap=9, vertical_cap=99), dict(target_recall=0.9)):
        config = with_file(tmp_path, content, **run)
        assert head_policies(config, 1, LAYERS, HEADS) == (DENSE,) * HEADS
        dense = [head == DENSE for head in head_policies(config, 2, LAYERS, HEADS)]
        assert dense == [False, True, False, False]


def test_a_target_that_no_head_follows_is_refused(tmp_path):
    target = dict(target_recall=0.95)
    refused = "--mtraining-target-recall is 0.95, but --mtraining-settings .*file.json"
    every = {str(head): {"vertical": 9} for head in range(HEADS)}
    layers = {"0": {"dense": True}, "1": {"policy": "moba"}, "2": {"heads": every}}
    config = with_file(tmp_path, {"layers": layers}, **target)
    with pytest.raises(ConfigError, match=f"{refused} leaves no head with policy price"):
        check_settings_file(config, LAYERS, HEADS)
    check_settings_file(with_file(tmp_path, {"layers": layers}), LAYERS, HEADS)  # no target
    # A head of the layers named, or a layer that is not, follows.
    del every["3"]
    check_settings_file(with_file(tmp_path, {"layers": layers}, **target), LAYERS, HEADS)
    del layers["2"]
    check_settings_file(with_file(tmp_path, {"layers": layers}, **target), LAYERS, HEADS)


@pytest.mark.parametrize("place", ["run", "layer", "head"])
def test_an_unknown_option_names_a_near_one(place, tmp_path):
    content = {
        "run": {"prise": 3},
        "layer": {"layers": {"0": {"prise": 3}}},
        "head": {"layers": {"0": {"heads": {"1": {"prise": 3}}}}},
    }[place]
    with pytest.raises(
        ConfigError, match="has 'prise', which is not a setting: did you mean price"
    ):
        check_settings_file(with_file(tmp_path, content), LAYERS, HEADS)


@pytest.mark.parametrize("layers", [{"layers": {}}, {}])
def test_settings_of_the_run_must_be_the_runs(layers, tmp_path):
    """They are taken for options that are not given."""
    content = {"policy": "price", "price": 0.31, **layers}
    for given in (dict(price=0.31), {}, dict(price=None)):
        config = with_file(tmp_path, content, **given)
        check_settings_file(config, LAYERS, HEADS)
        assert head_policies(config, 0, LAYERS, HEADS) is None
        assert config.policy == PricePolicy(price=0.31)
    assert settings_of_run(config.settings) == {"policy": "price", "price": 0.31}
    with pytest.raises(ConfigError, match="has price 0.31, but the run 0.25"):
        check_settings_file(with_file(tmp_path, content, price=0.25), LAYERS, HEADS)
    with pytest.raises(ConfigError, match="has price 0.31, but the run 0.25"):
        check_settings_file(MTrainingConfig(settings=config.settings), LAYERS, HEADS)
    with pytest.raises(
        ConfigError, match="--mtraining-price is 0.31, but --mtraining-policy is fixed"
    ):
        with_file(tmp_path, content, policy="fixed")


def test_options_take_what_inspect_has_written(tmp_path):
    one = results.Measured(
        sweep.Series("price", ("price",), tuple({"price": 0.5**i} for i in range(2))),
        np.array([[[0.7, 0.5]], [[1.0, 0.6]]]),
        np.array([[[0.1, 0.1]], [[0.3, 0.9]]]),
        0.9,
    )
    content = results.Recommendation([one]).settings_file()
    assert content["price"] < 1 and content["layers"] == {"0": {"heads": {"1": {"dense": True}}}}
    config = with_file(tmp_path, content)
    assert config.policy == PricePolicy(price=content["price"])
    assert head_policies(config, 0, 1, 2) == (config.policy, DENSE)
    assert MTrainingConfig.from_options(**config.options()) == config


def test_what_a_file_has_for_all_layers_must_fit_the_sequence(tmp_path):
    path = written(tmp_path, {"window": 4096, "vertical_cap": 99})
    with pytest.raises(ConfigError, match="--mtraining-window is 4096, more than"):
        MTrainingConfig.for_sequence(1024, settings=path).check_sizes(1024)
    config = MTrainingConfig.for_sequence(8192, settings=path, sink=2)
    check_settings_file(config, LAYERS, HEADS)
    assert (config.window, config.policy.vertical_cap, config.sink) == (4096, 99, 2)


def test_published_budgets(tmp_path):
    fixed = ["vertical_and_slash", 1000, 6096, 0.98]
    layer = {"0": fixed, "1": fixed, "2": fixed, "3": ["vertical_and_slash", 30, 800, 1.0]}
    config = with_file(tmp_path, [layer] * LAYERS)
    for number in range(LAYERS):
        heads = head_policies(config, number, LAYERS, HEADS)
        assert heads[:3] == (FixedPolicy(vertical=1000, slash=6096),) * 3
        assert heads[3] == FixedPolicy(vertical=30, slash=800)
    assert sets_every_head(config.settings) and settings_of_run(config.settings) == {}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON: maximum recursion depth"),
        ([], "has 0 layers, but the model 3"),
        ({}, "is empty: give settings"),
        ({"layers": [1]}, '"layers", an object by layer number'),
        ({"layers": {}, "cost": 1}, "'cost', which is not a setting"),
        ({"layers": {"3": {}}}, "layer 3: the model has 3 layers"),
        ({"layers": {"one": {}}}, "layer one: 'one' is not a number"),
        ({"layers": {"1": 5}}, "layer 1 must be an object"),
        ({"layers": {"1": {"heads": [1]}}}, 'layer 1 has "heads"'),
        ({"layers": {"1": {"heads": {"4": {}}}}}, "layer 1, head 4: the model has 4 query heads"),
        ({"layers": {"1": {"heads": {"0": {"window": 9}}}}}, "layer 1, head 0 has 'window'"),
        ({"layers": {"1": {"price": -1}}}, "layer 1: --mtraining-price is -1"),
        ({"layers": {"1": {"price": "low"}}}, "--mtraining-price must be a number"),
        ({"layers": {"1": {"dense": "yes"}}}, "layer 1 has dense 'yes'"),
        ({"layers": {"1": {"policy": "best"}}}, "layer 1: --mtraining-policy is best"),
        ({"layers": {"1": {"vertical": 9, "block_top_k": 5}}}, "--mtraining-block-top-k is 5, but"),
        ({"layers": {"1": {"price": None}}}, "layer 1 has price null: give a value"),
        (
            {"layers": {"1": {"dense": True, "price": -5}}},
            "layer 1 has dense true and price -5, but",
        ),
        (
            {"layers": {"1": {"dense": True, "policy": "foo"}}},
            "has dense true and policy 'foo', but",
        ),
        (
            {"layers": {"1": {"heads": {"2": {"price": 0, "slash_cap": 9}}}}},
            "layer 1, head 2: --mtraining-slash-cap is 9, but --mtraining-price is 0",
        ),
        (
            {"layers": {"1": {"dense": False, "price": 0}}},
            "layer 1 has dense false, but a price of 0",
        ),
        ({"layers": {"00": {}}}, "layer 00: '00' is not a number such as 0 or 12"),
        ({"layers": {"1": {"heads": {"-1": {}}}}}, "layer 1, head -1: '-1' is not a number"),
        ('{"layers": {"1": {"price": 0.2}, "1": {}}}', "has '1' twice in one object"),
        ('{"layers": {"1": {"price": 1' + 400 * "0" + "}}}", "--mtraining-price must be a number"),
        ({"layers": {"1": {"vertical_cap": 2**63}}}, "use less than 2^63"),
    ],
)
def test_mistakes_in_overrides(tmp_path, content, named):
    with pytest.raises(ConfigError) as raised:
        check_settings_file(with_file(tmp_path, content), LAYERS, HEADS)
    assert "--mtraining-settings" in str(raised.value) and "file.json" in str(raised.value)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([1], "must be a list of layers"),
        ([layer_of()] * 2, "has 2 layers, but the model 3"),
        (
            [layer_of(), layer_of(3), layer_of()],
            "layer 1 has 3 heads (0, 1, 2, ...), but the model 4",
        ),
        ([layer_of(h2=["block_sparse", 100, 9])] * 3, "layer 0, head 2 is 'block_sparse', which"),
        ([layer_of(h2="all")] * 3, "layer 0, head 2 is 'all': expected a pattern's name"),
        (
            [layer_of(h1=["flex_vertical_and_slash", [0.9, 9], [0.9, 9]])] * 3,
            "head 1 is 'flex_vertical_and_slash', which is not supported: use vertical_and_slash",
        ),
        (
            [layer_of(h1=["vertical_and_slash", -5, 9])] * 3,
            "layer 0, head 1: --mtraining-vertical is -5",
        ),
        (
            [layer_of(h1=["vertical_and_slash", 2.5, 9])] * 3,
            "--mtraining-vertical must be a whole number",
        ),
        ([layer_of(h1=["vertical_and_slash", None, 4])] * 3, "layer 0, head 1 has vertical null"),
        ([layer_of(3, h9=FIXED)] * 3, "layer 0, head 9: the model has 4 query heads"),
        ([layer_of(3, h01=FIXED)] * 3, "layer 0, head 01: '01' is not a number"),
    ],
)
def test_mistakes_in_budgets(tmp_path, content, named):
    config = with_file(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        check_settings_file(config, LAYERS, HEADS)
    assert named in str(raised.value) and "file.json" in str(raised.value)


def test_budgets_in_yaml_may_have_numbers_as_keys(tmp_path):
    pytest.importorskip("yaml")
    layer = "".join(f"  {head}: [vertical_and_slash, {head + 7}, 9]\n" for head in range(HEADS))
    text = LAYERS * f"-\n{layer}"
    config = MTrainingConfig.from_options(settings=written(tmp_path, text, "file.yaml"))
    assert [head.vertical for head in head_policies(config, 2, LAYERS, HEADS)] == [7, 8, 9, 10]
    config = MTrainingConfig.from_options(
        settings=written(tmp_path, text + "  4: 5\n", "more.yaml")
    )
    with pytest.raises(ConfigError, match=r"layer 2 has 5 heads \(0, 1, 2, 3, ...\), but"):
        check_settings_file(config, LAYERS, HEADS)


def test_no_file_and_one_that_is_no_text(tmp_path):
    with pytest.raises(ConfigError, match="--mtraining-settings /no/such.json cannot be read"):
        check_settings_file(MTrainingConfig(settings="/no/such.json"), LAYERS, HEADS)
    (tmp_path / "file.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="--mtraining-settings .*file.json is not UTF-8 text"):
        MTrainingConfig.from_options(settings=str(tmp_path / "file.json"))


def test_a_file_is_read_again_when_it_has_changed(tmp_path, monkeypatch):
    """The checks of a run ask several times."""
    path = tmp_path / "settings.json"
    path.write_text('{"price": 0.5}')
    reads = []
    original = settings_content.read_text
    monkeypatch.setattr(
        settings_content,
        "read_text",
        lambda *args, **more: reads.append(1) or original(*args, **more),
    )
    for _ in range(3):
        assert settings_of_run(str(path)) == {"price": 0.5}
    assert len(reads) == 1
    path.write_text('{"price": 0.75}')
    assert settings_of_run(str(path)) == {"price": 0.75} and len(reads) == 2
    path.unlink()
    with pytest.raises(ConfigError, match="settings.json"):
        settings_of_run(str(path))


def test_many_sinks_beside_dense_layers(tmp_path):
    """Dense attention has no caps that they could be above."""
    path = tmp_path / "settings.json"
    path.write_text('{"layers": {"0": {"dense": true}}}')
    config = MTrainingConfig.from_options(
        policy="fixed", vertical=6000, slash=10, sink=5000, settings=str(path)
    )
    assert head_policies(config, 0, 2, 2)[0].price == 0
    assert config.dense().sink == 5000


def test_settings_that_are_made_again_have_the_layers_of_the_changed_file(tmp_path):
    for price in (0.2, 0.4):
        config = with_file(tmp_path, {"layers": {"0": {"price": price}}})
        assert head_policies(config, 0, LAYERS, HEADS)[0].price == price


@pytest.mark.parametrize(
    "given, named",
    [
        (dict(price=0.9), "--mtraining-price is 0.9"),
        (dict(slash_cap=9), "--mtraining-slash-cap is 9"),
        (dict(vertical=500, slash=20), "--mtraining-vertical is 500"),
        (dict(policy="moba", block_top_k=3), "--mtraining-block-top-k is 3"),
        (dict(policy="xattention"), "--mtraining-policy is xattention"),
        (dict(target_recall=0.9), "--mtraining-target-recall is 0.9"),
    ],
)
def test_options_that_a_best_pattern_file_leaves_without_a_head(given, named, tmp_path):
    config = with_file(tmp_path, [layer_of()] * LAYERS, **given)
    with pytest.raises(
        ConfigError, match=f"{named}, but .*file.json has the policies of all heads"
    ):
        check_settings_file(config, LAYERS, HEADS)
    check_settings_file(with_file(tmp_path, [layer_of()] * LAYERS, sink=3), LAYERS, HEADS)


def test_options_of_a_policy_that_no_head_has(tmp_path):
    every = {str(layer): {"policy": "moba", "block_top_k": 3} for layer in range(LAYERS)}
    for layers, refused in ((every, True), ({"0": every["0"]}, False)):
        for given in (dict(price=0.9), dict(slash_cap=9)):
            config = with_file(tmp_path, {"layers": layers}, **given)
            if not refused:
                check_settings_file(config, LAYERS, HEADS)
                continue
            with pytest.raises(ConfigError, match="gives every head another policy than price"):
                check_settings_file(config, LAYERS, HEADS)
        check_settings_file(with_file(tmp_path, {"layers": layers}), LAYERS, HEADS)
    # The file's own word on the price of the heads that it leaves.
    check_settings_file(with_file(tmp_path, {"price": 0.9, "layers": every}), LAYERS, HEADS)


def test_a_value_that_makes_the_same_run_is_the_run_s(tmp_path):
    content = {"estimator": "last", "held_out_rows": 0, "layers": {}}
    check_settings_file(with_file(tmp_path, content), LAYERS, HEADS)
    with pytest.raises(ConfigError, match="has price 0.3, but the run 0.5"):
        check_settings_file(with_file(tmp_path, {"price": 0.3}, price=0.5), LAYERS, HEADS)
