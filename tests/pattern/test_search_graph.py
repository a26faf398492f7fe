# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pattern searches that are captured as CUDA graphs.

- on the CPU, with graphs that record what PyTorch runs: steps and collectives of a captured search, copies of
  an index, when a search is captured, bounds on memory;
- on a GPU: captured searches select the same bits as searches launched kernel by kernel.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig, stream_graphs
from megatron_mtraining.attention import attend
from megatron_mtraining.config import PricePolicy, XAttentionPolicy
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.kernels.selection import reference_threshold
from megatron_mtraining.pattern import build_index, search, search_graph, search_pattern
from megatron_mtraining.pattern.block_list_index import BlockListIndex
from megatron_mtraining.pattern.captured_search import CopiedIndex
from megatron_mtraining.pattern.constants import constant, constants_read, made_once
from megatron_mtraining.pattern.sampled_rows import _local_rows, gather_rows, gather_sampled_rows
from megatron_mtraining.pattern.search_graph import SearchGraph, SearchGraphs, SearchKind
from megatron_mtraining.stream_graphs import MAX_GRAPHS, Memory, padded
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import random_operands
from tests.support.recorded_graphs import RecordedGraph, fake_cuda
from tests.support.selection_cases import SCALE

CONFIG = MTrainingConfig.from_options(
    price=0.7, vertical_cap=90, window=70, sink=4, sample_strata=16, sample_rows=2
)


def tensors_of(index):
    found = {each.name: getattr(index, each.name) for each in dataclasses.fields(index)}
    found |= index.metrics
    if index.has_block_lists:  # undefined past the count
        for name in ("round_list", "rank_list"):
            found[name] = found[name][: int(index.round_ptr[-1])]
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def assert_same(found, expected):
    assert type(found) is type(expected)
    tensors, others = tensors_of(found), tensors_of(expected)
    assert tensors.keys() == others.keys()
    for name, b in others.items():
        a = tensors[name]
        assert a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b), name
    for field in dataclasses.fields(expected):
        if field.name not in (*others, "metrics"):
            assert getattr(found, field.name) == getattr(expected, field.name), field.name


