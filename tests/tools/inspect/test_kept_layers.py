# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Measured layers are kept by a run that is ended, and used by the next; which layers are measured."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.inspect import collect, kept_layers, measure, settled
from megatron_mtraining.tools.inspect.options import _layers
from tests.support.inspect_cases import LAYERS, inspect, quick, refused

SMALL = ("--rows", 64, "--policy", "fixed")


def end_at(monkeypatch, layer, module=collect):
    """End the run (as with Ctrl-C) when it measures this layer; returns the layers it has measured."""
    real, begun = measure.LayerRecall, []

    def measured(given, *rest):
        if given.layer == layer:
            raise KeyboardInterrupt
        begun.append(given.layer)
        return real(given, *rest)

    monkeypatch.setattr(module, "LayerRecall", measured)
    return begun


def test_an_ended_run_goes_on_where_it_was(llama, words, tmp_path, capsys, monkeypatch):
    out, other = tmp_path / "out", tmp_path / "other"
    with monkeypatch.context() as patch:
        assert end_at(patch, 1) == []
        assert inspect(llama, *quick(words, out, *SMALL)) == 130
    assert "1 measured layers are kept" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [".layers"]
    with monkeypatch.context() as patch:
        begun = end_at(patch, None)
        assert inspect(llama, *quick(words, out, *SMALL)) == 0
        assert begun == [1]
    assert "1 layers were measured before" in capsys.readouterr().err
    assert not (out / ".layers").exists()
    assert inspect(llama, *quick(words, other, *SMALL)) == 0
    one, whole = (json.loads((path / "results.json").read_text()) for path in (out, other))
    assert one["series"] == whole["series"] and one["measured"] == whole["measured"]


def test_layers_of_another_run_are_not_used(llama, words, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        end_at(patch, 1)
        assert inspect(llama, *quick(words, out, *SMALL)) == 130
    for more, name in (
        (("--rows", 63), "--rows or --seed"),
        (("--seq", 512), "text, tokenizer or --seq"),
        (("--window", 64), "--policy, --block-size or --window"),
        (("--dtype", "bf16"), "--dtype or --device"),
        (("--yarn", 2, "--seq", 1024), "--yarn"),
    ):
        named = ["--output", "1 measured layers", f"another {name}", "--overwrite"]
        refused(capsys, named, llama, *quick(words, out, *SMALL, *more))
        assert (out / ".layers" / "0.npz").exists()
    with monkeypatch.context() as patch:
        begun = end_at(patch, None)
        arguments = quick(words, out, *SMALL, "--seq", 512, "--overwrite")
        assert inspect(llama, *arguments) == 0
        assert begun == [0, 1]


def test_an_error_after_all_layers_keeps_them(llama, words, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(settled, "patterns_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            inspect(llama, *quick(words, out, *SMALL))
    assert kept_layers.measured_before(out) == LAYERS
    with monkeypatch.context() as patch:
        begun = end_at(patch, None)
        assert inspect(llama, *quick(words, out, *SMALL)) == 0
        assert begun == []


@pytest.mark.parametrize("output", ["inspect-out", "."])
def test_an_output_in_the_model_s_folder(output, llama, words, tmp_path, capsys, monkeypatch):
    """What the run writes there is not a change of the model: it goes on."""
    shutil.copytree(llama, tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    arguments = quick(words, output, *SMALL, "--settings", "mine.json")
    begun = end_at(monkeypatch, 1)
    for _ in range(2):
        assert inspect(".", *arguments) == 130
    assert begun == [0]
    assert "1 layers were measured before: going on" in capsys.readouterr().err


def test_half_written_files_are_not_read(tmp_path):
    with kept_layers.kept_layers(tmp_path, {"run": 1}, overwrite=False) as kept:
        (kept.folder / "new").write_bytes(b"PK half")
        assert kept.numbers() == [] and kept.load(3) is None
        kept.save(3, np.ones((2, 4)), np.zeros((2, 4)))
        recall, density = kept.load(3)
        assert recall.shape == density.shape == (2, 4) and kept.numbers() == [3]
    assert list(tmp_path.iterdir()) == []


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


def test_policies_by_device(llama, words, tmp_path):
    out = tmp_path / "out"
    assert (
        inspect(llama, *quick(words, out, "--rows", 32, "--layers", "1", "--block-size", 64)) == 0
    )
    series = json.loads((out / "results.json").read_text())["series"]
    assert {one["policy"] for one in series} == {"price"}
    every = quick(words, tmp_path / "all", "--rows", 32, "--layers", "1", "--policy", "all")
    assert inspect(llama, *every, "--block-size", 64) == 0
    series = json.loads((tmp_path / "all" / "results.json").read_text())["series"]
    assert len({one["policy"] for one in series}) == 4
