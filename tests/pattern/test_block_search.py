# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which blocks the sources of block lists take, against what they say they take; on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining.config import MobaPolicy, XAttentionPolicy
from megatron_mtraining.cp_group import CPGroup, cp_group_of
from megatron_mtraining.layout import block_at, stripe
from megatron_mtraining.pattern import build_block_index, select_key_blocks
from megatron_mtraining.pattern.selectors import key_blocks
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention
from tests.support.attention_cases import random_operands
from tests.support.ranks import run_ranks
from tests.support.selection_cases import planted_operands

pytestmark = pytest.mark.usefixtures("fresh_inputs")

BLOCK, SEQ = 64, 64 * 12
LOOKAHEAD = [
    dict(policy=MobaPolicy(top_k=3, lookahead=True)),
    dict(policy=MobaPolicy(top_k=0, lookahead=True), window_blocks=2, sink_blocks=0),
    dict(policy=MobaPolicy(top_k=50, lookahead=True), window_blocks=0, sink_blocks=2),
    dict(policy=XAttentionPolicy(stride=16, threshold=0.7, lookahead=True)),
    dict(policy=XAttentionPolicy(8, 0.3, lookahead=True), window_blocks=0, sink_blocks=0),
    dict(policy=XAttentionPolicy(stride=4, threshold=1.0, lookahead=True)),
]
"""A block's own queries select for it: what they ask for can be looked at."""
OPTIONS = [
    *LOOKAHEAD,
    *(dict(each, policy=replace(each["policy"], lookahead=False)) for each in LOOKAHEAD),
]


def name_of(options):
    policy = options["policy"]
    numbers = [*vars(policy).values(), *(v for k, v in options.items() if k != "policy")]
    return "-".join(map(str, [policy.name, *numbers]))


def select(query, key, scale, *, cp=None, block_size=BLOCK, **options):
    policy = options.pop("policy")
    return select_key_blocks(
        query, key, policy, cp or CPGroup(None), scale, block_size=block_size, **options
    )


def always_of(num_blocks, window_blocks=1, sink_blocks=1, **_):
    at = torch.arange(num_blocks)
    apart = at[:, None] - at
    return (apart >= 0) & ((apart <= window_blocks) | (at < sink_blocks)), apart >= 0


def means(tensor, block):
    parts = [part.double().mean(0) for part in tensor.split(block)]
    return torch.stack(parts, 2)  # [b, h, NB, d]


