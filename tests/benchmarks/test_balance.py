# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The counts of ``benchmarks/balance.py`` against masks written out and the ring's own schedule."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.layer import balance
from megatron_mtraining.layout import inner_size, locate
from megatron_mtraining.pattern import build_index
from megatron_mtraining.ring import rounds
from megatron_mtraining.ring.schedule import Action, forward_ops

BLOCK = 128
SEQ = 16 * BLOCK
# inner, outer: one rank, one node, a plain ring, and nodes of several ranks
SHAPES = [(1, 1), (4, 1), (8, 1), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)]
every_shape = pytest.mark.parametrize(("inner", "outer"), SHAPES)


@pytest.fixture(scope="module")
def chosen():
    """Distances and columns of three heads."""
    torch.manual_seed(3)
    distances, picked = balance.workloads.draw_few_far(SEQ, 3, 4, 40)
    picked[0, 1, 7:] = SEQ  # a head with fewer columns
    return distances, picked


@pytest.fixture(scope="module")
def drawn(chosen):
    """A pattern, and its mask, of slashes and in all: bool ``[heads, N, N]``."""
    distances, picked = chosen
    index = build_index(distances, picked, SEQ, BLOCK, 1)
    slashes = build_index(distances, picked[..., :0], SEQ, BLOCK, 1)
    masks = [torch.stack([i.token_mask(0, h) for h in range(3)]).numpy() for i in (slashes, index)]
    return balance.pattern_of("drawn", SEQ, distances, picked), *masks


def pairs_between(mask, owner, world):
    """Kept pairs by (query rank, key rank), token by token."""
    kept = mask.sum(0)
    by_query = np.stack([kept[owner == rank].sum(0) for rank in range(world)])
    return np.stack([by_query[:, owner == rank].sum(1) for rank in range(world)], 1)


def owners(layout, inner, outer):
    """The rank of each token."""
    world, token = inner * outer, np.arange(SEQ)
    if layout == "contiguous":
        return token // (SEQ // world)
    if layout == "zigzag":
        chunk = token // (SEQ // (2 * world))
        return np.minimum(chunk, 2 * world - 1 - chunk)
    if layout == "one direction":
        block = token // BLOCK
        return block % outer * inner + block // outer % inner
    return locate(torch.arange(SEQ), world, BLOCK, inner)[0].numpy()


