# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Shapes that are measured, and the patterns that are drawn for them."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.balance import KINDS, AttentionShape, visible_pairs
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.tools.profile.cases import Case, cases, tiny
from megatron_mtraining.tools.profile.workload import (
    documents_of,
    lengths,
    operands,
    vertical_slash_index,
)

SHAPES = [AttentionShape(16, 2, 128), AttentionShape(14, 2, 64)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_held_out_is_not_fitted(quick):
    found = cases(SHAPES, quick)
    for shape in SHAPES:
        own = [case for case in found if case.shape.head_dim == shape.head_dim]
        fitted = {(c.kind, c.shape, c.tokens, c.documents) for c in own if not c.held_out}
        held_out = {(c.kind, c.shape, c.tokens, c.documents) for c in own if c.held_out}
        assert not fitted & held_out
        for part in (fitted, held_out):
            assert {kind for kind, *_ in part} == set(KINDS)
            assert any(documents > 1 for *_, documents in part)
            assert len({shape for _, shape, *_ in part}) > 1
    assert max(case.tokens for case in found) == (65536 if quick else 524288)


def test_shapes_of_one_head_and_of_many():
    for shape in (AttentionShape(1, 1, 64), AttentionShape(32, 32, 128), AttentionShape(5, 5, 64)):
        for case in cases([shape]) + tiny([shape]):
            assert case.shape.num_heads % case.shape.num_kv_heads == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 24, 64])
def test_lengths_of_documents(count):
    found = lengths(Case("dense", SHAPES[0], 32768, 1.0, documents=count))
    assert len(found) == count and sum(found) == 32768 and min(found) > 0
    if count > 3:
        assert max(found) > 8 * min(found)
        assert found != sorted(found)


@pytest.mark.parametrize(
    "case", [c for c in cases(SHAPES[:1], quick=True) if c.kind == KINDS[0]], ids=str
)
def test_drawn_patterns_have_about_the_wanted_density(case):
    torch.manual_seed(0)
    index = vertical_slash_index(case, MTrainingConfig(), documents_of(case, CPU), CPU)
    found = float(index.density().mean())
    window = 384 / (visible_pairs(lengths(case)) / case.tokens)
    assert 0.7 * case.density < found < 1.3 * case.density + window
    if case.density == 1:
        assert found == 1
    else:
        assert len(set(index.density()[0].tolist())) > 1  # heads differ
        assert bool(index.column_ptr[..., -1].any()) == (case.columns > 0)


def test_operands():
    case = Case("dense", AttentionShape(4, 2, 64), 256, 1.0)
    query, key, value, grad_out = operands(case, CPU)
    assert query.shape == grad_out.shape == (256, 1, 4, 64)
    assert key.shape == value.shape == (256, 1, 2, 64)
    assert not value.is_contiguous() and value.stride(-1) == 1
