# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pattern: what is always kept, what is found, and that all ranks choose alike."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.config import FixedPolicy, MobaPolicy, PricePolicy, XAttentionPolicy
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.layout import block_at, stripe
from megatron_mtraining.pattern import build_index, search_pattern, selector
from megatron_mtraining.pattern.block_list_index import most_list_entries
from megatron_mtraining.pattern.sampled_rows import stratified_rows
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import random_index, random_operands
from tests.support.pattern_cases import structured
from tests.support.ranks import run_ranks

SEQ = 768


def settings(**changes):
    base = dict(vertical=24, slash=3, window=70, sink=4, block_size=64, sample_strata=32)
    return MTrainingConfig.from_options(**{**base, **changes})


def columns_of(index, b, h):
    """Global positions of a head's columns, and whether each is one, for world 1."""
    return index.columns[b, h, : int(index.column_ptr[b, h, -1])].tolist()


def test_rows_are_spread_each_once_and_the_same_everywhere():
    for seq, strata, rows in [(768, 32, 1), (768, 24, 4), (131072, 64, 1), (1000, 7, 3)]:
        got = stratified_rows(seq, strata, rows)
        assert (got.diff() > 0).all() and got[0] >= 0 and got[-1] < seq
        stratum = got.view(strata, rows) * strata // seq
        expected = torch.arange(strata)[:, None]
        assert ((stratum - expected).abs() <= (seq % (strata * rows) > 0)).all()
    # Offsets within blocks differ, so that no diagonal is seen at one offset only.
    assert len(set((stratified_rows(131072, 64, 1) % 128).tolist())) > 32


def test_distance_0_window_and_sinks_always_hold():
    query, key, _, _ = random_operands(SEQ, 1, 4, 2, 64, torch.float32, "cpu")
    for changes in ({}, dict(slash=0), dict(vertical=0), dict(slash=0, vertical=0), dict(sink=0)):
        config = settings(**changes)
        index = search_pattern(query, key, config, CPGroup(None), 0.125)
        for h in range(4):
            mask = index.token_mask(0, h)
            i = torch.arange(SEQ)
            for back in (0, 1, 63, 64, 70):
                assert mask[i[back:], i[: SEQ - back]].all()
            assert mask[:, : config.sink].tril().sum() == torch.ones(SEQ, config.sink).tril().sum()
            assert not mask.triu(1).any()


def test_diagonal_block_cannot_be_absent():
    nothing = torch.zeros(1, 1, 12, dtype=torch.bool)
    none = torch.full((1, 1, 5), SEQ)
    index = build_index(nothing, none, SEQ, 64, 3)
    assert index.member[0, 0, 0] == 1
    assert torch.equal(
        index.token_mask(0, 0),
        build_index(nothing.index_fill(-1, torch.tensor([0]), True), none, SEQ, 64, 3).token_mask(
            0, 0
        ),
    )
    assert index.token_mask(0, 0).diagonal().all()


def test_a_planted_diagonal_and_a_planted_column_are_found():
    query, key = structured(SEQ)
    index = search_pattern(query, key, settings(slash=1, vertical=5), CPGroup(None), 0.125)
    found = index.distances()[0, 0].nonzero().flatten().tolist()
    # Token distance 300 with blocks of 64 crosses block distances 4 and 5.
    assert set(found) == {0, 1, 2, 4, 5}
    assert 200 in columns_of(index, 0, 1)


