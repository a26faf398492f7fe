# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/rings.py`` on CPU processes, from options to rows; its timeline and its operands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.layer import ring_cases, ring_runs, timeline
from benchmarks.layer import rings as rings_script
from benchmarks.lib import plots, workloads
from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.layout import stripe, token_positions
from megatron_mtraining.pattern import build_index, search_pattern
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rings():
    return rings_script


def torchrun(*words, processes=2):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", MTRAINING_COMMIT="a commit")
    return subprocess.run(
        [*launch, "--standalone", "-m", "benchmarks.layer.rings", *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_from_torchrun_to_rows(rings, tmp_path):
    output = tmp_path / "rings.jsonl"
    small = ["--device", "cpu", "--seq", "1024", "--shape", "2", "1", "64", "--budget", "0"]
    cases = ["--case", "3500 columns", "3% density", "all distances"]
    kept = ["--timeline", str(tmp_path / "pictures"), "--output", str(output)]
    done = torchrun(*small, *cases, *kept)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in rings.DENSE:
        assert f"{name} is left out: it needs GPUs" in done.stdout
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["case"] for row in rows] == [
        "1K 3500 columns, 30 diagonals", "1K 3% density, 1000 columns", "1K all distances",
    ]  # fmt: skip
    chosen, given, everything = rows
    traced = hasattr(Ring(CPGroup(None)), "trace")
    for row in rows:
        assert (row["impl"], row["world"], row["inner"], row["seq"]) == (
            "mtraining_flat",
            2,
            2,
            1024,
        )
        assert (row["heads"], row["kv_heads"], row["dim"], row["hosts"]) == (2, 1, 64, 1)
        assert row["fwdbwd_ms"] > row["fwd_ms"] > 0 and row["kernel_ms"] > 0 and row["hop_gb_s"] > 0
        assert row["exposed_comm_ms"] == pytest.approx(
            row["fwdbwd_ms"] - row["kernel_ms"], abs=2e-3
        )
        assert row["kernel_ms"] > row["kernel_fwd_ms"] > 0
        assert row["exposed_fwd_ms"] == pytest.approx(
            row["fwd_ms"] - row["kernel_fwd_ms"], abs=2e-3
        )
        assert row["peak_gib"] is row["queued"] is None and row["versions"]["nccl"] == "none"
        assert row["max_connections"] == os.environ.get(rings.CONNECTIONS, "1")
        assert (row["imbalance_worker"] is not None) == traced
        assert (row["imbalance_step"] is not None) == traced
        assert row["gpu"] and row["torch"] == torch.__version__ and row["commit"] == "a commit"
        assert str(tmp_path) not in row["command"] and "--seq 1024" in row["command"]
    assert (chosen["vertical"], chosen["slash"]) == (64, 30) and chosen["index_ms"] > 0
    assert 0 < chosen["density"] < 1 and chosen["distances"] >= 2
    assert given["slash"] is None and given["index_ms"] is None and 0 < given["density"] < 1
    assert (everything["density"], everything["distances"]) == (1, 8)
    assert everything["index_ms"] is None and everything["slash"] == 1024


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (["--device", "cpu"], None, "start it with torchrun"),
        (["--device", "cpu"], 1, "one process is no ring"),
        (["--device", "cpu", "--seq", "1000"], 2, "1000 tokens"),
        (["--device", "cpu", "--seq", "256"], 1024, "256 tokens"),
        (["--device", "cpu", "--inner", "3"], 4, "--inner 3"),
        (["--device", "cpu", "--inner", "-1"], 4, "--inner -1"),
        (["--device", "cpu", "--shape", "3", "2", "64"], 2, "--shape 3 2 64"),
        (["--device", "cpu", "--case", "no such"], 2, "--list names them"),
        (["--device", "cpu", "--emulate-hosts"], 4, "--emulate-hosts needs GPUs"),
    ],
)
def test_bad_options_end_before_anything_starts(rings, monkeypatch, capsys, words, world, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit):
        rings.parse(words)
    assert message in capsys.readouterr().err


