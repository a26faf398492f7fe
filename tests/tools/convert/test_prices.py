# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert prices``: the file makes a later run select by the prices that a target has reached."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("transformers")

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import FixedPolicy, PricePolicy, head_policies, settings_of_run
from megatron_mtraining.megatron.options import attribute
from tests.support.convert_cases import change_args, convert, refused

TARGET = dict(mtraining_target_recall=0.95)


@pytest.fixture
def run(plain, tmp_path):
    """A checkpoint of a run with a target; its model has ``layers`` and ``heads``."""
    folder = tmp_path / "run"
    shutil.copytree(plain[1], folder)
    return folder


def sizes(folder):
    import torch

    args = torch.load(folder / "release" / "common.pt", weights_only=False)["args"]
    return args.num_layers, args.num_attention_heads


def policies_in(path, layers, heads, **options):
    """The policy of each layer's heads in a run that is given the file."""
    of_run = settings_of_run(str(path))
    config = MTrainingConfig.from_options(settings=str(path), **of_run, **options)
    return config, [head_policies(config, layer, layers, heads) for layer in range(layers)]


def test_each_head_has_its_price(run, tmp_path, capsys):
    layers, heads = sizes(run)
    reached = [[0.1 * (1 + layer) + head / 64 for head in range(heads)] for layer in range(layers)]
    change_args(run, **TARGET, mtraining_vertical_cap=900, mtraining_price_reached=reached)
    out = tmp_path / "settings.json"
    assert convert("prices", run, out) == 0
    assert f"the prices of {layers * heads} heads" in capsys.readouterr().out
    config, found = policies_in(out, layers, heads)
    assert config.policy.target_recall is None and config.policy.vertical_cap == 900
    for row, expected in zip(found, reached, strict=True):
        assert [policy.price for policy in row] == pytest.approx(expected, rel=1e-5)
        assert {policy.vertical_cap for policy in row} == {900}
    refused(capsys, out, ("prices", run, out), [out, "exists", "--overwrite"])
    assert convert("prices", run, out, "--overwrite") == 0


def test_arguments_as_megatron_saves_them(run, tmp_path):
    """All options are filled in before a checkpoint is saved."""
    config = MTrainingConfig.from_options(target_recall=0.95, sink=7, slash_cap=5, block_size=64)
    layers, heads = sizes(run)
    filled = {attribute(name): value for name, value in config.options().items()}
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"layers": {"1": {"heads": {"0": {"slash_cap": 3}}}}}))
    change_args(
        run,
        **filled | {"mtraining_settings": str(own)},
        mtraining_price_reached=[[0.5] * heads] * layers,
    )
    assert convert("prices", run, tmp_path / "s.json") == 0
    later, found = policies_in(tmp_path / "s.json", layers, heads)
    assert (later.sink, later.block_size, later.sampling) == (7, 64, config.sampling)
    assert [policy.slash_cap for policy in found[1]] == [3] + [5] * (heads - 1)


def test_layers_with_a_window_have_none(run, tmp_path, capsys):
    layers, heads = sizes(run)
    change_args(
        run, **TARGET, mtraining_price_reached=[[0.5] * heads] * layers, window_size=(64, 0),
        window_attn_skip_freq=[1] + [0] * (layers - 1),
    )  # fmt: skip
    assert convert("prices", run, tmp_path / "prices.json") == 0
    written = json.loads((tmp_path / "prices.json").read_text())
    assert [*written["layers"]] == [str(layer) for layer in range(1, layers)]
    assert f"{(layers - 1) * heads} heads in {layers - 1} layers" in capsys.readouterr().out


def test_one_price_of_the_model(run, tmp_path):
    change_args(run, **TARGET, mtraining_target_scope="model", mtraining_price_reached=0.37)
    assert convert("prices", run, tmp_path / "s.yaml") == 0
    assert settings_of_run(str(tmp_path / "s.yaml")) == {"price": 0.37}


def test_settings_of_heads_that_the_run_had(run, tmp_path, capsys):
    """A head's price is a multiple of the run's; dense heads and other policies stay."""
    layers, heads = sizes(run)
    own = tmp_path / "own.json"
    heads_of_first = {"0": {"price": 0.5, "slash_cap": 7}, "1": {"dense": True}}
    of_last = {"vertical": 9, "slash": 3}
    own.write_text(
        json.dumps({"layers": {"0": {"heads": heads_of_first}, str(layers - 1): of_last}})
    )
    reached = [[0.4] * heads for _ in range(layers)]
    change_args(run, **TARGET, mtraining_settings=str(own), mtraining_price_reached=reached)
    out = tmp_path / "out.json"
    assert convert("prices", run, out) == 0
    _, found = policies_in(out, layers, heads)
    # The run's price is the default, 0.25.
    assert (found[0][0].price, found[0][0].slash_cap) == (0.8, 7)
    assert found[0][1].price == 0 and found[0][2] == PricePolicy(price=0.4)
    assert set(found[-1]) == {FixedPolicy(9, 3)}
    refused(capsys, own, ("prices", run, own, "--overwrite"), [own])
    moved = own.rename(tmp_path / "moved.json")
    refused(
        capsys,
        tmp_path / "new.json",
        ("prices", run, tmp_path / "new.json"),
        ["own.json", "--settings"],
    )
    assert convert("prices", run, tmp_path / "new.json", "--settings", moved) == 0
    assert (tmp_path / "new.json").read_text() == out.read_text()


@pytest.mark.parametrize(
    "changes,named",
    [
        (dict(TARGET), ["had no --mtraining-target-recall", "did not move"]),
        (
            dict(mtraining_schedule="0:1,0.9:0"),
            ["prices are those of --mtraining-schedule 0:1,0.9:0"],
        ),
        (dict(TARGET, mtraining_price_reached=[[0.1]]), ["prices of 1 layers and 1 heads"]),
        (dict(TARGET, mtraining_price_reached="0.3"), ["not a number above 0"]),
        (dict(TARGET, mtraining_price_reached=[[0.1], 3]), ["not a table"]),
        (
            dict(mtraining_target_recall=7, mtraining_price_reached=0.3),
            ["--mtraining-target-recall is 7"],
        ),
    ],
)
def test_what_has_no_prices_is_refused(changes, named, run, tmp_path, capsys):
    change_args(run, **changes)
    refused(capsys, tmp_path / "s.json", ("prices", run, tmp_path / "s.json"), named)


def test_what_is_no_checkpoint_or_had_no_file_is_refused(run, tmp_path, capsys):
    out = tmp_path / "s.json"
    refused(capsys, out, ("prices", tmp_path / "none", out), ["none", "not a folder"])
    change_args(run, **TARGET, mtraining_price_reached=0.3)
    (tmp_path / "own.json").write_text('{"price": 0.3}')
    words = ("prices", run, out, "--settings", tmp_path / "own.json")
    refused(capsys, out, words, ["the run had no settings file"])
