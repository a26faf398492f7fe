# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Schedules of prices and target recalls: what points mean, and how each mistake is named."""

from __future__ import annotations

import json
import re

import pytest

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import PricePolicy, Span, check_settings_file, head_policies
from megatron_mtraining.config.schedule import NAMED, parse

STEPS = "0:1.2,0.4:1.2,0.4:0.6,0.8:0.15,0.9:0"
RECALLS = "0:0.8,0.9:0.95,0.9:1"


def options(**given):
    return MTrainingConfig.from_options(**given)


def written(tmp_path, content, name="file.json"):
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return str(path)


def test_prices_between_points():
    steps = parse("schedule", STEPS)
    found = [steps.at(share) for share in (0, 0.2, 0.4, 0.5, 0.6, 0.8, 0.89, 0.9, 1)]
    # Equal ratios in equal shares; before a 0 the price stays, and of two points the second holds.
    assert found == pytest.approx([1.2, 1.2, 0.6, 0.6 / 2**0.5, 0.3, 0.15, 0.15, 0, 0])
    assert steps.lowest == 0 and steps.ends_dense and steps.last_share == 0.9
    one = parse("schedule", "0:0.5")
    assert one.at(0) == one.at(1) == one.lowest == 0.5 and not one.ends_dense
    rising = parse("schedule", "0:0.1,0.5:0.4")
    assert rising.at(0.25) == pytest.approx(0.2) and rising.lowest == 0.1


@pytest.mark.parametrize("total", [7, 10, 100, 1000])
def test_a_point_holds_from_its_first_step_on(total):
    """Steps' shares are not rounded to before it."""
    steps = parse("schedule", STEPS)
    for step in range(total + 1):
        price = steps.at(Span(0, total).share(step))
        assert (price == 0) == (10 * step >= 9 * total)
        assert (price == 1.2) == (10 * step < 4 * total)


def test_recalls_are_lost_attention():
    steps = parse("target_schedule", RECALLS)
    found = [steps.at(share) for share in (0, 0.45, 0.899999, 0.9)]
    assert found == pytest.approx([0.2, 0.1, 0.05, 0], rel=1e-4)
    assert parse("target_schedule", "0:0.9,0.5:0.99").lowest == 0.01
    config = options(target_schedule=RECALLS)
    assert config.policy.target_recall == 0.8 and config.policy.target_scope == "head"
    assert options(target_schedule=RECALLS, target_scope="model").policy.target_scope == "model"