@pytest.mark.parametrize(("window", "block"), [(0, 64), (1, 64), (64, 64), (129, 64), (128, 128)])
def test_the_window_is_as_wide_as_asked(window, block):
    query, key, _, _ = random_operands(512, 1, 2, 2, 64, torch.float32, "cpu")
    config = settings(window=window, block_size=block, slash=0, vertical=0, sink=0)
    mask = search_pattern(query, key, config, CPGroup(None), 0.125).token_mask(0, 0)
    i = torch.arange(512)
    for back in (window, max(0, window - 1)):
        assert mask[i[back:], i[: 512 - back]].all()
    # No block more than it takes: the first query of a block sees no farther.
    farthest = -(-window // block) * block
    assert mask[256].int().argmax() == 256 - farthest


def test_the_callers_distances_are_left_alone():
    distances = torch.zeros(1, 1, 4, dtype=torch.bool)
    build_index(distances, torch.zeros(1, 1, 0, dtype=torch.int64), 256, 64, 1)
    assert not distances.any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_what_is_not_a_number_does_not_break_the_choice(bad):
    query, key, _, _ = random_operands(SEQ, 1, 2, 2, 64, torch.float32, "cpu")
    key[500, 0, 0, 3] = bad
    config = settings()
    index = search_pattern(query, key, config, CPGroup(None), 0.125)
    for h in range(2):
        found = columns_of(index, 0, h)
        assert len(set(found)) == len(found) and set(range(config.sink)) <= set(found)
        assert index.distances()[0, h, :3].all()


def test_the_future_can_change_the_choice_but_nothing_else():
    """A step's pattern is chosen from all of its queries and keys; under one pattern, attention is
    causal. With a pattern that no input can change, the future changes nothing."""
    query, key, value, _ = random_operands(SEQ, 1, 4, 2, 64, torch.float32, "cpu")
    cut = 300
    later = [torch.cat((t[:cut], torch.randn_like(t[cut:]))) for t in (query, key, value)]
    for config in (settings(slash=0, vertical=0), settings(slash=SEQ)):
        before, *_ = attend(query, key, value, config=config)
        after, *_ = attend(*later, config=config)
        assert torch.equal(before[:cut], after[:cut])
    before, _, index, *_ = attend(query, key, value, config=settings())
    after, *_ = ring_attention(*later, index, Ring(CPGroup(None)), 64**-0.5)
    assert torch.equal(before[:cut], after[:cut])


def test_budgets_are_kept_to():
    query, key, _, _ = random_operands(SEQ, 2, 4, 2, 64, torch.float32, "cpu")
    config = settings()
    index = search_pattern(query, key, config, CPGroup(None), 0.125)
    assert (index.column_ptr[..., -1] <= config.policy.vertical).all()
    near = 3  # a window of 70 tokens reaches into the second block before
    assert (index.round_ptr[..., -1] <= near + 2 * config.policy.slash).all()
    assert (index.round_ptr[..., -1] > near).all()
    for changes in (dict(slash=SEQ), dict(vertical=SEQ), dict(window=SEQ)):
        everything = search_pattern(query, key, settings(**changes), CPGroup(None), 0.125)
        assert (everything.density() == 1).all()


def test_fewer_columns_than_the_budget_is_no_column_twice():
    query, key, _, _ = random_operands(256, 1, 2, 2, 64, torch.float32, "cpu")
    index = search_pattern(query, key, settings(vertical=255), CPGroup(None), 0.125)
    for h in range(2):
        positions = columns_of(index, 0, h)
        assert len(set(positions)) == len(positions) <= 255


def choose(rank, world, query, key, config):
    parts = [stripe(t, rank, world, 64) for t in (query, key)]
    index = search_pattern(*parts, config, CPGroup(dist.group.WORLD), 0.125)
    masks = [index.token_mask(0, h) for h in range(query.shape[2])]
    return vars(index) | index.metrics, torch.stack(masks), index.work()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_choose_what_one_process_chooses(world):
    query, key, _, _ = random_operands(SEQ, 1, 4, 2, 64, torch.float32, "cpu")
    config = settings()
    alone = search_pattern(query, key, config, CPGroup(None), 0.125)
    masks = torch.stack([alone.token_mask(0, h) for h in range(4)])
    results = run_ranks(world, choose, query, key, config)
    first = results[0][0]
    for fields, mask, work in results:
        for name, value in fields.items():
            if name != "metrics":  # each beside
                equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
                assert equal(value, first[name]), f"{name} differs between ranks"
        # Sums over ranks round differently from sums in one process: nearly all choices agree.
        assert (mask != masks).float().mean() < 0.01
        assert torch.equal(work[0].sum((-1, -2)).double(), mask.sum((-1, -2)).double())


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", ["none", "columns", "few", "all"])
def test_work_is_exact_and_balanced(world, budget):
    # Balance is a matter of the draw: one in a hundred is beyond the bound.
    torch.manual_seed(world)
    index = random_index(64 * 24, 1, 3, 64, world, budget, "cpu")
    work = index.work()
    for h in range(3):
        assert work[0, h].sum() == index.token_mask(0, h).sum()
    per_rank = work[0].sum((0, 2))
    assert per_rank.max() / per_rank.mean() < 1.15
    causal = index.seq_length * (index.seq_length + 1) / 2
    assert torch.allclose(index.density().double(), work.sum((-1, -2)) / causal)
    if budget == "all":
        assert (index.density() == 1).all()


def test_work_with_a_partial_last_block():
    for budget in ("none", "columns", "few", "all"):
        index = random_index(500, 2, 3, 64, 1, budget, "cpu")
        for b in range(2):
            for h in range(3):
                pairs = index.token_mask(b, h).sum()
                assert index.work()[b, h].sum() == pairs
                assert index.density()[b, h].item() == pytest.approx(pairs / (500 * 501 / 2))


def test_index_is_small():
    index = random_index(64 * 1024, 1, 2, 64, 4, "columns", "cpu")
    assert index.nbytes < 150_000


def test_the_same_inputs_choose_the_same_pattern():
    query, key, value, _ = random_operands(SEQ, 1, 4, 2, 64, torch.float32, "cpu")
    first, _, one, *_ = attend(query, key, value, config=settings())
    again, _, two, *_ = attend(query, key, value, config=settings())
    assert torch.equal(first, again)
    assert torch.equal(one.round_list, two.round_list) and torch.equal(one.columns, two.columns)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(block_size=100), "--mtraining-block-size is 100"),
        (dict(vertical=-1), "--mtraining-vertical is -1"),
        (dict(slash=-2), "--mtraining-slash is -2"),
        (dict(window=-1), "--mtraining-window is -1"),
        (dict(sink=25), "--mtraining-sink is 25"),
        (dict(sample_strata=1), "--mtraining-sample-strata is 1"),
        (dict(sample_rows=0), "--mtraining-sample-rows is 0"),
        (dict(vertical=2.5), "--mtraining-vertical.*2.5"),
    ],
)
def test_settings_out_of_range_are_named(changes, named):
    with pytest.raises(ConfigError, match=named):
        settings(**changes)