# On the CPU.


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda as far as it is used, without a GPU."""
    monkeypatch.setattr(search_graph, "_STREAMS", {})
    return fake_cuda(monkeypatch)


class Mirrored(CPGroup):
    """The first of two ranks, of which the other has the same numbers, but no rows and keys to add, and no
    columns to offer: the same ones twice would leave holes in the index, with whatever was there."""

    def __init__(self):
        super().__init__(None)
        self.world, self.inner, self.calls = 2, 2, []

    def all_reduce(self, tensor, op="sum"):
        self.calls.append(op)
        return tensor.mul_(2) if op == "sum" and not tensor.is_floating_point() else tensor

    def all_gather(self, tensor):
        self.calls.append("gather")
        other = tensor
        if tensor.dtype == torch.int32 and tensor.dim() == 4:  # values and positions of columns
            other = torch.zeros_like(tensor)
            other[1] = 2**20  # past the end
        return torch.stack((tensor, other))

    def reduce_scatter(self, tensor):
        self.calls.append("scatter")
        return (2 * tensor).chunk(2, -1)[0].contiguous()


def toy_search(rows, key, price, cp, query=None):
    """Reads all inputs, and has each kind of collective."""
    both = key.sum((0, 3)).repeat_interleave(2, 1) + rows.query.sum((0, 3))
    if query is not None:
        both = both - 3 * query.sum((0, 3))
    sums = cp.all_reduce(both.round().int())
    parts = cp.all_gather(sums).sum(0)  # [b, h]
    most = cp.all_reduce(parts + 1, "max") * price
    own = cp.reduce_scatter(torch.stack((most, most + 2), -1))[..., 0]
    columns = (own.abs().long() % 256)[..., None]
    distances = torch.zeros(*own.shape, 2, dtype=torch.bool)
    index = build_index(distances, columns, 256, 128, 2, 2)
    return dataclasses.replace(index, metrics={"recall": own})


@pytest.mark.parametrize("reads_query", [False, True], ids=["sample", "all queries"])
@pytest.mark.parametrize("group", [lambda: CPGroup(None), Mirrored], ids=["one rank", "two"])
def test_a_replay_searches_what_it_is_given(cuda, group, reads_query):
    """Operands at other addresses, of other strides, over ranks: each replay is a search of its own."""
    cp = group()
    query, key, _, _ = random_operands(256 // cp.world, 2, 4, 2, 64, torch.float32, "cpu")
    rows, price = gather_sampled_rows(query, CONFIG, cp, 1, SCALE), torch.tensor(2.0)
    given = [rows.query, key, price] + [query] * reads_query
    memory = Memory(sum(map(padded, given)), query.device)
    cp.calls = []
    own = query if reads_query else None
    graph = SearchGraph(toy_search, rows, key, cp, price, memory, threading.Lock(), own)
    assert not cp.calls, "a capture has no collectives"
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        query = torch.randn(query.shape[0], 2, 4, 128)[..., 64:]
        key, price = torch.randn(2, 2, query.shape[0], 64).movedim(2, 0), torch.rand(())
        cp.calls = []
        found.append(graph(query, key, CONFIG, cp, price))
        replayed, cp.calls = cp.calls, []
        rows = gather_sampled_rows(query, CONFIG, cp, 1, SCALE)
        expected = toy_search(rows, key, price, cp, query if reads_query else None)
        assert replayed == cp.calls
        assert_same(found[-1], expected)
    assert not torch.equal(found[0].recall, found[1].recall), "results have memory of their own"


@pytest.mark.parametrize("group", [lambda: CPGroup(None), Mirrored], ids=["one rank", "two"])
def test_replays_of_whole_searches(cuda, monkeypatch, group):
    """The reference implementation: first a search kernel by kernel, then a capture, then replays."""
    graphs = SearchGraphs()
    policies = [dataclasses.replace(CONFIG.policy, vertical_cap=cap) for cap in (90, 50, 90, 90)]
    # The number of columns that the reference implementation leaves out is no longer read from them.
    monkeypatch.setattr(reference_threshold, "int", lambda count: 90, raising=False)
    for number in range(4):
        query, key, _, _ = random_operands(512, 1, 4, 2, 64, torch.float32, "cpu")
        for of_stream in (lambda *both: None, lambda *both: graphs):
            monkeypatch.setattr(SearchGraphs, "of_stream", staticmethod(of_stream))
            found = search_pattern(query, key, CONFIG, group(), SCALE, head_policies=policies)
            if of_stream() is None:
                expected = found
        assert_same(found, expected)
        assert len(graphs._graphs) == (number > 0)
    (graph,) = graphs._graphs.values()
    assert len(graph._steps) == (1 if group().world == 1 else 5 + 4)
    caps = constant((90, 50, 90, 90), query.device, torch.int64)
    assert any(each is caps for each in graph._constants), "while it is read"


@pytest.mark.parametrize("tokens", [512, 450])
def test_replays_of_searches_for_key_blocks(cuda, monkeypatch, tokens):
    """They read all queries, and nothing back to the host."""
    graphs = SearchGraphs()
    config = dataclasses.replace(CONFIG, policy=XAttentionPolicy(threshold=0.4), block_size=64)
    for number in range(4):
        query, key, _, _ = random_operands(tokens, 1, 4, 2, 64, torch.float32, "cpu")
        query, key = 4 * query.roll(80 * number, 0), key.roll(-48 * number, 0)
        for of_stream in (lambda *both: None, lambda *both: graphs):
            monkeypatch.setattr(SearchGraphs, "of_stream", staticmethod(of_stream))
            found = search_pattern(query, key, config, CPGroup(None), SCALE)
            if of_stream() is None:
                expected = found
        assert type(found) is BlockListIndex
        assert_same(found, expected)
        assert len(graphs._graphs) == (number > 0)
    (graph,) = graphs._graphs.values()
    at = config.sampling, query.device, 0, 1, 1, config.block_size
    rows = _local_rows(tokens, *at)
    assert any(each is rows for each in graph._constants), "their held-out rows, while it is read"


@pytest.mark.parametrize("limit", ["MAX_QUERY_BYTES", "UNCOUNTED_ENTRIES"])
def test_searches_for_key_blocks_that_are_not_captured(cuda, monkeypatch, limit):
    """Of more queries than a stream holds, or with lists whose entries the host counts."""
    graphs = SearchGraphs()
    monkeypatch.setattr(SearchGraphs, "of_stream", staticmethod(lambda *both: graphs))
    monkeypatch.setattr(search, limit, 10)
    config = dataclasses.replace(CONFIG, policy=XAttentionPolicy(), block_size=64)
    query, key, _, _ = random_operands(512, 1, 4, 2, 64, torch.float32, "cpu")
    for _ in range(3):
        search_pattern(query, key, config, CPGroup(None), SCALE)
    assert not graphs._graphs


def test_a_callers_graph_has_its_own_constants(monkeypatch):
    """They would be gone before it is replayed."""
    make = made_once(lambda count: torch.arange(count))
    first = make(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert make(3) is not first and make(3) is not make(3)
    with constants_read() as kept:  # one of this package keeps them
        assert make(3) is first
    assert kept == [first]


def test_constants_are_not_kept_for_good():
    """A sweep, or a schedule of prices, has others in each search."""
    device = torch.device("cpu")
    first = weakref.ref(constant((0.3, 0.7), device))
    with constants_read() as kept:
        constant((0.4, 0.6), device)
    held = weakref.ref(kept[0])
    assert constant((0.3, 0.7), device) is first()
    for number in range(2000):
        constant((float(number), 0.7), device)
    assert first() is None and held() is kept[0]


def test_copies_of_an_index(cuda):
    columns = torch.rand(1, 3, 640).topk(7).indices.sort(-1).values
    index = build_index(torch.rand(1, 3, 5) < 0.5, columns, 640, 128, 1)
    copied = CopiedIndex(index)
    first = copied.copy()
    assert_same(first, index)
    assert first.nbytes == index.nbytes
    storages = {each.untyped_storage().data_ptr() for each in tensors_of(first).values()}
    assert len(storages) == 1
    for tensor in tensors_of(first).values():
        assert tensor.data_ptr() % 16 == first.member.data_ptr() % 16
    copied.index.columns.fill_(3)
    assert (copied.copy().columns == 3).all() and not (first.columns == 3).all()


def test_an_index_without_columns_is_copied(cuda):
    index = build_index(
        torch.ones(1, 2, 4, dtype=torch.bool), torch.zeros(1, 2, 0).long(), 512, 128, 1
    )
    assert_same(CopiedIndex(index).copy(), index)


class OnGPU:
    """Of an operand, what says whether its search is captured."""

    is_cuda, device, dtype = True, torch.device("cpu"), torch.bfloat16

    def __init__(self, *shape):
        self.shape = torch.Size(shape)
        self.nbytes = 2 * self.shape.numel()


def of_stream(tokens=1024, batch=1, kv_heads=2, world=1):
    return SearchGraphs.of_stream(
        OnGPU(tokens, batch, 16, 128), OnGPU(tokens, batch, kv_heads, 128), world
    )


def test_short_searches_alone_are_captured(cuda, monkeypatch):
    monkeypatch.delenv("MTRAINING_SEARCH_GRAPH", raising=False)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    graphs = of_stream()
    assert isinstance(graphs, SearchGraphs) and of_stream(32768) is graphs
    assert of_stream(world=2) is None, "not measured over several ranks"
    assert of_stream(32769) is None and of_stream(16385, batch=2) is None
    assert of_stream(32768, kv_heads=8) is graphs and of_stream(32768, kv_heads=16) is None
    assert SearchGraphs.of_stream(torch.zeros(8, 1, 2, 64), torch.zeros(8, 1, 2, 64)) is None
    cuda.cuda_stream = 8
    assert of_stream() is not graphs, "a stream has graphs of its own"
    for stream in range(9, 20):
        cuda.cuda_stream = stream
        of_stream()
    assert of_stream() is None and len(search_graph._STREAMS) <= 4
    cuda.cuda_stream = 7
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert of_stream() is None, "a capture in a capture"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert of_stream() is None
    monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", "1")
    assert of_stream() is graphs and of_stream(world=2) is graphs
    monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", "0")
    assert of_stream() is None
    monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", "off")
    with pytest.raises(ConfigError, match="MTRAINING_SEARCH_GRAPH is 'off'.*0 or 1"):
        of_stream()


def test_all_that_launches_depend_on_makes_the_kind():
    query, key, cp = OnGPU(512, 1, 16, 128), OnGPU(512, 1, 2, 128), CPGroup(None)
    usual = (query, key, CONFIG, cp, SCALE, None)
    others = [
        (OnGPU(640, 1, 16, 128), OnGPU(640, 1, 2, 128), *usual[2:]),
        (query, OnGPU(512, 1, 4, 128), *usual[2:]),
        (query, key, dataclasses.replace(CONFIG, window=256), *usual[3:]),
        (query, key, CONFIG, Mirrored(), *usual[4:]),
        (query, key, CONFIG, cp, 0.5, None),
        (query, key, CONFIG, cp, SCALE, (PricePolicy(price=0.1),) * 16),
    ]
    kinds = {SearchKind.of(*arguments) for arguments in (usual, *others)}
    assert len(kinds) == 1 + len(others)
    assert SearchKind.of(*usual) in kinds


@pytest.fixture
def table(cuda, monkeypatch):
    """The captured searches of a stream, whose captures are just listed."""
    made = []
    monkeypatch.setattr(
        search_graph, "SearchGraph", lambda *arguments: made.append(arguments) or len(made)
    )
    graphs = SearchGraphs()
    query = torch.zeros(256, 1, 2, 64)
    rows = gather_sampled_rows(query, CONFIG, CPGroup(None), 1, SCALE)

    def search(kind, tokens=256):
        if (graph := graphs.get(kind)) is None:
            key = torch.zeros(tokens, 1, 2, 64)
            graphs.capture(kind, toy_search, rows, key, CPGroup(None), torch.ones(2))
        return graph

    return SimpleNamespace(search=search, made=made, graphs=graphs)


def test_the_second_search_of_a_kind_is_captured(table):
    assert [table.search("a") for _ in range(4)] == [None, None, 1, 1]
    assert table.search("b") is None and len(table.made) == 1
    assert table.search("a") == 1


def test_captures_are_bounded(table, monkeypatch):
    monkeypatch.setattr(stream_graphs, "MAX_GRAPHS", 3)
    monkeypatch.setattr(stream_graphs, "RENEWAL", 100)
    for _ in range(3):
        for kind in range(5):
            table.search(kind)
    assert len(table.made) == 3, "no capture in place of another in every search"
    assert table.search(0) == 1 and table.search(4) is None
    for _ in range(100):
        table.search("later")
    assert table.search("later") is not None, "after a while others have their turn"
    assert len(table.graphs._graphs) <= 3 and len(table.made) == 4
    for kind in range(1000, 1200):
        table.search(kind)
    assert len(table.graphs._seen) <= 3 * 8


def test_longer_keys_take_more_memory_for_all(table):
    for tokens in (256, 512, 256):
        for _ in range(3):
            table.search(tokens, tokens)
    first, second = table.made[0][5], table.made[1][5]
    assert second.nbytes - first.nbytes == 256 * 2 * 64 * 4
    assert table.graphs._memory is second and len(table.made) == 3


def test_a_search_that_cannot_be_captured_ends_the_run(table, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(search_graph, "SearchGraph", fails)
    table.search("a")
    with pytest.raises(
        RuntimeError, match="not permitted when.*set MTRAINING_SEARCH_GRAPH=0 in the environment"
    ):
        table.search("a")


@pytest.mark.parametrize("group", [lambda: CPGroup(None), Mirrored], ids=["one rank", "two"])
def test_a_graph_that_does_not_end_is_the_error(cuda, monkeypatch, group):
    """Over two ranks it ends at a collective, within the search."""

    def fails(self):
        self.__exit__(None, None, None)
        raise RuntimeError("capture invalidated")

    monkeypatch.setattr(RecordedGraph, "capture_end", fails)
    graphs = SearchGraphs()
    monkeypatch.setattr(SearchGraphs, "of_stream", staticmethod(lambda *given: graphs))
    monkeypatch.setattr(reference_threshold, "int", lambda count: 90, raising=False)
    query, key, _, _ = random_operands(512, 1, 4, 2, 64, torch.float32, "cpu")
    search_pattern(query, key, CONFIG, group(), SCALE)
    with pytest.raises(RuntimeError, match="capture invalidated.*MTRAINING_SEARCH_GRAPH=0"):
        search_pattern(query, key, CONFIG, group(), SCALE)


def test_replays_find_their_rows_again():
    """Where the sampled rows are is kept for as many kinds of searches as a stream captures."""
    group = CPGroup(None)
    for _ in range(2):
        before = _local_rows.cache_info().misses
        for blocks in range(MAX_GRAPHS):
            query = torch.zeros(4 + blocks, 1, 1, 1)
            gather_rows(query, CONFIG, group)
    assert _local_rows.cache_info().misses == before


# On a GPU.


@pytest.fixture
def searches(monkeypatch):
    """Pattern searches kernel by kernel and captured, and how many were replayed."""
    monkeypatch.setattr(search_graph, "_STREAMS", {})
    replayed = []
    original = SearchGraph.__call__

    def counted(self, *arguments):
        replayed.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(SearchGraph, "__call__", counted)

    def both(query, key, config=CONFIG, cp=None, **rest):
        cp = cp or CPGroup(None)
        monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", "0")
        expected = search_pattern(query, key, config, cp, SCALE, **rest)
        monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", "1")
        return search_pattern(query, key, config, cp, SCALE, **rest), expected

    return SimpleNamespace(both=both, replayed=replayed)


def operands(tokens, offset=0, batch=1, heads=4, kv_heads=2):
    """Query and key, at an offset in elements; odd ones are not aligned."""
    found = []
    for count in (heads, kv_heads):
        shape = (tokens, batch, count, 64)
        memory = torch.randn(offset + tokens * batch * count * 64, device="cuda")
        found.append(memory.bfloat16()[offset:].view(shape))
    return found


POLICIES = [
    pytest.param(dict(price=0.7, vertical_cap=90), id="price"),
    pytest.param(dict(price=0.9, vertical_cap=40, slash_cap=3), id="price-caps"),
    pytest.param(dict(vertical=24, slash=5), id="fixed"),
    pytest.param(dict(vertical=0, slash=5, sink=0), id="slashes-only"),
    pytest.param(dict(vertical=24, slash=5, estimator="last"), id="fixed-last"),
    pytest.param(dict(policy="xattention", block_threshold=0.7), id="xattention"),
    pytest.param(dict(policy="xattention", block_lookahead=True), id="xattention-lookahead"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_captured_searches_select_the_same(searches, policy):
    """Over lengths in turn (multiples of 16 and others), and operands that are aligned and that are not."""
    rows = {} if "estimator" in policy else dict(sample_strata=16, sample_rows=2)
    config = MTrainingConfig.from_options(**{**dict(window=70, sink=4), **policy, **rows})
    kept = []
    for _ in range(4):
        for tokens, offset in ((1024, 0), (1000, 0), (1024, 1), (777, 8), (1024, 4)):
            found, expected = searches.both(*operands(tokens, offset), config)
            assert_same(found, expected)
            kept.append((found, tensors_of(expected)))
    assert len(searches.replayed) >= 4 * 5 - 2 * 3, "of three lengths, two searches each were not"
    for found, expected in kept:  # no later search has written to an earlier one's index
        own = tensors_of(found)
        assert all(torch.equal(own[name], value) for name, value in expected.items())


@pytest.mark.gpu
def test_operands_as_megatron_gives_them(searches):
    """Views of one projection; two entries a batch; prices of the step, and of heads."""
    policies = [PricePolicy(price=0.5 + 0.1 * head, vertical_cap=80) for head in range(4)]
    for price in (None, torch.tensor(0.4), torch.tensor([0.3, 0.9, 0.5, 1.1])):
        for heads in (None, policies):
            for _ in range(4):
                qkv = torch.randn(640, 2, 2, 4 * 64, device="cuda", dtype=torch.bfloat16)
                query = qkv[..., :128].reshape(640, 2, 4, 64)
                given = None if price is None else (price * torch.rand(())).cuda()
                assert_same(
                    *searches.both(query, qkv[..., 128:192], price=given, head_policies=heads)
                )
    assert len(searches.replayed) == 2 * (3 * 4 - 2), "whatever says the price"


@pytest.mark.gpu
def test_captured_searches_on_two_streams(searches):
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    pairs = []
    for number in range(12):
        stream = streams[number % 2]
        query, key = operands(1024)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pairs.append(searches.both(query, key))
            query.record_stream(stream)
            key.record_stream(stream)
    torch.cuda.synchronize()
    for found, expected in pairs:
        assert_same(found, expected)
    assert len(searches.replayed) == 12 - 2 * 2 and len(search_graph._STREAMS) == 2


@pytest.mark.gpu
def test_captured_searches_over_ranks(searches):
    """A search in pieces, with collectives between its graphs."""
    for _ in range(4):
        assert_same(*searches.both(*operands(512), cp=Mirrored()))
    assert len(searches.replayed) == 2
    (graphs,) = search_graph._STREAMS.values()
    (graph,) = graphs._graphs.values()
    assert len(graph._steps) == 5 + 4, "graphs, and collectives beside that of the rows"


@pytest.mark.gpu
def test_searches_that_are_launched_kernel_by_kernel(searches):
    """Packed documents, policy moba, and a search in a capture of the caller's."""
    for _ in range(3):
        query, key = operands(1024)
        starts = torch.zeros(1, 1024, dtype=torch.int32, device="cuda")
        starts[:, 400:] = 400
        documents = VisibleRanges(starts)
        search_pattern(query, key, CONFIG, CPGroup(None), SCALE, visible=documents)
        blocks = MTrainingConfig.from_options(policy="moba", block_top_k=3)
        search_pattern(query, key, blocks, CPGroup(None), SCALE)
    assert not searches.replayed
    expected = search_pattern(query, key, CONFIG, CPGroup(None), SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = search_pattern(query, key, CONFIG, CPGroup(None), SCALE)
    graph.replay()
    assert_same(found, expected)
    assert not searches.replayed


@pytest.mark.gpu
def test_attention_with_captured_searches(searches, monkeypatch):
    """Forward, backward and a replay of its pattern; in inference mode, too."""
    results = {}
    for captured in ("0", "1"):
        monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", captured)
        found = []
        torch.manual_seed(3)
        with torch.inference_mode():
            query, key = operands(1024)
            found.append(attend(query, key, key, config=CONFIG).out.clone())
        for _ in range(4):
            query, key = operands(1024)
            value = torch.randn_like(key)
            leaves = [each.requires_grad_() for each in (query, key, value)]
            result = attend(*leaves, config=CONFIG)
            again = attend(*leaves, config=CONFIG, pattern=result.index)
            assert torch.equal(again.out, result.out)
            found += [result.out.detach(), *torch.autograd.grad(result.out.sum(), leaves)]
        results[captured] = found
    assert len(searches.replayed) == 3
    assert all(torch.equal(a, b) for a, b in zip(results["0"], results["1"]))
