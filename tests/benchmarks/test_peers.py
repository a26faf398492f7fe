# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The benchmark of other packages' kernels, on CPU: what the packages are handed is the pattern, written out
here as dense masks; who refuses has a row that says why."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels import attention, peer_blocks, peer_calls, peer_check, peers
from benchmarks.lib import record
from benchmarks.lib.workloads import BLOCK, draw_index, draw_pattern, mask_rows

CASE = attention.Case("tiny", 640, 4, 2, 128, 0.3, 0)


def problem_of(case=CASE):
    torch.manual_seed(0)
    index = draw_index(case.seq, case.heads, case.share, 0, "cpu")
    return peer_calls.draw(case, index, case.seq, "cpu")


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
    assert bounds.dtype == torch.int32 and bounds.shape[1] % 2 == 1 and bounds.is_contiguous()
    assert (bounds.diff(dim=1) >= 0).all() and bounds.min() >= 0 and bounds.max() <= seq
    keys = torch.arange(seq)
    found = keys < bounds[:, 0, :, None]
    for at in range(1, bounds.shape[1], 2):
        found |= (keys >= bounds[:, at, :, None]) & (keys < bounds[:, at + 1, :, None])
    return found


@pytest.mark.parametrize("seq", [128, 1100, 1280])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_lists_and_intervals_are_the_pattern(seq, share):
    torch.manual_seed(1)
    distances = draw_pattern(seq, 3, share, 0)[0][0]
    if share == 0.4:
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


def attend(query, key, value, allowed):
    """Dense attention of ``[b, h, s, d]`` under a mask, and its log-sum-exp."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.float().repeat_interleave(group, 1) for t in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def tokens_first(query, key, value, allowed):
    return attend(*(t.transpose(1, 2) for t in (query, key, value)), allowed)[0].transpose(1, 2)


def whole_blocks(mask):
    return mask.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


class BlockSparse:
    """In place of the cuDNN frontend's: attends to the blocks that it is handed."""

    def block_sparse_attention_forward(
        self, q, k, v, index, *, q2k_block_nums, sparse_block_size, softmax_scale
    ):
        assert (sparse_block_size, softmax_scale) == (BLOCK, q.shape[-1] ** -0.5)
        out, lse = attend(q, k, v, whole_blocks(listed_mask(q2k_block_nums, index)))
        return {"o_tensor": out, "lse_tensor": lse}

    def block_sparse_attention_backward(
        self, do, q, k, v, o, lse, index, *, q2k_block_nums, **options
    ):
        assert q.shape == k.shape == v.shape and lse.shape == q.shape[:-1]
        leaves = [t.float().requires_grad_() for t in (q, k, v)]
        out, _ = attend(*leaves, whole_blocks(listed_mask(q2k_block_nums, index)))
        assert torch.allclose(out, o, atol=1e-5)
        grads = torch.autograd.grad(out, leaves, do.float())
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), grads))


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, mask_mod=None, **lists):
    """In place of FlashAttention-4's: full blocks, and partial ones under the causal mask, both ways."""
    seq = q.shape[1]
    position = torch.arange(seq)
    allowed = position[:, None] >= position
    if lists:
        assert mask_mod == "causal" and not causal
        ahead, back = lists["block_sparse_tensors"], lists["block_sparse_tensors_bwd"]
        assert ahead.block_size == back.block_size == (BLOCK, BLOCK)
        full, partial = (
            listed_mask(getattr(ahead, f"{kind}_block_cnt"), getattr(ahead, f"{kind}_block_idx"))
            for kind in ("full", "mask")
        )
        for kind, expected in (("full", full), ("mask", partial)):
            count, order = (getattr(back, f"{kind}_block_{what}") for what in ("cnt", "idx"))
            assert torch.equal(listed_mask(count, order, by_key=True), expected)
        allowed = whole_blocks(full) | whole_blocks(partial) & allowed
    return tokens_first(q, k, v, allowed), None


