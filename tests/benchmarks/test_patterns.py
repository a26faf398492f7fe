# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/model/patterns.py`` on the CPU: its numbers against dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.model import pattern_rows, patterns
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
    cases = [case for case in patterns.cases_for(SEQ, 64) if case.series == series][1:3]
    rows = torch.arange(3, SEQ, 11)[:92]
    recall, density = patterns.measure(given, cases, rows)
    p = true_attention(given)
    causal = torch.ones(SEQ, SEQ).tril().bool()
    for number, case in enumerate(cases):
        for head in range(HEADS):
            if series == pattern_rows.DEFAULT:
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
            for half in range(2):
                expected = kept[half::2].mean().item()
                assert recall[number, half, head] == pytest.approx(expected, abs=1e-6)
    assert 0 < recall.min() and recall.max() < 0.999 and density.max() < 1


def measured_by_hand():
    """Two heads; halves of the rows disagree in the second."""
    kinds = [("price", "strata"), ("xattention", "own"), ("xattention", "own")]
    cases = [
        pattern_rows.Case(*kind, str(number), MTrainingConfig.from_options(price=0.5))
        for number, kind in enumerate(kinds)
    ]
    recall = np.array(
        [[[0.9, 0.8], [0.9, 0.6]], [[0.8, 0.6], [0.8, 0.9]], [[0.5, 0.1], [0.5, 0.1]]]
    )
    density = np.array([[0.3, 0.2], [0.2, 0.2], [0.1, 0.1]])
    return pattern_rows.Measured(cases, recall[:, None], density[:, None])


def test_each_head_takes_what_is_worth_most():
    measured = measured_by_hand()
    recall, density, taken = pattern_rows.best_of(measured, [0, 1, 2], 0.5, same_rows=False)
    # Judged by the first half, the second decides, and takes the lists in the second head.
    assert taken.tolist() == [[[0, 1]], [[0, 0]]]
    assert recall[0].tolist() == pytest.approx([0.9, (0.6 + 0.6) / 2])
    assert density[0].tolist() == pytest.approx([0.3, 0.2])
    recall, density, taken = pattern_rows.best_of(measured, [0, 1, 2], 2.0, same_rows=True)
    assert taken.tolist() == [[[1, 1]], [[1, 1]]]  # 0.9 - 0.6 < 0.8 - 0.4; 0.7 < 0.75
    assert recall[0].tolist() == pytest.approx([0.8, 0.75])
    recall, *_ = pattern_rows.best_of(measured, [1, 2], 0.0, same_rows=True)
    assert recall[0].tolist() == pytest.approx([0.8, 0.75])


def test_rows_weigh_heads_alike():
    rows = pattern_rows.rows_of(measured_by_hand())
    names = ["price", "xattention", "xattention", "mixed", "mixed, oracle choice"]
    assert [row["policy"] for row in rows] == [*names, "xattention, priced"]
    first = rows[0]
    assert first["recall"] == pytest.approx((0.9 + 0.7) / 2) and first["density"] == 0.25
    assert first["heads_below_0.9"] == 0.5 and first["recall_p10"] == pytest.approx(0.72)
    assert [row["lists"] for row in rows[3:]] == [0.25, 0.5, 1.0]
