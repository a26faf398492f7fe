# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect --layers`` and ``--policy``: what is measured, and what is refused."""

from __future__ import annotations

import json

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.inspect.options import _layers
from tests.support.inspect_cases import LAYERS, inspect, quick, refused

SMALL = ("--rows", 64, "--policy", "fixed")


@pytest.mark.parametrize(
    ("word", "layers"),
    [("all", None), ("8", 8), ("3,", (3,)), ("9,2,2", (2, 9)), ("0,1,", (0, 1))],
)
def test_which_layers(word, layers):
    assert _layers(word) == layers


@pytest.mark.parametrize("word", ["", "0", "-1", "x", "1,x", ",", "1-3", "1.5"])
def test_layers_that_are_none(word):
    with pytest.raises(ConfigError, match=f"--layers is {word}"):
        _layers(word)


@pytest.mark.usefixtures("unrendered")
def test_sampled_layers(llama, words, tmp_path, capsys):
    out = tmp_path / "out"
    assert inspect(llama, *quick(words, out, *SMALL, "--layers", "1,", "--head", "1:3")) == 0
    said = capsys.readouterr().out
    assert "of 1 layers" in said and f"1 of {LAYERS} layers were measured" in said
    numbers = json.loads((out / "results.json").read_text())
    assert numbers["measured_layers"] == [1] and numbers["layers"] == LAYERS
    whole = tmp_path / "whole"
    assert inspect(llama, *quick(words, whole, *SMALL)) == 0
    everything = json.loads((whole / "results.json").read_text())
    for one, other in zip(numbers["series"][0]["settings"], everything["series"][0]["settings"]):
        assert one["recall"] == other["recall"][1:]
    assert (out / "head_layer1_head3.png").exists()
    layers = json.loads((out / "settings.json").read_text()).get("layers", {})
    assert set(layers) <= {"1"}


def test_layers_and_heads_that_the_model_has_not(llama, words, tmp_path, capsys):
    rest = quick(words, tmp_path / "out", *SMALL)
    refused(capsys, ["--layers is 3", "2 layers"], llama, *rest, "--layers", "3")
    refused(capsys, ["--layers has 5", "2 layers"], llama, *rest, "--layers", "0,5")
    named = ["--head is 0:1", "not among --layers (1)"]
    refused(capsys, named, llama, *rest, "--layers", "1,", "--head", "0:1")
    named = ["--layers is 1", "--sensitivity measures all"]
    more = ("--layers", "1", "--sensitivity", "layers")
    refused(capsys, named, llama, *quick(words, tmp_path / "out"), *more)


@pytest.mark.usefixtures("unrendered")
def test_every_policy(llama, words, tmp_path):
    out = tmp_path / "out"
    more = ("--rows", 32, "--layers", "1", "--policy", "all", "--block-size", 64)
    assert inspect(llama, *quick(words, out, *more)) == 0
    series = json.loads((out / "results.json").read_text())["series"]
    assert len({one["policy"] for one in series}) == 4
