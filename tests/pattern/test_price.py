# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing at a price: masses, costs and recall against dense attention in float64, and what
must hold whatever the input is."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.config import LastRowsSampling
from megatron_mtraining.cp_group import CPGroup, cp_group_of
from megatron_mtraining.layout import stripe
from megatron_mtraining.pattern import search_pattern
from megatron_mtraining.pattern.sampled_rows import last_rows, stratified_rows
from megatron_mtraining.visibility import VisibleRanges
from tests.support.pattern_cases import operands, structured
from tests.support.ranks import run_ranks
from tests.support.selection_cases import dense_probabilities

SEQ = 768


def settings(**changes):
    base = dict(window=64, sink=4, block_size=64, sample_strata=32, sample_rows=2)
    return MTrainingConfig.from_options(**{**base, **changes})


def policies_of(configs):
    return [config.policy for config in configs]


def dense_recall(index, query, key, rows, scale):
    """float64 ``[b, h]``: what an index keeps of some rows' attention, by its mask written out."""
    p = dense_probabilities(query, key, rows, scale)
    return torch.stack(
        [
            torch.stack(
                [(p[b, h] * index.token_mask(b, h)[rows]).sum(-1).mean() for h in range(p.shape[1])]
            )
            for b in range(p.shape[0])
        ]
    )


@pytest.mark.parametrize(
    "policy",
    [
        dict(price=0.6), dict(price=1.5, vertical_cap=30), dict(vertical=40, slash=3),
        dict(price=0.6, estimator="last"),
        dict(policy="xattention", block_threshold=0.6), dict(policy="moba", block_top_k=2),
    ],
)  # fmt: skip
def test_recall_is_of_the_rows_that_did_not_choose(policy):
    query, key = operands()
    rows = {}
    if "estimator" not in policy:
        rows = dict(sample_strata=24, sample_rows=4, held_out_rows=3)
    config = MTrainingConfig.from_options(**policy, **rows, window=64, block_size=64)
    index = search_pattern(query, key, config, CPGroup(None), 0.125)
    if rows:
        held = stratified_rows(SEQ, 24, 4).view(24, 4)[:, 1:].flatten()
    else:
        held = last_rows(SEQ, 64)
    truth = dense_recall(index, query, key, held, 0.125)
    torch.testing.assert_close(index.recall, truth, atol=2e-5, rtol=1e-5, check_dtype=False)
    assert (index.density() < 1).any() and (index.recall < 1).any()
    # From the third block on, a row sees keys that are neither in its window nor sinks.
    assert index.exposed == pytest.approx((held >= 2 * 64).float().mean().item())


def test_what_rows_say_that_are_held_out_changes_nothing():
    query, key = operands()
    config = settings(price=0.8)
    held = stratified_rows(SEQ, 32, 2).view(32, 2)[:, 1]
    first = search_pattern(query, key, config, CPGroup(None), 0.125)
    other = query.clone()
    other[held] = torch.randn_like(other[held])
    again = search_pattern(other, key, config, CPGroup(None), 0.125)
    assert torch.equal(first.member, again.member) and torch.equal(first.columns, again.columns)
    assert not torch.equal(first.recall, again.recall)


def test_a_price_of_nothing_is_dense_and_a_high_one_leaves_what_always_holds():
    query, key = operands()
    index = search_pattern(query, key, settings(price=0.0), CPGroup(None), 0.125)
    assert (index.density() == 1).all()
    index = search_pattern(query, key, settings(price=1e9), CPGroup(None), 0.125)
    assert (index.member.sum(-1) == 2).all() and (index.column_ptr[..., -1] == 4).all()


def test_the_last_rows_count_for_as_many_as_see_what_they_see():
    """More density is more recall with them too: far distances are not worth what the last rows see there."""
    query, key = operands(seed=3)
    rows = torch.arange(SEQ)
    found = []
    for price in (2.0, 0.7, 0.3, 0.1):
        config = MTrainingConfig.from_options(
            price=price, estimator="last", window=64, block_size=64
        )
        index = search_pattern(query, key, config, CPGroup(None), 0.125)
        found.append((index.density().mean(), dense_recall(index, query, key, rows, 0.125).mean()))
    for (density, recall), (more, better) in zip(found, found[1:]):
        assert more >= density and better >= recall


