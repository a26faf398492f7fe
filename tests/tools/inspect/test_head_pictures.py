# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures of heads, against dense attention and masks written out: all rows of the sequence."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.models.types import LayerInput
from megatron_mtraining.pattern import build_index
from megatron_mtraining.tools.inspect import head_pictures, measure
from tests.support.inspect_cases import HEADS, SEQ, operands, true_attention


def coarse(values, rows, cells):
    """Means over rows of a cell, ``[cells, keys]``."""
    size = values.shape[-1] // cells
    return torch.stack([values[rows[rows // size == cell]].mean(0) for cell in range(cells)])


@pytest.mark.parametrize("most_rows", [SEQ, 300], ids=["all-rows", "every-fourth-row"])
def test_attention_of_a_head(most_rows, monkeypatch):
    monkeypatch.setattr(head_pictures, "CPU_ROWS", most_rows)
    monkeypatch.setattr(measure, "CHUNK_BYTES", 77 * 4 * SEQ)  # in several parts
    query, key = operands()
    p = true_attention(query, key, 0.2)
    rows = head_pictures.rows_of_picture(SEQ, query.device)
    assert len(rows) == SEQ // -(-SEQ // most_rows) and rows[-1] == SEQ - 1
    for head in range(HEADS):
        found = head_pictures.attention_picture(LayerInput(0, query, key, 0.2), head)
        cells = len(found)
        assert cells == 256 and found.isfinite().all()
        expected = coarse(p[head], rows, cells).unflatten(-1, (cells, -1)).sum(-1)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [256, 320, 192], ids="N{}".format)
def test_density_of_a_head(length, monkeypatch):
    monkeypatch.setattr(head_pictures, "CHUNK_BYTES", 16 * length * 5)
    distances = torch.zeros(1, 1, length // 64, dtype=torch.bool)
    distances[..., 2] = True
    index = build_index(distances, torch.tensor([[[3, 70, length]]]), length, 64, 1)
    pattern = measure.VerticalSlashPattern(index)
    found = head_pictures.density_picture(pattern, 0, length, torch.device("cpu"))
    cells = head_pictures.cells_of(length)
    assert found.shape == (cells, cells) and length % cells == 0
    mask = index.token_mask(0, 0).float()
    expected = coarse(mask, torch.arange(length), cells).unflatten(-1, (cells, -1)).mean(-1)
    torch.testing.assert_close(found, expected)


def test_cells_divide_any_length():
    assert [head_pictures.cells_of(n) for n in (1, 128, 257, 1024, 4096 * 3)] == [
        1,
        128,
        1,
        256,
        256,
    ]
