# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Visible ranges: attention within documents and sliding windows against dense attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.kernels.attention import reference
from megatron_mtraining.layout import block_at, token_positions
from megatron_mtraining.pattern import build_index
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import (
    BACKWARD_PATHS,
    PORTABLE_DIMS,
    TOLERANCE,
    assert_results,
    block_lists_of,
    dense_attention,
    has_backward_path,
    random_index,
    random_operands,
    relative_error,
    simulated_ring,
    written_out_mask,
)
from tests.support.pairs import pairwise

pytestmark = pytest.mark.usefixtures("fresh_inputs")

KINDS = ["random", "tokens", "edges", "one", "short end", "window"]


def random_lengths(seq_length: int, block: int, kind: str) -> list[int]:
    """Lengths of documents: any; some of one token; ends at blocks' edges; one for all; a last one of few."""
    if kind == "one":
        return [seq_length]
    if kind == "short end":
        return [seq_length - 3, 3] if seq_length > 3 else [seq_length]
    found, left = [], seq_length
    while left:
        most = {"tokens": block, "edges": 4}.get(kind, max(2, seq_length // 2))
        length = int(torch.randint(1, most, ()))
        if kind == "tokens" and torch.rand(()) < 0.4:
            length = 1
        if kind == "edges":
            length *= block
        found.append(min(length, left))
        left -= found[-1]
    return found


def drawn(seq_length, batch, block, kind, device="cpu"):
    """Visible ranges, and, made without them, which keys queries see but for causality: ``[b, N, N]``."""
    lengths = [random_lengths(seq_length, block, kind) for _ in range(batch)]
    if kind == "one" and batch > 1:  # beside others
        lengths[1] = random_lengths(seq_length, block, "random")
    ranges = VisibleRanges.from_lengths(lengths, seq_length, device)
    number = [torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in lengths]
    together = torch.stack([each[:, None] == each for each in number])
    if kind == "window":
        # Less than a block, too. Of one key there are no gradients to compare.
        size = int(2 * (seq_length / 2) ** float(torch.rand(())))
        position = torch.arange(seq_length)
        ranges, together = ranges.windowed(size), together & (position[:, None] - position < size)
    return ranges, together.to(device)


def packed_index(seq_length, batch, heads, block, world, inner, budget, kind, device, lists):
    """The index (each rank's, if of block lists), its mask, and the visible pairs, both made without it."""
    ranges, together = drawn(seq_length, batch, block, kind, device)
    index = random_index(seq_length, batch, heads, block, world, budget, device, inner)
    mask = written_out_mask(index, batch, heads) & together[:, None]
    if not lists:
        return replace(index, visible=ranges), mask, together.tril()
    num_blocks = index.member.shape[-1]
    blocks = torch.rand(batch, heads, num_blocks, num_blocks, device=device) < 0.4
    own = torch.arange(heads, device=device) % 2 == 0  # every second head has distances and columns
    blocks &= own[:, None, None]
    distances = index.distances() & ~own[:, None]
    columns = torch.where(own[:, None], seq_length, index.columns)
    at = torch.arange(seq_length, device=device) // block
    of_blocks = (blocks[:, :, at[:, None], at] | (at[:, None] == at)) & together[:, None]
    of_blocks = of_blocks.tril()
    mask = torch.where(own[:, None, None], of_blocks, mask)
    indices = block_lists_of(blocks, distances, columns, seq_length, block, world, inner)
    return [replace(each, visible=ranges) for each in indices], mask, together.tril()


def check(
    seq_length, world, inner, heads, dim, budget, kind, dtype, block, tolerance, device="cpu",
    lists=False, batch=2,
):  # fmt: skip
    operands = random_operands(seq_length, batch, *heads, dim, dtype, device)
    index, mask, _ = packed_index(
        seq_length, batch, heads[0], block, world, inner, budget, kind, device, lists
    )
    scale = 0.7 * dim**-0.5
    expected = dense_attention(*operands, mask, scale)
    actual = simulated_ring(*operands, index, scale, parts_of_heads=max(1, inner - 1))
    assert_results(actual, expected, tolerance)


@pairwise(
    {
        "seq_length, world, inner, budget": [
            (300, 1, 1, "few"), (384, 2, 2, "all"), (384, 2, 1, "few"), (768, 6, 3, "few"),
        ],
        "kind": KINDS,
        "lists": [False, True],
    }
)  # fmt: skip
def test_references(seq_length, world, inner, budget, kind, lists, monkeypatch):
    # The forward goes by parts of about 30 queries.
    monkeypatch.setattr(reference, "FORWARD_SCORES", 1 << 16)
    case = seq_length, world, inner, (4, 2), 64, budget, kind
    check(*case, torch.float64, 64, 1e-12, lists=lists)


@pairwise(
    {
        "seq_length, world, inner, block, kind": [
            (300, 1, 1, 64, "random"),
            (150, 1, 1, 64, "tokens"),
            (200, 1, 1, 128, "window"),
            (128, 1, 1, 64, "short end"),
            (256, 2, 1, 64, "window"),
            (192, 3, 3, 64, "random"),
            (256, 2, 2, 128, "edges"),
            (256, 4, 2, 64, "tokens"),
        ],
        "batch": [1, 2],
        "dim": [64, 128],
        "budget": ["few", "all"],
        "lists": [False, True],
    }
)
def test_kernels_interpreted(
    interpreter, seq_length, world, inner, block, kind, batch, dim, budget, lists
):
    case = seq_length, world, inner, (2, 1), dim, budget, kind
    check(*case, torch.float32, block, 1e-5, lists=lists, batch=batch)


@pairwise({"kind, lists": [("random", False), ("tokens", True)], "dim": PORTABLE_DIMS})
def test_other_head_dims_interpreted(interpreter, kind, lists, dim):
    case = 150, 1, 1, (2, 1), dim, "few", kind, torch.float32, 64, 1e-5
    check(*case, lists=lists, batch=1)


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "seq_length, world, inner, heads, block": [
            (1000, 1, 1, (7, 1), 128),
            (1152, 3, 1, (4, 2), 128),
            (2048, 4, 2, (4, 2), 128),
            (1536, 2, 2, (8, 1), 128),
            (768, 4, 4, (2, 2), 64),
        ],
        "dim": [64, 128, 256],
        "budget": ["few", "all"],
        "kind": KINDS,
        "dtype": TOLERANCE,
        "lists": [False, True],
        "backward_path": BACKWARD_PATHS,
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_kernels_compiled(seq_length, world, inner, heads, dim, block, budget, kind, dtype, lists):
    case = seq_length, world, inner, heads, dim, budget, kind, dtype, block, TOLERANCE[dtype]
    check(*case, "cuda", lists=lists)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seq_length", "world", "inner"), [(500, 1, 1), (768, 3, 1), (768, 4, 2)])
def test_what_is_attended_to_is_counted(seq_length, world, inner, kind):
    case = seq_length, 2, 3, 64, world, inner, "few", kind, "cpu"
    index, mask, visible = packed_index(*case, False)
    pairs, causal = mask.sum((-1, -2)).double(), visible.sum((-1, -2))
    assert torch.equal(written_out_mask(index, 2, 3), mask)
    assert torch.equal(index.work().sum((-1, -2)), pairs)
    assert torch.allclose(index.density().double(), pairs / causal[:, None])
    assert torch.equal(index.visible.pairs(64).sum(-1), causal.double())
    indices, mask, visible = packed_index(*case, True)
    for rank, own in enumerate(indices):
        rows = block_at(torch.arange(own.local_blocks), rank, world, inner)[:, None] * 64
        rows = (rows + torch.arange(64)).flatten()
        rows = rows[rows < seq_length]
        for b in range(2):
            for h in range(3):
                assert torch.equal(own.token_mask(b, h), mask[b, h, rows])
        pairs = mask[:, :, rows].sum((-1, -2)).double()
        assert torch.equal(own.work()[:, :, rank].sum(-1), pairs)
        # A share of the mean number of ranks: so the mean over ranks is that of the whole.
        assert torch.allclose(
            own.density().double(), pairs * world / visible.sum((-1, -2))[:, None]
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seq_length", "world", "inner"), [(500, 1, 1), (768, 3, 1), (768, 4, 2)])
def test_bounds_are_exact(seq_length, world, inner, kind):
    """What is skipped has nothing, what gets no mask is whole; and no block too few or too many of both."""
    block = 64
    documents, together = drawn(seq_length, 1, block, kind)
    num_blocks = -(-seq_length // block)
    seen = torch.zeros(num_blocks * block, num_blocks * block, dtype=torch.bool)
    seen[:seq_length, :seq_length] = together[0].tril()
    seen = seen.unflatten(0, (-1, block)).unflatten(2, (-1, block))  # [NB, B, NB, B]
    some = seen.any(3).any(1)
    there = torch.arange(num_blocks * block).view(-1, block) < seq_length
    whole = (seen | ~there[:, :, None, None] | ~there[None, None]).all(3).all(1)
    for rank in range(world):
        local = documents.on(rank, world, inner, block)
        assert torch.equal(local.start_f32, local.start.float())
        for a in range(num_blocks // world):
            own = int(block_at(a, rank, world, inner))
            first, from_there = local.kv_block_bounds[0, :, a].tolist()
            assert some[own].nonzero().min() == first
            assert whole[own, :own].nonzero().flatten().tolist() == list(range(from_there, own))
        for j in range(num_blocks):
            until, end = local.q_block_bounds[0, :, j].tolist()
            assert some[:, j].nonzero().max() + 1 == end
            later = whole[j + 1 :, j].nonzero().flatten() + j + 1
            assert later.tolist() == list(range(j + 1, until))


def test_one_start_in_many_notations():
    lengths = [[5, 1, 250], [256]]
    documents = VisibleRanges.from_lengths(lengths, 256)
    assert documents.start[0, [0, 4, 5, 6, 255]].tolist() == [0, 0, 5, 6, 6]
    assert documents.end[0, [0, 4, 5, 6, 255]].tolist() == [4, 4, 5, 255, 255]
    ids = torch.stack([torch.cat([torch.arange(n) for n in own]) for own in lengths])
    assert torch.equal(VisibleRanges.from_position_ids(ids).start, documents.start)
    ends = torch.tensor([0, 5, 6, 256, 256, 256], dtype=torch.int32)
    assert torch.equal(VisibleRanges.from_cu_seqlens(ends, 256).start, documents.start[:1])
    local = documents.on(1, 2, None, 64).start
    assert torch.equal(local, documents.start[:, token_positions(256, 1, 2, 64)])


def test_padding_sees_itself_alone():
    ends, own = torch.tensor([0, 100, 100, 160, 256]), torch.tensor([97, 0, 60, 1])
    padded = VisibleRanges.from_cu_seqlens(ends, 256, lengths=own)
    apart = [97, 1, 1, 1, 60, *[1] * 96]
    assert torch.equal(padded.start, VisibleRanges.from_lengths(apart, 256).start)
    assert len(padded.rows) == 158
    visible = torch.arange(256)[:, None] >= torch.arange(256)
    visible &= torch.arange(256) >= padded.start[0, :, None]
    assert padded.pairs(64).sum() == visible[padded.rows].sum()
    assert padded.windowed(16).rows is padded.rows
    whole = VisibleRanges.from_cu_seqlens(ends, 256, lengths=ends.diff())
    assert whole.rows is None
    assert VisibleRanges.from_cu_seqlens(ends, 256, lengths=0 * own).rows is None
    for wrong in (own[1:], -own, own + 4):
        with pytest.raises(
            ConfigError, match="tokens without padding, but .100, 0, 60, 96. with it"
        ):
            VisibleRanges.from_cu_seqlens(ends, 256, lengths=wrong)


def test_a_window_narrows_ranges_at_both_ends():
    ranges = VisibleRanges.from_lengths([5, 251], 256).windowed(4)
    assert ranges.start[0, [0, 3, 4, 5, 8, 9, 255]].tolist() == [0, 0, 1, 5, 5, 6, 252]
    assert ranges.end[0, [0, 1, 4, 5, 252, 255]].tolist() == [3, 4, 4, 8, 255, 255]
    assert torch.equal(ranges.windowed(9).start, ranges.start)
    for size, named in ((0, "window_size is 0: use 1 or more"), (1.5, "window_size is 1.5")):
        with pytest.raises(ConfigError, match=named):
            ranges.windowed(size)


def test_what_cannot_be_documents_is_named():
    with pytest.raises(ConfigError, match="2 documents of batch entry 1 have 255 tokens.* 256"):
        VisibleRanges.from_lengths([[256], [5, 250]], 256)
    with pytest.raises(ConfigError, match="document 1 of batch entry 0 has 0 tokens"):
        VisibleRanges.from_lengths([256, 0], 256)
    for ends in ([0, 5, 250], [1, 256], [0, 9, 5, 256], [0]):
        with pytest.raises(ConfigError, match="ascend from 0 to the 256 tokens"):
            VisibleRanges.from_cu_seqlens(torch.tensor(ends), 256)
    ids = torch.arange(256)[None].clone()
    ids[0, 7] = 0  # but not those after it
    with pytest.raises(ConfigError, match="token 8 of batch entry 0 has its document start at 0"):
        VisibleRanges.from_position_ids(ids)
    for wrong in (ids * 2, ids.flip(1) * 0 + 9, torch.tensor([[0, 1, 2, 1, 4]])):
        with pytest.raises(ConfigError, match="has its visible range start at"):
            VisibleRanges(wrong)
    with pytest.raises(ConfigError, match="torch.float32"):
        VisibleRanges(torch.zeros(1, 256))
    with pytest.raises(ConfigError, match="too long"):
        VisibleRanges(torch.zeros(1, 2**24 + 1, dtype=torch.int32))


def test_no_other_document_has_a_say():
    """NaN in one document stays in it, even where blocks hold tokens of both: they are skipped or masked."""
    query, key, value, grad_out = random_operands(256, 1, 2, 1, 64, torch.float64, "cpu")
    index = build_index(torch.ones(1, 2, 4, dtype=torch.bool), torch.zeros(1, 2, 0), 256, 64, 1)
    index = replace(index, visible=VisibleRanges.from_lengths([128, 128], 256))
    before = simulated_ring(query, key, value, grad_out, index, 0.1)
    for tensor in (query, key, value, grad_out):
        tensor[:128] += 1
    after = simulated_ring(query, key, value, grad_out, index, 0.1)
    for one, other in zip(before, after):
        assert torch.equal(one[128:], other[128:]) and not torch.equal(one[:128], other[:128])


def test_no_token_sees_padding():
    """Sequences of 90 and 60 tokens, each padded to 128: whatever the padding holds, and no gradient reaches
    it."""
    operands = random_operands(256, 1, 2, 1, 64, torch.float64, "cpu")
    index = build_index(torch.ones(1, 2, 4, dtype=torch.bool), torch.zeros(1, 2, 0), 256, 64, 1)
    index = replace(index, visible=VisibleRanges.from_cu_seqlens(torch.tensor([0, 128, 256]), 256))
    tokens = [torch.arange(90), torch.arange(128, 188)]
    padding = torch.ones(256, dtype=torch.bool).index_fill(0, torch.cat(tokens), False)
    for tensor in operands[:3]:
        tensor[padding] = 50
    operands[3][padding] = 0
    found = simulated_ring(*operands, index, 0.1)
    for gradient in found[1:]:
        assert not gradient[padding].any()
    for own in tokens:
        causal = torch.ones(len(own), len(own), dtype=torch.bool).tril()
        alone = dense_attention(*(t[own] for t in operands), causal, 0.1)
        for mine, truth in zip(found, alone):
            assert relative_error(mine[own], truth) < 1e-12


WRONG_NUMBERS = {
    "lengths": (lambda: VisibleRanges.from_lengths([1.7, 2.9], 3), "torch.float32"),
    "ends": (lambda: VisibleRanges.from_cu_seqlens(torch.tensor([0, 1.5, 3]), 3), "torch.float32"),
    "starts": (lambda: VisibleRanges(torch.tensor([[0, 2**32, 2**32]])), str(2**32)),
    "sums": (lambda: VisibleRanges.from_lengths([2**62] * 4 + [5], 5), "add up"),
    "nothing": (
        lambda: VisibleRanges(torch.zeros(1, 0, dtype=torch.int64)),
        "starts of visible ranges",
    ),
    "a list": (lambda: VisibleRanges([[0, 0]]), "list"),
    "starts without values": (
        lambda: VisibleRanges(torch.zeros(1, 4).long().to("meta")),
        "device meta",
    ),
    "sparse starts": (
        lambda: VisibleRanges(torch.zeros(1, 4).long().to_sparse()),
        "torch.sparse_coo",
    ),
    "a number": (lambda: VisibleRanges.from_lengths(4, 4), "lengths of documents are a int"),
    "a text": (lambda: VisibleRanges.from_lengths("13", 4), "lengths of documents are a str"),
    "what has no order": (
        lambda: VisibleRanges.from_lengths({3, 1}, 4),
        "lengths of documents are a set",
    ),
    "a length of none": (
        lambda: VisibleRanges.from_lengths([4, None], 4),
        r"are \[4, None\]: give a list",
    ),
    "lists in lists": (lambda: VisibleRanges.from_lengths([[[3], [1]]], 4), "have 2 dimensions"),
    "a sequence of a fraction": (lambda: VisibleRanges.from_lengths([4], 4.0), "seq_length is 4.0"),
    "a sequence of none": (
        lambda: VisibleRanges.from_cu_seqlens([0, 4], None),
        "seq_length is None",
    ),
    "no ends": (lambda: VisibleRanges.from_cu_seqlens(None, 4), "cu_seqlens are None"),
    "two rows of ends": (
        lambda: VisibleRanges.from_cu_seqlens(torch.tensor([[0, 3], [3, 4]]), 4),
        r"cu_seqlens are of shape \[2, 2\]",
    ),
    "no ids": (lambda: VisibleRanges.from_position_ids([[0, 1]]), "position_ids is a list"),
    "ids of one sequence": (
        lambda: VisibleRanges.from_position_ids(torch.arange(4)),
        r"position_ids are .*\[4\]",
    ),
    "ids of no numbers": (
        lambda: VisibleRanges.from_position_ids(torch.ones(1, 4) > 0),
        "torch.bool",
    ),
    "a rank past the last": (
        lambda: VisibleRanges.from_lengths([256], 256).on(2, 2, None, 64),
        "cp_rank is 2",
    ),
    "a negative rank": (
        lambda: VisibleRanges.from_lengths([256], 256).on(-1, 2, None, 64),
        "cp_rank is -1",
    ),
    "a block of none": (lambda: VisibleRanges.from_lengths([256], 256).pairs(0), "block_size is 0"),
    "a block of a fraction": (
        lambda: VisibleRanges.from_lengths([256], 256).on(0, 1, None, 1.5),
        "1.5",
    ),
}


@pytest.mark.parametrize("case", WRONG_NUMBERS)
def test_numbers_are_not_cut_to_others(case):
    wrong, named = WRONG_NUMBERS[case]
    with pytest.raises(ConfigError, match=named):
        wrong()
