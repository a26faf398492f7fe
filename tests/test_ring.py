# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The ring over processes against one process, and its schedule."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from attention_cases import (
    dense_attention,
    random_index,
    random_operands,
    relative_error,
    written_out_mask,
)
from ranks import run_ranks

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.layout import stripe, unstripe
from megatron_mtraining.pattern import build_index
from megatron_mtraining.ring import Ring, flat_ring, ring_attention

BLOCK = 64


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_every_rank_meets_every_key_once_its_own_first(world):
    for rank in range(world):
        steps = flat_ring(rank, world)
        assert [step.source for step in steps][0] == rank
        assert sorted(step.source for step in steps) == list(range(world))
        assert [step.first for step in steps] == [True] + [False] * (world - 1)
        assert [step.last for step in steps] == [False] * (world - 1) + [True]
        for earlier, later in zip(steps, steps[1:]):
            # What a rank has now, the next rank has one step later.
            following = flat_ring((rank + 1) % world, world)
            assert following[later.distance].source == earlier.source


def distances_and_columns(index):
    """The sets an index was built from, to build it again for another world."""
    batch, heads = index.slash_member.shape[:2]
    length = index.columns.shape[-1]
    columns = torch.full((batch, heads, length), index.seq_length)
    for b in range(batch):
        for h in range(heads):
            count = int(index.column_ptr[b, h, -1])
            columns[b, h, :count] = index.columns[b, h, :count].long()
    return index.distances(), columns  # positions are global where world is 1


def run_ring(rank, world, operands, distances, columns, scale):
    seq_length = operands[0].shape[0]
    index = build_index(distances, columns, seq_length, BLOCK, world)
    parts = [stripe(t, rank, world, BLOCK) for t in operands]
    leaves = [t.clone().requires_grad_() for t in parts[:3]]
    out, _ = ring_attention(*leaves, index, Ring(dist.group.WORLD), scale)
    out.backward(parts[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("budget", ["few", "all"])
@pytest.mark.parametrize(
    ("world", "dtype", "tolerance"),
    [(1, torch.float64, 1e-12), (2, torch.float64, 1e-12), (3, torch.float32, 1e-6),
     (4, torch.float64, 1e-12), (2, torch.bfloat16, 1e-2)],
)  # fmt: skip
def test_processes_agree_with_dense_attention(world, dtype, tolerance, budget):
    print("torch seed", torch.seed())
    seq_length, scale = BLOCK * world * 3, 0.1
    operands = random_operands(seq_length, 2, 4, 2, 64, dtype, "cpu")
    index = random_index(seq_length, 2, 4, BLOCK, 1, budget, "cpu")
    results = run_ranks(world, run_ring, operands, *distances_and_columns(index), scale)
    expected = dense_attention(*operands, written_out_mask(index, 2, 4), scale)
    for parts, truth in zip(zip(*results), expected):
        assert parts[0].dtype == dtype
        assert relative_error(unstripe(list(parts), BLOCK), truth) < tolerance


def run_in_halves(rank, world, operands, distances, columns, scale):
    """Two rings of half the ranks each: context parallelism beside data parallelism."""
    half = world // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))]
    seq_length = operands[0].shape[0]
    index = build_index(distances, columns, seq_length, BLOCK, half)
    parts = [stripe(t, rank % half, half, BLOCK) for t in operands]
    leaves = [t.clone().requires_grad_() for t in parts[:3]]
    out, _ = ring_attention(*leaves, index, Ring(groups[rank // half]), scale)
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
        config = MTrainingConfig(block_size=BLOCK, sample_strata=16, **budget)
        parts = [stripe(t, rank, world, BLOCK) for t in operands]
        leaves = [t.clone().requires_grad_() for t in parts[:3]]
        out, index = sparse_attention(*leaves, config=config, cp_group=dist.group.WORLD)
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


def test_a_replay_gives_the_same_gradients_and_attends_nothing(monkeypatch):
    query, key, value, grad_out = random_operands(192, 1, 4, 2, 64, torch.float32, "cpu")
    index = random_index(192, 1, 4, BLOCK, 1, "few", "cpu")
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    out, lse = ring_attention(*leaves, index, Ring(None), 0.1)
    expected = torch.autograd.grad(out, leaves, grad_out)
    with torch.no_grad():
        attended = ring_attention(*leaves, index, Ring(None), 0.1)
    assert torch.equal(attended[0], out) and torch.equal(attended[1], lse)
    monkeypatch.setattr("megatron_mtraining.ring.attention.attention_forward", None)
    again, _ = ring_attention(*leaves, index, Ring(None), 0.1, attended)
    assert torch.equal(again, out) and not attended[0].requires_grad
    for one, other in zip(torch.autograd.grad(again, leaves, grad_out), expected):
        assert torch.equal(one, other)


def test_operands_that_do_not_fit_are_named():
    q = torch.zeros(128, 1, 4, 64)
    k = torch.zeros(128, 1, 2, 64)
    index = random_index(128, 1, 4, 64, 1, "all", "cpu")
    ring = Ring(None)
    with pytest.raises(ValueError, match="head dim 32"):
        ring_attention(q[..., :32], k[..., :32], k[..., :32], index, ring, 0.1)
    with pytest.raises(ValueError, match="KV heads must divide"):
        ring_attention(q[:, :, :3], k, k, index, ring, 0.1)
    with pytest.raises(ValueError, match="int32"):
        ring_attention(q.int(), k.int(), k.int(), index, ring, 0.1)
    with pytest.raises(ValueError, match="128 tokens.*64"):
        ring_attention(q[:64], k[:64], k[:64], index, ring, 0.1)
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 2\)"):
        ring_attention(q[:, :, :2], k, k, index, ring, 0.1)
    with pytest.raises(ValueError, match="for 2 ranks"):
        ring_attention(q, k, k, random_index(256, 1, 4, 64, 2, "all", "cpu"), ring, 0.1)
    with pytest.raises(ValueError, match="softmax_scale is 0"):
        ring_attention(q, k, k, index, ring, 0)
