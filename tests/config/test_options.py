# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The table of options: it fits the dataclasses, flat options and nested settings are one another's inverse,
and unknown options are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import (
    OPTIONS,
    FixedPolicy,
    LastRowsSampling,
    MobaPolicy,
    PricePolicy,
    StratifiedSampling,
    XAttentionPolicy,
    settings_of_run,
)
from megatron_mtraining.config.policies import POLICIES, SAMPLINGS

GENERAL = {option.field_name: option for option in OPTIONS if not option.sections}


def test_every_field_has_one_option():
    names = [option.name for option in OPTIONS]
    assert len(names) == len(set(names))
    assert set(GENERAL) == {field.name for field in fields(MTrainingConfig)}
    for section in (*POLICIES.values(), *SAMPLINGS.values()):
        named = [option.field_name for option in OPTIONS if section in option.sections]
        assert sorted(named) == sorted(field.name for field in fields(section))


def test_defaults_in_help_are_those_of_the_settings():
    words = {"False": "off", "None": GENERAL["loss_chunk"].default}
    for field in fields(MTrainingConfig):
        if field.name not in ("policy", "sampling", "settings"):
            default = str(field.default)
            assert GENERAL[field.name].default == words.get(default, default), field.name
    for option in OPTIONS:
        assert option.default and len(option.help) > 20 and option.help.endswith(".")
        assert option.default in option.full_help and option.help.startswith(option.summary[:-1])


CONFIGS = [
    MTrainingConfig(),
    MTrainingConfig(PricePolicy(price=0.1, slash_cap=9, target_recall=0.9, target_scope="model")),
    MTrainingConfig(FixedPolicy(vertical=5, slash=0), window=0, sink=2, block_size=64),
    MTrainingConfig(FixedPolicy(100, 200), LastRowsSampling(rows=9), sink=3),
    MTrainingConfig(XAttentionPolicy(8, 0.5), StratifiedSampling(4, 3, 0), settings="file.json"),
    MTrainingConfig(MobaPolicy(3), recompute_attention=True, loss_chunk=0),
    MTrainingConfig(backward_threshold=0.5),
    MTrainingConfig(backward_threshold=3.0),
    MTrainingConfig(
        PricePolicy(price=0.2), batching="cost", tuning="on", tuning_mass=0.02,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.policy.name)
def test_options_and_from_options_are_inverse(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file.json").write_text('{"layers": {}}')
    flat = config.options()
    assert set(flat) == {option.name for option in OPTIONS}
    assert MTrainingConfig.from_options(**flat) == config


def test_the_policy_follows_from_what_is_given():
    assert MTrainingConfig.from_options() == MTrainingConfig(PricePolicy(price=0.25))
    assert MTrainingConfig.from_options(slash=7).policy == FixedPolicy(vertical=1000, slash=7)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(batching="time"), "--mtraining-batching is time: use one of off, length, cost"),
        (dict(tuning=True), "--mtraining-tuning must be a text, but is True"),
        (dict(tuning="on", tuning_mass=0.0), "--mtraining-tuning-mass is 0.0: use a share"),
        (dict(batching="cost", tuning_mass=0.5), "--mtraining-tuning-mass is 0.5, but --mtraining-tuning is"),
    ],
)  # fmt: skip
def test_options_of_balancing_that_cannot_work(options, named):
    with pytest.raises(ConfigError) as raised:
        MTrainingConfig.from_options(**options)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(policy="moba"), "--mtraining-policy is moba, which has no price to tune"),
        (dict(price=0), "--mtraining-price is 0, which is dense attention"),
    ],
)
def test_tuning_needs_a_price(options, named):
    config = MTrainingConfig.from_options(tuning="on", **options)
    with pytest.raises(ConfigError, match=named):
        config.check_tuning()
    MTrainingConfig.from_options(tuning="on").check_tuning()
    with pytest.raises(ConfigError, match="tuning is on, but the price follows a schedule"):
        MTrainingConfig.from_options(tuning="on", schedule="anneal").check_tuning()
    MTrainingConfig.from_options(batching="cost", **options).check_tuning()


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="--mtraining-cost is not a setting"):
        MTrainingConfig.from_options(cost=1)
    with pytest.raises(ConfigError, match="did you mean --mtraining-target-recall"):
        MTrainingConfig.from_options(targetrecall=0.9)


def test_defaults_are_cut_to_the_sequence_and_given_options_are_not():
    assert MTrainingConfig.for_sequence(512).policy == PricePolicy(vertical_cap=512)
    assert MTrainingConfig.for_sequence(512, policy="fixed").policy == FixedPolicy(512, 100)
    assert MTrainingConfig.for_sequence(512, vertical=600).policy.vertical == 600
    assert MTrainingConfig.for_sequence(512, price=0).keeps_all(512)


def test_what_a_section_must_be():
    with pytest.raises(ConfigError, match="policy is 'price': give one of PricePolicy, "):
        MTrainingConfig(policy="price")


def test_settings_need_no_torch():
    code = "import sys, megatron_mtraining.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("wrong", ["512", 512.0, None, True, [512], float("nan")], ids=repr)
def test_lengths_and_ranks_are_whole_numbers(wrong):
    """A length that is not a number took no part in the comparison that cuts defaults to it."""
    config = MTrainingConfig()
    for check in (
        lambda: MTrainingConfig.for_sequence(wrong),
        lambda: config.check_sizes(wrong),
        lambda: config.keeps_all(wrong),
        lambda: config.check_sequence(wrong, 2),
        lambda: config.check_sequence(4096, wrong),
        lambda: config.check_sequence(4096, 2, wrong),
    ):
        with pytest.raises(ConfigError, match="give a whole number"):
            check()


def test_lengths_and_ranks_out_of_range():
    config = MTrainingConfig()
    for wrong, named in (
        (lambda: MTrainingConfig.for_sequence(0), "--seq-length is 0"),
        (lambda: config.check_sizes(-1), "--seq-length is -1"),
        (lambda: config.check_sequence(4096, 0), "--context-parallel-size is 0"),
        (lambda: config.check_sequence(4096, 4, 0), "inner groups of 0"),
        (lambda: config.check_sequence(4096, 4, 3), "inner groups of 3"),
        (lambda: settings_of_run(None), "--mtraining-settings must be a text, but is None"),
    ):
        with pytest.raises(ConfigError, match=named):
            wrong()


def test_a_policy_of_a_derived_class_has_its_options():
    """Else ranks with other prices would agree."""

    class Own(PricePolicy):
        pass

    assert MTrainingConfig(policy=Own(price=3.0)).options()["price"] == 3.0
