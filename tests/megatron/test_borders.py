# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which ranks a model's hidden states are exchanged over; position ids over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.layout import token_positions
from megatron_mtraining.relayout import zigzag
from tests.support.gpt_models import start
from tests.support.ranks import run_ranks

BLOCK, LENGTH = 64, 512
PACKED = (8, 96, 200)
"""Lengths of packed sequences, which are padded to whole blocks."""


def a_model(groups, sequence_parallel: bool):
    return SimpleNamespace(
        pg_collection=groups, config=SimpleNamespace(sequence_parallel=sequence_parallel)
    )


def grids(rank, size):
    start(context_parallel_size=2, tensor_model_parallel_size=2)
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_mtraining.megatron.borders import borders_of, whole_sequence

    groups = ProcessGroupCollection.use_mpu_process_groups()
    borders = [borders_of(a_model(groups, each), BLOCK, 2) for each in (False, True)]
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    own = zigzag(ids, groups.cp.rank(), 2)
    assert torch.equal(whole_sequence(own, borders[0]), ids)
    _check_states(groups, borders[1], LENGTH, None)
    _check_states(groups, borders[1], sum(PACKED), PACKED)
    wrong = SimpleNamespace(cp=groups.cp, tp=groups.tp, tp_cp=groups.cp)
    with pytest.raises(ConfigError, match="has 2 ranks, which are not 2 x 2"):
        borders_of(a_model(wrong, True), BLOCK, 2)
    return [(each.ranks, each.group.world, each.padded(LENGTH + 1)) for each in borders]


def _check_states(groups, borders, total, lengths):
    """Each tensor-parallel rank has a part of its context-parallel rank's tokens, in both layouts."""
    whole = torch.arange(total, dtype=torch.float64)[:, None, None]
    tp = groups.tp.rank()
    pieces = whole.split(lengths or total)
    own = torch.cat([zigzag(each, groups.cp.rank(), 2, 0) for each in pieces]).chunk(2)[tp]
    padded = borders.padded(total)
    from megatron_mtraining.megatron.borders import relayout_of

    plan = relayout_of(borders, own, lengths)
    striped = torch.cat((whole, whole.new_zeros(padded - total, 1, 1)))
    positions = token_positions(padded, groups.cp.rank(), 2, BLOCK, inner=2)
    assert torch.equal(plan.there(own), striped[positions].chunk(2)[tp])
    assert torch.equal(plan.back(plan.there(own)), own)


def test_sequence_parallel_ranks_exchange_with_all():
    for apart, together in run_ranks(4, grids):
        assert apart == (((0,), (1,)), 2, LENGTH + 2 * BLOCK)
        assert together == (((0, 1), (2, 3)), 4, LENGTH + 2 * BLOCK)