@pytest.mark.parametrize("seed", range(6))
def test_a_lower_price_keeps_all_that_a_higher_one_does(seed):
    query, key = operands(seed=seed)
    before = None
    for price in (2.0, 1.2, 0.8, 0.5, 0.3, 0.25, 0.1, 0.02):
        config = settings(price=price, held_out_rows=0)
        index = search_pattern(query, key, config, CPGroup(None), 0.125)
        assert index.member[..., 0].all()
        if before is not None:
            assert (index.member >= before.member).all()
            for h in range(4):
                assert set(before.columns[0, h].tolist()) <= set(index.columns[0, h].tolist()) | {
                    SEQ
                }
            assert (index.density() >= before.density()).all()
            # Up to the rounding of sums in fixed point.
            assert (index.recall >= before.recall - 1e-4).all()
        before = index


def test_a_planted_diagonal_and_a_planted_column_are_found():
    query, key = structured(SEQ)
    index = search_pattern(query, key, settings(price=0.5), CPGroup(None), 0.125)
    # Token distance 300 with blocks of 64 crosses block distances 4 and 5, and 5 for most queries.
    assert index.distances()[0, 0].nonzero().flatten().tolist() in ([0, 1, 4, 5], [0, 1, 5])
    assert 200 in index.columns[0, 1].tolist()
    assert (index.density() < 0.9).all()


def test_caps():
    query, key = operands()
    config = settings(price=1e-6, vertical_cap=30, slash_cap=2)
    index = search_pattern(query, key, config, CPGroup(None), 0.125)
    assert (index.column_ptr[..., -1] <= 30).all() and (index.member.sum(-1) == 2 + 2).all()


def test_heads_with_settings_of_their_own():
    query, key = operands()
    base = settings(price=0.8)
    heads = (
        base,
        settings(price=0.0),
        settings(vertical=25, slash=2),
        settings(vertical=9, slash=4),
    )
    index = search_pattern(query, key, base, CPGroup(None), 0.125, head_policies=policies_of(heads))
    for h, config in enumerate(heads):
        alone = search_pattern(query, key, config, CPGroup(None), 0.125)
        assert torch.equal(index.member[0, h], alone.member[0, h]), h
        count = int(alone.column_ptr[0, h, -1])
        assert int(index.column_ptr[0, h, -1]) == count or h == 1
        if h != 1:
            assert torch.equal(index.columns[0, h, :count], alone.columns[0, h, :count])
            torch.testing.assert_close(index.recall[0, h], alone.recall[0, h])
    assert index.density()[0, 1] == 1
    # A price from outside moves all heads that have one.
    higher = search_pattern(
        query,
        key,
        base,
        CPGroup(None),
        0.125,
        head_policies=policies_of(heads),
        price=torch.tensor(1.6),
    )
    alone = search_pattern(query, key, settings(price=1.6), CPGroup(None), 0.125)
    assert torch.equal(higher.member[0, 0], alone.member[0, 0])
    assert torch.equal(higher.member[0, 1:], index.member[0, 1:])


