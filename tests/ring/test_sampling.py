# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sampling of the pruned backward: the draw, gradients with its weights, and that they are unbiased."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.cp_group import cp_group_of
from megatron_mtraining.kernels import attention as attention_kernels
from megatron_mtraining.kernels.attention.sampling import (
    MAX_LOG2_WEIGHT,
    codes_of,
    largest_mark,
    mark_of,
    random_bits,
)
from megatron_mtraining.layout import block_at, unstripe
from megatron_mtraining.pattern.block_list_index import pruned_index
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention
from megatron_mtraining.ring.pruning import BackwardPruning
from tests.support.attention_cases import (
    random_index,
    relative_error,
    simulated_ring,
    written_out_mask,
)
from tests.support.ids import parametrize
from tests.support.pruning_cases import (
    BLOCK,
    INNER,
    NAMES,
    SCALE,
    PruningCase,
    expected,
    mark_all_rounds,
    moved,
    over_ranks,
    peaked,
    run_pruned,
    seed_of,
    with_documents,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_inputs")

HIGH = 30.0
"""A threshold far above most shares: of blocks with even a large share some are left out."""


def test_random_bits_are_the_hash_that_is_documented():
    """MurmurHash3's finalizer, in Python's integers. A seed has one draw, in all versions."""
    word = 0xFFFFFFFF

    def mixed(x):
        x = (x ^ x >> 16) * 0x85EBCA6B & word
        x = (x ^ x >> 13) * 0xC2B2AE35 & word
        return x ^ x >> 16

    for numbers in torch.randint(2**31, (20, 5)).tolist():
        high, low, *place = numbers
        bits = low
        for number in (high, *place):
            bits = mixed(((bits ^ number) + 0x9E3779B9) & word)
        seed = torch.tensor([(high << 32) + low])
        assert random_bits(seed, *map(torch.tensor, place)).tolist() == [bits]


def test_random_bits_are_even_and_independent():
    """Each of 32 bits, and each pair of the first 6, over blocks, heads and seeds that follow one another."""
    seed, line, q_block, k_block = (torch.arange(n) for n in (16, 4, 32, 32))
    shape = seed.view(-1, 1, 1, 1), line.view(-1, 1, 1), q_block[:, None], k_block
    bits = random_bits(*shape)
    ones = torch.stack(
        [(bits >> k & 1).double() * 2 - 1 for k in range(32)]
    )  # [32, seeds, h, NB, NB]
    error = bits.numel() ** -0.5
    assert ones.mean((1, 2, 3, 4)).abs().max() < 6 * error
    neighbours = [ones.mul(ones.roll(1, dim)).mean((1, 2, 3, 4)) for dim in (1, 2, 3, 4)]
    assert torch.stack(neighbours).abs().max() < 6 * error
    first = ones[-6:].flatten(1)
    assert (first @ first.mT / bits.numel() - torch.eye(6)).abs().max() < 6 * error


def test_codes():
    """Probability and weight for each share, over 4096 seeds: weight times probability is 1."""
    shares = torch.tensor([2.0, 1.0, 0.9, 0.5, 0.4, 0.25, 0.1, 0.03, 1e-3, 0.0, float("nan")])
    log2 = torch.tensor([0, 0, 0, 1, 1, 2, 3, 5, 5, 5, 0])
    # One row has next to nothing: the other decides.
    least = torch.ones(1)
    marks = mark_of(shares, least, True) | mark_of(torch.full_like(shares, 1e-9), least, True)
    seed = torch.randint(2**62, (4096, 1))
    zero, k_block = torch.zeros(1, dtype=torch.int64), torch.arange(len(shares))
    codes = codes_of(marks, seed, zero, torch.tensor([100]), k_block)
    assert codes.dtype == torch.uint8 and codes.max() == 1 + MAX_LOG2_WEIGHT
    for column, k in zip(codes.T, log2.tolist()):
        assert set(column.tolist()) <= {0, 1 + k}
        kept = (column > 0).double().mean()
        assert (kept - 2.0**-k).abs() <= 6 * (2.0**-k * (1 - 2.0**-k) / 4096) ** 0.5
    always = torch.full_like(marks, largest_mark(True))
    assert (codes_of(always, seed, zero, zero, k_block) == 1).all()
    assert not codes_of(torch.zeros_like(marks), seed, zero, zero, k_block).any(), "not listed"


SEQUENCES = [(500, 1, 1), (576, 3, 3), (768, 6, 2)]


@parametrize("packed", [False, True])
@parametrize("seq_length, world, inner", SEQUENCES)
def test_blocks_that_are_drawn(seq_length, world, inner, packed):
    """By rank and round, as of the whole sequence at once."""
    heads = (4, 2)
    operands = peaked(seq_length, 2, heads, 64, torch.float64)
    index = random_index(seq_length, 2, heads[0], BLOCK, world, "all", "cpu", inner)
    if packed:
        index = with_documents(index)
    seed = torch.randint(2**62, (1,))
    truth = expected(operands, index, HIGH, seed=seed)
    codes = mark_all_rounds(operands, index, HIGH, seed)
    assert truth.codes.max() > 2 and (truth.dropped > 0).any()
    assert torch.equal(codes.masked_fill(truth.close, 0), truth.codes.masked_fill(truth.close, 0))


@parametrize("world", [1, 2, 4])
def test_gradients(world):
    """Ranks whose generators are in one state draw what a single process draws."""
    cases, truths = [], []
    seq_length = BLOCK * world * (6 if world == 1 else 2)
    for number, (budget, lists, packed) in enumerate(
        [("few", False, False), ("all", False, False), ("all", True, False), ("few", False, True)]
    ):
        operands = peaked(seq_length, 2, (4, 2), 64, torch.float64)
        index = random_index(seq_length, 2, 4, BLOCK, 1, budget, "cpu")
        whole = with_documents(index) if packed else index
        torch_seed = 100 + number
        for inner in INNER[world]:
            over = over_ranks(whole, world, inner)
            truth = expected(operands, over, HIGH, margin=1e-9, seed=seed_of(torch_seed))
            pattern = operands, index.distances(), index.columns
            cases.append(PruningCase(*pattern, inner, lists, HIGH, torch_seed, packed))
            truths.append(truth)
    assert any((truth.codes > 1).any() for truth in truths), "no block has a weight"
    ranks = run_ranks(world, run_pruned, cases) if world > 1 else [run_pruned(0, 1, cases)]
    for case, truth, results in zip(cases, truths, zip(*ranks)):
        assert not truth.close.any()
        for name, *parts in zip(NAMES, *(result for result, _, _ in results)):
            found = parts[0] if world == 1 else unstripe(parts, BLOCK, inner=case.inner)
            error = relative_error(found, truth.results[NAMES.index(name)])
            assert error < 1e-12, f"{name}, inner groups of {case.inner}: {error:.1e}"
        dropped = torch.stack([each for _, _, each in results]).mean(0)
        assert torch.allclose(dropped.double(), truth.dropped.mean(-1), atol=1e-5)
        if world == 1 and not case.packed:
            assert torch.allclose(results[0][1], truth.density, atol=1e-6)


def gradients_of(leaves, grad_out, index, pruning, torch_seed=0):
    torch.manual_seed(torch_seed)
    out, *_ = ring_attention(*leaves, index, Ring(cp_group_of(None, None)), SCALE, pruning=pruning)
    return torch.autograd.grad(out, leaves, grad_out)


def test_gradients_are_unbiased():
    """The squared distance of the mean over draws from the whole gradient, divided by its expectation, the
    variance of the mean: about 1; above 25, five standard deviations of a single block, less than once in a
    million tests. A plain threshold is far outside."""
    draws, threshold = 200, 8.0  # weights of 2 to 8
    start = int(torch.randint(2**40, ()))  # before anything sets the generator
    *operands, grad_out = peaked(BLOCK * 6, 1, (2, 1), 64, torch.float64)
    leaves = [t.clone().requires_grad_() for t in operands]
    index = random_index(BLOCK * 6, 1, 2, BLOCK, 1, "all", "cpu")
    whole = gradients_of(leaves, grad_out, index, None)
    plain = gradients_of(leaves, grad_out, index, BackwardPruning(threshold))
    sampling = BackwardPruning(threshold, sampling=True)
    found = [gradients_of(leaves, grad_out, index, sampling, start + n) for n in range(draws)]
    for name, exact, without, some in zip(NAMES[1:], whole, plain, zip(*found)):
        samples = torch.stack(some)
        of_mean = samples.var(0).sum() / draws
        assert of_mean > 0
        assert (samples.mean(0) - exact).square().sum() / of_mean < 25, name
        assert (without - exact).square().sum() / of_mean > 25, name


@pytest.mark.gpu
@parametrize("portable", [False, True])
@parametrize("dim", [64, 128])
@parametrize("packed", [False, True])
@parametrize("budget", ["few", "all"])
def test_gradients_compiled(monkeypatch, budget, packed, dim, portable, backward_path):
    """With Hopper's kernels where there is such a GPU, and with the portable ones; nothing waits for it, and
    equal seeds give equal bits (in two kernels)."""
    if portable:
        monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    length, batch, heads, block = 1192, 2, (4, 2), 128
    operands = [t.bfloat16() for t in peaked(length, batch, heads, dim, torch.float32, block=block)]
    index = random_index(length, batch, heads[0], block, 1, budget, "cpu")
    index = with_documents(index) if packed else index
    on_gpu = moved(index)
    codes: list = []
    unpack = attention_kernels.unpack_codes

    def spy(*arguments):
        codes.append(unpack(*arguments))
        return codes[-1]

    monkeypatch.setattr(attention_kernels, "unpack_codes", spy)
    leaves = [t.cuda().requires_grad_() for t in operands[:3]]
    ring, grad_out = Ring(cp_group_of(None, None)), operands[3].cuda()
    pruning = BackwardPruning(HIGH, sampling=True)
    runs = []
    for mode in ("default", "error", "error"):  # the first compiles
        torch.cuda.manual_seed(17)
        out, *_ = ring_attention(*leaves, on_gpu, ring, SCALE, pruning=pruning)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            runs.append(torch.autograd.grad(out, leaves, grad_out))
            pruning.seed(out.device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if portable or backward_path == "two_kernels":
        assert all(torch.equal(*each) for each in zip(runs[1], runs[2]))
    seed = seed_of(17, "cuda")
    drawn = expected(operands, index, HIGH, margin=0.02, seed=seed)
    found = codes[-1].cpu()
    assert torch.equal(found.masked_fill(drawn.close, 0), drawn.codes.masked_fill(drawn.close, 0))
    assert budget == "few" or (found > 1).any()
    truth = expected(operands, index, HIGH, codes=found)
    for name, gradient, exact in zip(NAMES[1:], runs[1], truth.results[1:]):
        error = relative_error(gradient.cpu(), exact)
        assert error < 1e-2, f"{name}: relative error {error:.2e}"


def test_equal_seeds_give_equal_bits():
    *operands, grad_out = peaked(BLOCK * 8, 1, (4, 2), 64, torch.float32)
    leaves = [t.clone().requires_grad_() for t in operands]
    index = random_index(BLOCK * 8, 1, 4, BLOCK, 1, "all", "cpu")
    pruning = BackwardPruning(HIGH, sampling=True)
    one, again, other = (gradients_of(leaves, grad_out, index, pruning, seed) for seed in (7, 7, 8))
    assert all(torch.equal(*each) for each in zip(one, again))
    assert not any(torch.equal(*each) for each in zip(one, other))


def test_shares_above_the_threshold_have_the_whole_gradient():
    *operands, grad_out = peaked(BLOCK * 5, 1, (2, 1), 64, torch.float32)
    leaves = [t.clone().requires_grad_() for t in operands]
    index = random_index(BLOCK * 5, 1, 2, BLOCK, 1, "few", "cpu")
    whole = gradients_of(leaves, grad_out, index, BackwardPruning(1e-30))
    found = gradients_of(leaves, grad_out, index, BackwardPruning(1e-30, sampling=True))
    assert all(torch.equal(*each) for each in zip(whole, found))


def test_without_sampling_nothing_is_drawn():
    *operands, grad_out = peaked(BLOCK * 5, 1, (2, 1), 64, torch.float32)
    leaves = [t.clone().requires_grad_() for t in operands]
    index = random_index(BLOCK * 5, 1, 2, BLOCK, 1, "few", "cpu")
    for pruning in (None, BackwardPruning(HIGH)):
        before = torch.Generator().manual_seed(3).get_state()
        gradients_of(leaves, grad_out, index, pruning, 3)
        assert torch.equal(torch.get_rng_state(), before)


@parametrize("way", ["not reentrant", "reentrant"])
def test_a_checkpoint_draws_the_same(way):
    """Dropout after attention too: the pass without gradients and its replay take the same random numbers."""
    *operands, grad_out = peaked(BLOCK * 8, 1, (2, 1), 64, torch.float32)
    config = MTrainingConfig.from_options(
        price=0.0, block_size=BLOCK, window=BLOCK, sample_strata=4, backward_threshold=HIGH,
        backward_sampling=True,
    )  # fmt: skip
    told: list = []

    def layer(query, key, value, factor, config=config):
        out = attend(
            query, key, value, config=config, softmax_scale=SCALE,
            observe_backward=lambda *both: told.append(both),
        ).out  # fmt: skip
        return torch.nn.functional.dropout(out * factor, 0.5)

    def run(through):
        leaves = [t.clone().requires_grad_() for t in (*operands, torch.full((2, 64), 0.5))]
        torch.manual_seed(9)
        out = through(*leaves)
        following = torch.rand(())
        out.backward(grad_out)
        return out.detach(), following, *(leaf.grad for leaf in leaves), *told.pop()

    plain = run(layer)
    again = run(partial(checkpoint, layer, use_reentrant=way == "reentrant"))
    assert all(torch.equal(*each) for each in zip(plain, again))
    cut = run(partial(layer, config=replace(config, backward_sampling=False)))
    assert (0 < plain[-1]).all() and (plain[-1] < cut[-1]).any(), "nothing is drawn"


def written_out(operands, mask, weights):
    """out and gradients in float64, where the gradients' probabilities have weights ``[b, h, N, N]``."""
    query, key, value, grad_out = (t.double() for t in operands)
    group = query.shape[2] // key.shape[2]
    q, k, v, do = (t.permute(1, 2, 0, 3) for t in (query, key, value, grad_out))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p = (q @ k.mT * SCALE).masked_fill(~mask, float("-inf")).softmax(-1)
    out = p @ v
    weighted = p * weights
    ds = weighted * (do @ v.mT - (out * do).sum(-1, keepdim=True)) * SCALE
    of_groups = [t.unflatten(1, (-1, group)).sum(2) for t in (ds.mT @ q, weighted.mT @ do)]
    return [t.permute(2, 0, 1, 3) for t in (out, ds @ k, *of_groups)]


@parametrize("portable", [False, True])
@parametrize("dim", [64, 128])
@parametrize("budget", ["few", "all"])
@parametrize("blocks, world, inner", [(3, 1, 1), (8, 2, 1), (6, 3, 3), (8, 4, 2)])
def test_kernels_with_weights(
    triton_device, monkeypatch, blocks, world, inner, budget, dim, portable, backward_path
):
    """Of every weight, through every round: a GPU takes Hopper's kernels where it has them, and portable
    ones."""
    on_gpu = triton_device == "cuda"
    if portable and backward_path != "two_kernels":
        pytest.skip("the portable kernels have no one-pass backward")
    if portable:
        monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    elif not on_gpu:
        pytest.skip("the Hopper kernels need a GPU")
    if dim != 64 and not on_gpu:
        pytest.skip("interpreted with dimension 64 only: it takes 10 seconds")
    block, dtype = (128, torch.bfloat16) if on_gpu else (BLOCK, torch.float32)
    length, heads = block * blocks, (4, 2)
    operands = [t.to(dtype) for t in peaked(length, 1, heads, dim, torch.float32, block=block)]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the lists by the reference
    index = random_index(length, 1, heads[0], block, world, budget, "cpu", inner)
    number = torch.arange(length) // block
    mask = written_out_mask(index, 1, heads[0])
    apart = (number[:, None] - number).clamp(min=0)
    slashes = index.distances()[:, :, apart] & mask
    codes = torch.randint(0, 2 + MAX_LOG2_WEIGHT, (1, heads[0], blocks, blocks)).to(torch.uint8)
    codes = codes.masked_fill(torch.arange(blocks)[:, None] - torch.arange(blocks) <= 1, 1)
    listed = index.distances()[:, :, apart[::block, ::block]].tril()
    codes *= listed
    of_tokens = codes[:, :, number][..., number].double()
    mask &= ~slashes | (of_tokens > 0)
    weights = torch.where(slashes, 2 ** (of_tokens - 1), 1)
    exact = written_out(operands, mask, weights)
    local = torch.arange(blocks // world)
    full = moved(index) if on_gpu else index
    indices = []
    for rank in range(world):
        own = codes[:, :, block_at(local, rank, world, inner)].contiguous()
        own = own.cuda() if on_gpu else own
        indices.append(pruned_index(full, own, rank, own.numel(), weighted=True))
    if not on_gpu:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    attended: list = []
    found = simulated_ring(
        *(t.to(triton_device) for t in operands), indices, SCALE, 2, attended=attended
    )
    # The forward attended to the same blocks: without the weights all is seen. The two passes add the
    # products of a score in their own orders: scores differ by the rounding of sums of that size, and a sum
    # of shares by as much.
    sizes = [t.double().abs() for t in operands[:2]]
    products = SCALE * torch.einsum("sbhd,tbhd->bhst", sizes[0], sizes[1].repeat_interleave(2, 2))
    rounding = 2 * dim**0.5 * torch.finfo(torch.float32).eps / 2 * products[mask].max().item()
    for seen in attended:
        assert torch.allclose(
            seen, torch.ones_like(seen), atol=1e-2 if on_gpu else 1e-5 + rounding, rtol=0
        )
    for name, one, other in zip(NAMES, found, exact):
        error = relative_error(one.detach().cpu(), other)
        assert error < (1e-2 if on_gpu else 1e-5), f"{name}: relative error {error:.2e}"
