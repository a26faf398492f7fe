# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Selection of slashes and columns by price, and recall: the kernels against the reference implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_mtraining.kernels import selection
from megatron_mtraining.kernels.common.fixed_point import fixed_point_one
from megatron_mtraining.kernels.selection import reference_threshold
from megatron_mtraining.pattern.selectors.price import cost_units
from tests.support.selection_cases import column_operands

SINK = 2**31 - 1


@pytest.mark.parametrize(("packed", "dim"), [(False, 64), (True, 96)])
def test_kernels(triton_device, packed, dim):
    rows, _, keys, positions, lse = column_operands(triton_device, packed, dim)
    one, window_blocks, sinks = fixed_point_one(24), 2, 7
    cost_per_block_pair, cost_per_block = cost_units(rows)
    # Half of the columns are worth enough.
    values = torch.rand(positions.shape, device=triton_device).view(torch.int32)
    operands = (rows, keys, positions, values, 0.5, lse, 8)
    in_columns = selection.slash_mass_in_columns(*operands)
    truth = reference_threshold.slash_mass_in_columns(*operands)
    enough = positions.where(values.view(torch.float32) >= 0.5, 500)
    operands = (rows, keys, enough, torch.full_like(values, SINK), 0.5, lse, 8)
    assert truth.any()
    assert torch.equal(truth, reference_threshold.slash_mass_in_columns(*operands))
    torch.testing.assert_close(in_columns / one, truth / one, atol=1e-5, rtol=1e-5)

    slash_mass = truth + (0.3 * torch.rand(truth.shape, device=triton_device) * one).int()
    price = torch.tensor([0.0, 0.2, 0.9, 3.0], device=triton_device)
    operands = (
        slash_mass, truth, price, 0.5, window_blocks, cost_per_block_pair, one, True, rows.costs,
    )  # fmt: skip
    actual = selection.select_slashes_by_price(*operands)
    expected = reference_threshold.select_slashes_by_price(*operands)
    for a, e in zip(actual[:3], expected[:3]):
        assert torch.equal(a, e)
    torch.testing.assert_close(actual[3], expected[3])
    if packed:  # no document is as long: mass that was rounded there is worth nothing
        unseen = rows.costs.seen == 0
        assert unseen.any() and not actual[3].masked_select(unseen[:, None]).any()
    slashes, reference_slashes, num_outside, _ = actual
    assert slashes[:, 0].all() and not slashes[:, 3, window_blocks:].all()
    assert not torch.equal(slashes, reference_slashes)

    operands = (
        rows, keys, positions, lse, slashes, reference_slashes, num_outside, price, sinks, cost_per_block,
    )  # fmt: skip
    columns, value, mass = selection.select_columns_by_price(*operands)
    expected = reference_threshold.select_columns_by_price(*operands)
    assert torch.equal(columns, expected[0])
    torch.testing.assert_close(value, expected[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mass, expected[2], atol=1e-5, rtol=1e-5)
    selected = columns < 500
    assert selected[positions < sinks].all() and 0 < selected.float().mean() < 1
    assert not selected[0, 0, 9:].any()
    for each in (rows, replace(rows, num_selection_rows=3)):  # rows held out, or none
        operands = (each, keys, positions, lse, slashes)
        alone = selection.column_masses(*operands)
        expected = reference_threshold.column_masses(*operands)
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)
        assert each is not rows or torch.equal(alone, mass)

    operands = (truth, slashes, columns, mass, 500, one, 8)
    recall = selection.attention_recall(*operands)
    torch.testing.assert_close(recall, reference_threshold.attention_recall(*operands))
    assert recall.all()
