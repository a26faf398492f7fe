# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Recall and density of a layer, against dense attention written out."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.models.types import LayerInput
from megatron_mtraining.pattern import build_index, search_pattern, search_price_series
from megatron_mtraining.pattern.sampled_rows import stratified_rows
from megatron_mtraining.tools.inspect import measure
from tests.support.inspect_cases import HEADS, SEQ, operands, true_attention


@pytest.mark.parametrize("block_size", [64, 128], ids="block{}".format)
def test_recall_is_that_of_the_written_out_mask(block_size, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 7 * 4 * HEADS * SEQ)  # rows in several parts
    query, key = operands()
    configs = [
        MTrainingConfig.from_options(block_size=block_size, vertical=vertical, slash=slash)
        for vertical, slash in [(0, 0), (20, 2), (100, 5), (8, SEQ)]
    ]
    rows = measure.held_out_rows(SEQ, 100, configs, seed=1)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.2), configs, rows)
    p = true_attention(query, key, 0.2)
    for number, pattern in enumerate(found.patterns):
        for head in range(HEADS):
            mask = pattern.index.token_mask(0, head)
            kept = (p[head] * mask)[rows].sum(-1).mean()
            assert found.recall[number, head] == pytest.approx(kept.item(), abs=1e-6)
            density = mask.sum() / (SEQ * (SEQ + 1) / 2)
            assert found.density[number, head] == pytest.approx(density.item(), abs=1e-6)
    assert found.recall[-1] == pytest.approx(1, abs=1e-6) and (found.recall[0] < 0.9).all()


def test_probabilities_do_not_depend_on_the_models_dtype_alone():
    query, key = operands(dtype=torch.bfloat16)
    configs = [MTrainingConfig.from_options(vertical=40, slash=1, block_size=64)]
    rows = measure.held_out_rows(SEQ, 64, configs, seed=0)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.125), configs, rows)
    p = true_attention(query, key, 0.125)
    kept = [
        (p[h] * found.patterns[0].index.token_mask(0, h))[rows].sum(-1).mean() for h in range(HEADS)
    ]
    assert found.recall[0] == pytest.approx(torch.stack(kept), abs=1e-6)


def test_a_column_under_a_slash_counts_once():
    seq, block = 256, 64
    distances = torch.zeros(1, 1, 4, dtype=torch.bool)
    distances[..., 2] = True
    columns = torch.tensor([[[3, 70, 200, seq]]])  # the last stands for none
    index = build_index(distances, columns, seq, block, 1)
    p = torch.rand(1, seq, seq).tril()
    mass = p.unflatten(-1, (-1, block)).sum(-1)
    kept = measure.VerticalSlashPattern(index).kept_mass(p, mass, torch.arange(seq))
    torch.testing.assert_close(kept[0], (p[0] * index.token_mask(0, 0)).sum(-1))


@pytest.mark.parametrize("policy", ["xattention", "moba"])
def test_recall_of_block_sparse_patterns_is_that_of_the_written_out_mask(policy, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 7 * 4 * HEADS * SEQ)  # rows in several parts
    query, key = operands()
    how = {"xattention": dict(block_threshold=0.5), "moba": dict(block_top_k=3)}[policy]
    config = MTrainingConfig.from_options(policy=policy, block_size=64, window=64, **how)
    rows = measure.held_out_rows(SEQ, 100, [config], seed=1)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.2), [config], rows)
    p = true_attention(query, key, 0.2)
    index = search_pattern(query, key, config, CPGroup(None), 0.2)
    (pattern,) = found.patterns
    for head in range(HEADS):
        mask = index.token_mask(0, head)
        kept = (p[head] * mask)[rows].sum(-1).mean()
        pairs = mask.sum().item() / (SEQ * (SEQ + 1) / 2)
        assert found.recall[0, head] == pytest.approx(kept.item(), abs=1e-6)
        assert found.density[0, head] == pytest.approx(pairs, abs=1e-6)
        assert 0.1 < found.density[0, head] < 0.9
        past = torch.arange(SEQ) <= rows[:, None]
        assert torch.equal(pattern.mask(head, rows) & past, mask[rows].bool())


SERIES = {
    "strata": dict(price=0.2),
    "last": dict(price=0.2, estimator="last"),
    "caps": dict(price=0.05, vertical_cap=30, slash_cap=3),
    "keeps all": dict(price=0.5, window=SEQ),
}


@pytest.mark.parametrize("base", SERIES.values(), ids=SERIES.keys())
def test_a_price_series_is_searched_as_each_of_its_prices(base):
    query, key = operands()
    prices = [base["price"] * factor for factor in (8, 1, 0.1)]
    configs = [
        MTrainingConfig.from_options(**{**base, "price": price, "block_size": 64})
        for price in prices
    ]
    other = MTrainingConfig.from_options(vertical=9, slash=2, block_size=64)
    shared = list(
        measure.patterns_of(LayerInput(0, query, key, 0.2), [*configs, other], torch.arange(SEQ))
    )
    assert len(shared) == 4
    for config, pattern in zip([*configs, other], shared):
        alone = search_pattern(query, key, config, CPGroup(None), 0.2)
        for head in range(HEADS):
            assert torch.equal(pattern.index.token_mask(0, head), alone.token_mask(0, head))
        same = torch.equal if alone.recall is not None else lambda a, b: a is b
        assert same(pattern.index.recall, alone.recall)
    if "window" not in base:
        assert len({pattern.density.sum().item() for pattern in shared}) == 4
    with pytest.raises(ValueError, match="price alone"):
        search_price_series(query, key, [configs[0], other], CPGroup(None), 0.2)


def test_held_out_rows_are_stratified_and_not_the_estimators():
    configs = [
        MTrainingConfig.from_options(sample_strata=64, sample_rows=1),
        MTrainingConfig.from_options(sample_strata=32, sample_rows=2),
    ]
    rows = measure.held_out_rows(8192, 512, configs, seed=0)
    assert len(rows) == 512 and (rows.diff() > 0).all()
    for config in configs:
        seen = stratified_rows(8192, config.sampling.strata, config.sampling.rows)
        assert not set(rows.tolist()) & set(seen.tolist())
    assert rows.diff().max() < 3 * 8192 / 512  # everywhere
    assert not torch.equal(rows, measure.held_out_rows(8192, 512, configs, seed=1))
    all_left = measure.held_out_rows(256, 192, configs[:1], seed=0)
    assert len(set(all_left.tolist())) == 192
    with pytest.raises(ConfigError, match="--rows is 193.*at most 192"):
        measure.held_out_rows(256, 193, configs[:1], seed=0)
    assert len(measure.held_out_rows(256, None, configs[:1], seed=0)) == 192
    assert len(measure.held_out_rows(8192, None, configs[:1], seed=0)) == 512
    with pytest.raises(ConfigError, match="64 tokens.*longer text"):
        measure.held_out_rows(64, None, configs[:1], seed=0)


def test_scores_that_are_not_finite_are_refused():
    query, key = operands()
    query[5] = float("nan")
    configs = [MTrainingConfig.from_options(vertical=SEQ)]
    with pytest.raises(ConfigError, match="layer 3 .*float32"):
        measure.LayerRecall(LayerInput(3, query, key, 0.125), configs, torch.arange(SEQ))
