# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block pruning of the backward: which blocks it keeps, and the gradients through them, against attention
written out in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.config import ConfigError
from megatron_mtraining.cp_group import cp_group_of
from megatron_mtraining.layout import block_at, stripe, unstripe
from megatron_mtraining.pattern.block_list_index import MAX_LIST_ENTRIES, pruned_index
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention
from megatron_mtraining.ring.pruning import BackwardPruning, check_entries, check_size, least_share
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import (
    BACKWARD_PATHS,
    RESULTS,
    block_lists_of,
    dense_attention,
    has_backward_path,
    random_index,
    relative_error,
    simulated_ring,
    written_out_mask,
)
from tests.support.pairs import all_pairs, pairwise
from tests.support.pruning_cases import (
    BLOCK,
    HIGH_THRESHOLD,
    INNER,
    SCALE,
    THRESHOLD,
    PruningCase,
    as_lists,
    expected,
    mark_all_rounds,
    moved,
    on_device,
    over_ranks,
    peaked,
    run_pruned,
    with_documents,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_inputs")

SEQUENCES = [(64, 1, 1), (300, 1, 1), (512, 2, 1), (576, 3, 3), (768, 6, 2)]


@pairwise(
    {
        "seq_length, world, inner": SEQUENCES,
        "heads": [(1, 1), (4, 2)],
        "budget": ["none", "few", "all"],
    }
)
def test_blocks_that_are_kept(seq_length, world, inner, heads, budget):
    operands = peaked(seq_length, 2, heads, 64, torch.float64)
    index = random_index(seq_length, 2, heads[0], BLOCK, world, budget, "cpu", inner)
    truth = expected(operands, index, THRESHOLD)
    kept = mark_all_rounds(operands, index, THRESHOLD)
    assert budget != "all" or index.local_blocks * world < 4 or (truth.dropped > 0).any()
    assert torch.equal(kept.bool() | truth.close, truth.kept | truth.close)


@pairwise(
    {
        "seq_length, world, inner": [(300, 1, 1), (384, 2, 1), (384, 3, 3), (512, 4, 2)],
        "heads": [(2, 1), (2, 2)],
        "dim": [64, 128],
        "budget, lists": [("few", False), ("all", False), ("all", True)],
        "packed": [False, True],
    }
)
def test_kernel_interpreted(
    interpreter, monkeypatch, seq_length, world, inner, heads, dim, budget, packed, lists
):
    operands = peaked(seq_length, 1, heads, dim, torch.float32)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the lists by the reference
    index = random_index(seq_length, 1, heads[0], BLOCK, world, budget, "cpu", inner)
    compare_with_reference(monkeypatch, operands, index, packed, lists)


@pytest.mark.gpu
@pairwise(
    {
        "blocks, world, inner": [(9, 1, 1), (16, 4, 2)],
        "dim": [64, 128, 256],
        "budget, lists": [("few", False), ("all", False), ("all", True)],
        "packed": [False, True],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "portable": [False, True],
    }
)
def test_kernel_compiled(
    monkeypatch, blocks, world, inner, dim, budget, packed, lists, dtype, portable
):
    """Hopper's kernels where there is such a GPU, and the portable ones."""
    if portable:
        monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    length = 128 * blocks - (40 if world == 1 else 0)
    operands = [
        t.to(dtype).float() for t in peaked(length, 1, (4, 2), dim, torch.float32, block=128)
    ]
    index = random_index(length, 1, 4, 128, world, budget, "cpu", inner)
    compare_with_reference(monkeypatch, operands, index, packed, lists, dtype, "cuda")


def compare_with_reference(
    monkeypatch, operands, index, packed, lists, dtype=torch.float32, device="cpu"
):
    indices = as_lists(index) if lists else [index] * index.world
    if packed:
        indices = [with_documents(each) for each in indices]
    exact = mark_all_rounds([t.double() for t in operands], indices[0], THRESHOLD, indices)
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    indices = [on_device(each, device) for each in indices]
    operands = [t.to(dtype) for t in operands]
    found = mark_all_rounds(operands, indices[0], THRESHOLD, indices, device)
    # A share within rounding of the threshold may fall on either side: random inputs have next to none.
    assert (found != exact).sum() <= (0 if dtype == torch.float32 else 2)
    assert found.max() <= 1
    assert found.any() and (found == 0).any()


@pytest.mark.parametrize("world", [1, 2, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_gradients(world):
    cases, truths = [], []
    seq_length = BLOCK * world * (5 if world == 1 else 2)
    kinds = [
        ("few", False, False),
        ("all", False, False),
        ("all", True, False),
        ("few", False, True),
    ]
    for (budget, lists, packed), heads, inner in all_pairs(
        list(product(kinds, [(4, 2), (3, 3)], INNER[world]))
    ):
        operands = peaked(seq_length, 2, heads, 64, torch.float64)
        index = random_index(seq_length, 2, heads[0], BLOCK, 1, budget, "cpu")
        index = with_documents(index) if packed else index
        parts = operands, index.distances(), index.columns
        cases.append(PruningCase(*parts, inner, lists, THRESHOLD, packed))
        truths.append(expected(operands, over_ranks(index, world, inner), THRESHOLD))
    assert any((truth.dropped > 0).any() and not truth.close.any() for truth in truths)
    ranks = run_ranks(world, run_pruned, cases) if world > 1 else [run_pruned(0, 1, cases)]
    for case, truth, results in zip(cases, truths, zip(*ranks)):
        if truth.close.any():
            continue  # the side of the threshold is a matter of rounding
        for name, *parts in zip(RESULTS, *(result for result, _, _ in results)):
            found = parts[0] if world == 1 else unstripe(parts, BLOCK, inner=case.inner)
            exact = truth.results[RESULTS.index(name)]
            error = relative_error(found, exact)
            assert error < 1e-12, f"{name}, inner groups of {case.inner}: {error:.1e}"
        dropped = torch.stack([each for _, _, each in results]).mean(0)
        assert torch.allclose(dropped.double(), truth.dropped.mean(-1), atol=1e-5)
        if world == 1 and not case.packed:
            assert torch.allclose(results[0][1], truth.density, atol=1e-6)


@pytest.mark.gpu
@pairwise(
    {
        "budget, lists, packed": [
            ("few", False, False),
            ("all", False, False),
            ("all", True, False),
            ("few", False, True),
        ],
        "dim": [64, 128, 256],
        "portable": [False, True],
        "backward_path": BACKWARD_PATHS,
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_gradients_compiled(monkeypatch, budget, lists, packed, dim, portable, backward_path):
    """With Hopper's kernels where there is such a GPU, and with the portable ones; nothing waits for it."""
    if portable:
        monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    length, batch, heads, block = 1192, 2, (4, 2), 128
    for _ in range(50):  # until no share is within rounding of the threshold
        operands = [
            t.bfloat16() for t in peaked(length, batch, heads, dim, torch.float32, block=block)
        ]
        index = random_index(length, batch, heads[0], block, 1, budget, "cpu")
        index = with_documents(index) if packed else index
        truth = expected(operands, index, THRESHOLD, margin=0.02)
        if not truth.close.any():
            break
    else:
        pytest.fail("shares were close to the threshold in all draws")
    assert budget == "few" or (truth.dropped > 0).any()
    on_gpu = moved(index)
    if lists:
        none, blocks = torch.zeros_like(index.distances()), index.block_mask(0)
        (on_gpu,) = block_lists_of(
            blocks.cuda(), none.cuda(), on_gpu.columns[..., :0], length, block, 1
        )
    told: list = []
    observed = backward_path == "two_kernels"  # in one pass, nothing is observed
    pruning = BackwardPruning(THRESHOLD, (lambda *both: told.append(both)) if observed else None)
    leaves = [t.cuda().requires_grad_() for t in operands[:3]]
    ring, grad_out = Ring(cp_group_of(None, None)), operands[3].cuda()
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out, *_ = ring_attention(*leaves, on_gpu, ring, SCALE, pruning=pruning)
            gradients = torch.autograd.grad(out, leaves, grad_out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, found, exact in zip(RESULTS, (out.detach(), *gradients), truth.results):
        error = relative_error(found.cpu(), exact)
        assert error < 1e-2, f"{name}: relative error {error:.2e}"
    if not observed:
        return
    (density, dropped), _ = told
    assert packed or torch.allclose(density.cpu(), truth.density, atol=1e-5)
    assert torch.allclose(dropped.cpu().double(), truth.dropped.mean(-1), atol=1e-3)


@pairwise(
    {
        "blocks, world, inner": [(3, 1, 1), (6, 2, 1), (8, 4, 2)],
        "heads": [(2, 1), (2, 2)],
        "budget": ["few", "all"],
    }
)
def test_kernels_over_rounds_interpreted(
    interpreter, monkeypatch, blocks, world, inner, heads, budget
):
    check_over_rounds(monkeypatch, blocks, world, inner, heads, 64, budget, "cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "blocks, world, inner": [(3, 1, 1), (8, 2, 1), (6, 3, 3), (8, 4, 2)],
        "dim": [64, 128, 256],
        "budget": ["few", "all"],
        "portable": [False, True],
        "backward_path": BACKWARD_PATHS,
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_kernels_over_rounds_compiled(monkeypatch, blocks, world, inner, dim, budget, portable):
    if portable:
        monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    check_over_rounds(monkeypatch, blocks, world, inner, (4, 2), dim, budget, "cuda")


def check_over_rounds(monkeypatch, blocks, world, inner, heads, dim, budget, device):
    """Kernels with lists of random blocks of a pattern, and the attention that the queries' gradient sums."""
    on_gpu = device == "cuda"
    block, dtype = (128, torch.bfloat16) if on_gpu else (BLOCK, torch.float32)
    length = block * blocks
    operands = [t.to(dtype) for t in peaked(length, 1, heads, dim, torch.float32, block=block)]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the lists by the reference
    index = random_index(length, 1, heads[0], block, world, budget, "cpu", inner)
    number = torch.arange(length) // block
    apart = (number[:, None] - number).clamp(min=0)
    kept = torch.rand(1, heads[0], blocks, blocks) < 0.7
    kept |= torch.arange(blocks)[:, None] - torch.arange(blocks) <= 1
    kept &= index.distances()[:, :, apart[::block, ::block]].tril()
    mask = written_out_mask(index, 1, heads[0])
    mask &= ~index.distances()[:, :, apart] | kept[:, :, number][..., number]
    exact = dense_attention(*(t.double() for t in operands), mask, SCALE)
    full = moved(index) if on_gpu else index
    indices = []
    for rank in range(world):
        own = kept[:, :, block_at(torch.arange(blocks // world), rank, world, inner)]
        own = own.to(torch.uint8).to(device).contiguous()
        indices.append(pruned_index(full, own, rank, own.numel()))
    if not on_gpu:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    attended: list = []
    found = simulated_ring(*(t.to(device) for t in operands), indices, SCALE, 2, attended=attended)
    # The forward attended to the same blocks. The two passes add the products of a score in their own orders:
    # scores differ by the rounding of sums of that size, and a sum of shares by as much.
    sizes = [t.double().abs() for t in operands[:2]]
    products = SCALE * torch.einsum(
        "sbhd,tbhd->bhst", sizes[0], sizes[1].repeat_interleave(heads[0] // heads[1], 2)
    )
    rounding = 2 * dim**0.5 * torch.finfo(torch.float32).eps / 2 * products[mask].max().item()
    for seen in attended:
        assert torch.allclose(
            seen, torch.ones_like(seen), atol=1e-2 if on_gpu else 1e-5 + rounding, rtol=0
        )
    for name, one, other in zip(RESULTS, found, exact):
        error = relative_error(one.detach().cpu(), other)
        assert error < (1e-2 if on_gpu else 1e-5), f"{name}: relative error {error:.2e}"


def test_a_tiny_threshold_keeps_everything():
    operands = peaked(BLOCK * 5, 1, (2, 1), 64, torch.float64)
    index = random_index(BLOCK * 5, 1, 2, BLOCK, 1, "few", "cpu")
    case = PruningCase(operands, index.distances(), index.columns, None, False, 1e-300)
    ((pruned, density, dropped),) = run_pruned(0, 1, [case])
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    out, *_ = ring_attention(*leaves, index, Ring(cp_group_of(None, None)), SCALE)
    out.backward(operands[3])
    for name, found, exact in zip(RESULTS, pruned, (out, *(leaf.grad for leaf in leaves))):
        assert relative_error(found, exact) < 1e-14, name
    assert torch.equal(density, index.density()) and (dropped < 1e-12).all()


def test_what_is_not_a_number_stays():
    """A query of NaN makes its whole row NaN, in the backward as well: nothing hides it."""
    operands = peaked(BLOCK * 6, 1, (1, 1), 64, torch.float32)
    operands[0][BLOCK * 5 + 3] = float("nan")
    index = random_index(BLOCK * 6, 1, 1, BLOCK, 1, "all", "cpu")
    kept = mark_all_rounds(operands, index, 1e6)
    assert kept[0, 0, 5].all() and not kept[0, 0, 4, :3].any()
    case = PruningCase(operands, index.distances(), index.columns, None, False, 1e6)
    (((_, *gradients), _, _),) = run_pruned(0, 1, [case])
    for gradient in gradients[1:]:  # of keys and values: all are seen by that query
        assert gradient.isnan().all()


def test_packed_documents_have_their_own_mean():
    index = random_index(BLOCK * 6, 2, 1, BLOCK, 1, "all", "cpu")
    starts = torch.zeros(2, BLOCK * 6, dtype=torch.int32)
    starts[1, BLOCK * 2 :] = BLOCK * 2
    found = least_share(replace(index, visible=VisibleRanges(starts)), 3.0)
    visible = [(torch.arange(BLOCK * 6) - start + 1).float().mean() for start in starts]
    assert torch.allclose(found, torch.tensor([3.0 * BLOCK / each for each in visible]))
    assert torch.allclose(found[0], least_share(index, 3.0)[0])


def test_padding_prunes_nothing_more():
    """What a gradient leaves out, and what is told of it, are those of the sequences without padding."""
    own, length = BLOCK * 6, BLOCK * 10
    operands = peaked(length, 1, (2, 1), 64, torch.float64)
    config = MTrainingConfig.from_options(price=0.0, block_size=BLOCK, backward_threshold=1.5)
    cases = []
    for end in (own, length):
        padded = VisibleRanges.from_cu_seqlens(
            torch.tensor([0, end]), end, lengths=torch.tensor([own])
        )
        leaves = [t[:end].clone().requires_grad_() for t in operands[:3]]
        told: list = []
        result = attend(
            *leaves, config=config, documents=padded,
            observe_backward=lambda *both, told=told: told.append(both),
        )  # fmt: skip
        result.out.backward(operands[3][:end])
        cases.append(([t.grad[:own] for t in leaves], told[0]))
    (alone, expected), (padded, found) = cases
    for mine, theirs in zip(padded, alone):
        assert relative_error(mine, theirs) < 1e-12
    assert (expected[1] > 0.001).all(), "something is left out"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_later_tokens_reach():
    """With a dense forward, those of the query block, and the lengths of documents, change which terms of a
    query's gradient are left out. No others do, and none of them changes an output."""
    length, begin, end = BLOCK * 12, BLOCK * 4, BLOCK * 5  # of all tokens, and of the query block
    config = MTrainingConfig.from_options(price=0.0, block_size=BLOCK, backward_threshold=1.5)
    query, *others = [torch.randn(length, 1, 1, 64, dtype=torch.float64) for _ in range(4)]

    def found(query, key, value, grad_out, lengths=(end, length - end)):
        """Outputs before the query block and in it, but for its last query; and queries' gradients."""
        leaf = query.clone().requires_grad_()
        documents = VisibleRanges.from_lengths(lengths, length)
        out = attend(leaf, key, value, config=config, documents=documents).out
        (grad,) = torch.autograd.grad(out, leaf, grad_out)
        return [each.detach()[part] for each in (out, grad) for part in parts]

    parts = slice(begin), slice(begin, end - 1)
    truth = found(query, *others)
    asks = query.clone()
    asks[end - 1] = 10 * others[0][BLOCK + 3]  # for the second block, as the others do not
    after = [torch.cat((t[:end], torch.randn_like(t[end:]))) for t in (query, *others)]
    for name, changed, moves in (
        ("tokens after the query block", found(*after), (False, False)),
        ("queries of the block", found(asks, *others), (False, True)),
        ("documents", found(query, *others, [end] + [1] * (length - end)), (True, True)),
    ):
        errors = [relative_error(mine, theirs) for mine, theirs in zip(changed, truth)]
        assert max(errors[:2]) < 1e-12, f"{name} change outputs"
        for error, moved_ in zip(errors[2:], moves):
            assert error > 0.01 if moved_ else error < 1e-12, f"{name}: {error}"


@pytest.mark.parametrize("budget, lists", [("few", False), ("all", False), ("all", True)])
def test_density_of_packed_documents(budget, lists):
    """Of one rank it is what the pruned lists themselves have."""
    operands = peaked(BLOCK * 9, 2, (3, 1), 64, torch.float64)
    index = with_documents(random_index(BLOCK * 9, 2, 3, BLOCK, 1, budget, "cpu"))
    if lists:
        index = replace(as_lists(index)[0], visible=index.visible)
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    told: list = []
    pruning = BackwardPruning(HIGH_THRESHOLD, lambda *both: told.append(both))
    out, *_ = ring_attention(*leaves, index, Ring(cp_group_of(None, None)), SCALE, pruning=pruning)
    out.backward(operands[3])
    kept = mark_all_rounds(operands, index, HIGH_THRESHOLD)
    exact = pruned_index(index, kept, 0, kept.numel()).density()
    assert torch.allclose(told[0][0], exact, rtol=1e-6)
    assert budget == "few" or (told[0][0] < index.density()).all()


def replay(rank, world, config, operands):
    """Gradients of attend, of its replay from the result of a first pass, and without pruning; and what the
    first two left out."""
    parts = [stripe(t, rank, world, BLOCK, inner=1) for t in operands]
    gradients: list = []
    told: list = []
    first = None
    for used in (config, config, replace(config, backward_threshold=0.0)):
        leaves = [t.clone().requires_grad_() for t in parts[:3]]
        result = attend(
            *leaves, config=used, cp_group=dist.group.WORLD, cp_inner=1, softmax_scale=SCALE,
            saved=first, observe_backward=lambda *both: told.append(both),
        )  # fmt: skip
        result.out.backward(parts[3])
        gradients.append([leaf.grad for leaf in leaves])
        first = first or result
    return gradients, told


def test_a_replay_keeps_the_same():
    operands = peaked(BLOCK * 8, 1, (2, 1), 64, torch.float32)
    config = MTrainingConfig.from_options(
        policy="fixed", vertical=8, slash=BLOCK * 8, block_size=BLOCK, window=BLOCK, sample_strata=4,
        backward_threshold=HIGH_THRESHOLD,
    )  # fmt: skip
    for (first, again, whole), told in run_ranks(2, replay, config, operands):
        for one, other in zip(first, again):
            assert torch.equal(one, other)
        assert not torch.allclose(first[1], whole[1], rtol=1e-3), "nothing is left out"
        (density, dropped), (density_again, dropped_again) = told[:2]
        assert len(told) == 2, "the third backward is whole"
        assert torch.equal(density, density_again) and torch.equal(dropped, dropped_again)
        assert (dropped > 0).any()


@pytest.mark.parametrize("value", [-1, -0.001, float("nan"), float("inf"), True, "1"])
def test_bad_thresholds_are_refused(value):
    with pytest.raises(ConfigError, match="--mtraining-backward-threshold"):
        MTrainingConfig.from_options(backward_threshold=value)


def test_too_many_blocks_are_refused():
    query = torch.empty(1, device="meta").expand(2**20, 1, 32, 128)
    with pytest.raises(ConfigError, match="use more tensor- or context-parallel ranks"):
        check_size(query, 128, 1, 1)
    check_size(query[: 2**17], 128, 8, 8)
    # One of two ranks has room: none goes on.
    with pytest.raises(ConfigError, match=f"{2**29 + 2**17} blocks"):
        check_size(query[: 2**19], 128, 2, 1)
    # Known before there are operands.
    with pytest.raises(ConfigError, match=f"{2**29 + 2**17} blocks"):
        check_entries(32, 1, 2**19, 128, 2, 1)
    check_entries(16, 1, 2**19, 128, 2, 1)
    with pytest.raises(ConfigError, match="for 16 heads and 524288 tokens on each of 2 ranks"):
        check_entries(16, 2, 2**19, 128, 2, 1)


@pytest.mark.parametrize(("length", "world"), [(2**19, 1), (2**18, 4)])
def test_32_heads_have_room(length, world):
    """At 512K tokens on one rank, and 1M on four: four tiles of each entry are counted in 32 bits."""
    check_entries(32, 1, length, 128, world, 1)
    assert 4 * MAX_LIST_ENTRIES < 2**31
