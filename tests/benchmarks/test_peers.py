# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The benchmark of other packages' kernels: the lists of blocks that they are handed are the pattern, and who
refuses has a row that says why. With the packages, ``peers --check`` compares what they return."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels import attention, peer_blocks, peer_calls, peer_check, peers
from benchmarks.lib import record
from benchmarks.lib.workloads import BLOCK, draw_index, draw_pattern, mask_rows

CASE = attention.Case("tiny", 640, 4, 2, 128, 0.3, 0)


def dense_masks(distances, seq):
    """bool ``[h, s, s]``, causal, by the drawn pattern."""
    rows, columns = torch.arange(seq), torch.zeros(0, dtype=torch.long)
    return torch.stack([mask_rows(one, columns, rows, seq) for one in distances])


def listed_mask(count, order, by_key=False):
    """bool ``[h, NB, NB]``, query blocks by key blocks; the lists ascend and name no block twice."""
    heads, blocks = count.shape[1:]
    found = torch.zeros(heads, blocks, blocks, dtype=torch.bool)
    for head in range(heads):
        for row in range(blocks):
            chosen = order[0, head, row, : count[0, head, row]].tolist()
            assert chosen == sorted(set(chosen))
            found[head, row, chosen] = True
    return found.transpose(1, 2) if by_key else found


def interval_mask(bounds, seq):
    """bool ``[h, s, s]``."""
    assert (bounds.diff(dim=1) >= 0).all() and bounds.min() >= 0 and bounds.max() <= seq
    keys = torch.arange(seq)
    found = keys < bounds[:, 0, :, None]
    for at in range(1, bounds.shape[1], 2):
        found |= (keys >= bounds[:, at, :, None]) & (keys < bounds[:, at + 1, :, None])
    return found


@pytest.mark.parametrize("seq", [128, 1100])
def test_lists_and_intervals_are_the_pattern(seq):
    torch.manual_seed(1)
    distances = draw_pattern(seq, 3, 0.4, 0)[0][0]
    distances[1, 1:] = False  # a head that keeps the diagonal alone
    masks = dense_masks(distances, seq)
    of_blocks = masks[:, BLOCK - 1 :: BLOCK, ::BLOCK]
    if seq % BLOCK:
        of_blocks = torch.cat((of_blocks, masks[:, -1:, ::BLOCK]), 1)
    for first in (0, 1):
        expected = of_blocks.tril(-first)
        assert torch.equal(listed_mask(*peer_blocks.key_blocks(distances, first)), expected)
        assert torch.equal(listed_mask(*peer_blocks.query_blocks(distances, first), True), expected)
    assert torch.equal(interval_mask(peer_blocks.key_intervals(distances, seq, BLOCK), seq), masks)


def test_a_wrong_pattern_is_found():
    torch.manual_seed(0)
    index = draw_index(CASE.seq, CASE.heads, CASE.share, 0, "cpu")
    problem = peer_calls.draw(CASE, index, CASE.seq, "cpu")
    call, *_ = peers.prepare("mtraining", peers.PEERS["mtraining"], problem, full=True)
    assert call.pairs == problem.pairs == dense_masks(problem.distances, CASE.seq).sum()
    assert not peer_check.too_far(peer_check.errors(problem, call))
    other = draw_index(CASE.seq, CASE.heads, 0.0, 0, "cpu")
    assert peer_check.too_far(peer_check.errors(problem._replace(index=other), call))
    assert peer_check.too_far({"out": float("nan")})


def test_rows_of_a_case(monkeypatch):
    """Rates count the pairs that each attends to, beside cuDNN's dense at its own length."""
    monkeypatch.setitem(attention.DENSE, "cudnn", torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(attention, "TURN", 1e-3)
    monkeypatch.setattr(record, "installed", lambda name: "none")
    names = ["mtraining", "cudnn", "fa4"]
    rows = peers.measure(peers.drawn(CASE, 512, "cpu"), names, 1e-3)
    of = {(row["op"], row["peer"]): row for row in rows}
    assert list(of) == [(op, name) for op in ("forward", "backward") for name in names]
    for op, factor in (("forward", 1), ("backward", 2.5)):
        row, dense = of[op, "mtraining"], of[op, "cudnn"]
        assert row["density"] == row["pattern_density"] < 1 == dense["density"]
        rate = row["pairs"] * 4 * 128 * factor / row["ms"] / 1e9
        assert row["tflops"] == pytest.approx(rate, abs=0.1)
        share = row["pairs"] / row["ms"] / (dense["pairs"] / dense["ms"])
        assert row["share_of_cudnn"] == pytest.approx(share, rel=0.02, abs=1e-3)
        assert (dense["seq"], dense["share_of_cudnn"], row["dense_seq"]) == (512, 1, 512)
        assert of[op, "fa4"]["why"].endswith("not installed") and of[op, "fa4"]["ms"] is None


def test_operands_of_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "TURN", 1e-3)
    query, key, value, grad = (torch.randn(640, 1, heads, 64) for heads in (4, 2, 2, 4))
    torch.save({"code layer 1": (query, key, value, grad)}, tmp_path / "operands")
    [problem] = peers.of_file(tmp_path / "operands")
    assert problem.case.name == "0K 4/2 d64 code layer 1"
    assert problem.distances[:, 0].all() and not problem.index.columns.numel()
    rows = peers.measure(problem, ["mtraining"], 1e-3)
    assert [(row["op"], row["why"]) for row in rows] == [("forward", ""), ("backward", "")]
    assert rows[0]["density"] == rows[0]["pattern_density"] > 0


def test_flash_msa_takes_as_many_blocks_as_the_pattern_has():
    case = attention.Case("longer", 128 * BLOCK, 2, 1, 128, 0.1, 0)
    distances = draw_pattern(case.seq, 2, 0.1, 0)[0]
    problem = peer_calls.Problem(case, SimpleNamespace(distances=lambda: distances), (), (), 0)
    most = peer_calls.msa_blocks(problem)
    rows, wanted = torch.arange(1, 129), int(distances[0].cumsum(-1).sum()) / 2
    assert rows.clamp(max=most).sum() >= wanted > rows.clamp(max=most - 1).sum()
