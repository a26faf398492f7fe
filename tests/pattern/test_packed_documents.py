# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing a pattern where documents are packed or windows slide, and attention with it over processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.cp_group import CPGroup, cp_group_of
from megatron_mtraining.layout import stripe, unstripe
from megatron_mtraining.pattern import search_pattern
from megatron_mtraining.pattern.sampled_rows import last_rows, rows_of, stratified_rows
from megatron_mtraining.pattern.selectors import price
from megatron_mtraining.pattern.selectors.candidates import SINK
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import (
    block_lists_of,
    dense_attention,
    random_operands,
    relative_error,
    written_out_mask,
)
from tests.support.pattern_cases import operands
from tests.support.ranks import run_ranks

SEQ, BLOCK = 768, 64
LENGTHS = [[200, 1, 240, 64, 263]]


def probabilities(query, key, rows, starts, scale):
    """Softmax of sampled rows over the keys of their documents: float64 ``[b, h, R, N]``."""
    group = query.shape[2] // key.shape[2]
    q, k = (t.permute(1, 2, 0, 3).double() for t in (query, key))
    scores = q[:, :, rows] @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    position = torch.arange(len(key))
    outside = (position > rows[:, None]) | (position < starts[:, rows, None])
    return scores.masked_fill(outside[:, None], float("-inf")).softmax(-1)


