# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining profile``: on a CPU with tiny shapes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megatron_mtraining.balance import AttentionShape, Latency, LatencyModel
from megatron_mtraining.balance.profile_file import FOLDER
from megatron_mtraining.balance.terms import Entry
from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.profile import cases as all_cases
from megatron_mtraining.tools.profile import measure as measuring
from megatron_mtraining.tools.profile.cases import Case
from megatron_mtraining.tools.profile.timing import Time

SHAPE = AttentionShape(2, 1, 64)
WRONG = {"search": {}, "forward": {"launch": 7.0}, "backward": {"launch": 7.0}}
HEADS = ["--num-attention-heads", "2", "--num-query-groups", "1", "--kv-channels", "64"]


@pytest.fixture
def made_up(monkeypatch):
    """Times without measuring: as a GPU might take."""

    def measure(case, device, clock, searches):
        attended = case.tokens**2 * case.density
        times = (Time(1e-6 * case.tokens + 1, 0.5), Time(1e-9 * attended + 0.1, 0.2))
        return measuring.Measurement(
            case,
            case.tokens * (case.tokens + 1) / 2,
            case.density,
            *times,
            Time(4e-9 * attended + 0.2, 0.3),
        )

    monkeypatch.setattr(measuring, "measure", measure)
    return measure


def profile(*words) -> int:
    return main(["profile", "--device", "cpu", *HEADS, *map(str, words)])


@pytest.mark.slow
def test_tiny_shapes_on_a_cpu(tmp_path, capsys):
    file, log = tmp_path / "cpu.json", tmp_path / "logs" / "points.jsonl"
    assert profile("--output", file, "--log", log) == 0
    said = capsys.readouterr()
    planned = all_cases.tiny([SHAPE])
    model = LatencyModel.load(file)
    assert model.gpu == "CPU" and model.left_out == () and model.seconds > 0
    assert {entry.kind for entry in model.entries} == {case.kind for case in planned}
    columns, rows = model.points["columns"], model.points["rows"]
    assert len(rows) == len(planned)
    for row in (dict(zip(columns, row)) for row in rows):
        assert 0 < row["density"] <= 1
        assert min(row["search_ms"], row["forward_ms"], row["backward_ms"]) > 0
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        dict(zip(columns, row)) for row in rows
    ]
    assert "--output" not in model.command and model.command.startswith("mtraining")
    assert "relative error" in said.out and f"{file} written in" in said.out
    assert f"[{len(planned)}/{len(planned)}," in said.err


def test_a_shape_that_fails_is_left_out_and_named(tmp_path, capsys, monkeypatch, made_up):
    first = all_cases.tiny([SHAPE])[0]

    def measure(case, *rest):
        if case == first:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        if case.kind == "block_lists":
            raise ValueError("no such thing\nat all")
        return made_up(case, *rest)

    monkeypatch.setattr(measuring, "measure", measure)
    assert profile("--output", tmp_path / "a.json", "--log", tmp_path / "log") == 0
    model = LatencyModel.load(tmp_path / "a.json")
    assert f"{first}: out of memory" in model.left_out
    assert {text.split(": ", 1)[1] for text in model.left_out[1:]} == {"ValueError: no such thing"}
    assert {entry.kind for entry in model.entries} == {"vertical_slash", "dense"}
    said = capsys.readouterr()
    assert f"left out: {first}: out of memory" in said.err and "shapes left out" in said.out
    assert '"reason": "out of memory"' in (tmp_path / "log").read_text()


def test_nothing_could_be_measured(tmp_path, capsys, monkeypatch):
    def measure(*_):
        raise RuntimeError("an illegal instruction")

    monkeypatch.setattr(measuring, "measure", measure)
    assert profile("--output", tmp_path / "a.json") == 2
    assert "no shape could be measured on this cpu; the first: " in last_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept(tmp_path, capsys, made_up):
    file = tmp_path / "a.json"
    file.write_text("before")
    assert profile("--output", file) == 2
    assert file.read_text() == "before" and "--overwrite" in last_line(capsys)
    assert profile("--output", file, "--overwrite") == 0
    assert LatencyModel.load(file).gpu == "CPU"