def test_names_and_many_points():
    for name, points in NAMED["schedule"].items():
        assert parse("schedule", name) == parse("schedule", points)
        assert options(schedule=name).policy.steps == parse("schedule", points)
    assert parse("schedule", " 0 : 1.2, 0.9: 0.3 ,0.9:0") == parse(
        "schedule", "0:1.2,0.9:0.3,0.9:0"
    )
    many = ",".join(f"{i / 500}:{1 - i / 500}" for i in range(500))
    assert parse("schedule", many).at(0.123) == pytest.approx(0.877)


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("schedule", "", "'' is not SHARE:PRICE: give anneal, or anneal-low, or points such as 0:1.2"),
        ("schedule", "anneals", "'anneals' is not SHARE:PRICE"),
        ("schedule", "0:1.2,0.9", "'0.9' is not SHARE:PRICE"),
        ("schedule", "0:1.2,", "'' is not SHARE:PRICE"),
        ("schedule", "0:1:2", "'0:1:2' is not SHARE:PRICE"),
        ("schedule", "0:1.2;0.9:0", "'0:1.2;0.9:0' is not SHARE:PRICE"),
        ("schedule", "0:1,0.6:0.5,0.5:0.2", "with 0.5 after 0.6: give points in the order of"),
        ("schedule", "0:1,1:0", "a point at 1: use shares of the run from 0 to below 1"),
        ("schedule", "0:1,90:0", "a point at 90: use shares"),
        ("schedule", "-0.1:1", "a point at -0.1: use shares"),
        ("schedule", "0:1,nan:0.5", "a point at nan: use shares"),
        ("schedule", "0.1:1,0.5:0.2", "which begins at 0.1: give a point at 0"),
        ("schedule", "0:1,0.5:-0.2", "the price -0.2: use prices above 0, or 0 for dense"),
        ("schedule", "0:nan", "the price nan: use prices"),
        ("schedule", "0:inf", "the price inf: use prices"),
        ("schedule", "0:1,0.5:0,0.9:0.5", "with dense steps before others: give dense attention (a price"),
        ("schedule", "0:1,0.5:0,0.9:0", "with dense steps before others"),
        ("schedule", "0:0", "which is dense from the start: use --mtraining-price 0"),
        ("schedule", "0:1,0:0", "with two points at 0, of which one never holds"),
        ("schedule", "0:1,0:0.5,0.5:0.1", "with two points at 0, of which one never holds"),
        ("schedule", "0:1,0.5:1,0.5:0.7,0.5:0.2", "with three points at 0.5, of which one never holds"),
        ("target_schedule", "anneal", "'anneal' is not SHARE:RECALL: give points such as 0:0.8,0.9:0.95"),
        ("target_schedule", "0:0,0.5:0.9", "the recall 0: use recalls above 0, or 1 for dense"),
        ("target_schedule", "0:0.5,0.5:1.2", "the recall 1.2: use recalls"),
        ("target_schedule", "0:nan", "the recall nan: use recalls"),
        ("target_schedule", "0:0.9,0.5:1,0.6:0.9", "give dense attention (a recall of 1) as the last point"),
        ("target_schedule", "0:1", "which is dense from the start"),
    ],
)  # fmt: skip
def test_points_that_cannot_work(name, text, problem):
    with pytest.raises(ConfigError) as raised:
        options(**{name: text})
    message = str(raised.value)
    assert problem in message and "\n" not in message
    assert message.startswith(f"--mtraining-{name.replace('_', '-')} is {text}")


@pytest.mark.parametrize(
    "given, problem",
    [
        (dict(schedule="anneal", price=0.3), "schedule is anneal, but --mtraining-price is 0.3: leave"),
        (dict(schedule="anneal", price=0.25), "schedule is anneal, but --mtraining-price is 0.25: leave"),
        (dict(schedule="anneal", price=0), "schedule is anneal, but --mtraining-price is 0: leave one"),
        (dict(target_schedule=RECALLS, price=0), "target-schedule is .*, but --mtraining-price is 0, which"),
        (dict(schedule="anneal", target_recall=0.9), "but --mtraining-target-recall is 0.9, which moves"),
        (dict(schedule="anneal", target_schedule=RECALLS), "but --mtraining-target-schedule is 0:0.8"),
        (dict(target_schedule=RECALLS, target_recall=0.9), "but --mtraining-target-recall is 0.9: leave"),
        (dict(target_schedule=RECALLS, target_recall=0.8), "but --mtraining-target-recall is 0.8: leave"),
        (dict(schedule="anneal", policy="fixed"), "policy is fixed, which has no such setting"),
        (dict(schedule="anneal", vertical=9), "policy is fixed, which has no such setting"),
        (dict(schedule="anneal", slash=9), "policy is fixed, which has no such setting"),
        (dict(target_schedule=RECALLS, policy="moba"), "policy is moba, which has no such setting"),
        (dict(schedule_extension="continue"), "is continue, but there is no --mtraining-schedule"),
        (dict(schedule="anneal", schedule_extension="stop"), "is stop: use one of continue, restart"),
        (dict(schedule=0.5), "--mtraining-schedule must be a text, but is 0.5"),
        (dict(schedule="anneal", target_scope="head"), "but there is no --mtraining-target-recall"),
    ],
)  # fmt: skip
def test_what_a_schedule_does_not_go_with(given, problem):
    with pytest.raises(ConfigError, match=problem):
        options(**given)


