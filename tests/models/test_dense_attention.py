# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dense attention for any source of layer inputs."""

from __future__ import annotations

import torch

from megatron_mtraining.models.dense_attention import dense_attention
from tests.support.inspect_cases import HEADS, KV_HEADS, operands, true_attention


def test_dense_attention_is_attention():
    query, key = operands(seq=192)
    value = torch.randn_like(key)
    out = dense_attention(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), 0.2)
    v = value[:, 0].double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
    expected = true_attention(query, key, 0.2) @ v
    torch.testing.assert_close(out[0].double(), expected, atol=1e-5, rtol=0)