def test_a_log_that_cannot_be_written(tmp_path, capsys, made_up):
    assert profile("--output", tmp_path / "a.json", "--log", tmp_path) == 2
    assert f"--log is {tmp_path}, which cannot be written: Is a directory" in last_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_measurements_are_fitted_again(tmp_path, capsys, made_up):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert profile("--output", first) == 0
    model = LatencyModel.load(first)
    entries = tuple(replace(entry, coefficients=WRONG) for entry in model.entries)
    replace(model, entries=entries, commit="1234567", processors=7).save(first)
    assert main(["profile", "--fit", str(first), "--output", str(second)]) == 0
    again = LatencyModel.load(second)
    assert again.commit == "1234567" and again.seconds == model.seconds and again.processors == 7
    assert again.points == model.points and again.errors.keys() == model.errors.keys()
    assert all(entry.coefficients != WRONG for entry in again.entries)
    assert f"{second} written" in capsys.readouterr().out
    assert main(["profile", "--fit", str(first), "--output", str(second)]) == 2
    assert "--overwrite" in last_line(capsys)


def test_the_committed_profile_is_what_its_measurements_give(tmp_path, capsys):
    """And its errors are within what is promised, but for a search that waited for the host."""
    own = FOLDER / "nvidia_h200.json"
    assert main(["profile", "--fit", str(own), "--output", str(tmp_path / "a.json")]) == 0
    found, committed = LatencyModel.load(tmp_path / "a.json"), LatencyModel.load(own)
    assert found.errors == committed.errors and found.points == committed.points
    for one, other in zip(found.entries, committed.entries):
        for part, terms in other.coefficients.items():
            assert one.coefficients[part] == pytest.approx(terms, rel=1e-3)
    assert found.errors["total"].median < 0.05
    assert found.errors["vertical_slash"].worst < 0.15 and found.errors["dense"].worst < 0.15


@pytest.mark.parametrize(
    "points, words, message",
    [
        ({}, [], "which has no measurements: measure again"),
        (
            {"columns": ["kind"], "rows": [["dense"]]},
            [],
            "a measurement that is none ('num_heads')",
        ),
        (
            {},
            ["--quick"],
            "--quick is an option of measuring, and --fit does not measure: leave one out",
        ),
    ],
)
def test_what_cannot_be_fitted_again(tmp_path, capsys, points, words, message):
    file = tmp_path / "a.json"
    entry = Entry("dense", 64, WRONG, Latency(0, 0, 0))
    LatencyModel("a GPU", (entry,), points=points).save(file)
    assert main(["profile", "--fit", str(file), "--output", str(tmp_path / "b.json"), *words]) == 2
    assert message in last_line(capsys)
    assert not (tmp_path / "b.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu(tmp_path, capsys):
    assert main(["profile", "--output", str(tmp_path / "a.json")]) == 2
    assert last_line(capsys) == (
        "mtraining profile: mtraining profile measures a GPU, and torch finds none here: run it on a machine "
        "with a GPU"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, message",
    [
        (["--kv-channels", "96"], "--kv-channels is 96: attention has head dimensions 64 and 128"),
        (["--num-attention-heads", "0"], "--num-attention-heads is 0: use 1 to 512"),
        (
            ["--num-attention-heads", "6", "--num-query-groups", "4"],
            "6, not a multiple of --num-query",
        ),
        (["--num-query-groups", "4"], "4, without --num-attention-heads: give both"),
    ],
)
def test_heads_that_cannot_be(tmp_path, capsys, words, message):
    assert main(["profile", "--output", str(tmp_path / "a.json"), *words]) == 2
    assert message in last_line(capsys)


def test_an_error_of_the_gpu_ends_the_measuring(monkeypatch):
    """After it, every call fails: the others are not tried."""
    tried = []

    def measure(case, *_):
        tried.append(case)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(
        measuring, "_broken", lambda device: "the GPU has failed before: RuntimeError"
    )
    told = []
    planned = [Case("dense", SHAPE, tokens, 1.0) for tokens in (256, 512)]
    found, left_out = measuring.measure_all(
        planned, torch.device("cpu"), lambda *words: told.append(words)
    )
    assert found == [] and tried == planned[:1] and len(told) == 2
    assert left_out == [
        f"{planned[0]}: RuntimeError: CUDA error: an illegal memory access was encountered",
        f"{planned[1]}: the GPU has failed before: RuntimeError",
    ]


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]
