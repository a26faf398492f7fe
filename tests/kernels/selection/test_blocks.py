# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Antidiagonal scores and the selection of key blocks: the kernels against the reference implementation, on
any number of ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.kernels import selection
from megatron_mtraining.kernels.selection import reference_blocks
from megatron_mtraining.layout import block_at, stripe
from tests.support.selection_cases import planted_operands

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