POLICIES = [
    dict(price=0.6), dict(price=1.0, estimator="last"), dict(vertical=40, slash=3),
    dict(policy="xattention", block_threshold=0.6), dict(policy="moba", block_top_k=1),
]  # fmt: skip


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("policy", POLICIES)
def test_recall_is_of_attention_to_visible_keys(policy, window):
    query, key = operands()
    documents = VisibleRanges.from_lengths(LENGTHS, SEQ)
    if window:
        documents = VisibleRanges.from_lengths([SEQ], SEQ).windowed(window)
    rows = {}
    if "estimator" not in policy:
        rows = dict(sample_strata=24, sample_rows=4, held_out_rows=3)
    config = MTrainingConfig.from_options(**policy, **rows, window=64, block_size=BLOCK)
    index = search_pattern(query, key, config, CPGroup(None), 0.125, visible=documents)
    held = stratified_rows(SEQ, 24, 4).view(24, 4)[:, 1:].flatten() if rows else last_rows(SEQ, 64)
    p = probabilities(query, key, held, documents.start, 0.125)
    masks = written_out_mask(index, 1, query.shape[2])[:, :, held]
    truth = (p * masks).sum(-1).mean(-1)
    torch.testing.assert_close(index.recall, truth, atol=2e-5, rtol=1e-5, check_dtype=False)
    assert (index.density() < 1).any() and (index.recall < 1).any()
    # Rows that see nothing beyond window and sinks lose nothing, whatever is selected.
    row, key = held[:, None], torch.arange(SEQ)
    seen = (key <= row) & (key >= documents.start[0, held, None])
    free = seen & (row // BLOCK - key // BLOCK >= 2) & (key >= config.sink)
    assert index.exposed.tolist() == pytest.approx([free.any(1).float().mean().item()])
    assert 0 < index.exposed <= 1
    lost = p * ~masks
    assert (lost.sum(-1)[:, :, ~free.any(1)] == 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_padding_changes_no_pattern_and_no_figure(policy):
    """Of a sequence with padding at its end, whatever that is: selection, density and recall of the sequence
    alone. Padding within it is no row that is searched from, either."""
    lengths, own = [300, 263], 563
    query, key = (each[:, :1] for each in operands())
    query[own:], key[own:] = 7 * query[own:], 7 * key[own:].flip(0)
    config = MTrainingConfig.from_options(
        **policy,
        window=64,
        block_size=BLOCK,
        **({} if "estimator" in policy else dict(sample_strata=32)),
    )
    ends = torch.tensor([0, 300, SEQ])
    padded = VisibleRanges.from_cu_seqlens(ends, SEQ, lengths=torch.tensor(lengths))
    alone = VisibleRanges.from_lengths(lengths, own)
    found, expected = (
        search_pattern(query[:n], key[:n], config, CPGroup(None), 0.125, visible=each)
        for n, each in ((SEQ, padded), (own, alone))
    )
    masks = [written_out_mask(each, 1, query.shape[2]) for each in (found, expected)]
    if policy.get("estimator") != "last":  # its costs are those of a whole sequence
        assert torch.equal(masks[0][:, :, :own, :own], masks[1])
        torch.testing.assert_close(found.recall, expected.recall, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.density(), expected.density(), atol=1e-6, rtol=0)
    assert torch.equal(
        masks[0][:, :, own:].sum(-1), torch.ones_like(masks[0][:, :, own:, 0]).long()
    )
    torch.testing.assert_close(found.exposed, expected.exposed)


@pytest.mark.parametrize("lengths", [[300, 263], [40, 30]])
def test_mean_density_of_ranks_is_that_of_the_whole(lengths):
    """Of block lists, of which each rank has its own, though one may have next to nothing but padding."""
    world, ends = 4, torch.tensor([0, 300, SEQ])
    padded = VisibleRanges.from_cu_seqlens(ends, SEQ, lengths=torch.tensor(lengths))
    torch.manual_seed(3)
    blocks = torch.rand(1, 2, SEQ // BLOCK, SEQ // BLOCK) < 0.3
    none = torch.zeros(1, 2, SEQ // BLOCK, dtype=torch.bool)
    columns = torch.full((1, 2, 0), SEQ)
    lists = block_lists_of(blocks, none, columns, SEQ, BLOCK, world)
    lists = [replace(each, visible=padded) for each in lists]
    masks = unstripe([written_out_mask(each, 1, 2) for each in lists], BLOCK, dim=2)
    rows = padded.rows
    visible = (rows - padded.start[0, rows] + 1).sum()
    densities = torch.stack([each.density() for each in lists])
    truth = masks[:, :, rows].sum((-1, -2)) / visible
    torch.testing.assert_close(densities.mean(0), truth, atol=1e-6, rtol=0)


def test_rows_are_not_of_padding():
    lengths, ends = torch.tensor([1, 70, 0, 130]), torch.tensor([0, 64, 256, 320, 640])
    padded = VisibleRanges.from_cu_seqlens(ends, 640, lengths=lengths)
    wanted = torch.cat(
        [start + torch.arange(n) for start, n in zip(ends.tolist(), lengths.tolist())]
    )
    assert torch.equal(padded.rows, wanted)
    for sampling in (
        MTrainingConfig.from_options(price=1.0).sampling,
        MTrainingConfig.from_options(price=1.0, estimator="last", sample_rows=300).sampling,
    ):
        rows = rows_of(sampling, 640, visible=padded)
        assert len(rows) == len(rows_of(sampling, 640)) and torch.isin(rows, wanted).all()
        assert (rows.diff() >= 0).all()


def test_short_documents_expose_no_rows():
    query, key = operands()
    config = MTrainingConfig.from_options(price=1e4, window=64, block_size=BLOCK, sample_strata=32)
    documents = VisibleRanges.from_lengths([[BLOCK] * (SEQ // BLOCK)], SEQ)
    index = search_pattern(query, key, config, CPGroup(None), 0.125, visible=documents)
    assert index.exposed.tolist() == [0]
    torch.testing.assert_close(index.recall, torch.ones_like(index.recall))


@pytest.mark.parametrize("policy", [each for each in POLICIES if "estimator" not in each])
def test_what_other_documents_hold_changes_no_mass(policy):
    """Whatever keys the first document has, what is chosen within the second stays, if the first one's
    queries ask for nothing in particular."""
    query, key = operands()
    documents = VisibleRanges.from_lengths([[384, 384]], SEQ)
    config = MTrainingConfig.from_options(
        **policy, window=64, block_size=BLOCK, sample_strata=32, sample_rows=2, sink=0
    )
    found = []
    for far in (1.0, 7.0):
        other = key.clone()
        other[:384] *= far
        query[:384] = 0
        index = search_pattern(query, other, config, CPGroup(None), 0.125, visible=documents)
        found.append(written_out_mask(index, 1, query.shape[2])[:, :, 384:])
    assert torch.equal(*found)


@pytest.mark.parametrize("window", [500, 150, 64, 7])
def test_costs_are_of_visible_pairs(window):
    lengths = [[60, 1, 300, 139], [500]]
    costs = VisibleRanges.from_lengths(lengths, 500).windowed(window).costs(64)
    number = [torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in lengths]
    position = torch.arange(500)
    seen = torch.stack([each[:, None] == each for each in number]).tril()
    seen &= position[:, None] - position < window
    pairs = seen.sum((-1, -2)).double()
    torch.testing.assert_close(costs.factor.double(), 500 * 501 / 2 / pairs, rtol=1e-6, atol=0)
    block = torch.arange(500) // 64
    for distance in range(8):
        count = (seen & (block[:, None] - block == distance)).sum((-1, -2)) / 64**2
        torch.testing.assert_close(costs.seen[:, distance].double(), count * costs.factor.double())
    for j in range(8):
        last = torch.stack([(each & (block == j)).any(1).nonzero().max() // 64 for each in seen])
        assert torch.equal(costs.further[:, j], (last - j).int())


CONFIGS = [
    dict(price=0.0), dict(price=0.5), dict(vertical=30, slash=2),
    dict(policy="xattention", block_threshold=0.5),
]  # fmt: skip
RUNS = {
    1: [(None, each, None) for each in CONFIGS] + [(None, each, 100) for each in CONFIGS[1:]],
    2: [(None, CONFIGS[0], None), (1, CONFIGS[1], 300)],
    3: [(None, CONFIGS[3], 100), (1, CONFIGS[0], None)],
    4: [(None, CONFIGS[0], 30), (1, CONFIGS[2], None), (2, CONFIGS[1], 100)],
}
"""Ranks a node, settings, and the sliding window, by the number of ranks."""


def run_packed(rank, world, operands, lengths):
    results = []
    for inner, policy, window in RUNS[world]:
        config = MTrainingConfig.from_options(
            block_size=BLOCK, sample_strata=16, window=0, sink=2, **policy
        )
        group, cp = None, CPGroup(None)
        if world > 1:
            group, cp = dist.group.WORLD, cp_group_of(dist.group.WORLD, inner)
        documents = VisibleRanges.from_lengths(lengths, operands[0].shape[0])
        if window:
            documents = documents.windowed(window)
        parts = [stripe(t, rank, world, BLOCK, inner=cp.inner) for t in operands]
        leaves = [t.clone().requires_grad_() for t in parts[:3]]
        out, _, index, *_ = attend(
            *leaves, config=config, cp_group=group, cp_inner=inner, documents=documents
        )
        out.backward(parts[3])
        masks = written_out_mask(index, 2, 4)
        results.append([masks, cp.inner, out.detach(), *(leaf.grad for leaf in leaves)])
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_processes_agree_with_dense_attention(world):
    """Packed documents, with and without a window, against dense attention, and, with nothing left out, the
    documents one by one."""
    print("torch seed", torch.seed())
    seq = BLOCK * 12
    # One document on several ranks, one of a token, others on and off blocks' edges.
    lengths = [[300, 1, 211, 128, 128], [64, 704 - 5, 5]]
    given = random_operands(seq, 2, 4, 2, 64, torch.float64, "cpu")
    if world == 1:
        results = [run_packed(0, 1, given, lengths)]
    else:
        results = run_ranks(world, run_packed, given, lengths)
    starts = VisibleRanges.from_lengths(lengths, seq).start
    position = torch.arange(seq)
    for number, ranks in enumerate(zip(*results)):
        masks, inner = ranks[0][:2]
        _, policy, window = RUNS[world][number]
        apart = starts[:, :, None] != starts[:, None]
        apart = apart | (position[:, None] - position >= (window or seq))
        if policy.get("policy") == "xattention":  # each rank has its own rows
            whole = [rank[0].transpose(0, 2) for rank in ranks]
            masks = unstripe(whole, BLOCK, inner=inner).transpose(0, 2)
        else:
            assert all(torch.equal(rank[0], masks) for rank in ranks)
        assert not (masks & apart[:, None]).any()
        if policy == CONFIGS[0]:
            assert masks.equal((~apart).tril()[:, None].expand_as(masks))
        expected = dense_attention(*given, masks, 64**-0.5)
        for i, truth in enumerate(expected):
            found = unstripe([rank[2 + i] for rank in ranks], BLOCK, inner=inner)
            assert relative_error(found, truth) < 1e-12
        if policy != CONFIGS[0] or window:
            continue
        for entry, own in enumerate(lengths):
            parts = [t[:, entry : entry + 1].split(own) for t in given]
            alone = [
                dense_attention(*part, torch.ones(len(part[0]), len(part[0])).tril() > 0, 64**-0.5)
                for part in zip(*parts)
            ]
            for truth, separate in zip(expected, zip(*alone)):
                assert relative_error(torch.cat(separate), truth[:, entry : entry + 1]) < 1e-12


def test_a_replay_keeps_documents_apart():
    given = random_operands(256, 1, 4, 2, 64, torch.float64, "cpu")
    config = MTrainingConfig.from_options(block_size=BLOCK, price=0.0)
    documents = VisibleRanges.from_lengths([100, 156], 256)
    gradients = []
    for replayed in (False, True):
        leaves = [t.clone().requires_grad_() for t in given[:3]]
        saved = None
        if replayed:
            with torch.no_grad():
                saved = attend(*leaves, config=config, documents=documents)
        out = attend(*leaves, config=config, saved=saved, documents=documents).out
        gradients.append(torch.autograd.grad(out, leaves, given[3]))
    for one, other in zip(*gradients):
        assert torch.equal(one, other)


def test_documents_of_another_batch_are_named():
    query, key, value, _ = random_operands(256, 2, 4, 2, 64, torch.float32, "cpu")
    config = MTrainingConfig.from_options(block_size=BLOCK, price=0.0)
    for documents in (
        VisibleRanges.from_lengths([256], 256),
        VisibleRanges.from_lengths([[128], [128]], 128),
    ):
        with pytest.raises(ConfigError, match="there are 2 of 256"):
            attend(query, key, value, config=config, documents=documents)


def test_a_cap_counts_slashes_that_documents_have():
    """Most block distances are longer than any document, and no value ranks before a number."""
    query, key = operands()
    documents = VisibleRanges.from_lengths([256] * 3, SEQ)
    config = MTrainingConfig.from_options(
        price=1e-6,
        slash_cap=1,
        window=64,
        sink=0,
        block_size=BLOCK,
        sample_strata=32,
        sample_rows=2,
    )
    index = search_pattern(query, key, config, CPGroup(None), 0.125, visible=documents)
    free = replace(config, policy=replace(config.policy, slash_cap=None))
    every = search_pattern(query, key, free, CPGroup(None), 0.125, visible=documents)
    assert every.distances()[..., 2:4].all(), "documents have four blocks"
    assert (index.distances()[..., 2:4].sum(-1) == 1).all()


def test_columns_are_kept_at_the_same_price_as_slashes(monkeypatch):
    """Of equal documents the visible pairs, and so all costs, are a known part of the causal ones."""
    query, key = operands()
    documents = VisibleRanges.from_lengths([SEQ // 4] * 4, SEQ)
    config = MTrainingConfig.from_options(
        price=0.5, window=64, block_size=BLOCK, sample_strata=32, sample_rows=2
    )
    given = []
    original = price.slash_mass_in_columns

    def seen(sample, keys, positions, values, least, *rest):
        given.append((values, least))
        return original(sample, keys, positions, values, least, *rest)

    monkeypatch.setattr(price, "slash_mass_in_columns", seen)
    search_pattern(query, key, config, CPGroup(None), 0.125, visible=documents)
    (values, least), factor = given[0], float(documents.costs(BLOCK).factor)
    kept = values.view(torch.float32)[(values > 0) & (values < SINK)]
    assert factor == pytest.approx(4, rel=0.01) and len(kept) and kept.min() >= least * factor
