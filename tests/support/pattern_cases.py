# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Queries and keys whose attention has structure, for tests of the pattern search."""

from __future__ import annotations

import torch

from tests.support.attention_cases import random_operands


def structured(seq_length, heads=2, kv_heads=1, distance=300, column=200):
    """q and k whose attention is one diagonal (head 0) or one column (head 1), above noise."""
    torch.manual_seed(3)
    base = torch.randn(seq_length + distance, 64)
    query = 0.1 * torch.randn(seq_length, 1, heads, 64)
    key = 0.3 * base[distance:, None, None].expand(-1, 1, kv_heads, -1).clone()
    # Query i looks like key i - distance.
    query[:, 0, 0] += 3 * base[:seq_length]
    query[:, 0, 1] += 6 * base[distance + column] / 8
    return query, key


def operands(heads=4, seq=768, seed=None):
    """Queries and keys with some structure: local attention, a few columns, noise, by different amounts."""
    if seed is not None:
        torch.manual_seed(seed)
    query, key, _, _ = random_operands(seq, 1, heads, 2, 64, torch.float32, "cpu")
    query, key = 1.5 * query, key.clone()
    key[torch.randperm(seq)[:9]] *= 2.5
    position = torch.arange(seq)[:, None, None] / 97
    for tensor in (query, key):
        tensor[..., 0] = 3 * position.cos()
        tensor[..., 1] = 3 * position.sin()
    return query * torch.linspace(0.3, 1.5, heads)[:, None], key
