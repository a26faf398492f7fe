# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dense causal attention for long sequences on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# Without the math backend, which materialises the scores.
LINEAR_MEMORY = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> Tensor:
    """Causal attention with memory linear in the sequence length.

    Args:
        query ``[b, h, s, d]``; key, value ``[b, hk, s, d]``.

    Returns:
        ``[b, h, s, d]``.
    """
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    with sdpa_kernel(LINEAR_MEMORY):
        # One key head at a time: it needs neither copies of keys nor a kernel with grouped queries.
        for head in range(key.shape[1]):
            here = slice(head * group, (head + 1) * group)
            keys, values = (x[:, head : head + 1].expand(-1, group, -1, -1) for x in (key, value))
            out[:, here] = scaled_dot_product_attention(
                query[:, here], keys, values, is_causal=True, scale=softmax_scale
            )
    return out
