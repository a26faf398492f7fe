# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A small model for tests of the integration with transformers, and comparisons with its own attention."""

from __future__ import annotations

import copy

import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.transformers import configure

LAYERS, HEADS, KV_HEADS, POSITIONS = 2, 4, 2, 1024
SEQ = 512
DENSE = MTrainingConfig.from_options(price=0.0)
SPARSE = MTrainingConfig.from_options(vertical=16, slash=4, sink=1, window=64, block_size=64)


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
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=2.0)
    return model.train()


def with_pattern(model, config):
    ours = copy.deepcopy(model)
    configure(ours, config)
    return ours


def loss_and_gradients(model, **batch):
    model.zero_grad()
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return out, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_same(model, ours, **batch):
    """Loss, logits of labelled tokens, and gradients are those of transformers' eager attention."""
    expected, grads = loss_and_gradients(model, **batch)
    found, own = loss_and_gradients(ours, **batch)
    there = batch["labels"] != -100
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logits[there], expected.logits[there], rtol=1e-3, atol=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(own[name], grad, rtol=1e-3, atol=1e-5, msg=name)
