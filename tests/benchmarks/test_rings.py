# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/layer/rings.py``: what its times have in them, its timeline and its operands."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.layer import ring_cases, ring_runs, rings, timeline
from benchmarks.lib import workloads
from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.layout import stripe, token_positions
from megatron_mtraining.pattern import build_index, search_pattern
from megatron_mtraining.ring import Ring
from tests.support.ranks import run_ranks

KERNELS = ("forward", "delta", "backward_query", "backward_key", "backward_columns")


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def test_dense_rings_are_beside_ours_of_all_pairs(four_gpus):
    """In one run, of the cases of one host's table, which it names in full."""
    for seq in ring_cases.LENGTHS:
        names = [case.name for case in ring_cases.host_cases(seq)]
        options, found = rings.parse(["--dense-once", "--case", *names])
        assert sorted(case.name for case in found) == sorted(names) and len(names) == 6
        dense = [case.name for case in found if rings.has_dense(case, options)]
        assert dense == [f"{seq // 1024}K all distances"]


def test_what_transfers_cost_is_told_of_both_directions():
    """With transfers less without, forward and both ways; a dense row has no pattern."""
    case, setting = rings.CASES[0], rings.Setting("cuda", None, 0, 4, 16, 2, 128)
    distances = torch.ones(1, 16, 8, dtype=torch.bool)
    index = build_index(distances, torch.zeros(1, 16, 0, dtype=torch.long), 1024, 128, 4, 2)
    ms = dict(fwd=4.5, fwdbwd=16.0, kernel_fwd=4.25, kernel=14.0, index=2.5)
    ahead = dict(fwd=4.0, index=1.0)
    row = rings.row_of(case, setting, ("mtraining_hier", 2), index, ms, None, 2.5, ahead)
    assert row["queued"] == dict(fwd_ms=4, index_ms=1)
    assert (row["kernel_fwd_ms"], row["exposed_fwd_ms"]) == (4.25, 0.25)
    assert (row["kernel_ms"], row["exposed_comm_ms"]) == (14, 2)
    ms = dict(fwd=508.0, fwdbwd=1739.0)
    dense = rings.row_of(case, setting, ("te_p2p", 0), None, ms, None, 2.5)
    assert (dense["density"], dense["vertical"], dense["exposed_comm_ms"]) == (1, None, None)


def transfers_and_kernels(rank, world):
    """By what is timed: how often it sent, and its kernels."""
    from megatron_mtraining.ring import attention

    sent, kernels, found = [], [], {}

    def recorded(calls, name, original):
        return lambda *given, **options: (calls.append(name), original(*given, **options))[1]

    for name in ("post", "gather", "sum_columns"):  # a silent ring has its own
        setattr(Ring, name, recorded(sent, name, getattr(Ring, name)))
    for name in (*KERNELS, "gather_columns", "pack_kv"):
        setattr(attention.kernels, name, recorded(kernels, name, getattr(attention.kernels, name)))
    setting = ring_runs.Setting("cpu", dist.group.WORLD, rank, world, 2, 1, 64)
    case = rings.CASES[0].at(1024)
    operands = ring_runs.operands_for(case, setting, 1)
    runs = ring_runs.sparse_runs(
        case, setting, operands, ring_runs.make_ring(setting.group, 1), 1
    ).runs
    for name, run in runs.items():
        sent.clear()
        kernels.clear()
        run()
        found[name] = (len(sent), kernels[:])
    return found


@pytest.mark.slow
def test_kernels_are_timed_without_transfers_forward_and_both_ways():
    for found in run_ranks(2, transfers_and_kernels):
        for name, whole in (("kernel_fwd", "fwd"), ("kernel", "fwdbwd")):
            assert found[name][0] == 0 < found[whole][0]
            assert found[name][1] == found[whole][1] != []


def test_imbalance_by_hand():
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


def test_structured_operands_lead_to_a_usual_pattern():
    """Few distances, and columns that stand out; the same sequence on every rank, but for noise."""
    seq = 8192
    torch.manual_seed(0)
    query, key, *_ = workloads.draw_structured(seq, torch.arange(seq), 4, 2, 64, 100, torch.float32)
    config = MTrainingConfig.from_options(vertical=100, slash=50)
    index = search_pattern(query, key, config, CPGroup(None), 64**-0.5)
    # 50 diagonals next to each other right beyond the window.
    assert index.distances()[..., :3].all() and not index.distances()[..., 6:].any()
    strong = key[:, 0, :, 32:40].abs().sum(-1) > 0
    for head in range(4):
        chosen = index.columns[0, head, :100].long()
        assert strong[chosen, head // 2].sum() > 90
    torch.manual_seed(0)
    part = workloads.draw_structured(
        seq, token_positions(seq, 1, 2, 128), 4, 2, 64, 100, torch.float32
    )
    assert torch.equal(part[0][..., :40], stripe(query, 1, 2, 128)[..., :40])
