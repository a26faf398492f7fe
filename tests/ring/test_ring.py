# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The ring over processes against one process, and what happens when a rank fails."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.config import ConfigError
from megatron_mtraining.cp_group import CPGroup, cp_group_of
from megatron_mtraining.kernels.attention import reference
from megatron_mtraining.layout import stripe, unstripe
from megatron_mtraining.pattern import build_index, recall, search_pattern
from megatron_mtraining.ring import Ring, attention, ring_of
from megatron_mtraining.ring.attention import ring_attention
from tests.support.attention_cases import (
    dense_attention,
    random_index,
    random_operands,
    relative_error,
    written_out_mask,
)
from tests.support.pairs import all_pairs, pairwise
from tests.support.ranks import run_ranks, run_to_their_ends

BLOCK = 64


def distances_and_columns(index):
    """The sets an index was built from, to build it again for another world."""
    return index.distances(), index.columns


def run_ring(rank, world, operands, distances, columns, scale, inner=None):
    seq_length = operands[0].shape[0]
    cp = cp_group_of(dist.group.WORLD, inner)
    index = build_index(distances, columns, seq_length, BLOCK, world, cp.inner)
    parts = [stripe(t, rank, world, BLOCK, inner=cp.inner) for t in operands]
    leaves = [t.clone().requires_grad_() for t in parts[:3]]
    out, *_ = ring_attention(*leaves, index, ring_of(cp), scale)
    assert out.is_contiguous()
    out.backward(parts[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def run_rings(rank, world, cases):
    return [run_ring(rank, world, *case) for case in cases]


def run_rings_in_one_pass(rank, world, cases):
    """The queries' gradient is a sum of what the other kernels add: there is no kernel of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTRAINING_BACKWARD", "one_pass")
        patch.delattr(reference, "backward_query")
        return run_rings(rank, world, cases)


# Ranks to the ranks a node that they are run with (None: all of so few): all in one set of processes.
NODES = {1: [None], 2: [None, 1], 3: [None, 1], 4: [None, 1, 2], 6: [None, 2, 3], 8: [None, 1, 4]}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


LONGER = [pytest.param(n, marks=pytest.mark.slow) for n in (6, 8)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, *LONGER])
def test_processes_agree_with_dense_attention(world):
    agree_with_dense_attention(world, run_rings)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_agree_with_dense_attention_in_one_pass(world):
    agree_with_dense_attention(world, run_rings_in_one_pass)


def agree_with_dense_attention(world, run):
    print("torch seed", torch.seed())
    seq_length, scale = BLOCK * world * (3 if world < 6 else 2), 0.1
    cases, expected = [], []
    for dtype, budget, inner in all_pairs(list(product(TOLERANCE, ("few", "all"), NODES[world]))):
        operands = random_operands(seq_length, 1, 4, 2, 64, dtype, "cpu")
        index = random_index(seq_length, 1, 4, BLOCK, 1, budget, "cpu")
        cases.append((operands, *distances_and_columns(index), scale, inner))
        expected.append(dense_attention(*operands, written_out_mask(index, 1, 4), scale))
    results = run_ranks(world, run, cases)
    for case, truths, ranks in zip(cases, expected, zip(*results)):
        dtype = case[0][0].dtype
        for parts, truth in zip(zip(*ranks), truths):
            assert parts[0].dtype == dtype
            error = relative_error(unstripe(list(parts), BLOCK, inner=case[-1]), truth)
            assert error < TOLERANCE[dtype], f"{dtype}, nodes of {case[-1]}: {error:.1e}"


def run_and_tell(rank, world, operands, distances, columns):
    """What a rank of two nodes of two asks for, in order: gathers are named by whose keys they bring."""
    ring = ring_of(cp_group_of(dist.group.WORLD, 2))
    index = build_index(distances, columns, operands[0].shape[0], BLOCK, world, 2)
    said, gather, post = [], ring.gather, ring.post

    def told_gather(tensor, after=None):
        said.append("gather next" if after else "gather own")
        return gather(tensor, after)

    def told_post(tensor, kind, link, received=None):
        said.append(f"{kind} {link.value}")
        return post(tensor, kind, link, received)

    ring.gather, ring.post = told_gather, told_post
    ring.trace = lambda name, step: said.append(name) or nullcontext()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MTRAINING_BACKWARD", "two_kernels")
            parts = [stripe(t, rank, world, BLOCK, inner=2) for t in operands]
            leaves = [t.clone().requires_grad_() for t in parts[:3]]
            ring_attention(*leaves, index, ring, 0.1)[0].backward(parts[3])
    finally:
        ring.trace = None
        del ring.gather, ring.post
    return [each for each in said if each != "wait"]


def test_no_kernel_waits_in_line_behind_another_node():
    """What another node sends is gathered after the kernels of the round that hides it, and what goes home
    over that link has kernels to hide behind."""
    operands = random_operands(BLOCK * 8, 1, 4, 2, 64, torch.float32, "cpu")
    index = random_index(BLOCK * 8, 1, 4, BLOCK, 1, "few", "cpu")
    for said in run_ranks(4, run_and_tell, operands, *distances_and_columns(index)):
        forward = ["columns", "values outer", "gather own", "attend", "gather next", "attend"]
        assert said[:6] == forward
        assert said[6:9] == forward[:3]
        backward = said[9:]
        following = backward.index("gather next")
        assert {"query", "key"} <= set(backward[:following])
        home = backward.index("gradients outer")
        assert home > following and backward[home + 1 :] == ["query", "key"]


def run_in_halves(rank, world, operands, distances, columns, scale):
    """Two rings of half the ranks each: context parallelism beside data parallelism."""
    half = world // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))]
    seq_length = operands[0].shape[0]
    index = build_index(distances, columns, seq_length, BLOCK, half)
    parts = [stripe(t, rank % half, half, BLOCK) for t in operands]
    leaves = [t.clone().requires_grad_() for t in parts[:3]]
    out, *_ = ring_attention(*leaves, index, Ring(CPGroup(groups[rank // half])), scale)
    out.backward(parts[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_a_ring_need_not_be_the_whole_world():
    operands = random_operands(BLOCK * 4, 1, 2, 1, 64, torch.float64, "cpu")
    index = random_index(BLOCK * 4, 1, 2, BLOCK, 1, "few", "cpu")
    results = run_ranks(4, run_in_halves, operands, *distances_and_columns(index), 0.1)
    expected = dense_attention(*operands, written_out_mask(index, 1, 2), 0.1)
    for ring in (results[:2], results[2:]):
        for parts, truth in zip(zip(*ring), expected):
            assert relative_error(unstripe(list(parts), BLOCK), truth) < 1e-12


BUDGETS = [
    dict(vertical=20, slash=3, window=0, sink=4),
    dict(vertical=0, slash=0, window=0, sink=0),
    dict(vertical=64, slash=0, window=64, sink=64),
    dict(vertical=0, slash=5, window=1, sink=2, sample_rows=2),
]


def run_sparse(rank, world, operands):
    results = []
    for budget in BUDGETS:
        config = MTrainingConfig.from_options(block_size=BLOCK, sample_strata=16, **budget)
        parts = [stripe(t, rank, world, BLOCK) for t in operands]
        leaves = [t.clone().requires_grad_() for t in parts[:3]]
        out, _, index, *_ = attend(*leaves, config=config, cp_group=dist.group.WORLD)
        out.backward(parts[3])
        masks = written_out_mask(index, 2, 4)
        results.append([out.detach(), *(leaf.grad for leaf in leaves), masks])
    return results


@pytest.mark.parametrize(("world", "blocks"), [(2, 3), (3, 2), (6, 1)])
def test_choosing_and_attending_over_processes(world, blocks):
    print("torch seed", torch.seed())
    operands = random_operands(BLOCK * world * blocks, 2, 4, 2, 64, torch.float64, "cpu")
    results = run_ranks(world, run_sparse, operands)
    for case in range(len(BUDGETS)):
        ranks = [result[case] for result in results]
        masks = ranks[0][4]
        assert all(torch.equal(rank[4], masks) for rank in ranks)
        expected = dense_attention(*operands, masks, 64**-0.5)
        for i, truth in enumerate(expected):
            assert relative_error(unstripe([rank[i] for rank in ranks], BLOCK), truth) < 1e-12


def run_with_columns_told(rank, world, operands, config):
    """How often columns are gathered in a choice alone, and in a forward; how far recall is apart."""
    query, key, value = (stripe(t, rank, world, BLOCK) for t in operands)
    group, asked, gather = dist.group.WORLD, [], attention.kernels.gather_columns

    def told(*words):
        asked.append(words)
        return gather(*words)

    attention.kernels.gather_columns = recall.gather_columns = told
    try:
        alone = search_pattern(query, key, config, cp_group_of(group), 64**-0.5)
        in_choice = len(asked)
        _, _, index, *_ = attend(query, key, value, config=config, cp_group=group)
    finally:
        attention.kernels.gather_columns = recall.gather_columns = gather
    assert torch.equal(index.member, alone.member) and torch.equal(index.columns, alone.columns)
    apart = (index.recall - alone.recall).abs().max().item()
    return in_choice, len(asked) - in_choice, apart, index.recall


def test_columns_travel_once_for_recall_and_attention():
    config = MTrainingConfig.from_options(block_size=BLOCK, sample_strata=16, vertical=20, slash=3)
    operands = random_operands(BLOCK * 8, 2, 4, 2, 64, torch.float32, "cpu")[:3]
    results = run_ranks(2, run_with_columns_told, operands, config)
    for in_choice, in_forward, apart, kept in results:
        assert (in_choice, in_forward) == (1, 1) and apart < 1e-6 and (kept > 0).all()
        assert torch.equal(kept, results[0][3])


def test_a_replay_gives_the_same_gradients_and_attends_nothing(monkeypatch):
    query, key, value, grad_out = random_operands(192, 1, 4, 2, 64, torch.float32, "cpu")
    index = random_index(192, 1, 4, BLOCK, 1, "few", "cpu")
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    out, lse, _ = ring_attention(*leaves, index, Ring(CPGroup(None)), 0.1)
    expected = torch.autograd.grad(out, leaves, grad_out)
    with torch.no_grad():
        attended = ring_attention(*leaves, index, Ring(CPGroup(None)), 0.1)
    assert torch.equal(attended[0], out) and torch.equal(attended[1], lse)
    monkeypatch.setattr("megatron_mtraining.kernels.attention.forward", None)
    again, *_ = ring_attention(*leaves, index, Ring(CPGroup(None)), 0.1, attended)
    assert torch.equal(again, out) and not attended[0].requires_grad
    for one, other in zip(torch.autograd.grad(again, leaves, grad_out), expected):
        assert torch.equal(one, other)


def run_turned(rank, world, operands):
    """Whether operands whose head dim has another stride give what those of unit stride do."""
    group = dist.group.WORLD if world > 1 else None
    config = MTrainingConfig.from_options(
        block_size=BLOCK, vertical=20, slash=2, window=1, sample_strata=8
    )
    parts = [stripe(t, rank, world, BLOCK) for t in operands]
    turned = [torch.stack((t, t), -1)[..., 0] for t in parts[:3]]
    assert all(t.stride(-1) == 2 for t in turned)
    found = []
    for tensors in (parts[:3], turned):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out, *_ = attend(*leaves, config=config, cp_group=group)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, parts[3])])
    return [torch.equal(one, other) for one, other in zip(*found)]


def test_any_strides_will_do():
    operands = random_operands(BLOCK * 4, 1, 2, 1, 64, torch.float32, "cpu")
    assert run_ranks(2, run_turned, operands) == [[True] * 4] * 2


def test_any_strides_will_do_for_kernels(interpreter):
    operands = random_operands(BLOCK * 2, 1, 2, 1, 64, torch.float32, "cpu")
    assert run_turned(0, 1, operands) == [True] * 4


def test_keys_in_flight_take_no_gradient():
    """Their gradient is the backward's: a graph of copies would keep memory."""
    key = torch.randn(128, 1, 2, 64, requires_grad=True)
    index = random_index(128, 1, 4, 64, 1, "columns", "cpu")
    keys = attention.KeysAndValues(key, key * 2, ring_of(CPGroup(None)), index)
    assert torch.is_grad_enabled()
    for tensor in (*keys.current(), keys.columns(index).wait()):
        assert not tensor.requires_grad and tensor.grad_fn is None
    assert torch.equal(keys.current()[0][0], key)


def test_operands_that_do_not_fit_are_named():
    q = torch.zeros(128, 1, 4, 64)
    k = torch.zeros(128, 1, 2, 64)
    config = MTrainingConfig()

    def replay(*operands, index):
        attend(*operands, config=config, pattern=index)

    attend(q, k, k, config=config)  # what fits is not remembered for what does not
    with pytest.raises(
        ValueError,
        match=r"expected query \[s, b, h, d\].*, got query \(64, 1, 4, 64\), key \(128, 1, 2, 64\), value",
    ):
        attend(q[:64], k, k, config=config)
    with pytest.raises(ValueError, match="head dim 32"):
        attend(q[..., :32], k[..., :32], k[..., :32], config=config)
    with pytest.raises(ValueError, match="KV heads must divide"):
        attend(q[:, :, :3], k, k, config=config)
    with pytest.raises(ValueError, match="int32"):
        attend(q.int(), k.int(), k.int(), config=config)
    with pytest.raises(ValueError, match="softmax_scale is 0"):
        attend(q, k, k, config=config, softmax_scale=0)
    index = random_index(128, 1, 4, 64, 1, "all", "cpu")
    with pytest.raises(ValueError, match="128 tokens.*64"):
        replay(q[:64], k[:64], k[:64], index=index)
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 2\)"):
        replay(q[:, :, :2], k, k, index=index)
    with pytest.raises(ValueError, match="for 2 ranks"):
        replay(q, k, k, index=random_index(256, 1, 4, 64, 2, "all", "cpu"))


def test_inner_groups_that_do_not_divide_the_ranks_are_refused():
    refused = "1 context-parallel ranks cannot be cut into inner groups of 2"
    with pytest.raises(ConfigError, match=refused):
        CPGroup(None, 2)


FAILING = {
    "forward": "forward",
    "backward": "backward_query",
    "choice": "gather_columns",
}


def run_until_a_rank_fails(rank, world, operands, index_sets, inner, where, how):
    """Rank 1 fails in the second round of its forward or backward, or in the only one, or as it chooses a
    pattern: transfers are under way."""
    name, calls = FAILING[where], []
    original = getattr(attention.kernels, name)

    def fail(*arguments, **keywords):
        calls.append(name)
        if rank == 1 and len(calls) == (1 if where == "choice" else min(2, world // inner)):
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 has had enough")
        return original(*arguments, **keywords)

    setattr(attention.kernels, name, fail)
    if where == "choice":
        config = MTrainingConfig.from_options(
            block_size=BLOCK, vertical=20, slash=2, window=1, sample_strata=8
        )
        parts = (stripe(t, rank, world, BLOCK, inner=inner) for t in operands[:3])
        attend(*parts, config=config, cp_group=dist.group.WORLD, cp_inner=inner)
    else:
        run_ring(rank, world, operands, *index_sets, 0.1, inner)
    dist.barrier()  # a rank that needs nothing more of the others meets them at the next collective


@pairwise(
    {
        "world, inner": [(2, 2), (2, 1), (4, 2)],
        "how": ["raises", "dies"],
        "where": FAILING,
    }
)
def test_a_rank_that_fails_ends_all(world, inner, how, where):
    operands = random_operands(BLOCK * world, 1, 4, 2, 64, torch.float32, "cpu")
    index = random_index(BLOCK * world, 1, 4, BLOCK, 1, "few", "cpu")
    sets = distances_and_columns(index)
    given = operands, sets, inner, where, how
    statuses, said = run_to_their_ends(world, 60, run_until_a_rank_fails, *given)
    others = [rank for rank in range(world) if rank != 1]
    if how == "dies":
        assert statuses[1] == -signal.SIGKILL
    else:
        assert statuses[1] == 1 and "rank 1 has had enough" in said[1]
    # Nobody has killed them: each has an error of its own, of a connection or of the timeout.
    assert all(statuses[rank] == 1 and said[rank] for rank in others), (statuses, said)