class Lists(SimpleNamespace):
    def __init__(self, mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx, block_size):
        super().__init__(
            mask_block_cnt=mask_block_cnt, mask_block_idx=mask_block_idx, full_block_cnt=full_block_cnt,
            full_block_idx=full_block_idx, block_size=block_size,
        )  # fmt: skip


@pytest.fixture
def packages(monkeypatch):
    """In place of the packages: dense attention under what they are handed."""

    def create_mask_plan(mask_func, q, k, v, *, build_backward):
        assert build_backward and mask_func.shape[-1] == q.shape[1]
        return interval_mask(mask_func, q.shape[1])

    def flex_attn_func(q, k, v, *, mask_plan, softmax_scale):
        return tokens_first(q, k, v, mask_plan)

    def flash_msa_func(q_proxy, k_proxy, q, k, v, top_k, scale):
        assert q_proxy.shape == k.shape and k_proxy.shape[1] == 1 and top_k % BLOCK == 0
        near = dense_masks(
            torch.ones(q.shape[1], q.shape[2] // BLOCK, dtype=torch.bool), q.shape[2]
        )
        out = attend(q, k, v, near)[0] + 0 * (q_proxy.sum() + k_proxy.sum())
        return out.transpose(1, 2).flatten(2), torch.zeros(())

    modules = {
        "cudnn": SimpleNamespace(BSA=BlockSparse()),
        "cudnn.flex_attention": SimpleNamespace(
            create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func
        ),
        "flash_attn.cute": SimpleNamespace(flash_attn_func=flash_attn_func),
        "flash_attn.cute.block_sparsity": SimpleNamespace(BlockSparseTensorsTorch=Lists),
        "fa3_fwd_interface": SimpleNamespace(
            flash_attn_func=lambda *tensors, causal: flash_attn_func(*tensors, causal=causal)[0]
        ),
        "flash_msa": SimpleNamespace(flash_msa_func=flash_msa_func),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peer_calls, "_causal_in_cute", lambda: "causal")
    monkeypatch.setattr(record, "installed", lambda name: "1.0")
    monkeypatch.setitem(attention.DENSE, "cudnn", torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(attention, "TURN", 1e-3)
    return modules


@pytest.mark.parametrize(
    "name",
    ["mtraining", "cudnn", "cudnn_blocks", "cudnn_flex", "fa4_blocks", "fa4", "fa3", "flash_msa"],
)
def test_what_a_peer_is_handed_is_the_pattern(packages, name):
    """Against dense attention under the mask written out, of a pattern whose heads differ."""
    problem = problem_of()
    call, *reasons = peers.prepare(name, peers.PEERS[name], problem, full=True)
    assert reasons == ["", peer_calls.NO_BACKWARD if name == "fa3" else ""]
    masks = dense_masks(problem.distances, CASE.seq)
    assert problem.pairs == masks.sum() and len(set(masks.sum((1, 2)).tolist())) > 1
    found = peer_check.errors(problem, call)
    if name == "flash_msa":
        assert found == {} and problem.pairs <= call.pairs < 1.3 * problem.pairs
        return
    allowed = peer_check.mask(problem, call)
    assert call.pairs == allowed.sum()
    if name == "cudnn_blocks":
        assert torch.equal(allowed & torch.ones_like(allowed).tril(), masks)
        assert (allowed & ~masks).sum() == CASE.heads * 5 * BLOCK * (BLOCK - 1) // 2
    elif peers.PEERS[name].dense:
        assert torch.equal(allowed, torch.ones_like(allowed).tril())
    else:
        assert torch.equal(allowed, masks)
    assert list(found) == ["out", "dq", "dk", "dv"][: 1 if name == "fa3" else 4]
    assert not peer_check.too_far(found), found


def test_a_wrong_pattern_is_found(packages, monkeypatch):
    problem = problem_of()

    def shifted(distances, first=0):
        return peer_blocks.key_blocks(distances.roll(1, 0), first)

    monkeypatch.setattr(peer_calls, "key_blocks", shifted)
    call, *_ = peers.prepare("cudnn_blocks", peers.PEERS["cudnn_blocks"], problem)
    assert peer_check.too_far(peer_check.errors(problem, call))
    assert peer_check.too_far({"out": float("nan")})


def test_a_case_from_drawing_to_rows(packages, monkeypatch, capsys):
    names = ["mtraining", "cudnn", "cudnn_blocks", "fa3", "flash_sparse"]
    packages["cudnn"].BSA.block_sparse_attention_backward = None
    rows = peers.run_case(CASE, names, 512, 1e-3, "cpu")
    assert [(row["op"], row["peer"]) for row in rows] == [
        (op, name) for op in ("forward", "backward") for name in names
    ]
    of = {(row["op"], row["peer"]): row for row in rows}
    pairs = problem_of().pairs
    for op, factor in (("forward", 1), ("backward", 2.5)):
        row, dense = of[op, "mtraining"], of[op, "cudnn"]
        assert (row["pairs"], row["block"], row["seq"]) == (pairs, "128x128", 640)
        assert row["density"] == row["pattern_density"]
        rate = pairs * 4 * 128 * factor / row["ms"] / 1e9
        assert row["tflops"] == pytest.approx(rate, abs=0.1) and row["why"] == ""
        assert row["share_of_cudnn"] == pytest.approx(
            pairs / row["ms"] / (dense["pairs"] / dense["ms"]), rel=0.02, abs=1e-3
        )
        assert (dense["seq"], dense["density"], dense["block"]) == (512, 1.0, None)
        assert dense["share_of_cudnn"] == 1 and row["dense_seq"] == 512
        assert of[op, "flash_sparse"]["why"].startswith("takes no blocks")
        assert of[op, "flash_sparse"]["ms"] is None
    ahead, back = of["forward", "cudnn_blocks"], of["backward", "cudnn_blocks"]
    assert ahead["ms"] > 0 and ahead["pairs"] == pairs + 4 * 5 * BLOCK * (BLOCK - 1) // 2
    assert "repeated to 4 heads" in ahead["note"] and back["ms"] is None
    assert back["why"].startswith("TypeError: ")
    assert of["backward", "fa3"]["why"] == peer_calls.NO_BACKWARD
    assert "of cuDNN" in peers.line(ahead) and "none: TypeError" in peers.line(back)


def test_who_is_not_installed_has_a_row(monkeypatch):
    monkeypatch.setattr(record, "installed", lambda name: "none")
    monkeypatch.setattr(attention, "TURN", 1e-3)
    rows = peers.run_case(CASE, ["mtraining", "fa3", "flash_msa"], 640, 1e-3, "cpu")
    whys = {(row["op"], row["peer"]): (row["why"], row["version"]) for row in rows}
    for op in ("forward", "backward"):
        assert whys[op, "flash_msa"] == ("flash-msa: not installed", "none")
        assert whys[op, "fa3"][0] == "flash-attn-3 or fa3-fwd or tokenspeed-fa3: not installed"
        assert whys[op, "mtraining"][0] == ""


def test_flash_msa_takes_as_many_blocks_as_the_pattern_has():
    case = attention.Case("longer", 128 * BLOCK, 2, 1, 128, 0.1, 0)
    distances = draw_pattern(case.seq, 2, 0.1, 0)[0]
    problem = peer_calls.Problem(case, SimpleNamespace(distances=lambda: distances), (), (), 0)
    most = peer_calls.msa_blocks(problem)
    rows, wanted = torch.arange(1, 129), int(distances[0].cumsum(-1).sum()) / 2
    assert rows.clamp(max=most).sum() >= wanted > rows.clamp(max=most - 1).sum()
    distances[:] = True
    with pytest.raises(peer_calls.Refusal, match="at most 32 blocks"):
        peer_calls.msa_blocks(problem)


def test_cases_and_options(monkeypatch, capsys):
    names = [case.name for case in peers.CASES]
    assert len(set(names)) == len(names) == 2 * 12 + 2 * 9
    for case in peers.CASES:
        assert case.heads % case.kv_heads == 0 and 0 <= case.share <= 1 and case.columns == 0
    assert {case.seq for case in peers.selected(["512K"])} == {524288}
    measured: set = set()
    case = peers.CASES[0]
    assert peers.peers_of(case, list(peers.PEERS), measured) == list(peers.PEERS)
    again = peers.peers_of(peers.CASES[1], list(peers.PEERS), measured)
    assert set(peers.PEERS) - set(again) == {"fa3", "fa4"} and "cudnn" in again
    assert "fa4" in peers.peers_of(peers.CASES[4], list(peers.PEERS), measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = peers.parse(["--case", "64K 16/2", "--peer", "flex", "mtraining", "--minutes", "2"])
    assert len(options.cases) == 4 and options.peer == ["flex", "mtraining"]
    for words, message in (
        ("--case 3K", "no case has any of ['3K']"),
        ("--peer nobody", "invalid choice: 'nobody'"),
        ("--minutes 0", "--minutes is 0.0: use more than 0"),
        ("--dense-seq 0", "--dense-seq is 0: use 1 or more"),
    ):
        with pytest.raises(SystemExit):
            peers.parse(words.split())
        assert message in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert len(peers.parse(["--list"]).cases) == len(names)
    with pytest.raises(SystemExit):
        peers.parse([])
    assert "there is no GPU here" in capsys.readouterr().err


def test_checked_on_short_sequences(packages, monkeypatch, capsys):
    monkeypatch.setattr(peers, "CHECKED", 256)

    def failing(*words, **options):
        raise ValueError("\nno such mask\nand more")

    packages["cudnn.flex_attention"].create_mask_plan = failing
    found = peers.check(CASE, ["mtraining", "cudnn_flex", "fa3"], "cpu")
    assert [(name, list(errors)) for name, errors in found] == [
        ("mtraining", ["out", "dq", "dk", "dv"]), ("cudnn_flex", []), ("fa3", ["out"])
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "refused: ValueError: no such mask" in said.out and "and more" in said.err
    assert f"refused: {peer_calls.NO_BACKWARD}" in said.out and "WRONG" not in said.out


def test_out_of_memory_of_all_together_has_rows(packages, monkeypatch):
    def full(*words):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(peers, "take_turns", full)
    rows = peers.run_case(CASE, ["mtraining", "cudnn_blocks"], 512, 1e-3, "cpu")
    assert len(rows) == 4 and all(row["ms"] is None and row["pairs"] for row in rows)
    assert all(row["why"].startswith("OutOfMemoryError: CUDA out of memory") for row in rows)


def test_cases_in_turn_until_time_is_short(monkeypatch, tmp_path, capsys):
    output, seen = tmp_path / "peers.jsonl", []

    def run_case(case, names, dense_seq, budget):
        seen.append((case.name, dense_seq, "fa4" in names))
        return [dict(op="forward", peer="flex", ms=None, why="a reason", case=case.name)]

    words = f"peers --case 512K --dense-seq 65536 --minutes 1000 --output {output}"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "run_case", run_case)
    monkeypatch.setattr(record, "provenance", lambda: {"commit": "here"})
    peers.main()
    dense = [(name, dense) for name, _, dense in seen]
    assert len(seen) == 9 and {length for _, length, _ in seen} == {65536}
    assert [name for name, first in dense if first] == [seen[at][0] for at in (0, 3, 6)]
    rows = attention.read_rows(output)
    assert [row["case"] for row in rows] == [name for name, *_ in seen]
    assert all(row["commit"] == "here" for row in rows)
    monkeypatch.setattr(peers, "Deadline", lambda *_, **__: SimpleNamespace(fits=lambda: False))
    peers.main()
    assert "time is short: 9 cases are left" in capsys.readouterr().out and len(seen) == 9