def test_heads_with_lists_of_blocks_beside_others():
    query, key = operands()
    heads = (
        settings(price=0.6),
        settings(policy="xattention", block_threshold=0.7),
        settings(policy="moba", block_top_k=2),
        settings(vertical=25, slash=2),
    )
    index = search_pattern(
        query, key, heads[0], CPGroup(None), 0.125, head_policies=policies_of(heads)
    )
    value = torch.randn_like(key)
    out, _, pattern, *_ = attend(
        query, key, value, config=settings(price=0.6), head_policies=policies_of(heads)
    )
    for h, config in enumerate(heads):
        alone = search_pattern(query, key, config, CPGroup(None), 0.125)
        mask = index.token_mask(0, h)
        assert torch.equal(mask, alone.token_mask(0, h)), h
        torch.testing.assert_close(index.recall[0, h], alone.recall[0, h])
        scores = query[:, 0, h].double() @ key[:, 0, h // 2].double().T * 0.125
        expected = (
            scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value[:, 0, h // 2].double()
        )
        torch.testing.assert_close(out[:, 0, h], expected, atol=1e-5, rtol=1e-5, check_dtype=False)
    assert pattern.has_block_lists


@pytest.mark.parametrize("policy", [dict(vertical=(9, 40, 4, 30), slash=(1, 4, 0, 4))])
def test_budgets_that_differ_from_head_to_head(policy):
    query, key = operands()
    heads = tuple(
        settings(vertical=v, slash=s) for v, s in zip(policy["vertical"], policy["slash"])
    )
    index = search_pattern(
        query, key, heads[0], CPGroup(None), 0.125, head_policies=policies_of(heads)
    )
    for h, config in enumerate(heads):
        alone = search_pattern(query, key, config, CPGroup(None), 0.125)
        assert torch.equal(index.member[0, h], alone.member[0, h])
        count = int(alone.column_ptr[0, h, -1])
        assert torch.equal(index.columns[0, h, :count], alone.columns[0, h, :count])
        assert int(index.column_ptr[0, h, -1]) == count


def _choose(rank, world, query, key, config, inner):
    import torch.distributed as dist

    cp = cp_group_of(dist.group.WORLD, inner)
    part = [stripe(t, rank, world, 64, inner=inner) for t in (query, key)]
    index = search_pattern(*part, config, cp, 0.125)
    masks = None
    if index.has_block_lists:  # each rank has the lists of its own queries
        masks = torch.stack([index.token_mask(0, head) for head in range(query.shape[2])])
    return index.member, index.columns, index.column_ptr, index.recall, masks


@pytest.mark.parametrize(("world", "inner"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(
    "policy",
    [
        dict(price=0.6), dict(vertical=20, slash=4),
        dict(policy="xattention", block_threshold=0.6), dict(policy="moba", block_top_k=2),
    ],
)  # fmt: skip
def test_sets_do_not_depend_on_the_number_of_ranks(world, inner, policy):
    query, key = operands(seed=11)
    config = settings(**policy)
    alone = search_pattern(query, key, config, CPGroup(None), 0.125)
    found = run_ranks(world, _choose, query, key, config, inner)
    for rank, (member, columns, column_ptr, recall, masks) in enumerate(found):
        if masks is not None:
            own = stripe(torch.arange(SEQ), rank, world, 64, inner=inner)
            for head, mask in enumerate(masks):
                assert torch.equal(mask, alone.token_mask(0, head)[own])
        assert torch.equal(member, alone.member) and torch.equal(column_ptr, alone.column_ptr)
        width = min(columns.shape[-1], alone.columns.shape[-1])
        assert torch.equal(columns[..., :width], alone.columns[..., :width])
        assert torch.equal(recall, found[0][3])
        torch.testing.assert_close(recall, alone.recall)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            dict(policy="best"),
            "--mtraining-policy is best: use one of price, fixed, xattention, moba",
        ),
        (dict(estimator="first"), "--mtraining-estimator is first"),
        (dict(price=-0.1), "--mtraining-price is -0.1"),
        (dict(price=float("nan")), "--mtraining-price must be a number"),
        (
            dict(policy="price", vertical=9),
            "--mtraining-vertical is 9, but --mtraining-policy is price",
        ),
        (dict(vertical_cap=0, sink=0), "--mtraining-vertical-cap is 0: use 1 or more"),
        (dict(vertical_cap=3), "--mtraining-sink is 4, more than --mtraining-vertical-cap"),
        (dict(sample_rows=2, held_out_rows=2), "leaves none of the --mtraining-sample-rows"),
        (dict(estimator="last", held_out_rows=1), "--mtraining-held-out-rows is 1, but"),
        (dict(estimator="last", sample_strata=2), "--mtraining-sample-strata is 2, but"),
        (
            dict(target_scope="head"),
            "target-scope is head, but there is no --mtraining-target-recall",
        ),
        (dict(target_recall=0.9, target_scope="layer"), "is layer: use one of head, model"),
        (dict(target_recall=1.5), "--mtraining-target-recall is 1.5"),
        (dict(policy="fixed", target_recall=0.9), "--mtraining-target-recall is 0.9, but"),
        (dict(policy="xattention", block_stride=24), "--mtraining-block-stride is 24"),
        (dict(policy="xattention", block_threshold=0.0), "--mtraining-block-threshold is 0.0"),
        (dict(policy="moba", block_top_k=-1), "--mtraining-block-top-k is -1"),
        (dict(block_top_k=9), "--mtraining-block-top-k is 9, but --mtraining-policy is price"),
    ],
)
def test_settings_that_cannot_be(changes, named):
    with pytest.raises(ConfigError) as raised:
        MTrainingConfig.from_options(**changes)
    assert named in str(raised.value)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8])
def test_recall_of_few_rows_whose_mass_is_at_one_distance(rows):
    """Their probabilities sum to a little more than 1, by the rounding of the LSE."""
    documents = VisibleRanges.from_lengths([924, 100], 1024)  # the last of one block
    config = MTrainingConfig(sampling=LastRowsSampling(rows))
    for seed in range(8):
        torch.manual_seed(seed)
        query, key = torch.randn(1024, 1, 8, 64) * 4, torch.randn(1024, 1, 8, 64)
        found = search_pattern(query, key, config, CPGroup(None), 64**-0.5, visible=documents)
        assert found.recall.min() >= 0 and found.recall.max() <= 1 + 1e-5