def test_a_policy_s_own_price_is_not_lost():
    """A schedule beside it would be over nothing that the price says."""
    with pytest.raises(ConfigError, match="schedule is anneal, but --mtraining-price is 0.4"):
        MTrainingConfig(PricePolicy(price=0.4, schedule="anneal"))
    with pytest.raises(ConfigError, match="price is 0, which is dense attention"):
        PricePolicy(price=0.0, schedule="anneal")


OWN = {"1": {"heads": {"0": {"price": 0.1}, "1": {"dense": True}, "2": {"vertical": 9}}}}
FILES = {
    "prices": ({"price": 0.4, "layers": OWN}, dict(schedule=STEPS)),
    "default price": ({"price": 0.25, "layers": OWN}, dict(schedule=STEPS)),
    "layers alone": ({"layers": OWN}, dict(schedule=STEPS)),
    "its own schedule": ({"price": 0.4, "schedule": "anneal", "held_out_rows": None, "layers": OWN}, {}),
    "extension": ({"layers": {}}, dict(schedule="anneal", schedule_extension="restart")),
    "targets": (
        {"layers": {"1": {"heads": {"0": {"target_recall": 0.9}, "1": {"price": 0.5}}}}},
        dict(target_schedule=RECALLS),
    ),
    "targets for all": ({"target_scope": "model"}, dict(target_schedule=RECALLS)),
}  # fmt: skip


@pytest.mark.parametrize("given", FILES)
def test_options_are_the_inverse_also_with_a_file(given, tmp_path):
    content, more = FILES[given]
    config = options(settings=written(tmp_path, content), **more)
    assert options(**config.options()) == config and hash(config) == hash(
        options(**config.options())
    )
    assert config.options()["target_recall"] is None
    check_settings_file(config, 2, 4)
    again = MTrainingConfig.for_sequence(1 << 20, **config.options())
    assert again == config
    short = MTrainingConfig.for_sequence(1024, settings=config.settings, **more)
    assert short.policy.vertical_cap == 1024 and short.policy.price == config.policy.price
    assert short.policy.steps == config.policy.steps
    check_settings_file(short, 2, 4)


def test_options_are_the_inverse_without_a_file():
    for given in (
        dict(schedule="anneal", vertical_cap=99, slash_cap=7),
        dict(schedule=STEPS, schedule_extension="continue"),
        dict(target_schedule=RECALLS, target_scope="model", price=0.5),
    ):
        config = options(**given)
        assert options(**config.options()) == config
        assert {config: 1}[options(**given)] == 1
        assert MTrainingConfig.for_sequence(8192, **given) == config


def test_heads_keep_the_ratio_to_the_file_s_price(tmp_path):
    content = {"price": 0.4, "layers": OWN}
    config = options(settings=written(tmp_path, content), schedule="anneal")
    own, dense, fixed, plain = head_policies(config, 1, 2, 4)
    assert own.price / config.policy.price == pytest.approx(0.1 / 0.4)
    assert plain.price == config.policy.price and dense.price == 0 and fixed.name == "fixed"
    with pytest.raises(ConfigError, match="price is 0.3: leave one of them out"):
        options(settings=config.settings, schedule="anneal", price=0.3)


def test_heads_may_have_targets_under_a_target_schedule(tmp_path):
    content, more = FILES["targets"]
    config = options(settings=written(tmp_path, content), **more)
    own, price, plain, _ = head_policies(config, 1, 2, 4)
    assert (own.target_recall, price.target_recall, plain.target_recall) == (0.9, 0.8, 0.8)
    assert price.price == 0.5


