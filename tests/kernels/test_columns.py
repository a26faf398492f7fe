# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Columns gathered from ranks, and found again by their keys."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from megatron_mtraining.kernels.attention.portable.columns import gather_columns, invert_columns
from megatron_mtraining.layout import stripe
from megatron_mtraining.pattern import build_index


@pytest.mark.parametrize(
    ("seq", "block", "world", "inner", "count"),
    [(500, 64, 1, 1, 90), (128, 128, 1, 1, 128), (768, 64, 6, 3, 200), (576, 64, 3, 1, 0)],
)
def test_each_key_knows_its_column(triton_device, seq, block, world, inner, count):
    columns = torch.stack([torch.randperm(seq)[:count] for _ in range(6)]).view(2, 3, count)
    columns[1, 1] = seq  # none
    columns[0, 2, count // 2 :] = seq  # fewer than the others
    distances = torch.rand(2, 3, -(-seq // block)) < 0.3
    index = build_index(
        distances.to(triton_device), columns.to(triton_device), seq, block, world, inner
    )
    length = seq // world
    keys = torch.arange(seq, dtype=torch.float32)[:, None, None, None].expand(seq, 2, 1, 64)
    for rank in range(world):
        own = keys if world == 1 else stripe(keys, rank, world, block, inner=inner)
        own = own.contiguous()
        entries = invert_columns(index, rank, length).cpu()
        assert entries.dtype == torch.int32 and entries.shape == (2, 3, length)
        gathered = gather_columns(own.to(triton_device), None, index, rank).cpu()[0, ..., 0]
        for b in range(2):
            for h in range(3):
                here = entries[b, h] >= 0
                positions = own[:, b, 0, 0][here]
                assert torch.equal(gathered[b, h, entries[b, h][here].long()], positions)
                wanted = set(columns[b, h].tolist()) & set(own[:, b, 0, 0].long().tolist())
                assert set(positions.long().tolist()) == wanted
