# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Parameters of a rank, counted as ``GPTModel`` makes them."""

from __future__ import annotations

from .setting import Setting


def norm_parameters(setting: Setting, width: int) -> int:
    return width * (1 if setting.args.normalization == "RMSNorm" else 2)


def layer_parameters(setting: Setting) -> int:
    """Of one layer, on a tensor-parallel rank."""
    args, h = setting.args, setting.args.hidden_size
    qkv = setting.q_width + 2 * setting.kv_width
    attention = (h * qkv + setting.q_width * h) // setting.tp
    mlp = h * setting.ffn * (setting.gated + 1) // setting.tp
    biases = 0
    if args.add_bias_linear or args.add_qkv_bias:
        biases += qkv // setting.tp
    if args.add_bias_linear:
        biases += h + setting.ffn * setting.gated // setting.tp + h
    norms = 2 * norm_parameters(setting, h)
    if args.qk_layernorm:
        norms += 2 * norm_parameters(setting, setting.head_dim)
    return attention + mlp + biases + norms


def vocabulary_parameters(setting: Setting) -> int:
    """Of the embedding, and of the output layer, on a tensor-parallel rank."""
    return setting.vocab // setting.tp * setting.args.hidden_size


def stage_parameters(setting: Setting, stage: int) -> int:
    """Of a pipeline stage, on a tensor-parallel rank. A last stage that is not the first has its own copy of
    tied embeddings."""
    args = setting.args
    first, last = stage == 0, stage == setting.pp - 1
    count = setting.layers * layer_parameters(setting)
    if first:
        count += vocabulary_parameters(setting)
        if args.position_embedding_type == "learned_absolute" and args.add_position_embedding:
            count += args.max_position_embeddings * args.hidden_size
    if last:
        count += norm_parameters(setting, args.hidden_size)
        if not setting.tied or not first:
            count += vocabulary_parameters(setting)
    return count
