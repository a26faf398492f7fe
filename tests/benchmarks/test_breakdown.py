# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/pretrain.py`` without a run: traces into parts, what is started, Megatron's log."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.lib import record
from benchmarks.model import breakdown, instrument, pretrain

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    return SimpleNamespace(
        pretrain=pretrain, breakdown=breakdown, instrument=instrument, record=record
    )


class Trace:
    """A trace made by hand: a CPU thread 1 for the forward, 2 for the backward."""

    def __init__(self):
        self.events = [
            {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
            {"ph": "s", "id": 1, "pid": 9, "tid": 1, "ts": 10, "cat": "ac2g", "name": "ac2g"},
        ]

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


def test_parts_of_a_step(scripts, tmp_path):
    found = scripts.breakdown.split(hand_made().events)
    parts = found["breakdown"]
    assert tuple(parts) == scripts.breakdown.PARTS
    waiting = 2000 - sum(EXPECTED.values())
    for part, expected in dict(EXPECTED, waiting=waiting).items():
        assert parts[part] == pytest.approx(expected / 1000, abs=6e-4), part
    assert sum(parts.values()) == pytest.approx(2.0, abs=3e-3) and found["profiled_ms"] == 2
    assert found["communication_hidden_ms"] == 0.15 and found["unplaced_ms"] == 0.09
    file = tmp_path / "trace.json.gz"
    with gzip.open(file, "wt") as opened:
        json.dump({"traceEvents": hand_made().events}, opened)
    assert scripts.breakdown.read(file) == found


def test_the_mean_of_steps(scripts):
    trace = hand_made()
    trace.range("step", 4000, 5000)
    found = scripts.breakdown.split(trace.events)
    assert (found["profiled_steps"], found["profiled_ms"]) == (2, 1.5)
    assert found["breakdown"]["loss"] == 0.075
    with pytest.raises(ValueError, match="no range 'mtraining: step'"):
        scripts.breakdown.split([e for e in trace.events if e["name"] != "mtraining: step"])


LOG = """
------------------------ arguments ------------------------
  mtraining_loss_chunk ............................ 2048
  num_layers ...................................... 36
  seq_length ...................................... 524288
  world_size ...................................... 4
-------------------- end of arguments ---------------------
{iterations}[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 81920.0 | x
"""
ITERATION = (
    " [2026-11-22 04:00:00.0] iteration {i:8d}/       9 | consumed samples:       {i} | elapsed time per "
    "iteration (ms): {ms} | learning rate: 1.000000E-05 | global batch size:     3 | lm loss: 1.1{i}E+01 |\n"
    "[mtraining] iteration {i} | density 0.03 | recall 0.9\n"
)


def parsed(scripts, monkeypatch, tmp_path, *words):
    """The options that ``run`` gets."""
    checkout = tmp_path / "checkout"
    (checkout / "megatron/core").mkdir(parents=True, exist_ok=True)
    (checkout / "pretrain_gpt.py").write_text("")
    version = checkout / "megatron/core/package_info.py"
    version.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    got = []
    monkeypatch.setattr(scripts.pretrain, "run", got.append)
    scripts.pretrain.main(["run", str(checkout), *words])
    return got[0]


RECIPE = str(FOLDER.parent / "examples/qwen2.5-0.5b-128k/run.sh")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mtraining", dict(model="qwen2.5-3b", loss_chunk=2048, price=0.25, iter_ms=6500)),
        ("mtraining --price 0", dict(price=0, dense_recompute=None)),
        ("fused --loss-chunk 512", dict(loss_chunk=512, price=None, dense_recompute="twice")),
        ("fused --dense-recompute kept", dict(dense_recompute="output kept")),
        ("fused --warm-up 2", dict(loss_chunk=0, iter_ms=6000, warm_up=2)),
        ("fused --warm-up 1", dict(iter_ms=6250, warm_up=1)),  # of eight, the second 40000
        (f"mtraining --script {RECIPE} --breakdown", dict(model="qwen2.5-0.5b", iter_ms=5500)),
    ],
)
def test_a_log_s_row(scripts, monkeypatch, tmp_path, words, expected):
    options = parsed(scripts, monkeypatch, tmp_path, "--attention", *words.split())
    times = [90000, 40000, 3000, 4000, 5000, 6000, 6500, 7000, 8000]
    if options.breakdown:
        times[-3:] = [20000, 30000, 40000]  # under the profiler
    logged = [times[0], sum(times[:2]) / 2, *times[2:]]  # Megatron's second line is a mean
    lines = [ITERATION.format(i=i + 1, ms=ms) for i, ms in enumerate(logged)]
    row = scripts.pretrain.row_of(options, LOG.format(iterations="".join(lines)))
    assert {name: row[name] for name in expected} == expected
    assert row["step_ms"] == times
    assert (row["seq"], row["world"], row["batch"], row["layers"]) == (524288, 4, 3, 36)
    assert row["max_alloc_gb"] == 80
    assert row["tokens_per_s"] == round(3 * 524288 / row["iter_ms"] * 1000)
    assert row["iterations"] == len(row["losses"]) == 9 and row["loss"] == 11.9
    assert row["versions"]["megatron"] == "0.19.1"


