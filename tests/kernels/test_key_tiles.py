# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tiles of keys smaller than a block, in the Hopper kernels that walk them: the same sums and marks as with
tiles of a block, which other tests compare with dense attention."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_cases import (
    assert_results,
    random_index,
    random_operands,
    simulated_ring,
)
from tests.support.pruning_cases import (
    THRESHOLD,
    as_lists,
    mark_all_rounds,
    on_device,
    peaked,
    with_documents,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_inputs")]

CASES = [
    # tokens, ranks, ranks of a round, query and KV heads, head dim, budget, packed, lists, keys of a tile
    (1000, 1, 1, (4, 2), 128, "few", False, False, 64),
    (1000, 1, 1, (7, 1), 64, "all", True, True, 32),
    (1536, 2, 2, (8, 1), 128, "few", True, False, 64),
    (1152, 3, 1, (4, 2), 64, "columns", True, False, 64),
    (2048, 4, 2, (4, 2), 128, "few", False, True, 32),
    (1024, 2, 1, (4, 2), 256, "few", True, False, 32),
]
parametrize_cases = pytest.mark.parametrize(
    "length, world, inner, heads, dim, budget, packed, lists, keys", CASES
)


def an_index(length, world, inner, heads, budget, packed, lists):
    index = random_index(length, 1, heads[0], 128, world, budget, "cpu", inner)
    indices = as_lists(index) if lists else [index] * world
    return [on_device(with_documents(each) if packed else each, "cuda") for each in indices]


def set_tile(monkeypatch, keys, dim):
    module = "megatron_mtraining.kernels.attention.hopper.item_arguments"
    monkeypatch.setattr(f"{module}.TILE_BYTES", keys * dim * 2)


@parametrize_cases
def test_sums(monkeypatch, length, world, inner, heads, dim, budget, packed, lists, keys):
    monkeypatch.setenv("MTRAINING_BACKWARD", "two_kernels")
    operands = random_operands(length, 1, *heads, dim, torch.float16, "cuda")
    indices = an_index(length, world, inner, heads, budget, packed, lists)
    expected = simulated_ring(*operands, indices, dim**-0.5)
    set_tile(monkeypatch, keys, dim)
    actual = simulated_ring(*operands, indices, dim**-0.5)
    assert_results(actual, [each.double() for each in expected], 2e-3)


@parametrize_cases
def test_marks(monkeypatch, length, world, inner, heads, dim, budget, packed, lists, keys):
    operands = peaked(length, 1, heads, dim, torch.float32, block=128)
    operands = [each.half() for each in operands]
    indices = an_index(length, world, inner, heads, budget, packed, lists)
    expected = mark_all_rounds(operands, indices[0], THRESHOLD, indices, "cuda")
    set_tile(monkeypatch, keys, dim)
    found = mark_all_rounds(operands, indices[0], THRESHOLD, indices, "cuda")
    # A share within rounding of the threshold may fall on either side: random inputs have next to none.
    assert (found != expected).sum() <= 2
    assert found.any()
