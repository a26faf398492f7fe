# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention that is captured as CUDA graphs: on the CPU with graphs that record what PyTorch runs, on a GPU
against launches kernel by kernel."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.documents import Documents
from megatron_mtraining.kernels.selection import reference_threshold
from megatron_mtraining.pattern import search_graph, search_pattern
from megatron_mtraining.pattern.captured_search import CopiedIndex
from megatron_mtraining.pattern.search_graph import SearchGraphs
from megatron_mtraining.ring import Ring, attention_graph
from megatron_mtraining.ring.attention import _backward, _forward, _replayed
from megatron_mtraining.ring.attention_graph import AttentionGraph, AttentionGraphs, replayed
from tests.support.attention_cases import random_index, relative_error
from tests.support.recorded_graphs import fake_cuda

CONFIG = MTrainingConfig.from_options(
    price=0.7, vertical_cap=90, window=70, sink=4, sample_strata=16, sample_rows=2
)
SCALE = 0.3
CALLS = 7
"""The second search is captured; the third has an index in one piece; the fourth attention is captured."""


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of searches and of attention without a GPU, and how many calls of attention were replayed."""
    fake_cuda(monkeypatch)
    searches, found = SearchGraphs(), AttentionGraphs()
    monkeypatch.setattr(SearchGraphs, "of_stream", staticmethod(lambda *given: searches))
    monkeypatch.setattr(AttentionGraphs, "of_stream", staticmethod(lambda query: found))
    # The number of columns that the reference implementation leaves out is no longer read from them.
    monkeypatch.setattr(reference_threshold, "int", lambda count: 90, raising=False)
    return found


@pytest.fixture
def replays(monkeypatch):
    found = []
    original = AttentionGraph.__call__

    def counted(self, given):
        found.append(self)
        return original(self, given)

    monkeypatch.setattr(AttentionGraph, "__call__", counted)
    return found


def operands(length=512, dtype=torch.float32, device="cpu", dim=64, batch=1):
    """query, key and value as a projection gives them, and a gradient."""
    mixed = torch.randn(length, batch, 2, 4 * dim, device=device, dtype=dtype)
    query = mixed[..., : 2 * dim].unflatten(-1, (2, dim)).flatten(2, 3)
    parts = query, mixed[..., 2 * dim : 3 * dim], mixed[..., 3 * dim :]
    return [*(each.detach().requires_grad_() for each in parts), torch.randn_like(query)]


def results(given, config=CONFIG, recomputes=False):
    """out, lse and gradients."""
    *leaves, grad = given

    def run(*leaves):
        found = attend(*leaves, config=config, softmax_scale=SCALE)
        return found.out, found.lse

    out, lse = checkpoint(run, *leaves, use_reentrant=False) if recomputes else run(*leaves)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("recomputes", [False, True])
def test_replays_compute_what_they_are_given(graphs, replays, monkeypatch, recomputes):
    kept = []
    for _ in range(CALLS):
        given = operands()
        found = results(given, recomputes=recomputes)
        with monkeypatch.context() as plain:
            plain.setattr(AttentionGraphs, "of_stream", staticmethod(lambda query: None))
            plain.setattr(SearchGraphs, "of_stream", staticmethod(lambda *given: None))
            kept.append((found, results(given)))
    for found, expected in kept:  # results have memory of their own
        assert_equal(found, expected)
    assert len(graphs._graphs) == 2 and {kind.name for kind in graphs._graphs} == {
        "forward",
        "backward",
    }
    assert len(replays) >= 2 * (CALLS - 4)


def test_what_is_not_captured(graphs, monkeypatch):
    query, key, value, _ = (each.detach() for each in operands())
    for _ in range(3):
        index = search_pattern(query, key, CONFIG, CPGroup(None), SCALE)
    assert attention_graph._bytes_of(index) is not None

    def refused(index):
        replayed("forward", lambda *both: (), (query, key, value), index, SCALE)
        return not graphs._seen

    assert refused(replace(index, documents=Documents.from_lengths([200, 312], 512)))
    assert refused(replace(index, columns=index.columns.clone())), "memory of its own"
    assert not refused(index)
    seen = len(graphs._seen)
    pruned = replace(CONFIG, backward_threshold=2.0)
    for _ in range(CALLS):
        results(operands(), pruned)
    assert len(graphs._seen) == seen, "a pruned backward is launched kernel by kernel"
    odd = torch.zeros(513 * 64 * 2 + 1)[1:].view(513, 1, 2, 64)[:512]
    replayed("forward", lambda *both: (), (odd, key, value), index, SCALE)
    assert len(graphs._seen) == seen, "other kernels take what is not aligned"


def test_only_of_one_rank(graphs):
    """Over ranks there are transfers; somebody who follows a ring would see none of a graph."""
    query, key, value, _ = (each.detach() for each in operands())
    for _ in range(3):
        index = search_pattern(query, key, CONFIG, CPGroup(None), SCALE)
    over_ranks, traced = Ring(CPGroup(None)), Ring(CPGroup(None))
    over_ranks.cp.world = 2
    traced.trace = lambda *step: nullcontext()
    for ring in (over_ranks, traced):
        assert _replayed("forward", _forward, (query, key, value), index, ring, SCALE) is None
        given = query, key, value, query, query, torch.zeros(1, 2, 512)
        assert _replayed("backward", _backward, given, index, ring, SCALE) is None
    assert not graphs._seen
    alone = Ring(CPGroup(None))
    assert _replayed("forward", _forward, (query, key, value), index, alone, SCALE) is None
    assert len(graphs._seen) == 1


def test_kinds(graphs, monkeypatch):
    """Whatever the launches depend on is another kind."""
    query, key, value, _ = (each.detach() for each in operands())
    first, longer, smaller = (
        CopiedIndex(random_index(512, 1, 4, block, 1, "few", "cpu")).copy()
        for block in (128, 128, 64)
    )
    more = torch.cat((longer.columns, torch.full_like(longer.columns[..., :4], 512)), -1)
    longer = CopiedIndex(replace(longer, columns=more)).copy()

    def call(name="forward", given=(query, key, value), scale=SCALE, index=first):
        before = len(graphs._seen)
        replayed(name, lambda *both: (query.clone(),), given, index, scale)
        return len(graphs._seen) > before

    assert call() and not call()
    assert call(index=longer) and call(index=smaller)
    same_size = replace(first, block_size=first.block_size // 2)
    assert call(index=same_size) and call(index=replace(first, seq_length=511))
    assert call("backward") and call(scale=0.1) and call(given=(query, key, value.bfloat16()))
    for name in attention_graph.KERNEL_SWITCHES:
        monkeypatch.setenv(name, "1")
        assert call()
    torch.use_deterministic_algorithms(True)
    try:
        assert call()
    finally:
        torch.use_deterministic_algorithms(False)


class OnGPU:
    is_cuda, device = True, torch.device("cpu")

    def __init__(self, *shape):
        self.shape = torch.Size(shape)


def test_environment_chooses(monkeypatch):
    fake_cuda(monkeypatch)
    monkeypatch.setattr(attention_graph, "_STREAMS", {})
    short, long = OnGPU(32768, 1, 4, 64), OnGPU(16385, 2, 4, 64)
    monkeypatch.delenv("MTRAINING_ATTENTION_GRAPH", raising=False)
    assert AttentionGraphs.of_stream(short) is None
    monkeypatch.setenv("MTRAINING_ATTENTION_GRAPH", "1")
    found = AttentionGraphs.of_stream(short)
    assert isinstance(found, AttentionGraphs) and AttentionGraphs.of_stream(short) is found
    assert AttentionGraphs.of_stream(long) is None
    assert AttentionGraphs.of_stream(torch.zeros(8, 1, 2, 64)) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert AttentionGraphs.of_stream(short) is None, "a capture in a capture"
    monkeypatch.setenv("MTRAINING_ATTENTION_GRAPH", "yes")
    with pytest.raises(ConfigError, match="MTRAINING_ATTENTION_GRAPH is 'yes'.*0 or 1"):
        AttentionGraphs.of_stream(short)


def test_a_call_that_cannot_be_captured_ends_the_run(graphs):
    query, key, value, _ = (each.detach() for each in operands())
    for _ in range(3):
        index = search_pattern(query, key, CONFIG, CPGroup(None), SCALE)

    def fails(given, own):
        raise RuntimeError("not permitted when stream is capturing")

    assert replayed("forward", fails, (query, key, value), index, SCALE) is None
    with pytest.raises(RuntimeError, match="not permitted.*set MTRAINING_ATTENTION_GRAPH=0"):
        replayed("forward", fails, (query, key, value), index, SCALE)


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pytest.mark.parametrize("portable", [False, True], ids=["any", "portable"])
@pytest.mark.parametrize(("length", "batch", "dim"), [(4096, 1, 128), (1536, 2, 64)])
def test_the_same_on_a_gpu(monkeypatch, replays, backward_path, length, batch, dim, portable):
    """The same bits, but for the gradient of queries in one pass, whose sums have no fixed order."""
    if portable:
        monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    for module in (search_graph, attention_graph):
        monkeypatch.setattr(module, "_STREAMS", {})
    config = MTrainingConfig.for_sequence(length, policy="price")
    kept = []
    for _ in range(CALLS):
        given = operands(length, torch.bfloat16, "cuda", dim, batch)
        both = []
        for wanted in ("1", "0"):
            monkeypatch.setenv("MTRAINING_ATTENTION_GRAPH", wanted)
            both.append(results(given, config))
        kept.append(both)
    for found, expected in kept:
        if backward_path == "two_kernels" or portable:
            assert_equal(found, expected)
            continue
        assert_equal([*found[:2], *found[3:]], [*expected[:2], *expected[3:]])
        assert relative_error(found[2], expected[2]) < 1e-2
    assert len(replays) >= 2 * (CALLS - 4)