@pytest.mark.parametrize("logged", [{}, {4: 9.5}])
def test_a_log_of_less_than_two_steps_has_no_mean(scripts, logged):
    assert scripts.pretrain.step_times(logged) == logged


def test_a_log_that_begins_later_has_a_mean_all_the_same(scripts):
    """A run that is resumed: its timer starts with it."""
    assert scripts.pretrain.step_times({7: 50.0, 8: 30.0, 9: 12.0}) == {7: 50.0, 8: 10.0, 9: 12.0}


def test_a_row_says_what_the_backward_left_out(scripts, monkeypatch, tmp_path):
    options = parsed(scripts, monkeypatch, tmp_path, "--attention", "mtraining", "--warm-up", "0")
    line = ITERATION.replace("recall 0.9", "recall 0.9 (lowest head 0.8){pruned}")
    arguments = (
        "  mtraining_backward_threshold .................... 3.0\n"
        "  mtraining_slash_cap ............................. 308\n  num_layers ."
    )
    log = LOG.replace("  num_layers .", arguments)

    def row(*pruned):
        lines = [line.format(i=i + 1, ms=9, pruned=each) for i, each in enumerate(pruned)]
        return scripts.pretrain.row_of(options, log.format(iterations="".join(lines)))

    said = " | backward density {} without {} of attention (highest head 0.2)"
    found = row(said.format(0.2, 0.05), said.format(0.4, 0.15))
    assert found["backward_threshold"] == 3
    assert (found["backward_density"], found["dropped_mass"]) == (0.3, 0.1)
    assert (found["recall"], found["slash_cap"], found["weights"]) == (0.9, 308, "random")
    assert "backward_threshold" not in row("", "")


def test_what_is_started(scripts, monkeypatch, tmp_path):
    def command(words):
        options = parsed(scripts, monkeypatch, tmp_path, *words.split())
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return options.megatron, *scripts.pretrain.command(options, folder)

    checkout, words, environment = command("--attention fused --data some/text --lr 1e-4")
    assert words[0].endswith("pretrain_qwen2.5_3b.sh") and words[1] == str(checkout)
    assert words[2] == "--data-cache-path" and words[-2:] == ["--lr", "1e-4"]
    assert (environment["SEQ_LENGTH"], "GPUS" in environment) == ("131072", False)
    assert environment["DATA_PATH"] == str(Path("some/text").resolve())

    checkout, words, environment = command(
        f"--attention fused --script {RECIPE} --data some/text --loss-chunk 64 --gpus 2 --seq-length 256 "
        "--breakdown 3"
    )
    assert words[0] == RECIPE and environment["GPUS"] == "2" and "DATA_PATH" not in environment
    assert environment["SEQ_LENGTH"] == "256"
    assert " --attention-backend fused --seq-length 256 " in " ".join(words)
    place = Path(words[1])
    assert place != checkout and (place / "megatron/core/package_info.py").is_file()
    text = (place / "pretrain_gpt.py").read_text()
    assert str(checkout / "pretrain_gpt.py") in text and "'loss_chunk': 64, 'traces': " in text
    assert "'steps': 3, 'drop': ['--mtraining-', '--mock-data']" in text

    checkout, words, environment = command("--attention mtraining --loss-chunk 0 --vertical 9")
    assert words[1] == str(checkout) and words[2:] == ["--mtraining-loss-chunk", "0"]
    assert environment["VERTICAL"] == "9" and "SLASH" not in environment
    # A recipe takes one or the other.
    assert "PRICE" not in environment and "MODEL" not in environment

    _, words, _ = command("--attention fused --dense-recompute kept")
    assert "'keep_output': True" in (Path(words[1]) / "pretrain_gpt.py").read_text()
    _, words, _ = command("--attention fused --dense-recompute selective")
    assert words[-4:] == ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    text = (Path(words[1]) / "pretrain_gpt.py").read_text()
    assert "'drop': ['--recompute-method', '--recompute-num-layers']" in text

    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "megatron_args.sh").touch()
    _, words, environment = command(
        f"--attention mtraining --script {RECIPE} --weights {weights} --price 0.3 --data one two"
    )
    assert environment["MODEL"] == str(weights) and environment["PRICE"] == "0.3"
    at = words.index("--data-path")
    assert words[at + 1 : at + 3] == [str(Path(name).resolve()) for name in ("one", "two")]


