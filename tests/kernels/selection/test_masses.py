# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Statistics of the sampled rows: log-sum-exp, mass by column, block distance and token distance.

- The reference implementation, summed over all ranks, against dense attention in float64.
- The kernels against the reference implementation, also with packed documents and non-finite keys.
"""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.kernels import selection
from megatron_mtraining.kernels.common.fixed_point import fixed_point_one
from megatron_mtraining.kernels.selection import reference_masses, topk_torch
from megatron_mtraining.layout import unstripe
from tests.support.attention_cases import random_operands
from tests.support.selection_cases import (
    CASES,
    SCALE,
    Case,
    case_operands,
    column_operands,
    dense_masses,
    dense_probabilities,
    local_part,
    rows_of_case,
    sampled_rows,
)

SINK = 2**31 - 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_columns_and_diagonals_against_dense(case: Case):
    torch.manual_seed(case.seq_length)
    query, key, _ = case_operands(case)
    sinks = case.num_sinks
    rows = [rows_of_case(case, query, rank) for rank in range(case.world)]
    keys = [local_part(key, rank, case.world, case.block_size) for rank in range(case.world)]
    lse = selection.merge_lse(torch.cat([selection.partial_lse(r, k) for r, k in zip(rows, keys)]))
    columns = [selection.attention_masses(r, k, lse, sinks, False)[0] for r, k in zip(rows, keys)]
    threshold = columns[0].flatten(2).median(-1).values  # about half of the columns are taken
    threshold = torch.stack((threshold, torch.full_like(threshold, case.seq_length // 2)))
    diagonals = sum(
        selection.diagonal_masses(r, k, lse, sinks, (c, threshold))
        for r, k, c in zip(rows, keys, columns)
    )
    whole = unstripe(columns, case.block_size, dim=2) if case.world > 1 else columns[0]
    position = torch.arange(case.seq_length)
    value, last = threshold[..., None]
    taken = (whole > value) | (position < sinks) | ((whole == value) & (position <= last))
    assert 0.3 < taken.float().mean() < 0.8
    positions = rows[0].rows.long()
    truth = dense_masses(
        query, key, positions, case.rows_per_stratum, case.window_blocks, case.block_size, SCALE, taken
    )  # fmt: skip
    assert (whole[..., :sinks] == SINK).all()
    got = whole[..., sinks:].contiguous().view(torch.float32)
    torch.testing.assert_close(got.double(), truth[0][..., sinks:], atol=2e-6, rtol=1e-5)
    one = fixed_point_one(len(positions))
    torch.testing.assert_close(diagonals / one, truth[1], atol=1e-6, rtol=1e-5, check_dtype=False)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("held_out", [0, 1])
def test_reference_block_distances_against_dense(case: Case, held_out):
    if held_out >= case.rows_per_stratum:
        pytest.skip("one row in a stratum: none can be held out")
    block, world, sinks = case.block_size, case.world, case.num_sinks
    query, key, _ = case_operands(case)
    rows = [rows_of_case(case, query, rank, held_out) for rank in range(world)]
    keys = [local_part(key, rank, world, block) for rank in range(world)]
    lse = selection.merge_lse(torch.cat([selection.partial_lse(r, k) for r, k in zip(rows, keys)]))
    found = [selection.attention_masses(r, k, lse, sinks, True) for r, k in zip(rows, keys)]
    one = fixed_point_one(case.strata * case.rows_per_stratum)
    slashes, held_out_masses = sum(masses for _, masses in found) / one
    positions = rows[0].rows.long()
    p = dense_probabilities(query, key, positions, SCALE)
    selects = (
        torch.arange(len(positions)) % case.rows_per_stratum < case.rows_per_stratum - held_out
    )
    blocks = slashes.shape[-1]
    expected, exact = torch.zeros(2, case.batch, case.num_heads, blocks + 1, dtype=torch.float64)
    for r, row in enumerate(positions.tolist()):
        for k in range(row + 1):
            distance, offset = divmod(row - k, block)
            if selects[r]:
                expected[..., distance] += p[:, :, r, k] * (1 - offset / block)
                expected[..., distance + 1] += p[:, :, r, k] * offset / block
            else:
                exact[..., row // block - k // block] += p[:, :, r, k]
            if not held_out:
                exact[..., row // block - k // block] += p[:, :, r, k]
    close = dict(atol=2e-6, rtol=1e-5, check_dtype=False)
    torch.testing.assert_close(slashes, expected[..., :blocks], **close)
    torch.testing.assert_close(held_out_masses, exact[..., :blocks], **close)
    # The cost of a column is the number of query blocks that see it beyond their window.
    values = torch.zeros(case.batch, case.num_heads, case.seq_length)
    for rank, (bits, _) in enumerate(found):
        own = local_part(torch.arange(case.seq_length), rank, world, block)
        values[..., own] = bits.view(torch.float32)
    position = torch.arange(case.seq_length)
    in_window = positions[:, None] // block - position // block < case.window_blocks
    p = p.masked_fill(in_window | ~selects[:, None], 0).unflatten(2, (case.strata, -1)).sum(3)
    cost = (blocks - position // block - case.window_blocks).clamp(min=1)
    mass = (p.sum(2) - p.amax(2)) / cost
    torch.testing.assert_close(values[..., sinks:], mass[..., sinks:], **close)
    assert values[..., :sinks].isnan().all()


@pytest.mark.parametrize("num_rows", [2, 3, 64, 100, 256, 257, 100_000])
def test_fixed_point_cannot_overflow(num_rows):
    one = fixed_point_one(num_rows)
    assert 0 < one * num_rows < 2**31
    assert int(torch.tensor(float(one)) + 0.5) == one


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [(CASES[3], torch.float16)],
    ids=str,
)
def test_kernels(triton_device, case: Case, dtype):
    query, key, value = case_operands(case, dtype, triton_device)
    rank, world, sinks = case.world - 1, case.world, case.num_sinks
    rows = rows_of_case(case, query, rank)
    one = fixed_point_one(case.strata * case.rows_per_stratum)
    strided = value[: case.seq_length // world]
    for keys in (local_part(key, rank, world, case.block_size), strided):
        lse = reference_masses.merge_lse(reference_masses.partial_lse(rows, keys))
        actual = selection.merge_lse(selection.partial_lse(rows, keys))
        assert actual.shape == lse.shape
        torch.testing.assert_close(actual, lse, atol=1e-5, rtol=1e-5)
        # As if other ranks had some more: also finite where this one has no key that the row sees.
        lse = torch.logaddexp(lse, torch.zeros_like(lse))
        expected = reference_masses.attention_masses(rows, keys, lse, sinks, False)[0]
        actual = selection.attention_masses(rows, keys, lse, sinks, False)[0]
        assert torch.equal(actual == SINK, expected == SINK)
        actual, truth = (t.view(torch.float32).nan_to_num(0) for t in (actual, expected))
        torch.testing.assert_close(actual, truth, atol=1e-6, rtol=1e-5)
        threshold = topk_torch.select_topk(expected, 9, case.seq_length, 0, 1, 1, 64)[1]
        for columns in (None, (expected, threshold)):
            truth = reference_masses.diagonal_masses(rows, keys, lse, sinks, columns)
            actual = selection.diagonal_masses(rows, keys, lse, sinks, columns)
            torch.testing.assert_close(actual / one, truth / one, atol=1e-6, rtol=1e-5)
            assert truth.any()


def test_kernels_with_packed_documents(triton_device):
    rows, key, _, _, _ = column_operands(triton_device, packed=True)
    one, sinks = fixed_point_one(24), 7
    close = dict(atol=1e-5, rtol=1e-4)
    lse = selection.merge_lse(selection.partial_lse(rows, key))
    expected = reference_masses.merge_lse(reference_masses.partial_lse(rows, key))
    torch.testing.assert_close(lse, expected, **close)
    values, masses = selection.attention_masses(rows, key, lse, sinks, True)
    expected, truth = reference_masses.attention_masses(rows, key, lse, sinks, True)
    torch.testing.assert_close(masses / one, truth / one, **close)
    assert (truth[1].sum(-1) / one - 8).abs().max() < 1e-4  # held-out rows' whole attention
    floats = (bits[..., sinks:].contiguous().view(torch.float32) for bits in (values, expected))
    torch.testing.assert_close(*floats, **close)
    diagonals = selection.diagonal_masses(rows, key, lse, sinks, None)
    expected = reference_masses.diagonal_masses(rows, key, lse, sinks, None)
    torch.testing.assert_close(diagonals / one, expected / one, **close)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_kernels_with_non_finite_keys(triton_device, bad):
    query, key, _, _ = random_operands(200, 1, 2, 1, 64, torch.float32, triton_device)
    key[150, 0, 0, 3] = bad
    rows = sampled_rows(query, 0, 1, 64, 8, 1, 1)
    lse = selection.merge_lse(selection.partial_lse(rows, key))
    mass, slashes = selection.attention_masses(rows, key, lse, 0, True)
    assert (slashes >= 0).all()
    assert (mass >= 0).all() and mass.view(torch.float32).isfinite().all()
    diagonals = selection.diagonal_masses(rows, key, lse, 0, None)
    assert (diagonals >= 0).all()
    # Rows before the key do not see it.
    assert mass[..., :64].any() and diagonals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_scores_are_float32_scores(dtype):
    """Products of 16-bit operands are exact: sums agree with the reference to float32's accuracy."""
    query, key, _, _ = random_operands(16384, 1, 8, 2, 128, dtype, "cuda")
    rows = sampled_rows(query, 0, 1, 128, 64, 4, 2)
    lse = reference_masses.merge_lse(reference_masses.partial_lse(rows, key))
    actual = selection.merge_lse(selection.partial_lse(rows, key))
    torch.testing.assert_close(actual, lse, atol=2e-5, rtol=1e-5)
    expected, truth = reference_masses.attention_masses(rows, key, lse, 4, False)
    actual, masses = selection.attention_masses(rows, key, lse, 4, False)
    one = fixed_point_one(256)
    torch.testing.assert_close(masses / one, truth / one, atol=1e-5, rtol=1e-4)
    pair = (t[..., 4:].contiguous().view(torch.float32) for t in (actual, expected))
    torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)
    truth = reference_masses.diagonal_masses(rows, key, lse, 4, None)
    actual = selection.diagonal_masses(rows, key, lse, 4, None)
    torch.testing.assert_close(actual / one, truth / one, atol=1e-5, rtol=1e-4)
