# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's arguments for a model: those kept in its checkpoint, and the flags to type."""

from __future__ import annotations

import math
import shlex
from argparse import Namespace

from ..config import ConfigError
from .families import Model


def namespace(model: Model, positions: dict) -> Namespace:
    """What ``args`` of the checkpoint holds; plain values only, as Megatron loads nothing else."""
    return Namespace(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        group_query_attention=model.groups != model.heads,
        num_query_groups=model.groups if model.groups != model.heads else 1,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        norm_epsilon=model.norm_eps,
        layernorm_epsilon=model.norm_eps,
        apply_layernorm_1p=False,
        swiglu=True,
        squared_relu=False,
        add_bias_linear=False,
        add_qkv_bias=model.family.qkv_bias,
        qk_layernorm=model.family.qk_norm,
        untie_embeddings_and_output_weights=not model.tied,
        padded_vocab_size=model.padded_vocab,
        add_position_embedding=True,
        use_rotary_position_embeddings=False,
        rotary_interleaved=False,
        apply_query_key_layer_scaling=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_experts=model.experts or None,
        moe_layer_freq=1,
        moe_ffn_hidden_size=model.expert_ffn or None,
        moe_router_topk=model.topk or 2,
        moe_router_pre_softmax=bool(model.experts) and not model.norm_topk,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        ckpt_format="torch_dist",
        **positions,
    )


def flags(args: Namespace) -> list[list[str]]:
    """Megatron-LM's command-line flags, by line."""
    sizes = ["--num-layers", args.num_layers, "--hidden-size", args.hidden_size]
    sizes += ["--ffn-hidden-size", args.ffn_hidden_size]
    heads = ["--num-attention-heads", args.num_attention_heads, "--kv-channels", args.kv_channels]
    if args.group_query_attention:
        heads += ["--group-query-attention", "--num-query-groups", args.num_query_groups]
    model = [sizes, heads, ["--normalization", "RMSNorm", "--norm-epsilon", args.norm_epsilon]]
    linear = ["--swiglu", "--disable-bias-linear"]
    linear += ["--add-qkv-bias"] if args.add_qkv_bias else []
    linear += ["--qk-layernorm"] if args.qk_layernorm else []
    model.append(linear)
    vocabulary = ["--padded-vocab-size", args.padded_vocab_size]
    if args.untie_embeddings_and_output_weights:
        vocabulary.append("--untie-embeddings-and-output-weights")
    model += [vocabulary, ["--attention-dropout", 0, "--hidden-dropout", 0]]
    if args.num_experts:
        experts = ["--num-experts", args.num_experts, "--moe-router-topk", args.moe_router_topk]
        experts += ["--moe-ffn-hidden-size", args.moe_ffn_hidden_size]
        experts += ["--moe-router-pre-softmax"] if args.moe_router_pre_softmax else []
        model.append(experts)
    positions = ["--position-embedding-type", args.position_embedding_type]
    positions += ["--rotary-base", args.rotary_base]
    positions += ["--max-position-embeddings", args.max_position_embeddings]
    model.append(positions)
    if args.use_rope_scaling:
        model.append(["--use-rope-scaling", "--rope-scaling-factor", args.rope_scaling_factor])
    if args.position_embedding_type == "yarn":
        yarn = ["--rotary-scaling-factor", args.rotary_scaling_factor]
        yarn += ["--yarn-original-max-position-embeddings"]
        yarn.append(args.yarn_original_max_position_embeddings)
        more = ["--yarn-beta-fast", args.yarn_beta_fast, "--yarn-beta-slow", args.yarn_beta_slow]
        more += ["--mscale", args.mscale, "--mscale-all-dim", args.mscale_all_dim]
        if not args.yarn_correction_range_round_to_int:
            more.append("--no-yarn-correction-range-round-to-int")
        # Transformer Engine's fused rotation cannot scale, and Megatron would warn and fall back.
        model += [yarn, more, ["--no-rope-fusion"]]
    return [
        [f"{word:g}" if isinstance(word, float) else str(word) for word in line] for line in model
    ]


def script(args: Namespace, source: str) -> str:
    """A file for bash to source: ``MEGATRON_ARGS``, to be given to pretrain_gpt.py."""
    note = ""
    if args.position_embedding_type == "yarn":
        note = "# Flags for YaRN are in Megatron-LM 0.19 and later.\n"
    lines = "\n".join("  " + shlex.join(line) for line in flags(args))
    # The source is in a comment: without line ends.
    source = " ".join(source.split())
    return (
        f"# What {source} is in Megatron-LM; source this, and give pretrain_gpt.py\n"
        '#   "${MEGATRON_ARGS[@]}"\n'
        f"{note}"
        'CONVERTED=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
        f"MEGATRON_ARGS=(\n{lines}\n"
        '  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$CONVERTED/hf"\n'
        '  --load "$CONVERTED" --ckpt-format torch_dist\n)\n'
    )


def check_same(model: Model, args: Namespace, place: str, like: str) -> None:
    """Raise :class:`ConfigError` where a checkpoint's arguments are another model's.

    What they do not say is not compared; sizes of tensors are, elsewhere.
    """
    expected = vars(namespace(model, {}))
    compared = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization",
        "norm_epsilon", "layernorm_epsilon", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
        "untie_embeddings_and_output_weights", "num_experts", "apply_layernorm_1p", "rotary_interleaved",
    )  # fmt: skip
    compared += (
        ("moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax")
        if model.experts
        else ()
    )
    for name in compared:
        given, value = getattr(args, name, None), expected[name]
        # GGUF files have float32 numbers: 1e-6 is 9.999999974752427e-07 in a configuration from one.
        near = isinstance(value, float) and given is not None
        near = near and math.isclose(given, value, rel_tol=1e-6)
        if given is not None and given != value and not near:
            raise ConfigError(
                f"{place}: {name} is {given}, but {like} describes a model with {value}: give the folder of "
                "the same model with --like"
            )
    grouped = getattr(args, "group_query_attention", None)
    groups = getattr(args, "num_query_groups", None) if grouped else model.heads
    if grouped is not None and groups != model.groups:
        raise ConfigError(
            f"{place}: num_query_groups is {groups}, but {like} describes a model with {model.groups}: give "
            "the folder of the same model with --like"
        )
