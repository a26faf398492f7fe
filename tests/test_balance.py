# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The counts of ``benchmarks/balance.py`` against masks written out, and its schedule's times by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_mtraining.layout import locate
from megatron_mtraining.pattern import build_index
from megatron_mtraining.ring import flat_ring

FOLDER = Path(__file__).parent.parent / "benchmarks"
BLOCK = 128
SEQ = 16 * BLOCK


@pytest.fixture(scope="module")
def balance():
    """The script, loaded as it is when it is run; what it imported by short names is forgotten after."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("balance")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("balance", "record", "workloads"):
            if name not in before:
                sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def drawn(balance):
    """A pattern, and its mask, of slashes and in all: bool ``[heads, N, N]``."""
    torch.manual_seed(3)
    distances, picked = balance.workloads.draw_few_far(SEQ, 3, 4, 40)
    picked[0, 1, 7:] = SEQ  # a head with fewer columns
    index = build_index(distances, picked, SEQ, BLOCK, 1)
    slashes = build_index(distances, picked[..., :0], SEQ, BLOCK, 1)
    masks = [torch.stack([i.token_mask(0, h) for h in range(3)]).numpy() for i in (slashes, index)]
    return balance.pattern_of("drawn", SEQ, distances, picked), *masks


def pairs_between(mask, owner, world):
    """Kept pairs by (query rank, key rank), token by token."""
    kept = mask.sum(0)
    by_query = np.stack([kept[owner == rank].sum(0) for rank in range(world)])
    return np.stack([by_query[:, owner == rank].sum(1) for rank in range(world)], 1)


def columns_by_step(slash_mask, mask, owner, world):
    """Pairs that columns alone keep, by query rank and the step of their head."""
    work, heads = np.zeros((world, world), dtype=np.int64), len(mask)
    for head in range(heads):
        own = slice(head, head + 1)
        pairs = pairs_between(mask[own], owner, world) - pairs_between(
            slash_mask[own], owner, world
        )
        work[:, head * world // heads] += pairs.sum(1)
    return work


def owners(layout, world):
    token = np.arange(SEQ)
    if layout == "striped":
        return locate(torch.arange(SEQ), world, BLOCK)[0].numpy()
    if layout == "contiguous":
        return token // (SEQ // world)
    chunk = token // (SEQ // (2 * world))
    return np.minimum(chunk, 2 * world - 1 - chunk)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["striped", "zigzag", "contiguous"])
def test_pairs_are_those_of_the_mask(balance, drawn, layout, world):
    pattern, slash_mask, mask = drawn
    slash, columns = getattr(balance, layout)(pattern, world)
    owner = owners(layout, world)
    assert slash.dtype == columns.dtype == np.int64
    assert np.array_equal(slash, pairs_between(slash_mask, owner, world))
    if columns.ndim == 3:
        columns = columns.sum(0)
    assert np.array_equal(slash + columns, pairs_between(mask, owner, world))


def test_striped_is_the_index_s_own_count(balance, drawn):
    pattern = drawn[0]
    world = 4
    torch.manual_seed(3)
    distances, picked = balance.workloads.draw_few_far(SEQ, 3, 4, 40)
    picked[0, 1, 7:] = SEQ
    index = build_index(distances, picked, SEQ, BLOCK, world)
    work = balance.on_schedule(*balance.striped(pattern, world), balance.sources(world), dealt=True)
    assert np.array_equal(work, index.work().sum((0, 1)).long().numpy())
    assert pattern.density() == pytest.approx(index.density().mean().item())


def test_columns_are_dealt_to_steps_by_head(balance, drawn):
    pattern, slash_mask, mask = drawn
    slash, columns = balance.striped(pattern, 4)
    work = balance.on_schedule(slash, columns, balance.sources(4), dealt=True)
    assert work.sum() == mask.sum()
    expected = np.take_along_axis(slash, balance.sources(4), axis=1)
    expected += columns_by_step(slash_mask, mask, owners("striped", 4), 4)
    assert np.array_equal(work, expected)


@pytest.mark.parametrize("world", [1, 4, 6])
def test_flat_sources_are_the_ring_s(balance, world):
    expected = [[step.source for step in flat_ring(rank, world)] for rank in range(world)]
    assert balance.sources(world).tolist() == expected


@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (3, 4), (1, 4), (4, 1)])
def test_hierarchical_sources_are_as_written_down(balance, outer, inner):
    source = balance.sources(outer * inner, inner)
    for x in range(outer):
        for y in range(inner):
            for o in range(outer):
                for i in range(inner):
                    expected = ((x - o) % outer) * inner + (y - i) % inner
                    assert source[x * inner + y, o * inner + i] == expected
    assert (np.sort(source, axis=1) == np.arange(outer * inner)).all()


def test_over_groups_a_group_has_one_residue_a_step(balance):
    """With rank (x, y) holding blocks y * O + x mod W. And all groups have the same in each round."""
    outer, inner = 3, 4
    world = outer * inner
    rank = np.arange(world)
    place = rank % inner * outer + rank // inner
    residue = (place[:, None] - place[balance.sources(world, inner)]) % world
    residue = residue.reshape(outer, inner, outer, inner)  # group, rank, round, step
    assert (residue == residue[:, :1]).all()
    rounds = np.sort(residue[:, 0], axis=-1)
    assert (rounds == rounds[:1]).all()


def test_the_layout_over_groups_counts_permuted_ranks(balance, drawn):
    pattern, slash_mask, mask = drawn
    rows = {row["layout"]: row for row in balance.count(pattern, 8, 4)}
    owner = owners("striped", 8)
    owner = owner % 2 * 4 + owner // 2  # residue y * 2 + x is rank x * 4 + y
    slash = pairs_between(slash_mask, owner, 8)
    work = np.take_along_axis(slash, balance.sources(8, 4), axis=1)
    work += columns_by_step(slash_mask, mask, owner, 8)
    assert balance.figures(work, 4).items() <= rows["striped over groups"].items()
    assert rows["striped over groups"]["exposed"] < rows["striped"]["exposed"]
    flat = {row["layout"]: row for row in balance.count(pattern, 8, 0)}
    assert {**flat["striped over groups"], "layout": "striped"} == flat["striped"]


def test_makespan_by_hand(balance):
    even = np.full((4, 4), 5)
    assert balance.makespan(even) == balance.makespan(even, 2) == 20
    # Rank 1 is late in its first step; the ranks beside it run a step ahead, then wait until 9.
    late = np.array([[1, 1, 1], [9, 1, 1], [1, 1, 1]])
    assert balance.makespan(late) == 9 + 1 + 1
    # Rank 2 needs in its step 1 what rank 1 has at its start: nothing to wait for. In its step 2, what
    # rank 1 has in its step 1, which starts at 9.
    slow_after = np.array([[1, 1, 1], [9, 1, 1], [1, 1, 4]])
    assert balance.makespan(slow_after) == 9 + 4
    # Two groups of 2: the first round's keys have been sent at its start, so groups do not wait.
    groups = np.array([[7, 1, 1, 1], [7, 1, 1, 1], [1, 1, 7, 1], [1, 1, 7, 1]])
    assert balance.makespan(groups, 2) == 10 < groups.max(0).sum()


def test_makespan_against_events(balance):
    """The rule of the docstring, written with a dictionary and recursion."""
    work = np.random.default_rng(0).integers(1, 30, (6, 6))
    for inner in (6, 3, 2):

        def times(inner=inner):
            found = {}

            def start(rank, t):
                if t == 0:
                    return 0
                if (rank, t) in found:
                    return found[rank, t]
                base = rank - rank % inner
                before, after = base + (rank - 1) % inner, base + (rank + 1) % inner

                def over(sender, receiver):
                    free = done(receiver, t - 2) if t > 1 else 0
                    return max(start(sender, t - 1), free)

                found[rank, t] = done(rank, t - 1)
                if t % inner:
                    found[rank, t] = max(found[rank, t], over(before, rank), over(rank, after))
                else:
                    for other in ((rank - inner) % 6, (rank + inner) % 6):
                        found[rank, t] = max(found[rank, t], start(other, t - inner))
                return found[rank, t]

            def done(rank, t):
                return start(rank, t) + work[rank, t]

            return max(done(rank, 5) for rank in range(6))

        assert balance.makespan(work, inner) == times()


def test_figures_are_in_order(balance, drawn):
    for inner in (0, 2, 4):
        for row in balance.count(drawn[0], 8, inner):
            assert 1 <= row["worker_imbalance"] <= row["exposed"] <= row["step_imbalance"]
            assert row["step_over_mean"] >= 1
            assert 0 < row["density"] < 1
    assert balance.count(drawn[0], 16, 0) == []  # 16 blocks make no 32 chunks


def test_dense_attention_s_known_figures(balance):
    """All pairs: zigzag is even to the pair, contiguous nearly twice the mean, striping off by a block a
    stripe."""
    distances = torch.ones(1, 1, 64, dtype=torch.bool)
    none = torch.zeros(1, 1, 0, dtype=torch.int64)
    pattern = balance.pattern_of("dense", 64 * BLOCK, distances, none)
    assert pattern.density() == 1
    found = {row["layout"]: row["worker_imbalance"] for row in balance.count(pattern, 8, 0)}
    assert found["zigzag"] == 1 and found["contiguous"] == pytest.approx(2 - 1 / 8, abs=1e-3)
    assert found["striped"] == pytest.approx(1 + 7 / 64, abs=2e-3)


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


def test_a_model_s_own_pattern_and_its_stretch(balance, tmp_path, monkeypatch):
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


def test_from_patterns_to_rows(balance, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(balance, "SEQ", 32 * BLOCK)
    monkeypatch.setattr(balance, "HEADS", 4)
    folder = tmp_path / "some" / "where"
    folder.mkdir(parents=True)
    write_operands(folder / "layer.safetensors", 32 * BLOCK)
    output = tmp_path / "balance.jsonl"
    words = ["--data", str(folder), "--world", "4", "8", "--inner", "4", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/balance.py", *words])
    balance.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 7 * 3 * len(balance.LAYOUTS)
    assert {(row["world"], row["inner"]) for row in rows} == {(4, 0), (8, 0), (8, 4)}
    names = ("density", "worker_imbalance", "step_imbalance", "step_over_mean", "exposed", "commit")
    assert all(row[name] for row in rows for name in names)
    # Where the data lay is not kept, its folder's name is.
    assert {row["command"] for row in rows} == {
        "python benchmarks/balance.py --data where --world 4 8 --inner 4"
    }
    assert "columns at owner" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--world", "3"], "--world 3"), (["--inner", "1"], "--inner 1"),
     (["--data", "/no/such"], "no such folder")],
)  # fmt: skip
def test_bad_options_end_early(balance, monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["balance.py", *words])
    with pytest.raises(SystemExit):
        balance.main()
    assert message in capsys.readouterr().err


def test_drawn_patterns_are_as_they_say(balance):
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
    local = balance.workloads.draw_local(65536, 2, 100, 10)[0]
    # Diagonals 256 to 355 cross block distances 2 and 3; the window has 0 and 1.
    assert local[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert (balance.workloads.draw_few_far(65536, 2, 8, 0)[0].sum(-1) == 4 + 8).all()
