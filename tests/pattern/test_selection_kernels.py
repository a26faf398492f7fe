# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The whole pattern search: with the kernels as with the reference implementation, and that against dense
attention in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.layout import stripe
from megatron_mtraining.pattern import build_index, search_pattern
from megatron_mtraining.pattern.sampled_rows import gather_sampled_rows, stratified_rows
from tests.support.attention_cases import random_operands
from tests.support.selection_cases import SCALE, dense_masses


def test_columns_and_diagonals_against_dense():
    """Columns, then diagonals, selected by sorting the dense masses: the same sets."""
    config = MTrainingConfig.from_options(
        vertical=24, slash=5, window=70, sink=4, block_size=64, sample_strata=16, sample_rows=2,
        held_out_rows=0,
    )  # fmt: skip
    torch.manual_seed(5)
    query, key, _, _ = random_operands(500, 2, 4, 2, 64, torch.float32, "cpu")
    index = search_pattern(query, key, config, CPGroup(None), SCALE)
    rows, window_blocks = stratified_rows(500, 16, 2), 3
    masses = dense_masses(query, key, rows, 2, window_blocks, 64, SCALE)[0]
    masses[..., : config.sink] = float("inf")
    columns = masses.argsort(dim=-1, descending=True, stable=True)[..., : config.policy.vertical]
    taken = torch.zeros_like(masses, dtype=torch.bool).scatter_(-1, columns, True)
    masses = dense_masses(query, key, rows, 2, window_blocks, 64, SCALE, taken)[1]
    diagonals = masses.argsort(dim=-1, descending=True, stable=True)[..., : config.policy.slash]
    distances = torch.zeros(2, 4, 9, dtype=torch.bool)
    distances[..., :window_blocks] = True
    distances.scatter_(-1, diagonals // 64, True).scatter_(-1, (diagonals + 63) // 64, True)
    expected = build_index(distances[..., :8], columns, 500, 64, 1)
    for name in ("member", "round_list", "round_ptr", "columns", "column_ptr"):
        assert torch.equal(getattr(index, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(dict(vertical=24, slash=5), id="fixed"),
        pytest.param(dict(price=0.7, vertical_cap=90), id="price"),
        pytest.param(
            dict(price=0.9, vertical_cap=40, slash_cap=3),
            id="price-floors-caps",
        ),
        pytest.param(dict(vertical=24, slash=5, estimator="last"), id="fixed-last"),
    ],
)
def test_the_same_index_from_kernels(triton_device, monkeypatch, policy):
    rows = {} if "estimator" in policy else dict(sample_strata=16, sample_rows=2)
    config = MTrainingConfig.from_options(**policy, **rows, window=70, sink=4, block_size=64)
    torch.manual_seed(6)
    query, key, _, _ = random_operands(500, 1, 4, 2, 64, torch.float32, "cpu")
    operands = (query.to(triton_device), key.to(triton_device))
    actual = search_pattern(*operands, config, CPGroup(None), SCALE)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    expected = search_pattern(query, key, config, CPGroup(None), SCALE)
    for field in dataclasses.fields(actual):
        a, e = getattr(actual, field.name), getattr(expected, field.name)
        if field.name == "metrics":
            a = {name: value.cpu() for name, value in a.items()}
            torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(a.cpu(), e) if isinstance(e, torch.Tensor) else a == e


def test_sampled_rows_are_the_sequences_rows():
    """Each rank contributes the rows that it has."""
    query = torch.randn(576, 1, 2, 64)
    config = MTrainingConfig.from_options(block_size=64, sample_strata=8, sample_rows=3)
    total = 0
    for rank in range(3):
        cp = CPGroup(None)
        cp.rank, cp.world, cp.inner = rank, 3, 3
        cp.all_reduce = lambda tensor: tensor
        total = total + gather_sampled_rows(stripe(query, rank, 3, 64), config, cp, 1, SCALE).query
    rows = stratified_rows(576, 8, 3)
    assert torch.equal(total, query[rows])


@pytest.mark.gpu
def test_deterministic_and_small():
    """The same bits from run to run, atomics or not; and without rows x keys in memory."""
    query, key, _, _ = random_operands(131072, 1, 16, 2, 128, torch.bfloat16, "cuda")
    config = MTrainingConfig()
    first = search_pattern(query, key, config, CPGroup(None), SCALE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = search_pattern(query, key, config, CPGroup(None), SCALE)
    assert torch.cuda.max_memory_allocated() - before < 64 * 16 * 131072
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(again, field.name)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), field.name
