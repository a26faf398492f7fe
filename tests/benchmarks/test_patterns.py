# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/model/patterns.py`` on the CPU: its numbers against dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.model import patterns
from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.models.types import LayerInput
from megatron_mtraining.pattern import build_block_index, select_key_blocks
from megatron_mtraining.tools.inspect import measure

SEQ, HEADS, KV_HEADS = 1024, 4, 2


@pytest.fixture(scope="module")
def given():
    torch.manual_seed(3)
    query, key = 2 * torch.randn(SEQ, 1, HEADS, 64), torch.randn(SEQ, 1, KV_HEADS, 64)
    return LayerInput(0, query, key, 0.25)


def true_attention(given):
    """Probabilities written out: float64 ``[h, s, s]``."""
    query, key = (t[:, 0].double().transpose(0, 1) for t in (given.query, given.key))
    scores = query @ key.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2)
    future = torch.ones(SEQ, SEQ).triu(1).bool()
    return (scores * given.softmax_scale).masked_fill(future, float("-inf")).softmax(-1)


@pytest.mark.parametrize("series", [("xattention", "own"), ("moba", "own"), ("price", "strata")])
def test_recall_and_density_are_those_of_dense_attention_under_the_mask(given, series, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 7 * 4 * HEADS * SEQ)  # rows in several parts
    cases = [case for case in patterns.cases_for(SEQ, 64) if case[:2] == series][1:3]
    rows = torch.arange(3, SEQ, 11)[:92]
    recall, density = patterns.measure(given, cases, rows)
    p = true_attention(given)
    causal = torch.ones(SEQ, SEQ).tril().bool()
    for number, case in enumerate(cases):
        for head in range(HEADS):
            if series == ("price", "strata"):
                index = patterns.choose(case, given, rows).index
            else:
                blocks = select_key_blocks(
                    given.query, given.key, case.how, CPGroup(None), given.softmax_scale
                )
                none = torch.zeros(1, HEADS, SEQ // 128, dtype=torch.bool)
                columns = torch.zeros(1, HEADS, 0, dtype=torch.long)
                index = build_block_index(blocks, none, columns, SEQ, 128, 1)
            mask = index.token_mask(0, head)
            share = (mask & causal).double().sum() / causal.sum()
            assert density[number, head] == pytest.approx(share.item(), abs=1e-6)
            kept = (p[head] * mask)[rows].sum(-1)
            assert recall[number, head] == pytest.approx(kept.mean().item(), abs=1e-6)
    assert 0 < recall.min() and recall.max() < 0.999 and density.max() < 1


def test_rows_weigh_heads_alike():
    case = patterns.Case("price", "strata", "price 0.5", MTrainingConfig.from_options(price=0.5))
    recall, density = np.array([[[0.9, 0.7]]]), np.array([[[0.3, 0.2]]])
    [row] = patterns.rows_of(patterns.Measured([case], recall, density))
    assert row["recall"] == pytest.approx(0.8) and row["density"] == 0.25
