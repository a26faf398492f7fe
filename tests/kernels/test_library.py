# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dense attention by the kernels of a library.

- where it is taken: one rank, all pairs, nothing that the library does not know
- results through the public entry, against attention in float64: on CPUs PyTorch's kernel stands in
- on a GPU, FlashAttention-4, if it is installed, and this package's backward after a library's forward
"""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.kernels import attention as kernels
from megatron_mtraining.kernels.attention import library
from megatron_mtraining.kernels.types import PatternOperand
from megatron_mtraining.pattern.vertical_slash_index import full_index
from tests.support.attention_cases import (
    TOLERANCE,
    assert_results,
    dense_attention,
    random_operands,
)

pytestmark = pytest.mark.usefixtures("fresh_inputs")

HEADS_FIRST, TOKENS_FIRST = (1, 2, 0, 3), (2, 0, 1, 3)
SHAPES = [(256, 1, 4, 2, 64), (300, 2, 3, 1, 64), (129, 1, 2, 2, 96)]


def cpu_forward(query, key, value, scale):
    group = query.shape[2] // key.shape[2]
    operands = [query, *(each.repeat_interleave(group, 2) for each in (key, value))]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(each.permute(HEADS_FIRST) for each in operands), 0.0, True, scale=scale
    )
    return out.permute(TOKENS_FIRST).contiguous(), lse


def cpu_backward(grad_out, query, key, value, out, lse, scale):
    kv_heads, group = key.shape[2], query.shape[2] // key.shape[2]
    operands = [grad_out, query, *(each.repeat_interleave(group, 2) for each in (key, value)), out]
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(each.permute(HEADS_FIRST) for each in operands), lse, 0.0, True, scale=scale
    )
    dq, *dkv = (each.permute(TOKENS_FIRST) for each in found)
    return dq, *(each.unflatten(2, (kv_heads, group)).sum(3) for each in dkv)


def results_of(operands, **options):
    *inputs, grad_out = operands
    leaves = [each.detach().requires_grad_() for each in inputs]
    config = MTrainingConfig.for_sequence(len(inputs[0]), block_size=64, **options)
    out = attend(*leaves, config=config).out
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def dense_of(operands):
    query = operands[0]
    mask = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril()
    return dense_attention(*operands, mask, query.shape[-1] ** -0.5)


@pytest.fixture
def taken(monkeypatch):
    """A library on CPUs, taken as others on GPUs; the calls of it."""
    calls = []

    def counted(function):
        return lambda *given: calls.append(function.__name__) or function(*given)

    on_cpus = library.Library("CPU", counted(cpu_forward), counted(cpu_backward))

    def library_for(index: PatternOperand, *operands):
        return on_cpus if index.is_dense and index.world == 1 else None

    monkeypatch.setattr(kernels, "library_for", library_for)
    return calls


@pytest.mark.parametrize("shape", SHAPES)
def test_results(taken, shape):
    operands = random_operands(*shape, torch.float32, "cpu")
    assert_results(results_of(operands, price=0), dense_of(operands), 1e-5)
    assert taken == ["cpu_forward", "cpu_backward"]


@pytest.mark.parametrize("options", [dict(price=0.3), dict(price=0, backward_threshold=3.0)])
def test_not_where_a_pattern_leaves_something_out(taken, options):
    results_of(random_operands(256, 1, 4, 2, 64, torch.float32, "cpu"), **options)
    assert not taken


def test_not_with_softmax_offsets(taken):
    *inputs, _ = random_operands(256, 1, 4, 2, 64, torch.float32, "cpu")
    config = MTrainingConfig.for_sequence(256, block_size=64, price=0)
    attend(*inputs, config=config, softmax_offset=torch.zeros(4))
    assert not taken


def test_environment_chooses(monkeypatch):
    operands = random_operands(128, 1, 2, 1, 64, torch.bfloat16, "cpu")[:3]
    index = full_index(1, 2, 128, 64, 1, 1, "cpu")
    for value in ("own", "flash4"):
        monkeypatch.setenv("MTRAINING_DENSE", value)
        assert kernels.library_for(index, *operands) is None, "these are on the CPU"
    monkeypatch.setenv("MTRAINING_DENSE", "fast")
    with pytest.raises(ConfigError, match="MTRAINING_DENSE is 'fast'.*own or flash4"):
        kernels.library_for(index, *operands)


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match="flash-attn-4 not installed: pip install flash-attn-4"):
        library._flash4_runs.__wrapped__(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1024, 1, 14, 2, 64), (1000, 2, 4, 4, 128), (777, 1, 8, 1, 128), (512, 1, 4, 2, 96)]
)
def test_flash_attention(monkeypatch, dtype, shape):
    pytest.importorskip("flash_attn.cute")
    monkeypatch.setenv("MTRAINING_DENSE", "flash4")
    operands = random_operands(*shape, dtype, "cuda")
    index = full_index(shape[1], shape[2], shape[0], 64, 1, 1, "cuda")
    assert kernels.library_for(index, *operands[:3]) is not None
    expected = dense_of(operands)
    assert_results(results_of(operands, price=0), expected, TOLERANCE[dtype])
    # Each half with the other of this package.
    there = kernels.library_for(index, *operands[:3])
    for halves in ([there, None], [None, there]):
        monkeypatch.setattr(kernels, "library_for", Mock(side_effect=halves))
        assert_results(results_of(operands, price=0), expected, TOLERANCE[dtype])


@pytest.mark.gpu
def test_not_under_deterministic_algorithms(monkeypatch, deterministic):
    monkeypatch.setenv("MTRAINING_DENSE", "flash4")
    operands = random_operands(256, 1, 2, 1, 64, torch.bfloat16, "cuda")[:3]
    index = full_index(1, 2, 256, 64, 1, 1, "cuda")
    assert kernels.library_for(index, *operands) is None
