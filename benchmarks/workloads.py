# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Patterns that the kernel benchmarks share."""

from __future__ import annotations

import torch

from megatron_mtraining.pattern import build_index

BLOCK = 128


def draw_index(seq, heads, share, columns, device):
    """A local band of 4 distances, far ones at random, columns at random (denser at the start)."""
    blocks = seq // BLOCK
    distances = torch.rand(1, heads, blocks) < share
    distances[..., :4] = True
    weights = 1 / (1 + torch.arange(seq, dtype=torch.float32) / 1000)
    picks = [torch.multinomial(weights, columns) for _ in range(heads)] if columns else []
    picked = torch.stack(picks)[None] if columns else torch.zeros(1, heads, 0, dtype=torch.int64)
    return build_index(distances.to(device), picked.to(device), seq, BLOCK, 1)
