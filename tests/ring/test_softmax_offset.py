# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Softmax offsets and sliding windows of :func:`attend`, over ranks, against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.layout import stripe, unstripe
from megatron_mtraining.pattern.sampled_rows import rows_of
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import (
    TOLERANCE,
    assert_results,
    dense_attention,
    random_operands,
    relative_error,
    written_out_mask,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_inputs")

BLOCK, SCALE = 64, 0.2
SPARSE = MTrainingConfig.from_options(block_size=BLOCK, window=BLOCK, sample_strata=8, price=1.5)
NODES = {1: [None], 2: [None, 1], 4: [4, 2]}


def masked(length, lengths, window, device="cpu"):
    """Visible ranges, and the mask ``[b, 1, N, N]`` made without them."""
    ranges = VisibleRanges.from_lengths(lengths, length, device)
    number = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    mask = (number[:, :, None] == number[:, None]).tril()
    if window is not None:
        position = torch.arange(length)
        ranges, mask = ranges.windowed(window), mask & (position[:, None] - position < window)
    return ranges, mask[:, None].to(device)


def attend_here(rank, world, operands, offset, ranges, config, inner):
    """The pattern written out, out and gradients of this rank."""
    *given, grad_out = operands
    if world > 1:
        *given, grad_out = (stripe(t, rank, world, BLOCK, inner=inner) for t in operands)
    leaves = [t.clone().requires_grad_() for t in given]
    own = None if offset is None else offset.clone().requires_grad_()
    found = attend(
        *leaves, config=config, cp_group=dist.group.WORLD if world > 1 else None, cp_inner=inner,
        softmax_scale=SCALE, softmax_offset=own, documents=ranges,
    )  # fmt: skip
    found.out.backward(grad_out)
    mask = written_out_mask(found.index, *found.index.member.shape[:2])
    gradients = [leaf.grad for leaf in leaves]
    return mask, [found.out.detach(), *gradients], None if own is None else own.grad


def attend_to_all(rank, world, cases):
    return [attend_here(rank, world, *case) for case in cases]


@pytest.mark.parametrize("world", NODES)
def test_offsets_and_windows_over_ranks(world):
    length, cases = BLOCK * 4 * world if world < 4 else BLOCK * 8, []
    cut = int(torch.randint(1, length - 1, ()))
    for number, inner in enumerate(NODES[world]):
        for window in (None, 1, 7, BLOCK, 101) if number == 0 else (None, 101):
            for config in (SPARSE, SPARSE.dense()) if window is None else (SPARSE.dense(),):
                operands = random_operands(length, 2, 4, 2, 64, torch.float64, "cpu")
                offset = None if window == 7 else torch.randn(4, dtype=torch.float64)
                ranges, mask = masked(length, [[length], [cut, length - cut]], window)
                cases.append((operands, offset, ranges, config, inner))
    results = run_ranks(world, attend_to_all, cases)
    for case, ranks in zip(cases, zip(*results)):
        operands, offset, ranges, config, inner = case
        masks, outs, offsets = zip(*ranks)
        mask = masks[0]
        if config == SPARSE:
            assert not mask.equal(masks[0].new_ones(mask.shape).tril())
        truth = dense_attention(*operands, mask, SCALE, offset)
        found = [t[0] if world == 1 else unstripe(list(t), BLOCK, inner=inner) for t in zip(*outs)]
        assert_results(found, truth, 1e-12)
        if offset is not None:
            assert relative_error(sum(offsets), truth[-1]) < 1e-12


@pytest.mark.parametrize("window", [1, 37, 64, 65, 200])
def test_a_window_has_its_keys_alone(window):
    lengths = [[1, 130, 169], [300]]
    ranges, mask = masked(300, lengths, window)
    operands = random_operands(300, 2, 2, 1, 64, torch.float64, "cpu")
    found, *_ = attend_here(0, 1, operands, None, ranges, SPARSE.dense(), None)
    assert torch.equal(found, mask.expand_as(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window, offset", [(None, -3.0), (33, 0.0), (70, 4.0)])
def test_one_rank(request, dtype, window, offset):
    """The kernels in Triton's interpreter, which has no bfloat16: that by the reference."""
    if dtype == torch.float32:
        request.getfixturevalue("interpreter")
    operands = random_operands(150, 1, 2, 1, 64, dtype, "cpu")
    ranges, mask = masked(150, [[40, 110]], window)
    offset = torch.full((2,), offset) + torch.rand(2)
    _, found, gradient = attend_here(0, 1, operands, offset, ranges, SPARSE.dense(), None)
    *truth, of_offset = dense_attention(*operands, mask.expand(1, 2, -1, -1), SCALE, offset)
    assert_results(found, truth, 1e-5 if dtype == torch.float32 else 2e-2)
    if dtype == torch.float32:  # a sum over rows that may cancel
        torch.testing.assert_close(gradient.double(), of_offset, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window, offset", [(None, -1.0), (129, 0.0), (300, 2.0)])
def test_one_gpu(dtype, window, offset, device="cuda"):
    operands = random_operands(1000, 1, 4, 2, 128, dtype, device)
    ranges, mask = masked(1000, [[290, 710]], window, device)
    offset = torch.full((4,), offset, device=device) + torch.rand(4, device=device)
    config = MTrainingConfig.from_options(block_size=128).dense()
    _, found, gradient = attend_here(0, 1, operands, offset, ranges, config, None)
    *truth, of_offset = dense_attention(*operands, mask.expand(1, 4, -1, -1), SCALE, offset)
    assert_results(found, truth, TOLERANCE[dtype])
    # A sum over rows that may cancel.
    error = (gradient.double() - of_offset).norm()
    assert error < 10 * TOLERANCE[dtype] * of_offset.norm()


@pytest.mark.parametrize(
    "options", [dict(price=0.5), dict(slash=3, vertical=20), dict(policy="moba", block_top_k=2)]
)
def test_recall_counts_the_offset_as_kept(options):
    """Recall is the share of the held-out rows' attention, of which the offset has some."""
    config = MTrainingConfig.from_options(
        block_size=BLOCK, window=BLOCK, sample_strata=8, **options
    )
    query, key, value, _ = random_operands(640, 1, 2, 1, 64, torch.float32, "cpu")
    sampling = config.sampling
    rows = rows_of(sampling, 640).view(-1, sampling.rows)[:, -sampling.held_out_rows :].flatten()
    scores = torch.einsum("rbhd,kbgd->bhrk", query[rows], key) * SCALE
    scores = scores.masked_fill(torch.arange(640) > rows[:, None], float("-inf"))
    densities = []
    for offset in (-80.0, 2.0, 5.0, 80.0):
        offsets = torch.tensor([offset, offset + 0.5])
        index = attend(
            query, key, value, config=config, softmax_scale=SCALE, softmax_offset=offsets
        ).index
        share = torch.cat((scores, offsets[:, None, None].expand(1, 2, len(rows), 1)), -1).softmax(
            -1
        )
        mask = written_out_mask(index, 1, 2)[:, :, rows]
        expected = (share[..., :-1] * mask).sum(-1).mean(-1) + share[..., -1].mean(-1)
        torch.testing.assert_close(index.recall, expected, atol=2e-3, rtol=0)
        densities.append(index.density())
    if "price" in options:  # keys have too little attention for it
        assert (densities[0] > densities[-1]).all()


def test_a_replay_uses_the_saved_result():
    operands = random_operands(300, 1, 4, 2, 64, torch.float64, "cpu")
    offset = torch.randn(4, dtype=torch.float64)
    *given, grad_out = operands
    leaves = [t.clone().requires_grad_() for t in (*given, offset)]

    def run(saved=None):
        return attend(
            *leaves[:3], config=SPARSE, softmax_scale=SCALE, softmax_offset=leaves[3], saved=saved
        )

    first = run()
    expected = torch.autograd.grad(first.out, leaves, grad_out)
    again = run(first._replace(out=first.out.detach()))
    assert torch.equal(again.out, first.out)
    for value, wanted in zip(torch.autograd.grad(again.out, leaves, grad_out), expected):
        assert torch.equal(value, wanted)


def test_a_pruned_backward_leaves_no_offset_out():
    query, key, value, grad_out = random_operands(512, 1, 2, 1, 64, torch.float32, "cpu")
    told = []
    config = replace(SPARSE.dense(), backward_threshold=1e-6)  # keeps everything
    leaves = [t.clone().requires_grad_() for t in (query, key, value, torch.ones(2))]
    attend(
        *leaves[:3], config=config, softmax_offset=leaves[3], softmax_scale=SCALE,
        observe_backward=lambda density, dropped: told.append((density, dropped)),
    ).out.backward(grad_out)  # fmt: skip
    mask = torch.ones(512, 512, dtype=torch.bool).tril().expand(1, 2, -1, -1)
    truth = dense_attention(query, key, value, grad_out, mask, SCALE, leaves[3])
    for leaf, wanted in zip(leaves, truth[1:]):
        assert relative_error(leaf.grad, wanted) < 1e-5
    ((density, dropped),) = told
    torch.testing.assert_close(density, torch.ones(1, 2))
    torch.testing.assert_close(dropped, torch.zeros(1, 2), atol=1e-5, rtol=0)


def disagree(rank, world):
    query, key, value, _ = random_operands(128, 1, 2, 1, 64, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"softmax_offset is \[0.0, 0.0\] on .*\[1.0, 1.0\] on"):
        attend(
            query, key, value, config=SPARSE.dense(), cp_group=dist.group.WORLD,
            softmax_offset=torch.full((2,), float(rank)),
        )  # fmt: skip


def test_ranks_with_other_offsets_are_refused():
    run_ranks(2, disagree)
