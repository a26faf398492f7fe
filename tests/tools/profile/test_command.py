# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining profile``: on a CPU with tiny shapes, from times that are made up, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.balance.latency import AttentionShape, Entry, LatencyModel, visible_pairs
from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.profile import measure
from megatron_mtraining.tools.profile.fit import fit, relative_errors

TRUE = {
    "search": {"launch": 0.4, "rows": 0.3},
    "forward": {"launch": 0.05, "rows": 0.3, "pairs": 0.8},
    "backward": {"launch": 0.1, "rows": 0.4, "pairs": 1.5, "key_span": 1.0},
}
HEADS = ["--num-attention-heads", "2", "--num-query-groups", "1", "--kv-channels", "64"]


def profile(*words, heads=HEADS) -> int:
    return main(["profile", "--device", "cpu", *heads, *map(str, words)])


def made_up(case, shape, device=None) -> measure.Measurement:
    """As a GPU with those coefficients would take it."""
    gpu = LatencyModel("made up", (Entry(case.kind, shape.head_dim, TRUE),))
    pairs = visible_pairs([case.tokens // case.documents] * case.documents)
    times = gpu.predict(case.tokens, pairs, case.density, shape, kind=case.kind)
    return measure.Measurement(case, shape, pairs, case.density, *map(float, times))


def test_exact_times_give_their_coefficients():
    measured = [made_up(case, AttentionShape(16, 2, 128)) for case in measure.CASES]
    model = LatencyModel("fitted", fit(measured, 132))
    assert max(relative_errors(model, measured)) < 1e-3
    lists = model.entry("block_lists", 128).coefficients
    assert lists["backward"] == pytest.approx(TRUE["backward"], rel=1e-3)


@pytest.mark.slow
def test_tiny_shapes_on_a_cpu(tmp_path, capsys):
    assert profile("--output", tmp_path / "cpu.json") == 0
    model = LatencyModel.load(tmp_path / "cpu.json")
    assert model.gpu == "CPU" and {entry.kind for entry in model.entries} == {
        case.kind for case in measure.TINY
    }
    assert "5 of 5 shapes measured" in capsys.readouterr().out


def test_a_shape_that_fails_is_left_out_and_named(tmp_path, capsys, monkeypatch):
    def fails(case, *rest):
        if case.kind == "block_lists":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory\nat all")
        return made_up(case, *rest)

    monkeypatch.setattr(measure, "measure", fails)
    assert profile("--output", tmp_path / "a.json") == 0
    assert {entry.kind for entry in LatencyModel.load(tmp_path / "a.json").entries} == {
        "vertical_slash", "dense",
    }  # fmt: skip
    said = capsys.readouterr()
    assert "left out: block_lists 512 tokens" in said.err and "4 of 5 shapes" in said.out


def test_what_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "measure", lambda *_: 1 / 0)
    (file := tmp_path / "a.json").write_text("before")
    assert profile("--output", file) == 2 and file.read_text() == "before"
    assert "--overwrite" in capsys.readouterr().err
    assert profile("--output", tmp_path / "b.json") == 2 and not (tmp_path / "b.json").exists()
    assert "no shape could be measured" in capsys.readouterr().err
    wrong = [*HEADS[:3], "3", *HEADS[4:]]
    assert profile("--output", file, "--overwrite", heads=wrong) == 2
    assert "a multiple of the groups" in capsys.readouterr().err
    assert (
        main(["profile", *HEADS, "--output", str(tmp_path / "c.json")]) == 2
        or torch.cuda.is_available()
    )
