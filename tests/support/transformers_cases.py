# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A small model for tests of the integration with transformers."""

from __future__ import annotations

import torch

LAYERS, HEADS, KV_HEADS, POSITIONS = 2, 4, 2, 1024


def small_model(kind="llama", **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=97, hidden_size=HEADS * 64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=64,
        max_position_embeddings=POSITIONS, sliding_window=None, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    config = AutoConfig.for_model(kind, **{**sizes, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Small weights would make attention even, and all patterns alike.
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 6
    return model.train()
