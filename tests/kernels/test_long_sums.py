# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradients of a column that all queries attend to, such as an attention sink, against sums in float64.

Tensor cores round towards zero as they add. In one chain of 524288 rows 0.3% of the gradient was gone, more
than bf16 rounds by (0.13%).
"""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.pattern import build_index

pytestmark = pytest.mark.usefixtures("fresh_inputs")

ROWS = 65536  # of a float64 product


def sink_gradients(seq_length, heads, kv_heads, columns, dtype, device):
    """Gradients of the first key and value, by name: what ``attend`` computes, and a float64 sum."""
    dim = 128
    query = torch.randn(seq_length, 1, heads, dim, device=device) + 0.25
    key, value = torch.randn(2, seq_length, 1, kv_heads, dim, device=device)
    key[0] += 1
    grad_out = 1 + torch.randn(seq_length, 1, heads, dim, device=device)
    query, key, value, grad_out = (t.to(dtype) for t in (query, key, value, grad_out))
    distances = torch.zeros(1, heads, -(-seq_length // 128), dtype=torch.bool, device=device)
    distances[..., 0] = True
    others = 1 + torch.randperm(seq_length // 2 - 1)[: columns - 1].sort().values
    chosen = torch.cat((torch.zeros(1, dtype=torch.long), others)).expand(1, heads, -1).contiguous()
    index = build_index(distances, chosen.to(device), seq_length, 128, 1)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    config = MTrainingConfig.from_options(block_size=128)
    result = attend(*leaves, config=config, pattern=index)
    result.out.backward(grad_out)

    scale = dim**-0.5
    k, v = (t[0, 0, 0].detach().double() for t in (key, value))
    grad_k, grad_v = torch.zeros(2, dim, dtype=torch.float64, device=device)
    for head in range(heads // kv_heads):
        for start in range(0, seq_length, ROWS):
            rows = slice(start, start + ROWS)
            q, out, do = (t[rows, 0, head].detach().double() for t in (query, result.out, grad_out))
            p = torch.exp(scale * (q @ k) - result.lse[0, head, rows].double())
            grad_v += p @ do
            grad_k += scale * (p * (do @ v - (do * out).sum(-1))) @ q
    return {"key": (key.grad[0, 0, 0], grad_k), "value": (value.grad[0, 0, 0], grad_v)}


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_sums_of_the_references():
    gradients = sink_gradients(500, 4, 2, 40, torch.float32, "cpu")
    for name, (found, expected) in gradients.items():
        assert error(found, expected) < 1e-5, name


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True])
def test_sums_of_half_a_million_rows(monkeypatch, portable):
    monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", str(int(portable)))
    # With fewer heads or columns, several programs would share a column's queries.
    gradients = sink_gradients(524288, 16, 2, 4096, torch.bfloat16, "cuda")
    for name, (found, expected) in gradients.items():
        rounding = error(expected.to(found.dtype), expected)
        assert error(found, expected) < 1.2 * rounding, name