def block_mass(query, key, stride, block, scale):
    """Antidiagonal scores square by square, and their softmax summed to blocks: float64 [b, h, NB, NB]."""
    heads, length = query.shape[2], query.shape[0]
    count = -(-length // block) * block
    q, k = (
        torch.nn.functional.pad(t.double(), (0, 0, 0, 0, 0, 0, 0, count - length))
        for t in (query, key)
    )
    k = k.repeat_interleave(heads // k.shape[2], 2)
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * scale
    squares = scores.unflatten(-2, (-1, stride)).unflatten(-1, (-1, stride)).transpose(-3, -2)
    squares = squares.flip(-2).diagonal(dim1=-2, dim2=-1).sum(-1) / stride
    at = torch.arange(squares.shape[-1])
    p = squares.masked_fill(at[:, None] < at, float("-inf")).softmax(-1)
    p[:, :, -(-length // stride) :] = 0
    per = block // stride
    return p.unflatten(-1, (-1, per)).sum(-1).unflatten(-2, (-1, per)).sum(-2)


def check_moba(blocks, query, key, block, top_k, options):
    scores = means(query, block) @ means(key, block).repeat_interleave(2, 1).transpose(-1, -2)
    always, causal = always_of(scores.shape[-1], **options)
    assert torch.equal(blocks & always, always.expand_as(blocks)) and not (blocks & ~causal).any()
    chosen = blocks & ~always
    open_ = (causal & ~always).sum(-1)
    assert torch.equal(chosen.sum(-1), open_.clamp(max=top_k).expand_as(chosen[..., 0]))
    worst = scores.masked_fill(~chosen, math.inf).amin(-1)
    best_left = scores.masked_fill(chosen | always | ~causal, -math.inf).amax(-1)
    assert (worst >= best_left - 1e-5 * scores.abs().max()).all()


def check_share(blocks, mass, threshold, options, slack):
    """It holds the threshold, and without its least free block it would not."""
    always, causal = always_of(mass.shape[-1], **options)
    assert torch.equal(blocks & always, always.expand_as(blocks)) and not (blocks & ~causal).any()
    total = mass.sum(-1)
    held = (mass * blocks).sum(-1) / total
    assert (held >= threshold - slack).all()
    chosen = blocks & ~always
    least = mass.masked_fill(~chosen, math.inf).amin(-1)
    assert (held - least / total < threshold + slack)[chosen.any(-1)].all()
    best_left = mass.masked_fill(chosen | always | ~causal, -math.inf).amax(-1)
    assert (least >= best_left - slack * total).all()


@pytest.mark.parametrize("seq_length", [SEQ, 450])  # the last block has rows past the end
@pytest.mark.parametrize("options", LOOKAHEAD, ids=name_of)
def test_what_is_taken(options, seq_length):
    query, key = planted_operands(torch.float64, seq_length)
    blocks = select(query, key, 0.5, **options)
    assert blocks.dtype == torch.uint8
    policy = options["policy"]
    if isinstance(policy, MobaPolicy):
        check_moba(blocks.bool(), query, key, BLOCK, policy.top_k, options)
    else:
        mass = block_mass(query, key, policy.stride, BLOCK, 0.5)
        check_share(blocks.bool(), mass, policy.threshold, options, 1e-6)


@pytest.mark.parametrize("options", LOOKAHEAD, ids=name_of)
def test_the_block_before_selects(options):
    query, key = planted_operands(torch.float64, 450)
    own = select(query, key, 0.5, **options).bool()
    causal = dict(options, policy=replace(options["policy"], lookahead=False))
    always, _ = always_of(own.shape[-1], **options)
    expected = always | torch.nn.functional.pad(own[:, :, :-1], (0, 0, 1, 0))
    assert torch.equal(select(query, key, 0.5, **causal).bool(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", LOOKAHEAD, ids=name_of)
def test_what_is_taken_on_a_gpu(options, dtype):
    query, key = planted_operands(dtype, 4096, "cuda")
    options = dict(options, block_size=128)
    blocks = select(query, key, 0.5, **options).bool().cpu()
    query, key = query.cpu(), key.cpu()
    policy = options["policy"]
    if isinstance(policy, MobaPolicy):
        check_moba(blocks, query, key, 128, policy.top_k, options)
    else:
        mass = block_mass(query, key, policy.stride, 128, 0.5)
        check_share(blocks, mass, policy.threshold, options, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_nothing_is_read_back_to_the_host(options):
    query, key = planted_operands(torch.bfloat16, 4096, "cuda")
    options = dict(options, block_size=128)
    select(query, key, 0.5, **options)  # compilation may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        select(query, key, 0.5, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ties_go_to_the_earlier_block():
    query, key = torch.ones(SEQ, 1, 1, 64), torch.ones(SEQ, 1, 1, 64)
    policies = MobaPolicy(top_k=3, lookahead=True), XAttentionPolicy(threshold=0.4, lookahead=True)
    for policy, count in zip(policies, (3, None)):
        blocks = select(query, key, 1.0, policy=policy, window_blocks=0, sink_blocks=0)[0, 0]
        for i, row in enumerate(blocks.tolist()):
            taken = [j for j in range(i) if row[j]]
            assert row[i] and taken == list(range(len(taken))) and not any(row[i + 1 :])
            assert count is None or len(taken) == min(i, count)


def test_what_holds_nothing_is_not_taken():
    query, key = torch.ones(SEQ, 1, 1, 64), torch.ones(SEQ, 1, 1, 64)
    key[3 * BLOCK : 5 * BLOCK] = -10
    policy = XAttentionPolicy(threshold=1.0, lookahead=True)
    blocks = select(query, key, 1.0, policy=policy)[0, 0]
    at = torch.arange(SEQ // BLOCK)
    # But as the window, of blocks 4 and 5, and by the query blocks themselves.
    expected = (at[:, None] >= at) & ((at < 3) | (at > 4) | (at[:, None] - at < 2))
    assert torch.equal(blocks.bool(), expected)


def test_chunks_change_nothing(monkeypatch):
    query, key = planted_operands()
    whole = [select(query, key, 0.5, **o) for o in OPTIONS]
    monkeypatch.setattr(key_blocks, "CHUNK", 4 * 2 * 4 * 12 * 3)
    for options, expected in zip(OPTIONS, whole):
        blocks = select(query, key, 0.5, **options)
        assert torch.equal(blocks, expected)


def run_choices(rank, world, cases, inner):
    cp = cp_group_of(dist.group.WORLD, inner)
    results = []
    for query, key in cases:
        parts = [stripe(t, rank, world, BLOCK, inner=inner) for t in (query, key)]
        for options in OPTIONS:
            results.append(select(*parts, 0.5, cp=cp, **options))
    return results


@pytest.mark.parametrize(("world", "inner"), [(2, 2), (3, 1), (4, 2)])
def test_the_same_on_any_number_of_ranks(world, inner):
    cases = [planted_operands(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    alone = [select(*case, 0.5, **options) for case in cases for options in OPTIONS]
    for rank, results in enumerate(run_ranks(world, run_choices, cases, inner)):
        own = block_at(torch.arange(SEQ // BLOCK // world), rank, world, inner)
        for blocks, whole in zip(results, alone):
            assert torch.equal(blocks, whole[:, :, own])


def test_what_is_not_a_number_is_not_chosen_by():
    query, key = planted_operands()
    key[100], query[600] = float("nan"), float("inf")
    for options in OPTIONS:
        blocks = select(query, key, 0.5, **options)
        always, causal = always_of(SEQ // BLOCK, **options)
        assert (blocks.bool() | ~always).all() and not (blocks.bool() & ~causal).any()


def test_a_stride_that_does_not_divide_the_block_is_named():
    query, key = planted_operands()
    with pytest.raises(ValueError, match="stride is 5"):
        select(query, key, 0.5, policy=XAttentionPolicy(stride=5))


def test_from_choice_to_attention():
    """What is chosen goes into an index and through attention; all of it is dense attention."""
    query, key, value, _ = random_operands(SEQ, 1, 4, 2, 64, torch.float64, "cpu")
    none = torch.zeros(1, 4, 12, dtype=torch.bool), torch.zeros(1, 4, 0, dtype=torch.int64)
    outs = []
    policies = (
        MobaPolicy(top_k=12),
        XAttentionPolicy(threshold=1.0),
        XAttentionPolicy(threshold=0.2),
    )
    for policy in policies:
        blocks = select(query, key, 0.125, policy=policy)
        index = build_block_index(blocks, *none, SEQ, BLOCK, 1)
        outs.append(ring_attention(query, key, value, index, Ring(CPGroup(None)), 0.125)[0])
        density = index.density().mean()
    assert torch.allclose(outs[0], outs[1]) and density < 1
    assert not torch.allclose(outs[0], outs[2])
