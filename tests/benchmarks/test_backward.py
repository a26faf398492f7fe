# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/model/backward.py: rows of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.lib import jobs
from benchmarks.model import backward
from tests.support.inspect_cases import save_model

SEQ = 512


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model, a text, and sizes for a CPU."""
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder / "model")
    (folder / "code.txt").write_text(Path(np.__file__).read_text()[:40000])
    return [
        "--model", str(model), "--device", "cpu", "--cache", str(folder / "tokens.npz"), "--tokens", "100000",
        "--text", f"code={folder / 'code.txt'}", "--kinds", "code", "--seq", str(SEQ), "--block-size", "64",
        "--held-out", "2", "--needles", "1", "--jobs", "1", "--lr", "1e-3", "--warm-up", "1",
    ]  # fmt: skip


def test_gradients_of_a_tiny_model(words, tmp_path):
    output = tmp_path / "rows.jsonl"
    given = [*words, "--output", str(output), "--thresholds", "0.000001", "4"]
    backward.main(["gradient", *given, "--forward", "dense"])
    rows = {(row["what"], row["threshold"]): row for row in jobs.read(output)}
    assert len(rows) == 3
    all_kept, pruned = rows["pruned", 1e-6], rows["pruned", 4.0]
    assert all_kept["backward_density"] == all_kept["forward_density"] == 1
    assert all_kept["err_grad"] < 1e-4 and all_kept["cos_grad"] > 0.9999
    assert pruned["backward_density"] < 1 and pruned["dropped_mass"] > 0
    assert all_kept["err_grad"] < pruned["err_grad"] < rows["another window", 0.0]["err_grad"]
    assert pruned["loss"] == pytest.approx(all_kept["loss"], rel=1e-6)
    backward.main(["gradient", *given, "--forward", "dense"])
    assert len(jobs.read(output)) == 3, "what is there is not made again"


def test_training_and_times(words, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    given = [*words, "--output", str(output), "--thresholds", "4", "--forward", "dense"]
    backward.main(["train", *given, "--steps", "2", "--seeds", "1"])
    plain, pruned = jobs.read(output)
    assert (plain["threshold"], pruned["threshold"]) == (0.0, 4.0)
    assert plain["before_dense"] == pytest.approx(pruned["before_dense"], rel=1e-5)
    assert pruned["density"] == 1 and pruned["backward_density"] < 1
    backward.main(["time", *given, "--lengths", "512", "--shape", "2", "1", "64"])
    rows = [row for row in jobs.read(output) if row["stage"] == "time"]
    assert [row["backward_density"] < 1 for row in rows] == [False, True]
    assert all(row["backward_ms"] > 0 and row["dense_backward_ms"] > 0 for row in rows)
    backward.main(["table", "--output", str(output), *words])
    assert "| 512 | dense | 4.0 | 1 |" in capsys.readouterr().out


def test_dense_training_is_the_frontiers(words, tmp_path):
    output, frontier = tmp_path / "rows.jsonl", tmp_path / "frontier.jsonl"
    training = ["train", *words, "--steps", "2"]
    first = ["--forward", "dense", "--seeds", "1", "--thresholds", "4"]
    backward.main([*training, "--output", str(frontier), *first])
    row = next(row for row in jobs.read(frontier) if not row["threshold"])
    for name in ("forward", "threshold", "backward_density", "dropped_mass"):
        del row[name]
    row |= dict(policy="dense", wanted=None, commit="of the frontier")
    frontier.write_text(json.dumps(row) + "\n")
    given = [*training, "--output", str(output), "--frontier", str(frontier), "--forward", "dense"]
    for _ in range(2):  # no row twice
        backward.main([*given, "--thresholds", "4", "--seeds", "1", "2"])
    rows = jobs.read(output)
    assert [(row["seed"], row["threshold"]) for row in rows] == [(1, 0), (1, 4), (2, 0), (2, 4)]
    assert rows[0]["commit"] == "of the frontier" != rows[2]["commit"]
    assert rows[0]["own"] == row["own"] and "policy" not in rows[0]
    assert rows[0].keys() == rows[2].keys()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--forward", "target@0.9"], "has no density"),
        (["--forward", "prices@0.1"], "is not dense"),
        (["--thresholds", "0"], "--thresholds 0.0: use numbers above 0"),
        (["--thresholds", "nan"], "--thresholds nan: use numbers above 0"),
    ],
)
def test_bad_options(words, message, capsys):
    with pytest.raises(SystemExit):
        backward.options_from(["time", "--model", "m.gguf", *words])
    assert message in capsys.readouterr().err


def test_compared():
    exact = {"qkv": torch.tensor([3.0, 0.0]), "rest": torch.tensor([0.0, 4.0])}
    found = {"qkv": torch.tensor([3.0, 0.0]), "rest": torch.tensor([0.0, 2.0])}
    row = backward.compared(found, exact)
    assert row["err_qkv"] == 0 and row["cos_rest"] == 1 and row["norm_rest"] == 0.5
    assert row["err_grad"] == pytest.approx(2 / 5)
    json.dumps(row)