@pytest.mark.parametrize(
    ("changes", "seq_length", "cp_size", "named"),
    [
        ({}, 1000, 2, "--seq-length is 1000.*128"),
        (dict(vertical=2000), 1024, 2, "--mtraining-vertical is 2000"),
        (dict(window=2000), 1024, 2, "--mtraining-window is 2000"),
        (dict(slash=2000), 1024, 2, "--mtraining-slash is 2000"),
        (dict(sample_strata=64, sample_rows=32), 1024, 2, "64 x 32"),
        ({}, 2**23 + 256, 4, "--seq-length is 8388864.* at least 5 ranks"),
    ],
)
def test_sequences_that_do_not_fit_are_named(changes, seq_length, cp_size, named):
    with pytest.raises(ConfigError, match=named):
        settings(**changes).check_sequence(seq_length, cp_size)
    settings().check_sequence(1024, 2)
    settings().check_sequence(2**23, 4)
    with pytest.raises(ConfigError, match="4 context-parallel ranks.*--mtraining-gathered-ranks"):
        settings().check_sequence(2**22 + 512, 8, 4)


def test_a_part_that_is_no_multiple_of_the_block_is_refused():
    two = CPGroup(None)
    two.world = 2
    query, key, _, _ = random_operands(100, 1, 2, 2, 64, torch.float32, "cpu")
    with pytest.raises(ValueError, match="200 tokens"):
        search_pattern(query, key, settings(), two, 0.125)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "policy", [MobaPolicy(top_k=3), XAttentionPolicy()], ids=["moba", "xattention"]
)
def test_a_search_for_block_lists_waits_for_nothing(policy, monkeypatch):
    """Those of xattention have room for all blocks of a short sequence."""
    monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", "0")
    torch.manual_seed(0)
    query, key = (torch.randn(4096, 1, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2))
    config = MTrainingConfig(policy=policy)
    search_pattern(query, key, config, CPGroup(None), 0.125)  # compilation may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        search_pattern(query, key, config, CPGroup(None), 0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sink, window", [(0, 0), (128, 512), (1000, 2000)])
