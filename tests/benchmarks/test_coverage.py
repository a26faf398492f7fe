# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The baseline coverage: what its columns hold."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lib.coverage import from_options
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.pattern import search_pattern
from megatron_mtraining.pattern.sampled_rows import last_rows, stratified_rows
from tests.support.pattern_cases import operands
from tests.support.selection_cases import dense_probabilities

SEQ = 768
STRATA = dict(sample_strata=32, sample_rows=2, held_out_rows=0)


def search(query, key, **changes):
    config = from_options(policy="coverage", window=64, block_size=64, **changes)
    return search_pattern(query, key, config, CPGroup(None), 0.125)


@pytest.mark.parametrize("sampling", [STRATA, dict(estimator="last")], ids=["strata", "last"])
def test_columns_hold_their_share(sampling):
    """As few as hold it: one fewer would not."""
    query, key = operands(seed=2)
    index = search(query, key, coverage=0.5, sink=0, **sampling)
    rows = last_rows(SEQ, 64) if "estimator" in sampling else stratified_rows(SEQ, 32, 2)
    p = dense_probabilities(query, key, rows, 0.125)
    if "estimator" not in sampling:
        p = p.masked_fill(rows[:, None] // 64 - torch.arange(SEQ) // 64 < 2, 0)
    p = p.sum(2)
    for h in range(4):
        taken = index.columns[0, h, : int(index.column_ptr[0, h, -1])].long()
        share = p[0, h, taken] / p[0, h].sum()
        assert share.sum() >= 0.5 > share.sum() - share.min()