def test_cases_at_their_own_and_other_lengths(rings, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    _, cases = rings.parse([])
    assert cases == [case for case in rings.CASES if not (case.slow_link or case.by_name)]
    assert len({case.name for case in rings.CASES}) == len(rings.CASES)
    for case in rings.CASES:
        assert case.name.startswith(f"{case.seq // 1024}K ")
        if case.config(0.3):
            case.config(0.3).check_sequence(case.seq, 4)
    assert [case.config().keeps_all(case.seq) for case in cases if case.config()] == [
        False, False, False, True,
    ]  # fmt: skip
    _, few = rings.parse(["--case", "all distances", "3% density", "--seq", "65536"])
    assert [case.seq for case in few] == [65536, 65536] and few[1].slash == 65536
    for words in (["--list"], ["--list", "--emulate-hosts"]):
        with pytest.raises(SystemExit):
            rings.parse(words)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(" (")[0] for line in lines] == [case.name for case in rings.CASES]
        for said, name in (
            ("--emulate-hosts or by name", "slow_link"),
            ("only by its whole name", "by_name"),
        ):
            assert [line for line in lines if f"{said})" in line] == [
                line for line, case in zip(lines, rings.CASES) if getattr(case, name)
            ]
    with pytest.raises(SystemExit):
        rings.parse(["--list", "--case", "128K"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["128K"] * 3


def test_cases_of_one_host_s_table_run_by_name(rings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for seq in ring_cases.LENGTHS:
        names = [case.name for case in ring_cases.host_cases(seq)]
        options, found = rings.parse(["--dense-once", "--case", *names])
        # A whole name that another one begins with names one case.
        assert sorted(case.name for case in found) == sorted(names) and len(names) == 6
        dense = [case.name for case in found if rings.has_dense(case, options)]
        assert dense == [f"{seq // 1024}K all distances"]
        small = [case.at(8192) for case in found]
        assert {case.threshold for case in small} == {0, ring_cases.THRESHOLD}
    assert rings.has_dense(found[0], rings.parse([])[0])


def test_cases_for_slow_links_run_there_or_by_name(rings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    names = ("512K 10%", "128K 25%", "128K 50%")
    slow = dict(zip((f"{name} density, 1000 columns" for name in names), (0.1, 0.25, 0.5)))
    assert {case.name: case.density for case in rings.CASES if case.slow_link} == slow
    assert all(case.vertical == 1000 for case in rings.CASES if case.slow_link)

    def names(*words):
        return [case.name for case in rings.parse(list(words))[1]]

    assert not slow.keys() & set(names()) and len(names()) == 5
    assert names("--emulate-hosts") == [case.name for case in rings.CASES if not case.by_name]
    assert names("--case", *slow) == list(slow)
    # A name chooses, slow link or not.
    assert names("--case", "10%") == names("--case", "10%", "--emulate-hosts") == list(slow)[:1]
    assert names("--case", "all distances", "--emulate-hosts") == ["512K all distances"]
    # At another length it is still the same case.
    assert [c.slow_link for c in rings.parse(["--case", "50%", "--seq", "65536"])[1]] == [True]


def test_ranks_share_gpus_only_where_they_are_different_hosts(rings, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rings.parse(["--emulate-hosts"])[1]
    for gpus, words in ((2, []), (1, ["--emulate-hosts"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(SystemExit):
            rings.parse(words)
        assert f"4 ranks on {gpus} GPU(s)" in capsys.readouterr().err


def test_emulated_hosts_are_pairs_of_ranks(rings, monkeypatch):
    found = []
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "before")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        rings.emulate_hosts()
        found.append(os.environ["NCCL_HOSTID"])
    assert found[0] == found[1] != found[2] == found[3]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_dense_rows_have_no_pattern(rings):
    case = rings.CASES[0]
    setting = rings.Setting("cuda", None, 0, 4, 16, 2, 128)
    ms = dict(fwd=508.0, fwdbwd=1739.0)
    row = rings.row_of(case, setting, ("te_p2p", 0), None, ms, None, 2.5)
    assert row["density"] == 1 and row["peak_gib"] == 2.5
    for name in ("vertical", "slash", "distances", "index_ms", "kernel_ms", "exposed_comm_ms"):
        assert row[name] is None
    assert row["kernel_fwd_ms"] is None and row["exposed_fwd_ms"] is None
    assert "te_p2p" in rings.line(row) and row["queued"] is None and "queued" not in rings.line(row)


def test_what_transfers_cost_is_told_of_both_directions(rings):
    case = rings.CASES[0]
    setting = rings.Setting("cuda", None, 0, 4, 16, 2, 128)
    index = build_index(
        torch.ones(1, 16, 8, dtype=torch.bool),
        torch.zeros(1, 16, 0, dtype=torch.long),
        1024,
        128,
        4,
        2,
    )
    ms = dict(fwd=4.5, fwdbwd=16.0, kernel_fwd=4.25, kernel=14.0, index=2.5)
    ahead = dict(fwd=4.0, index=1.0)
    row = rings.row_of(case, setting, ("mtraining_hier", 2), index, ms, None, 2.5, ahead)
    assert row["queued"] == dict(fwd_ms=4, index_ms=1)
    assert rings.line(row).endswith("; queued fwd 4.00, index 1.00")
    assert (row["kernel_fwd_ms"], row["exposed_fwd_ms"]) == (4.25, 0.25)
    assert (row["kernel_ms"], row["exposed_comm_ms"]) == (14, 2)
    assert "exposed    2.00 (forward   0.25)" in rings.line(row)


KERNELS = ("forward", "delta", "backward_query", "backward_key", "backward_columns")


def kernels_without_transfers(rank, world):
    """The calls of kernels, with shapes, of rings and of their silent counterparts."""
    from megatron_mtraining.ring import attention

    called = []

    def recorded(name, original):
        def call(*arguments, **keywords):
            given = (*arguments, *keywords.values())
            shapes = [tuple(a.shape) for a in given if isinstance(a, torch.Tensor)]
            called.append((name, shapes))
            return original(*arguments, **keywords)

        return call

    for name in KERNELS:
        setattr(attention.kernels, name, recorded(name, getattr(attention.kernels, name)))
    torch.manual_seed(0)
    seq, block = 128 * world * 2, 128
    operands = [torch.randn(seq // world, 1, 2, 64, dtype=torch.float64) for _ in range(4)]
    distances = torch.ones(1, 2, seq // block, dtype=torch.bool)
    columns = torch.arange(10).expand(1, 2, -1)
    results = []
    for inner in (1, 2, 4):
        index = build_index(distances, columns, seq, block, world, inner)
        ring = Ring(CPGroup(dist.group.WORLD, inner))
        for one in (ring, ring_runs.silent(ring)):
            leaves = [tensor.clone().requires_grad_() for tensor in operands[:3]]
            out, *_ = ring_attention(*leaves, index, one, 0.125)
            out.backward(operands[3])
            results.append(called[:])
            called.clear()
    return results


@pytest.mark.slow
def test_a_silent_ring_runs_the_same_kernels():
    for results in run_ranks(4, kernels_without_transfers):
        for real, silent in zip(results[::2], results[1::2]):
            assert real == silent and len(real) > 4


def transfers_and_kernels(rank, world):
    """By what is timed, of a case with budgets and of a drawn one: how often it sent, and its kernels and the
    choice's collectives."""
    from megatron_mtraining.pattern import recall
    from megatron_mtraining.ring import attention

    rings = rings_script
    sent, kernels, found = [], [], []

    def recorded(calls, name, original):
        def call(*arguments, **options):
            calls.append(name)
            return original(*arguments, **options)

        return call

    for name in ("post", "gather", "sum_columns"):  # a silent ring has its own
        setattr(Ring, name, recorded(sent, name, getattr(Ring, name)))
    for name in ("all_reduce", "all_gather", "reduce_scatter"):  # of the choice, on both sides
        setattr(CPGroup, name, recorded(kernels, name, getattr(CPGroup, name)))
    for name in (*KERNELS, "gather_columns", "pack_kv"):
        setattr(attention.kernels, name, recorded(kernels, name, getattr(attention.kernels, name)))
    recall.gather_columns = attention.kernels.gather_columns
    setting = ring_runs.Setting("cpu", dist.group.WORLD, rank, world, 2, 1, 64)
    for case in (rings.CASES[0], rings.CASES[3]):
        case = case.at(1024)
        torch.manual_seed(0)
        operands = ring_runs.operands_for(case, setting, 1)
        ring = ring_runs.make_ring(setting.group, 1)
        runs = ring_runs.sparse_runs(case, setting, operands, ring, 1).runs
        found.append({})
        for name, run in runs.items():
            sent.clear()
            kernels.clear()
            run()
            found[-1][name] = (len(sent), kernels[:])
    return found


def test_kernels_are_timed_without_transfers_forward_and_both_ways():
    for budgets, drawn in run_ranks(2, transfers_and_kernels):
        assert set(budgets) == set(drawn) | {"index"}
        for found in (budgets, drawn):
            for name, whole in (("kernel_fwd", "fwd"), ("kernel", "fwdbwd")):
                assert found[name][0] == 0 < found[whole][0]
                assert found[name][1] == found[whole][1] != []
            assert len(found["kernel"][1]) > len(found["kernel_fwd"][1])
        whole = budgets["fwd"][1]
        assert "all_gather" in whole and "all_gather" not in drawn["fwd"][1]
        assert whole.count("gather_columns") == whole.count("pack_kv") == 1


def traced_run(rank, world):
    """Two steps a phase; rank 1 takes three times as long in the second."""
    rings = rings_script

    class TracedRing:
        trace = None

    ring = TracedRing()
    steps = [("some", "step"), ("another", "step", rank)]  # told apart by order, whatever they are

    def run(query, key, value):
        for number, step in enumerate(steps):
            with ring.trace("attend", step):
                time.sleep(0.02 * (3 if rank and number else 1))
            with ring.trace("wait", step):
                time.sleep(0.05)
        with ring.trace("columns"):
            pass
        return query + key + value

    setting = rings.Setting("cpu", dist.group.WORLD, rank, world, 1, 1, 64)
    operands = [torch.ones(2) for _ in range(4)]
    spans = rings.watch(run, ring, operands, setting)
    assert ring.trace is None
    assert rings.watch(run, object(), operands, setting) is None
    return spans, timeline.imbalance(spans)


def test_a_trace_over_ranks(rings, tmp_path, monkeypatch):
    results = run_ranks(2, traced_run)
    spans, (worker, step) = results[0]
    assert results[0] == results[1]
    for rank, found in enumerate(spans):
        assert [(s.name, s.step) for s in found] == [
            ("attend", 0), ("wait", 0), ("attend", 1), ("wait", 1), ("columns", -1),
        ]  # fmt: skip
        assert {s.phase for s in found} == {"forward"}
        assert all(s.start <= s.end for s in found) and found[0].start >= 0
        assert found[2].end - found[2].start == pytest.approx(60 if rank else 20, rel=0.4)
    # 40 and 80 ms of compute: 80 / 60, and 20 + 60 over 60. Waits do not count.
    assert worker == pytest.approx(80 / 60, rel=0.15)
    assert step == pytest.approx(80 / 60, rel=0.2) and step >= worker
    drawn = []
    monkeypatch.setattr(plots.pyplot, "close", drawn.append)
    layers = {"flat, 2 ranks": spans, "2 x 1 ranks": spans}
    assert plots.timeline(tmp_path / "t.png", layers, "a layer").stat().st_size > 5000
    assert [axes.get_title(loc="left") for axes in drawn[0].axes] == list(layers)
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["attend", "columns", "wait"]
    monkeypatch.undo()
    plots.pyplot.close("all")


def test_imbalance_by_hand(rings):
    span = timeline.Span

    def rank(*ms):
        return [span("forward", "attend", step, 0, took) for step, took in enumerate(ms)]

    # Both ranks take 6; each step's slowest are 5, 1 and 5... of a mean of 6.
    assert timeline.imbalance([rank(5, 1, 0), rank(0, 1, 5)]) == (1, 11 / 6)
    assert timeline.imbalance([rank(2, 2), rank(4, 4)]) == (8 / 6, 8 / 6)
    backward = [span("backward", "key", 0, 0, 3), span("backward", "query", 0, 3, 4)]
    # Another phase's step 0 is another step; a step's spans add up; a wait is none.
    waits = [span("backward", "wait", 0, 0, 100)]
    assert timeline.imbalance([rank(4), backward + waits]) == (1, 2)
    assert timeline.imbalance([[], waits]) == (None, None)


def test_transfers_of_a_profile(rings):
    span = rings.timeline.Span
    spans = [span("forward", "attend", 0, 1.0, 2.0), span("backward", "query", 0, 5.0, 6.0)]

    def kernel(name, ts, dur=500):
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur}

    mark = "at::cuda::spin_kernel(long)"
    events = [
        {"cat": "gpu_memcpy", "name": "ncclMemcpy", "ts": 20500.0, "dur": 1},
        {"cat": "cpu_op", "name": mark, "ts": 30000.0, "dur": 1},
        kernel(mark, 10000.0), kernel("ncclDevKernel_AllGather_RING_LL", 10100.0),
        kernel(mark, 20000.0), kernel("ncclDevKernel_SendRecv(x)", 25500.0),
        kernel("ncclDevKernel_AllGather_RING_LL", 20250.0, 1000), kernel("_forward_kernel", 21000.0),
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    timeline = rings.timeline
    assert timeline.moves(events, spans) == [
        span("forward", "transfer", -1, 0.25, 1.25), span("backward", "transfer", -1, 5.5, 6.0),
    ]  # fmt: skip
    assert timeline.moves(events[:2], spans) == [] and timeline.moves([], []) == []
    both = spans + timeline.moves(events, spans)
    assert timeline.imbalance([both, spans]) == timeline.imbalance([spans, spans]) == (1, 1)


def parts_of_operands(rank, world, seq):
    torch.manual_seed(0)
    positions = token_positions(seq, rank, world, 128)
    query, key, value, _ = workloads.draw_structured(seq, positions, 4, 2, 64, 100, torch.float32)
    config = MTrainingConfig.from_options(vertical=100, slash=50)
    index = search_pattern(query, key, config, CPGroup(dist.group.WORLD), 64**-0.5)
    return query, key, value, index


def test_structured_operands_lead_to_a_usual_pattern():
    seq, world = 8192, 2
    results = run_ranks(world, parts_of_operands, seq)
    index = results[0][3]
    # 50 diagonals next to each other right beyond the window, so few distances.
    assert index.distances()[..., :3].all() and not index.distances()[..., 6:].any()
    assert (index.column_ptr[..., -1] == 100).all()
    torch.manual_seed(0)
    whole = workloads.draw_structured(seq, torch.arange(seq), 4, 2, 64, 100, torch.float32)
    for rank, (query, key, value, _) in enumerate(results):
        # All but the noise is the same part of one sequence on every rank.
        for part, full in ((query, whole[0]), (key, whole[1])):
            assert torch.equal(part[..., :40], stripe(full, rank, world, 128)[..., :40])
        assert not value.is_contiguous() and value.stride(-1) == 1
    # The columns chosen are strong ones, and not the same for all heads.
    one = search_pattern(
        *whole[:2], MTrainingConfig.from_options(vertical=100, slash=50), CPGroup(None), 64**-0.5
    )
    chosen = [set(one.columns[0, head].tolist()) for head in range(4)]
    strong = whole[1][:, 0, :, 32:40].abs().sum(-1) > 0
    for head in range(4):
        own = sum(bool(strong[column, head // 2]) for column in chosen[head])
        assert own > 90
    assert len(chosen[0] & chosen[1]) < 95 and len(chosen[0] & chosen[2]) < 30
