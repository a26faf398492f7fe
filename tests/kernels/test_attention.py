# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention and its gradients against dense attention under the same mask in float64.

- the reference implementations, in float64, on many shapes and patterns
- the kernels, interpreted on CPU and compiled on a GPU
- long sums of the Hopper kernels, packing of keys and values, equal bits from run to run
- causality: later tokens change nothing

Ids: query heads (H), key and value heads (KV), head dimension (D), tokens (N), ranks (cp), ranks of a round
(I), block size (B).
"""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.kernels.attention import pack_kv
from tests.support.attention_cases import (
    BACKWARD_PATHS,
    COMPILED_SEQUENCES,
    INTERPRETED_SEQUENCES,
    PORTABLE_DIMS,
    PORTABLE_SEQUENCES,
    SEQUENCES,
    TOLERANCE,
    assert_results,
    dense_attention,
    has_backward_path,
    random_index,
    random_operands,
    simulated_ring,
    written_out_mask,
)
from tests.support.pairs import pairwise

pytestmark = pytest.mark.usefixtures("fresh_inputs")

BUDGETS = ["none", "columns", "few", "all"]
HEADS = [(1, 1), (4, 2), (7, 1), (8, 1)]  # query heads, key and value heads


def check(
    seq_length, world, inner, heads, dim, budget, dtype, block, tolerance, device="cpu", batch=2
):
    operands = random_operands(seq_length, batch, *heads, dim, dtype, device)
    index = random_index(seq_length, batch, heads[0], block, world, budget, device, inner)
    mask = written_out_mask(index, batch, heads[0])
    scale = 0.7 * dim**-0.5
    expected = dense_attention(*operands, mask, scale)
    actual = simulated_ring(*operands, index, scale, parts_of_heads=max(1, inner - 1))
    assert_results(actual, expected, tolerance)


@pairwise(
    {
        "seq_length, world, inner": SEQUENCES,
        "heads": HEADS,
        "dim": [64, 128],
        "budget": BUDGETS,
    }
)
def test_references(seq_length, world, inner, heads, dim, budget):
    check(seq_length, world, inner, heads, dim, budget, torch.float64, 64, 1e-12, batch=1)


@pairwise(
    {
        "seq_length, world, inner, block": INTERPRETED_SEQUENCES,
        "heads": [(4, 2), (2, 2)],
        "dim": [64, 128],
        "budget": ["few", "all"],
    }
)
def test_kernels_interpreted(interpreter, seq_length, world, inner, heads, dim, budget, block):
    check(seq_length, world, inner, heads, dim, budget, torch.float32, block, 1e-5, batch=1)


PORTABLE_CASES = {
    "seq_length, world, inner, block": PORTABLE_SEQUENCES,
    "dim": PORTABLE_DIMS,
    "budget": ["few", "all"],
}


@pairwise(
    PORTABLE_CASES,
    lambda dim, budget, world, **_: (dim == 96) == ((budget == "few") == (world == 1)),
)
def test_other_head_dims_interpreted(interpreter, seq_length, world, inner, dim, budget, block):
    check(seq_length, world, inner, (2, 1), dim, budget, torch.float32, block, 1e-5, batch=1)


@pytest.mark.gpu
@pairwise({**PORTABLE_CASES, "dtype": TOLERANCE}, has_backward_path)
def test_other_head_dims_compiled(monkeypatch, seq_length, world, inner, dim, budget, block, dtype):
    monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    case = seq_length * 4, world, inner, (4, 2), dim, budget, dtype, block, TOLERANCE[dtype]
    check(*case, "cuda")


@pytest.mark.parametrize(
    "seq_length, world, heads, budget, block",
    [
        (256, 1, (2, 2), "columns", 128),
        (384, 2, (2, 1), "few", 64),
    ],
)
def test_long_sums_interpreted(monkeypatch, interpreter, seq_length, world, heads, budget, block):
    """Sums are put aside after every CHAIN query tiles: here often."""
    monkeypatch.setattr("megatron_mtraining.kernels.attention.launch_args.CHAIN", 2)
    check(seq_length, world, 1, heads, 64, budget, torch.float32, block, 1e-5, batch=1)


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "seq_length, world, inner, heads, block": COMPILED_SEQUENCES,
        "dim": [64, 96, 128, 192, 256],
        "budget": BUDGETS,
        "dtype": TOLERANCE,
        "backward_path": BACKWARD_PATHS,
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_kernels_compiled(seq_length, world, inner, heads, dim, budget, block, dtype):
    check(seq_length, world, inner, heads, dim, budget, dtype, block, TOLERANCE[dtype], "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "seq_length, world": [(2996, 1), (3072, 2)],
        "dim": [64, 128, 256],
        "budget": ["few", "all"],
        "backward_path": BACKWARD_PATHS,
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_long_sums(monkeypatch, seq_length, world, dim, budget):
    """Sums are put aside after every CHAIN query tiles: here often."""
    monkeypatch.setattr("megatron_mtraining.kernels.attention.launch_args.CHAIN", 32)
    check(seq_length, world, 1, (8, 2), dim, budget, torch.bfloat16, 128, 1e-2, "cuda", batch=1)


def check_pack(device):
    """Operands strided as in a projection's result, with rows that do not divide into tiles."""
    for length, batch, heads, dim in ((77, 3, 2, 64), (130, 1, 5, 128), (1, 1, 1, 64)):
        mixed = torch.randn(length, batch, heads, 3 * dim, device=device).to(torch.bfloat16)
        key, value = (
            mixed[..., :dim].transpose(0, 1).contiguous().transpose(0, 1),
            mixed[..., dim : 2 * dim],
        )
        room = torch.full((3, 2, length, batch, heads, dim), 7.0, device=device).to(torch.bfloat16)
        pack_kv(key, value, room[1])
        assert torch.equal(room[1], torch.stack((key, value)))
        assert (room[0] == 7).all() and (room[2] == 7).all()


def test_pack_kv(monkeypatch):
    check_pack("cpu")
    if not torch.cuda.is_available():  # interpreted
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        check_pack("cpu")


@pytest.mark.gpu
def test_pack_kv_compiled():
    check_pack("cuda")


@pytest.mark.gpu
def test_bitwise_equal_from_run_to_run():
    operands = random_operands(4096, 1, 8, 2, 128, torch.bfloat16, "cuda")
    index = random_index(4096, 1, 8, 128, 2, "few", "cuda")
    first = simulated_ring(*operands, index, 0.1)
    for _ in range(3):
        again = simulated_ring(*operands, index, 0.1)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("world", [1, 2])
def test_no_future_token_leaks_under_a_pattern(world):
    """Changing keys and values from a token on changes nothing before it, in any budget. How later tokens
    change the pattern itself: see tests/pattern."""
    seq_length, cut = 512, 300
    query, key, value, grad_out = random_operands(seq_length, 1, 4, 2, 64, torch.float32, "cpu")
    for budget in ("none", "columns", "few", "all"):
        index = random_index(seq_length, 1, 4, 64, world, budget, "cpu")
        before = simulated_ring(query, key, value, grad_out, index, 0.1)[0]
        other_key, other_value = key.clone(), value.clone()
        other_key[cut:] = torch.randn_like(key[cut:])
        other_value[cut:] = torch.randn_like(value[cut:])
        after = simulated_ring(query, other_key, other_value, grad_out, index, 0.1)[0]
        assert torch.equal(before[:cut], after[:cut])
        assert not torch.equal(before[cut:], after[cut:])