@pytest.mark.parametrize("found", [True, False])
def test_a_run_s_row_is_kept(scripts, monkeypatch, tmp_path, capsys, found):
    """Even if nothing could be made of the trace. A stand-in for torchrun leaves a log and a breakdown."""
    options = ["--attention", "fused", "--breakdown", "--traces", str(tmp_path / "traces")]
    options += ["--output", str(tmp_path / "rows.jsonl"), "--log", str(tmp_path / "log")]
    with monkeypatch.context() as patch:
        options = parsed(scripts, patch, tmp_path, *options)
    lines = "".join(ITERATION.format(i=i, ms=1000 * i) for i in range(1, 10))
    (tmp_path / "said").write_text(LOG.format(iterations=lines))
    (tmp_path / "rank-0.json").write_text(
        json.dumps({"breakdown": {"loss": 2.5}, "profiled_ms": 3})
    )
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        f"#!/bin/sh\ncd {tmp_path}; mkdir traces; cat said\n"
        + ("cp rank-0.json traces\n" if found else "")
    )
    torchrun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if found:
        scripts.pretrain.run(options)
    else:
        with pytest.raises(SystemExit, match="the row has no breakdown"):
            scripts.pretrain.run(options)
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["iter_ms"] == 5500 and row["commit"] and row["command"]
    assert (
        row.get("breakdown_longest") == row.get("breakdown") == ({"loss": 2.5} if found else None)
    )
    assert (tmp_path / "log").read_text() == (tmp_path / "said").read_text()
    assert "lm loss: 1.19E+01" in capsys.readouterr().out


def test_options_that_are_left_out(scripts):
    words = (
        "--lr 1 --mtraining-price 0.25 --bf16 --mtraining-flag --mock-data --split 99,1,0".split()
    )
    kept = scripts.instrument.without(words, ["--mtraining-", "--mock-data"])
    assert kept == ["--lr", "1", "--bf16", "--split", "99,1,0"]
    assert scripts.instrument.without(words, []) == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--attention mtraining --dense-recompute kept", "is of Transformer Engine's attention"),
        ("--breakdown 0", "--breakdown 0: use 1 or more"),
        ("--breakdown 3 --iterations 8", "--iterations 8 leave none .* use 9 or more"),
        ("--breakdown --warm-up 7 --iterations 10", "use 11 or more"),
        ("--traces x", "--traces is given without --breakdown"),
        ("--breakdown --traces {full}", "--traces .* is not empty"),
        ("--loss-chunk -1", "--loss-chunk -1: use"),
        ("--script no/run.sh", "there is no script no/run.sh"),
        ("--weights {full}", "--weights is given without --script"),
        (f"--weights {{full}} --script {RECIPE}", "there is no megatron_args.sh in"),
        ("--data one two", "--data has several datasets: use them with --script"),
    ],
)
def test_bad_options(scripts, monkeypatch, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        words = words.format(full=FOLDER).split()
        parsed(scripts, monkeypatch, tmp_path, "--attention", "fused", *words)
    assert re.search(message, capsys.readouterr().err)
    with pytest.raises(SystemExit):
        scripts.pretrain.main(["run", str(tmp_path / "none"), "--attention", "fused"])
    assert "there is no pretrain_gpt.py in" in capsys.readouterr().err


def test_ranks_side_by_side(scripts, tmp_path):
    for rank, (attention, waiting) in enumerate([(5.0, 1.0), (3.0, 2.0)]):
        parts = {"breakdown": {"attention": attention, "waiting": waiting}, "profiled_ms": 6 + rank}
        (tmp_path / scripts.instrument.RANK.format(rank)).write_text(json.dumps(parts))
    found = scripts.pretrain.breakdowns(tmp_path)
    assert found["breakdown"] == {"attention": 5, "waiting": 1} and found["profiled_ms"] == 6
    assert found["breakdown_longest"] == {"attention": 5, "waiting": 2}
    assert scripts.pretrain.breakdowns(tmp_path / "none") == {}
