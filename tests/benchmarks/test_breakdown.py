# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/model/pretrain.py`` and ``breakdown.py``: traces into parts, Megatron's log into a row."""

from __future__ import annotations

import json

import pytest

from benchmarks.model import breakdown, instrument, pretrain


class Trace:
    """A trace made by hand: a CPU thread 1 for the forward, 2 for the backward."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}}]

    def add(self, cat, name, start, end, tid, **args):
        event = dict(ph="X", cat=cat, name=name, pid=9, tid=tid, ts=start, dur=end - start)
        self.events.append({**event, "args": args})

    def range(self, part, start, end, tid=1):
        self.add("user_annotation", f"mtraining: {part}", start, end, tid)
        self.add("gpu_user_annotation", f"mtraining: {part}", start + 500, end + 700, 7)

    def work(self, name, launched, start, end, tid=1, cat="kernel", api="cuda_runtime"):
        number = len(self.events)
        if launched is not None:
            self.add(api, "cudaLaunchKernel", launched, launched + 1, tid, correlation=number)
        self.add(cat, name, start, end, 7, correlation=number)


def hand_made() -> Trace:
    trace = Trace()
    trace.range("step", 1000, 3000)
    trace.range("attention", 1010, 1020)
    trace.range("attention", 1030, 1040)
    trace.range("loss", 1050, 1060)
    trace.range("loss", 1100, 1110, tid=2)
    trace.range("attention", 1120, 1130, tid=2)
    trace.range("optimizer", 1140, 1150)
    gemm = "nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT"
    trace.work(gemm, 900, 950, 1050)  # of before, still running
    trace.work(gemm, 1005, 1100, 1200)
    trace.work("forward", 1015, 1200, 1400, api="cuda_driver")
    trace.work("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1016, 1250, 1450)
    trace.work(gemm, 1025, 1500, 1600)
    trace.work("backward_of_something_between", 1035, 1600, 1610)
    trace.work(gemm, 1055, 1700, 1800)
    trace.work(gemm, 1105, 1800, 1850, tid=2)
    trace.work(gemm, 1115, 1850, 1900, tid=2)
    trace.work("flash_bprop", 1125, 1900, 2000, tid=2, api="cuda_driver")
    trace.work("flash_bprop", 1125, 1950, 2000, tid=2)  # on another stream
    trace.work(gemm, 1125, 1960, 1980)  # at that time, but of thread 1
    trace.work("Memcpy PtoP (Device -> Device)", 1126, 2010, 2020, tid=2, cat="gpu_memcpy")
    trace.work("Memset (Device)", 1145, 2100, 2130, cat="gpu_memset")
    trace.work("of a launch that was lost", None, 2200, 2250)
    trace.work("of a thread without a name", 1145, 2300, 2340, tid=3)
    trace.work("after the step", 1146, 2990, 3050)
    return trace


EXPECTED = dict(
    attention=(200 + 10) + 60 + 20 * 2 / 3 + 20,  # alone, with another thread's, alone again
    layers=50 + 100 + 100 + 50 + 20 / 3 + 50 + 40,
    loss=100 + 50,
    optimizer=30 + 10,
    communication=50 + 10,
)


def test_parts_of_a_step():
    found = breakdown.split(hand_made().events)
    parts = found["breakdown"]
    waiting = 2000 - sum(EXPECTED.values())
    for part, expected in dict(EXPECTED, waiting=waiting).items():
        assert parts[part] == pytest.approx(expected / 1000, abs=6e-4), part
    assert sum(parts.values()) == pytest.approx(2.0, abs=3e-3) and found["profiled_ms"] == 2
    assert found["communication_hidden_ms"] == 0.15 and found["unplaced_ms"] == 0.09


def test_the_mean_of_steps():
    trace = hand_made()
    trace.range("step", 4000, 5000)
    found = breakdown.split(trace.events)
    assert (found["profiled_steps"], found["profiled_ms"]) == (2, 1.5)
    assert found["breakdown"]["loss"] == 0.075


def test_ranks_side_by_side(tmp_path):
    for rank, (attention, waiting) in enumerate([(5.0, 1.0), (3.0, 2.0)]):
        parts = {"breakdown": {"attention": attention, "waiting": waiting}, "profiled_ms": 6 + rank}
        (tmp_path / instrument.RANK.format(rank)).write_text(json.dumps(parts))
    found = pretrain.breakdowns(tmp_path)
    assert found["breakdown"] == {"attention": 5, "waiting": 1} and found["profiled_ms"] == 6
    assert found["breakdown_longest"] == {"attention": 5, "waiting": 2}


LOG = """
------------------------ arguments ------------------------
  mtraining_loss_chunk ............................ 2048
  mtraining_backward_threshold .................... 3.0
  num_layers ...................................... 36
  seq_length ...................................... 524288
  world_size ...................................... 4
-------------------- end of arguments ---------------------
{iterations}[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 81920.0 | x
"""
ITERATION = (
    " [2026-11-22 04:00:00.0] iteration {i:8d}/       9 | consumed samples:       {i} | elapsed time "
    "per iteration (ms): {ms} | learning rate: 1.000000E-05 | global batch size:     3 | lm loss: 1.1{i}E+01 "
    "|\n[mtraining] iteration {i} | density 0.03 | recall 0.9 (lowest head 0.8) | backward density 0.{i} "
    "without 0.05 of attention (highest head 0.2)\n"
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mtraining", dict(loss_chunk=2048, price=0.25, iter_ms=6500, backward_density=0.5)),
        ("fused --dense-recompute kept", dict(dense_recompute="output kept", price=None)),
        ("fused --warm-up 2", dict(loss_chunk=0, iter_ms=6000, dense_recompute="twice")),
        ("fused --warm-up 1", dict(iter_ms=6250)),  # of eight, the second 40000
        ("mtraining --breakdown", dict(iter_ms=5500)),  # without the last three
    ],
)
def test_a_log_s_row(monkeypatch, tmp_path, words, expected):
    """The time is the median of the steps that count; densities are means of all."""
    core = tmp_path / "megatron/core"
    core.mkdir(parents=True)
    (tmp_path / "pretrain_gpt.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    options = pretrain.parse(["run", str(tmp_path), "--attention", *words.split()])
    times = [90000, 40000, 3000, 4000, 5000, 6000, 6500, 7000, 8000]
    if options.breakdown:
        times[-3:] = [20000, 30000, 40000]  # under the profiler
    logged = [times[0], sum(times[:2]) / 2, *times[2:]]  # Megatron's second line is a mean
    lines = [ITERATION.format(i=i + 1, ms=ms) for i, ms in enumerate(logged)]
    row = pretrain.row_of(options, LOG.format(iterations="".join(lines)))
    assert {name: row[name] for name in expected} == expected
    assert row["step_ms"] == times and row["versions"]["megatron"] == "0.19.1"
    assert (row["seq"], row["world"], row["batch"], row["layers"]) == (524288, 4, 3, 36)
    assert row["tokens_per_s"] == round(3 * 524288 / row["iter_ms"] * 1000)
    assert (row["max_alloc_gb"], row["loss"], len(row["losses"])) == (80, 11.9, 9)


def test_logged_steps_apart():
    """Of seven steps, one of warm-up and a last one without a next, the third and the sixth are logged."""
    starts = [0, 9, 10, 13, 14, 15, 19]
    found = pretrain.logged_apart(starts, 3, 1)
    assert found == dict(logged_ms=3500, unlogged_ms=1000)
