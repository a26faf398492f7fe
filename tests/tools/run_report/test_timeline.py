# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The timeline of a step, from traces of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

from megatron_mtraining import MTrainingConfig, labels
from megatron_mtraining.attention import attend
from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.run_report import timeline
from megatron_mtraining.tools.run_report.timeline import BINS, NAMES, OF_LABEL, find, read

pytest.importorskip("matplotlib")


def event(cat, name, ts, dur, tid=1, **args) -> dict:
    return dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, pid=1, tid=tid, args=args)


def gpu_step(at: float) -> list[dict]:
    """A step of 100 us from ``at`` on whose GPU lags its CPU by 50: search, attention of two threads, a
    transfer on another stream, and a kernel of something else."""
    found = [event("user_annotation", f"ProfilerStep#{at:.0f}", at, 100)]
    kernels = (  # launched at, by thread, runs at, for, on stream
        ("k", 10, 1, 50, 20, 7), ("k", 30, 1, 70, 40, 7), ("ncclDevKernel", 31, 1, 60, 50, 16),
        ("k", 60, 2, 120, 10, 7), ("k", 90, 1, 130, 20, 7),
    )  # fmt: skip
    for name, ts, dur, tid in (
        ("pattern search", 5, 10, 1), ("attention forward", 25, 20, 1), ("attention backward", 55, 20, 2),
    ):  # fmt: skip
        found.append(event("user_annotation", labels.PREFIX + name, at + ts, dur, tid))
    for number, (name, launch, tid, ts, dur, stream) in enumerate(kernels):
        number += int(at)
        found.append(event("cuda_runtime", "launch", at + launch, 1, tid, correlation=number))
        found.append(event("kernel", name, at + ts, dur, 0, correlation=number, stream=stream))
    return found


def write(path, events, compress=False):
    content = json.dumps(dict(traceEvents=events)).encode()
    path.write_bytes(gzip.compress(content) if compress else content)
    return path


@pytest.mark.parametrize("compress", [False, True])
def test_streams_of_the_last_step(tmp_path, compress):
    events = [*gpu_step(1000), *gpu_step(0), dict(ph="i", name="flow", ts=1)]
    found = read(write(tmp_path / "trace", events, compress))
    assert found.rows == ["stream 7", "stream 16"] and found.milliseconds == pytest.approx(0.1)

    def at(row: int, time: float) -> str:
        kind = found.cells[row, int(time / 100 * BINS)]
        return "" if kind < 0 else NAMES[kind]

    assert [at(0, time) for time in (10, 40, 65, 75, 90)] == [
        "search", "attention", "", "attention", "other",
    ]  # fmt: skip
    assert [at(1, time) for time in (5, 30, 70)] == ["", "communication", ""]


def test_the_labels_are_those_of_the_package():
    given = {
        labels.SEARCH,
        labels.FORWARD,
        labels.BACKWARD,
        labels.LOSS_FORWARD,
        labels.LOSS_BACKWARD,
    }
    assert {labels.PREFIX + label for label in given} == set(OF_LABEL)


def test_threads_of_a_cpu(tmp_path):
    operands = [torch.randn(512, 1, 2, 64, requires_grad=True) for _ in range(3)]
    config = MTrainingConfig.from_options(price=0.5, block_size=64)
    with torch.profiler.profile() as profiler:
        attend(*operands, config=config).out.sum().backward()
    path = tmp_path / "host_1.123.pt.trace.json"
    profiler.export_chrome_trace(str(path))
    assert find(tmp_path) == path
    found = read(path)
    assert found.rows and all(row.startswith("thread") for row in found.rows)
    shown = set(np.unique(found.cells)) - {-1}
    assert {NAMES[kind] for kind in shown} >= {"search", "attention"}


def test_the_report_shows_it(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "torch_profile").mkdir(parents=True)
    history = [dict(loss=2.0, step=1)]
    (run / "trainer_state.json").write_text(json.dumps(dict(log_history=history)))
    words = ["report", str(run), "--overwrite", "--output", str(tmp_path / "report.html")]
    assert main(words) == 0
    title = "<h3>Timeline of a step</h3>"
    assert title not in (tmp_path / "report.html").read_text(encoding="utf-8")
    for rank in (1, 0):
        write(run / "torch_profile" / f"rank-{rank}.json.gz", gpu_step(0), compress=True)
    assert main(words) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert title in text and "rank-0.json.gz" in text and "stream 16" in text
    # One that nobody asked for, of a job that was killed as it wrote it.
    (run / "torch_profile" / "rank-0.json.gz").write_bytes(b"{")
    assert main(words) == 0 and "without a timeline" in capsys.readouterr().err
    assert title not in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"{", "is no whole trace"),
        (gzip.compress(b'{"traceEvents": []}')[:-9], "is no whole trace"),
        (b"[]", "is no whole trace"),
        (b"[" * 100_000, "is no whole trace"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}', "is no whole trace"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "args": null}]}', "is no whole trace"),
        (b'{"traceEvents": []}', "has no kernel and no operator"),
        (None, "cannot be read"),
    ],
    ids=[
        "cut",
        "compressed and cut",
        "a list",
        "deep",
        "no time",
        "no arguments",
        "empty",
        "missing",
    ],
)
def test_refusals(tmp_path, capsys, content, said):
    (tmp_path / "trainer_state.json").write_text(
        json.dumps(dict(log_history=[dict(loss=2, step=1)]))
    )
    trace = tmp_path / "trace.json"
    if content is not None:
        trace.write_bytes(content)
    assert main(["report", str(tmp_path), "--trace", str(trace)]) == 2
    assert said in capsys.readouterr().err


def test_many_rows_are_cut_to_the_busiest(tmp_path):
    events = [event("cpu_op", "op", 0, 10 + tid, tid) for tid in range(20)]
    found = read(write(tmp_path / "trace.json", events))
    assert found.rows == [f"thread {tid}" for tid in range(20 - timeline.MOST_ROWS, 20)]
