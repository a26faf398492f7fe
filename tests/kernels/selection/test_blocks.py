# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Antidiagonal scores, the selection of key blocks and what they hold: the kernels against the reference
implementation, on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.kernels import selection
from megatron_mtraining.kernels.selection import reference_blocks
from megatron_mtraining.layout import block_at, stripe
from megatron_mtraining.pattern.recall import held_out
from tests.support.selection_cases import (
    CASES,
    SCALE,
    case_operands,
    column_operands,
    dense_probabilities,
    local_part,
    planted_operands,
    rows_of_case,
)

pytestmark = pytest.mark.usefixtures("fresh_inputs")


def check_antidiagonal_lse(operands, world, inner, block, stride, tolerance, first=0):
    """Check all ranks' scores. Returns those of all query blocks, in the order of the sequence."""
    query, key = operands
    device = query.device
    keys = torch.stack([stripe(key, r, world, block, inner=inner) for r in range(world)])
    found = []
    for rank in range(world):
        part = stripe(query, rank, world, block, inner=inner)[first * block :]
        rest = stride, block, first, rank, inner, 0.3
        parts, lse = selection.antidiagonal_lse(part, keys, *rest)
        for a, e in zip((parts, lse), reference_blocks.antidiagonal_lse(part, keys, *rest)):
            assert torch.equal(a.isinf(), e.isinf())
            a, e = a.double().exp2(), e.exp2()
            assert ((a - e).abs() <= tolerance * e.abs()).all()
        own = block_at(torch.arange(8 // world, device=device), rank, world, inner)[first:]
        found.append((own, parts.unflatten(2, (-1, block // stride))))
    whole = torch.zeros(2, 4, 8, block // stride, 8, dtype=found[0][1].dtype, device=device)
    for own, parts in found:
        whole[:, :, own] = parts
    return whole


@pytest.mark.filterwarnings("ignore:divide by zero")  # numpy's, in the interpreter
def test_antidiagonal_lse_interpreted(interpreter):
    operands = planted_operands(torch.float32, 512)
    one, two = (
        check_antidiagonal_lse(operands, *ranks, 64, 16, 1e-4) for ranks in ((1, 1), (2, 1))
    )
    # Not bit for bit: a row's bits from numpy's products depend on where in a tile it is.
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    check_antidiagonal_lse(operands, 2, 1, 64, 32, 1e-4, first=1)
    check_antidiagonal_lse(planted_operands(torch.float32, 512, dim=192), 2, 1, 64, 16, 1e-4)


@pytest.mark.filterwarnings("ignore:divide by zero")  # numpy's, in the interpreter
@pytest.mark.parametrize(("world", "first"), [(1, 0), (1, 5), (2, 1)])
def test_antidiagonal_lse_of_what_is_seen(triton_device, world, first):
    """Tiles of rows whose blocks see other first blocks, some of them beyond the first tile of keys."""
    query, key = planted_operands(torch.float32, 512, triton_device)
    seen_from = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 7], [0, 1, 1, 1, 4, 4, 4, 4]])
    keys = torch.stack([stripe(key, r, world, 64, inner=1) for r in range(world)])
    own = block_at(torch.arange(8 // world), world - 1, world, 1)
    given = 4, 64, first, world - 1, 1, 0.3, seen_from[:, own].int().to(triton_device)
    part = stripe(query, world - 1, world, 64, inner=1)[first * 64 :]
    expected = reference_blocks.antidiagonal_lse(part, keys, *given)
    every = reference_blocks.antidiagonal_lse(part, keys, *given[:-1])
    for b in range(2):
        for row, block in enumerate(own.tolist()[first:]):
            hidden = expected[0][b, :, 16 * row : 16 * row + 16].isinf()
            before = int(seen_from[b, block])
            assert hidden[..., :before].all() and not hidden[..., before : block + 1].any()
    seen = expected[0].isfinite()
    assert torch.equal(expected[0][seen], every[0][seen])
    found = selection.antidiagonal_lse(part, keys, *given)
    for a, e in zip(found, expected):
        assert torch.equal(a.isinf(), e.isinf())
        torch.testing.assert_close(a.double().exp2(), e.exp2(), rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stride", [4, 16, 64])
@pytest.mark.parametrize("block", [64, 128])
def test_antidiagonal_lse_compiled(block, stride, dtype):
    operands = planted_operands(dtype, 8 * block, "cuda")
    wholes = [
        check_antidiagonal_lse(operands, *ranks, block, stride, 1e-3)
        for ranks in ((1, 1), (2, 2), (4, 2))
    ]
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    check_antidiagonal_lse(operands, 2, 1, block, stride, 1e-3, first=1)


@pytest.mark.parametrize("top", [3, 2**20], ids=["ties", "int20"])
@pytest.mark.parametrize(
    ("by_mass", "target"),
    [
        pytest.param(True, 2**29, id="half-of-mass"),
        pytest.param(True, 2**30, id="all-of-mass"),
        pytest.param(True, 2**28 + 7, id="quarter-of-mass"),
        pytest.param(False, 0, id="k0"),
        pytest.param(False, 4, id="k4"),
    ],
)
def test_top_blocks(triton_device, by_mass, target, top):
    values = torch.randint(0, top, (1, 2, 5, 20), dtype=torch.int32, device=triton_device)
    rest = by_mass, target, 1, 2, 1, 1, 2, 1
    expected = reference_blocks.top_blocks(values, *rest)
    assert torch.equal(selection.top_blocks(values, *rest), expected)


@pytest.mark.parametrize(("squares", "num_blocks", "num_rows"), [(2, 5, 7), (8, 300, 16)])
def test_block_masses(triton_device, squares, num_blocks, num_rows):
    parts = torch.randn(2, 3, 2 * squares + 4 * (squares == 2), num_blocks, device=triton_device)
    parts[..., -1] = float("-inf")
    lse = parts.logsumexp(-1)
    parts[0, 0, 0, 0], lse[1, 0, 1], lse[1, 1, 1] = float("nan"), float("-inf"), float("inf")
    found = selection.block_masses(parts, lse, squares, num_rows)
    expected = reference_blocks.block_masses(parts, lse, squares, num_rows)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (expected > 2**18).any() and not expected[..., -1].any()
    # A share of 2^23 is rounded once in float32.
    assert ((found - expected).abs() <= squares).all()


def kept_in_blocks(case, dtype, device, attention):
    """What held-out rows keep over all ranks in random blocks, and in float64."""
    query, key, _ = case_operands(case, dtype, device)
    ranks = range(case.world)
    rows = [rows_of_case(case, query, rank) for rank in ranks]
    held = torch.arange(0, len(rows[0].rows), 2, device=device)
    p = dense_probabilities(query, key, rows[0].rows.long(), SCALE)
    num_blocks = -(-case.seq_length // case.block_size)
    seen = torch.rand(case.batch, case.num_heads, len(held), num_blocks, device=device) < 0.4
    seen[..., 0] = True
    block = torch.arange(case.seq_length, device=device) // case.block_size
    truth = (p[:, :, held] * seen[..., block]).sum((-1, -2))
    parts = [local_part(key, rank, case.world, case.block_size) for rank in ranks]
    scores = query.index_select(0, rows[0].rows.long()).permute(1, 2, 0, 3).double() @ (
        key.permute(1, 2, 3, 0).double().repeat_interleave(case.num_heads // case.kv_heads, 1)
    )
    later = torch.arange(case.seq_length, device=device) > rows[0].rows[:, None]
    lse = (scores * SCALE).masked_fill(later, float("-inf")).logsumexp(-1).float()
    given = lse, held, seen.to(torch.uint8)
    return sum(attention(r, k, *given) for r, k in zip(rows, parts)), truth


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_attention_in_blocks_against_dense(case):
    kept, truth = kept_in_blocks(case, torch.float32, "cpu", reference_blocks.attention_in_blocks)
    assert truth.min() > 0
    torch.testing.assert_close(kept.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES] + [(CASES[3], torch.float16)],
    ids=str,
)
def test_attention_in_blocks(triton_device, case, dtype):
    kept, truth = kept_in_blocks(case, dtype, triton_device, selection.attention_in_blocks)
    torch.testing.assert_close(kept.double(), truth, atol=1e-4, rtol=1e-4)


def test_attention_in_blocks_of_documents(triton_device):
    rows, key, _, _, lse = column_operands(triton_device, packed=True)
    key[3, 0], key[7, 1] = float("nan"), float("inf")
    held = held_out(rows, torch.arange(len(rows.rows), device=triton_device))
    assert held.stride() == (3,), "not copied: every third number is of a row that is held out"
    seen = torch.randint(0, 2, (2, 4, len(held), 8), dtype=torch.uint8, device=triton_device)
    given = rows, key, lse, held, seen
    expected = reference_blocks.attention_in_blocks(*given)
    assert expected.isfinite().all() and expected.any()
    torch.testing.assert_close(
        selection.attention_in_blocks(*given), expected, atol=1e-4, rtol=1e-4
    )