@pytest.mark.parametrize("packed", [False, True])
def test_lists_of_moba_fit_what_is_allocated_for_them(sink, window, packed):
    """The device checks it: a search with too small lists raises."""
    query, key = (torch.randn(2048, 2, h, 32) for h in (4, 2))
    documents = VisibleRanges.from_lengths([700, 1000, 348], 2048) if packed else None
    config = MTrainingConfig(policy=MobaPolicy(top_k=3), sink=sink, window=window)
    index = search_pattern(query, key, config, CPGroup(None), 0.125, visible=documents)
    entries = int(index.round_ptr[-1])
    assert 0 < entries <= len(index.round_list) == len(index.rank_list)
    assert int(index.block_mask(0).sum()) == entries


def test_short_lists_of_other_policies_have_room_for_all_blocks():
    query, key = (torch.randn(2000, 2, h, 32) for h in (4, 2))  # 16 blocks
    config = MTrainingConfig(policy=XAttentionPolicy(threshold=0.9))
    policies = [config.policy] * 3 + [MobaPolicy(top_k=3)]
    index = search_pattern(query, key, config, CPGroup(None), 0.2, head_policies=policies)
    assert len(index.round_list) == len(index.rank_list) == 2 * 4 * 16 * 17 // 2
    assert int(index.round_ptr[-1]) == int(index.block_mask(0).sum()) < len(index.round_list)


@pytest.mark.parametrize(("world", "inner"), [(1, 1), (2, 2), (4, 2), (3, 1)])
def test_no_rank_has_more_list_entries_than_there_is_room_for(world, inner):
    local = torch.arange(5)
    entries = [int((block_at(local, rank, world, inner) + 1).sum()) for rank in range(world)]
    assert max(entries) <= most_list_entries((1, 1, 5, 5 * world))


def test_long_lists_of_moba_and_other_heads_are_counted(monkeypatch):
    monkeypatch.setattr(selector, "UNCOUNTED_ENTRIES", 0)
    query, key = (torch.randn(2000, 1, h, 32) for h in (4, 2))  # the last block is partial
    policies = [MobaPolicy(top_k=3), PricePolicy()] * 2
    index = search_pattern(
        query, key, MTrainingConfig(), CPGroup(None), 0.2, head_policies=policies
    )
    assert len(index.round_list) == int(index.round_ptr[-1]) == int(index.block_mask(0).sum())
    alone = MTrainingConfig(policy=policies[0])
    bounded = search_pattern(query, key, alone, CPGroup(None), 0.2)
    assert len(bounded.round_list) > int(bounded.round_ptr[-1])
    assert torch.equal(index.block_mask(0)[:, ::2], bounded.block_mask(0)[:, ::2])


def test_a_head_without_columns_has_its_diagonals_beside_heads_with_columns():
    query, key = structured(SEQ)
    config = settings(sink=0)
    alone = search_pattern(
        query, key, config, CPGroup(None), 0.125, head_policies=[FixedPolicy(0, 3)] * 2
    )
    policies = [FixedPolicy(0, 3), FixedPolicy(8, 3)]
    mixed = search_pattern(query, key, config, CPGroup(None), 0.125, head_policies=policies)
    assert torch.equal(mixed.member[:, 0], alone.member[:, 0])
    assert int(mixed.column_ptr[0, 0, -1]) == 0 < int(mixed.column_ptr[0, 1, -1])


@pytest.mark.parametrize("columns", [[3, 3], [5, 9, 5], [-1]])
def test_columns_given_twice_or_before_the_first_token_are_refused(columns):
    distances = torch.zeros(1, 1, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="give positions of 0 or more, each once"):
        build_index(distances, torch.tensor([[columns]]), 256, 64, 1)


def test_padding_may_come_more_than_once():
    distances = torch.zeros(1, 1, 4, dtype=torch.bool)
    index = build_index(distances, torch.tensor([[[256, 3, 256, 300]]]), 256, 64, 1)
    assert index.column_ptr[0, 0, -1] == 1