def node_before(rank, by, inner, outer):
    """The ranks of the node ``by`` before a rank's."""
    node = (rank // inner - by) % outer
    return [node * inner + y for y in range(inner)]


def work_of(slash_mask, mask, owner, inner, outer, dealt):
    """w[r, o] as the module's text says it, from the masks."""
    world, heads = inner * outer, len(mask)
    slash = pairs_between(slash_mask, owner, world)
    columns = [
        pairs_between(mask[h : h + 1], owner, world)
        - pairs_between(slash_mask[h : h + 1], owner, world)
        for h in range(heads)
    ]
    work = np.zeros((world, outer), dtype=np.int64)
    for rank in range(world):
        for o in range(outer):
            keys = node_before(rank, o, inner, outer)
            work[rank, o] = slash[rank, keys].sum()
            for h, of_head in enumerate(columns):
                if not dealt:
                    work[rank, o] += of_head[rank, keys].sum()
                elif h * outer // heads == o:
                    work[rank, o] += of_head[rank].sum()
    return work


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_pairs_are_those_of_the_mask(drawn, layout, world):
    pattern, _, mask = drawn
    pairs = getattr(balance, layout)(pattern, world)
    assert pairs.dtype == np.int64
    assert np.array_equal(pairs, pairs_between(mask, owners(layout, 1, world), world))


@every_shape
def test_striped_is_the_index_s_own_count(drawn, chosen, inner, outer):
    world = inner * outer
    index = build_index(*chosen, SEQ, BLOCK, world, inner)
    work = balance.striped_work(drawn[0], world, inner)["striped"]
    assert work.dtype == np.int64 and work.sum() == drawn[2].sum()
    assert np.array_equal(work, index.work().sum((0, 1)).numpy())
    assert drawn[0].density() == pytest.approx(index.density().mean().item())


@every_shape
def test_work_is_that_of_the_mask(drawn, inner, outer):
    """Every layout's counts and figures, from masks and owners of tokens. The turn makes no difference to
    nodes of one rank."""
    pattern, slash_mask, mask = drawn
    world = inner * outer
    rows = {row["layout"]: row for row in balance.count(pattern, world, [inner])}
    assert list(rows) == [name for name in balance.LAYOUTS if name != "one direction" or inner > 1]
    counted = balance.striped_work(pattern, world, inner)
    for name, row in rows.items():
        dealt = name in ("striped", "one direction")
        work = work_of(slash_mask, mask, owners(name, inner, outer), inner, outer, dealt)
        if name in counted:
            assert counted[name].dtype == np.int64
            assert np.array_equal(counted[name], work), name
        assert balance.figures(work).items() <= row.items(), name
        query, key = np.argwhere(slash_mask.any(0)).T // BLOCK
        rounds = set(((query - key) % outer).tolist())
        assert row["idle_rounds"] == (outer - len(rounds) if dealt else None)
        assert (row["world"], row["nodes"]) == (world, outer)


@pytest.mark.parametrize(("world", "inner"), [(8, 8), (64, 8), (256, 8)])
def test_no_pair_is_lost_at_512k(world, inner):
    """Sums of products by FFT are exact at the size they are made for: all layouts have as many pairs."""
    torch.manual_seed(0)
    drawn = balance.workloads.draw_unequal(balance.SEQ, 16, 0.03, 3500)
    pattern = balance.pattern_of("unequal", balance.SEQ, *drawn)
    pairs = balance.chunk_pairs(pattern, 1).sum()
    for name, work in balance.striped_work(pattern, world, inner).items():
        assert work.shape == (world, world // inner)
        assert work.sum() == pairs, name


def test_sizes_of_nodes_are_counted_once(drawn):
    """0 is the package's own size. What was counted, or does not divide the ranks, is left out."""
    rows = balance.count(drawn[0], 8, [0, 1, 8, 3, 4])
    assert inner_size(8) == 8
    assert [(0, 1), (1, 8), (4, 2)] == list(dict.fromkeys((r["inner"], r["nodes"]) for r in rows))
    [own] = [row for row in balance.count(drawn[0], 8, [8]) if row["layout"] == "zigzag"]
    assert {**own, "inner": 0} in rows


@pytest.mark.parametrize(("inner", "outer"), [*SHAPES, (3, 2), (2, 3), (3, 4)])
def test_sources_are_the_schedule_s(inner, outer):
    world = inner * outer
    found = balance.sources(world, inner)
    assert found.shape == (world, outer, inner)
    for rank in range(world):
        for this in rounds(rank, inner, outer):
            expected = list(this.sources)
            assert found[rank, this.round_index].tolist() == expected
            assert expected == node_before(rank, this.round_index, inner, outer)


def test_makespan_by_hand():
    even = np.full((4, 4), 5)
    assert balance.makespan(even) == 20 and balance.makespan(even[:, :2]) == 10
    # One node: nothing is waited for.
    assert balance.makespan(np.array([[3], [9]])) == 9
    # Rank 1 is late in its first round; the ranks beside it run a round ahead, then wait until 9.
    late = np.array([[1, 1, 1], [9, 1, 1], [1, 1, 1]])
    assert balance.makespan(late) == 9 + 1 + 1
    # Rank 2 needs in its round 1 what rank 1 has at its start: nothing to wait for. In its round 2, what
    # rank 1 has in its round 1, which starts at 9.
    slow_after = np.array([[1, 1, 1], [9, 1, 1], [1, 1, 4]])
    assert balance.makespan(slow_after) == 9 + 4
    # Nodes of 2: the next round's keys are sent when a round starts, so nodes of unlike rounds do not wait.
    nodes = np.array([[7, 1], [7, 1], [1, 7], [1, 7]])
    assert balance.makespan(nodes) == 8 < nodes.max(0).sum()


def test_who_waits_for_a_late_rank():
    """Rank 0 of nodes of 2 begins its round 1 at 9. For that wait, before their round 2, its own node, the
    next, which gets keys from it, and the one before, which sends to it."""
    for rank in range(10):
        work = np.ones((10, 5), dtype=np.int64)
        work[0, 0] = 9
        work[:, 3:] = 0
        work[rank, 2] += 50
        waits = rank // 2 in (0, 1, 4)
        # Rank 0 has its round 1 after that; the others have had theirs.
        assert balance.makespan(work) == (10 if rank == 0 else 9 if waits else 2) + 51, rank


def run_schedule(work, inner):
    """When the schedule's last rank is done: its operations as they stand, each run when what it needs is
    there. A transfer is over when both ends have posted it, and gathered when it is over for all of a
    node; there is room for what comes in."""
    world, outer = work.shape
    ops = [list(forward_ops(rank, inner, outer)) for rank in range(world)]
    clock, turn = [0] * world, [0] * world
    posted, held = {}, [1] * world
    while any(ops):
        moved = False
        for rank in range(world):
            while ops[rank]:
                op = ops[rank][0]
                if op.action is Action.SEND_KV:
                    posted[rank, turn[rank]] = clock[rank]
                    held[rank] += 1
                    assert held[rank] <= 2, "buffers of two rounds"
                elif op.action is Action.GATHER_KV:
                    ends = [
                        (end, turn[rank])
                        for by in (-1, 0, 1)  # whom the node sends to, itself, who sends to it
                        for end in node_before(rank, by, inner, outer)
                    ]
                    if not all(end in posted for end in ends):
                        break
                    clock[rank] = max(clock[rank], *(posted[end] for end in ends))
                    turn[rank] += 1
                    held[rank] -= 1
                else:
                    assert op.action is Action.COMPUTE_OUT
                    clock[rank] += work[rank, op.round.round_index]
                ops[rank].pop(0)
                moved = True
        assert moved, "every rank waits"
    return max(clock)


@pytest.mark.parametrize(("inner", "outer"), [*SHAPES, (3, 2), (2, 3), (3, 5), (1, 6)])
def test_makespan_is_the_schedule_s(inner, outer):
    work = np.random.default_rng(0).integers(1, 30, (inner * outer, outer))
    assert balance.makespan(work) == run_schedule(work, inner)
    # One rank far behind, and one that is far ahead until it has to wait.
    work[0, 0] += 200
    work[-1] = 1
    assert balance.makespan(work) == run_schedule(work, inner)


def test_figures_are_in_order(drawn):
    for row in balance.count(drawn[0], 8, (0, 1, 2, 4)):
        assert 1 <= row["worker_imbalance"] <= row["exposed"] <= row["step_imbalance"]
        assert row["step_over_mean"] >= 1
        assert 0 < row["density"] < 1
        if row["nodes"] == 1:
            assert row["worker_imbalance"] == row["exposed"] == row["step_imbalance"]
    assert balance.count(drawn[0], 16, (0, 1)) == []  # 16 blocks make no 32 chunks


def test_dense_attention_s_known_figures():
    """All pairs: zigzag is even to the pair, and so are nodes' blocks dealt there and back, of an even
    number of stripes; contiguous nearly twice the mean; dealt in one direction, off by a block a stripe."""
    distances = torch.ones(1, 1, 64, dtype=torch.bool)
    none = torch.zeros(1, 1, 0, dtype=torch.int64)
    pattern = balance.pattern_of("dense", 64 * BLOCK, distances, none)
    assert pattern.density() == 1
    node, plain = (
        {row["layout"]: row["worker_imbalance"] for row in balance.count(pattern, 8, [inner])}
        for inner in (8, 1)
    )
    assert plain["zigzag"] == 1 == node["zigzag"] == node["striped"]
    assert plain["contiguous"] == pytest.approx(2 - 1 / 8, abs=1e-3)
    assert node["one direction"] == plain["striped"] == pytest.approx(1 + 7 / 64, abs=2e-3)


def write_operands(path, tokens):
    """A safetensors file, by hand."""
    torch.manual_seed(0)
    header, data = {}, b""
    for name, heads in (("query", 2), ("key", 1)):
        tensor = torch.randn(heads, tokens, 64, dtype=torch.bfloat16)
        raw = tensor.view(torch.int16).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = dict(dtype="BF16", shape=list(tensor.shape), data_offsets=offsets)
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_model_s_own_pattern_and_its_stretch(tmp_path, monkeypatch):
    monkeypatch.setattr(balance, "SEQ", 8 * SEQ)
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors"):
        balance.real(tmp_path)
    write_operands(tmp_path / "layer.safetensors", SEQ)
    found, long = balance.real(tmp_path)
    assert (found.seq, long.seq) == (SEQ, 8 * SEQ) and found.name + ", stretched" == long.name
    assert found.columns.sum(1).tolist() == [1000, 1000] == long.columns.sum(1).tolist()
    assert (found.distances.sum(1) == long.distances.sum(1)).all()
    assert long.distances[:, :2].all() and not long.distances[:, 2:16].any()
    for head in range(2):
        places = set((long.distances[head, 16:].nonzero()[0] // 8).tolist())
        assert places == set(found.distances[head, 2:].nonzero()[0].tolist())
    assert long.columns[:, 0].tolist() == found.columns[:, 0].tolist()


def test_from_patterns_to_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(balance, "SEQ", 32 * BLOCK)
    monkeypatch.setattr(balance, "HEADS", 4)
    folder = tmp_path / "some" / "where"
    folder.mkdir(parents=True)
    write_operands(folder / "layer.safetensors", 32 * BLOCK)
    output = tmp_path / "balance.jsonl"
    words = [
        "--data",
        str(folder),
        "--world",
        "4",
        "8",
        "--inner",
        "0",
        "1",
        "4",
        "--output",
        str(output),
    ]
    monkeypatch.setattr(sys, "argv", ["benchmarks/balance.py", *words])
    balance.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    # 4 ranks are one node, or 4; 8 are one, 8, or 2 of 4. The turn is nothing to the two plain rings.
    assert len(rows) == 7 * (5 * len(balance.LAYOUTS) - 2)
    found = {(row["world"], row["inner"], row["nodes"]) for row in rows}
    assert found == {(4, 0, 1), (4, 1, 4), (8, 0, 1), (8, 1, 8), (8, 4, 2)}
    names = ("density", "worker_imbalance", "step_imbalance", "step_over_mean", "exposed", "commit")
    assert all(row[name] for row in rows for name in names)
    # Where the data lay is not kept, its folder's name is.
    assert {row["command"] for row in rows} == {
        "python -m benchmarks.balance --data where --world 4 8 --inner 0 1 4"
    }
    printed = capsys.readouterr().out
    assert "columns at owner" in printed
    assert all(printed.count("\n" + ring) == 7 for ring in ("1x4 ", "4x1 ", "1x8 ", "8x1 ", "2x4 "))


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--world", "3"], "--world 3"), (["--inner", "-1"], "--inner -1"),
     (["--world", "4", "8", "--inner", "0", "16"], "--inner 16"),
     (["--data", "/no/such"], "no such folder")],
)  # fmt: skip
def test_bad_options_end_early(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["balance.py", *words])
    with pytest.raises(SystemExit):
        balance.main()
    assert message in capsys.readouterr().err


def test_drawn_patterns_are_as_they_say():
    for pattern in balance.synthetic(65536, 8):
        assert pattern.distances[:, 0].all()
        columns = 0 if "columns" not in pattern.name or "no columns" in pattern.name else 1000
        assert (pattern.columns.sum(1) == columns).all()
    torch.manual_seed(0)
    distances, picked = balance.workloads.draw_unequal(524288, 16, 0.03, 1000)
    unequal = balance.pattern_of("unequal", 524288, distances, picked)
    assert unequal.density() == pytest.approx(0.03, rel=0.1)
    by_head = np.sort(distances[0].sum(-1).numpy())
    assert by_head[-1] > 5 * by_head[0]
    # Where the densest heads keep all there is, the others make up for it.
    half = balance.pattern_of(
        "half", 131072, *balance.workloads.draw_unequal(131072, 16, 0.5, 1000)
    )
    assert half.density() == pytest.approx(0.5, rel=0.05)
    local = balance.workloads.draw_local(65536, 2, 100, 10)[0]
    # Diagonals 256 to 355 cross block distances 2 and 3; the window has 0 and 1.
    assert local[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert (balance.workloads.draw_few_far(65536, 2, 8, 0)[0].sum(-1) == 4 + 8).all()