@pytest.mark.parametrize("name", ["schedule", "target_schedule", "schedule_extension"])
def test_layers_and_heads_have_no_schedule_of_their_own(name, tmp_path):
    value = {"schedule": "anneal", "target_schedule": RECALLS}.get(name, "continue")
    for number, of_layer in enumerate(({name: value}, {"heads": {"2": {name: value}}})):
        path = written(tmp_path, {"layers": {"1": of_layer}}, f"{number}.json")
        with pytest.raises(ConfigError, match=f"has '{name}', which layers and heads cannot set"):
            check_settings_file(options(settings=path, schedule="anneal"), 2, 4)


def test_files_that_contradict_a_schedule(tmp_path):
    own = written(tmp_path, {"schedule": "anneal", "layers": {}})
    assert options(settings=own).policy.schedule == "anneal"
    with pytest.raises(ConfigError, match="file.json has schedule 'anneal', but the run '0:1'"):
        check_settings_file(options(settings=own, schedule="0:1"), 2, 4)
    with pytest.raises(ConfigError, match="schedule is anneal, but --mtraining-price is 0.3"):
        options(settings=own, price=0.3)
    with pytest.raises(
        ConfigError, match="schedule is anneal, but --mtraining-target-recall is 0.9"
    ):
        options(settings=own, target_recall=0.9)
    target = written(tmp_path, {"target_recall": 0.9}, "target.json")
    for name, value in (("schedule", "anneal"), ("target_schedule", RECALLS)):
        with pytest.raises(ConfigError, match="but --mtraining-target-recall is 0.9"):
            options(settings=target, **{name: value})
    dense = {str(layer): {"dense": True} for layer in range(2)}
    for name, value in (("schedule", "anneal"), ("target_schedule", RECALLS)):
        flag = f"--mtraining-{name.replace('_', '-')} is {re.escape(value)}"
        config = options(
            settings=written(tmp_path, {"layers": dense}, "dense.json"), **{name: value}
        )
        with pytest.raises(ConfigError, match=f"{flag}, but .* leaves no head with policy price"):
            check_settings_file(config, 2, 4)
        fixed = ["vertical_and_slash", 1000, 6096, 0.98]
        best = [{str(head): fixed for head in range(4)} for _ in range(2)]
        config = options(settings=written(tmp_path, best, "best.json"), **{name: value})
        with pytest.raises(ConfigError, match=f"{flag}, but .* has the policies of all heads"):
            check_settings_file(config, 2, 4)


def test_what_a_run_s_schedule_is_over():
    def span(done, end, saved=None, extension=None):
        return Span.of_run(done, end, saved, extension, f"--train-iters is {end}")

    assert span(0, 100) == Span(0, 100)
    assert span(0, 100, extension="restart") == Span(0, 100)
    assert span(40, 100) == Span(0, 100), "from a checkpoint without a schedule"
    assert span(40, 100, extension="continue") == Span(0, 100)
    assert span(40, 100, extension="restart") == Span(40, 100)
    before = Span(0, 100)
    for extension in (None, "continue", "restart"):
        assert span(100, 100, before, extension) == before
    with pytest.raises(
        ConfigError,
        match="^--train-iters is 200, but the schedule of the checkpoint is to 100: give "
        "--mtraining-schedule-extension continue .* or restart",
    ):
        span(100, 200, before)
    assert span(100, 200, before, "continue") == Span(0, 200)
    after = span(100, 200, before, "restart")
    assert after == Span(100, 200)
    # Requeued with the same command line, and made longer once more.
    assert span(150, 200, after, "restart") == after
    assert span(200, 300, after, "continue") == Span(100, 300)
    assert span(50, 80, before, "continue") == Span(0, 80), "shorter"
    for done, end, saved, extension in (
        (100, 100, Span(0, 90), "restart"),
        (150, 80, after, "continue"),
        (150, 150, None, "restart"),
    ):
        with pytest.raises(
            ConfigError, match=f"is {end}, and {done} are done: there is nothing left"
        ):
            span(done, end, saved, extension)


def test_shares_of_a_span():
    found = [Span(100, 200).share(done) for done in (0, 100, 150, 200, 300)]
    assert found == [0, 0, 0.5, 1, 1]
