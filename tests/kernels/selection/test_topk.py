# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Top-k of integers with positions as tie-breakers: the kernel against ``torch.topk``, in several levels of
tiles, with ties and with too few positive values."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.kernels import selection
from megatron_mtraining.kernels.selection import topk as topk_kernel
from megatron_mtraining.kernels.selection import topk_torch
from megatron_mtraining.layout import positions_at, stripe


def pairs(selected):
    """The selected (value, position) pairs of each head, sorted."""
    values, positions = selected.flatten(1, 2).tolist()
    return [sorted(zip(v, p)) for v, p in zip(values, positions)]


@pytest.mark.parametrize(
    ("length", "k", "top"),
    [
        pytest.param(700, 9, 2**31 - 1, id="L700-k9-int32"),
        pytest.param(700, 100, 5, id="L700-k100-ties"),
        pytest.param(700, 100, 1, id="L700-k100-binary"),
        pytest.param(40, 40, 3, id="L40-k40-all"),
        pytest.param(300, 17, 2**30, id="L300-k17-int30"),
        pytest.param(256, 1, 9, id="L256-k1-ties"),
    ],
)
def test_topk(triton_device, monkeypatch, length, k, top):
    monkeypatch.setattr(topk_kernel, "TILE", 256)  # several levels
    world, rank, block = 3, 1, 64
    values = torch.randint(0, min(top + 1, 2**31 - 1), (2, 3, length), device=triton_device)
    values[0, 0, 5:] = 0  # fewer than are asked for
    values[0, 1] = 7  # only ties
    values[1, 0, length // 2 :] = 0
    values[1, 0, : length // 2] = 3  # more ties in one tile than it offers to the next level
    values = values.int()
    fill = 10_000
    layout = (rank, world, world, block)
    expected, _ = topk_torch.select_topk(values, k, fill, *layout)
    actual, (threshold, last) = selection.select_topk(values, k, fill, *layout)
    assert pairs(actual) == pairs(expected)
    position = positions_at(torch.arange(length, device=triton_device), rank, world, block)
    # The threshold selects the same as the list.
    tied = (values == threshold[..., None]) & (position <= last[..., None])
    above = (values > threshold[..., None]) | tied
    for b in range(2):
        for h in range(3):
            listed = [p for p in actual[1, b, h].tolist() if p != fill]
            assert sorted(listed) == position[above[b, h]].tolist()


def test_merge_topk(triton_device, monkeypatch):
    """From three ranks' selections, the same as one selection from everything, ties included."""
    monkeypatch.setattr(topk_kernel, "TILE", 256)
    world, block, k, seq = 3, 64, 100, 64 * 3 * 3
    values = torch.randint(0, 30, (1, 2, seq), device=triton_device, dtype=torch.int32)
    values[0, 1, 50:] = 0
    candidates = [
        selection.select_topk(stripe(values, r, world, block, 2), k, seq, r, world, world, block)[0]
        for r in range(world)
    ]
    merged, (threshold, last) = selection.merge_topk(torch.stack(candidates), k, seq)
    expected, _ = topk_torch.select_topk(values, k, seq, 0, 1, 1, 128)
    assert pairs(merged) == pairs(expected)
    position = torch.arange(seq, device=triton_device)
    tied = (values == threshold[..., None]) & (position <= last[..., None])
    above = (values > threshold[..., None]) | tied
    assert above.sum(-1).tolist() == [[k, merged[0, 0, 1].count_nonzero().item()]]


def test_k_too_large_for_the_kernel(triton_device, monkeypatch):
    monkeypatch.setattr(topk_kernel, "TILE", 64)
    values = torch.randint(0, 99, (1, 1, 200), device=triton_device, dtype=torch.int32)
    actual = selection.select_topk(values, 90, 200)[0]
    assert pairs(actual) == pairs(topk_torch.select_topk(values, 90, 200, 0, 1, 1, 128)[0])
