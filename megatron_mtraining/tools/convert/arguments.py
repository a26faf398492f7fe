# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's arguments for a model: those kept in its checkpoint, and the flags to type."""

from __future__ import annotations

import math
import shlex
from argparse import Namespace

from ...config import ConfigError
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
        # Of a float all its digits: what is typed is compared with config.json on the way back.
        [repr(word) if isinstance(word, float) else str(word) for word in line]
        for line in model
    ]


def script(args: Namespace, source: str, tokenizer: bool) -> str:
    """A file for bash to source: ``MEGATRON_ARGS``, to be given to pretrain_gpt.py.

    Args:
        source: what the model was converted from.
        tokenizer: whether hf/ beside the file has one.
    """
    note = ""
    if args.position_embedding_type == "yarn":
        note = "# Flags for YaRN are in Megatron-LM 0.19 and later.\n"
    lines = "\n".join("  " + shlex.join(line) for line in flags(args))
    # The source is in a comment: without line ends.
    source = " ".join(source.split())
    named = '  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$CONVERTED/hf"\n'
    if not tokenizer:
        named = ""
        note += (
            "# The model came without a tokenizer: add --tokenizer-type and --tokenizer-model.\n"
        )
    return (
        f"# What {source} is in Megatron-LM; source this, and give pretrain_gpt.py\n"
        '#   "${MEGATRON_ARGS[@]}"\n'
        f"{note}"
        'CONVERTED=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
        f"MEGATRON_ARGS=(\n{lines}\n{named}"
        '  --load "$CONVERTED" --ckpt-format torch_dist\n)\n'
    )


PLAIN = {
    "window_size": (), "softmax_type": ("vanilla",), "no_rope_freq": (), "mrope_section": (),
    "squared_relu": (False,), "quick_geglu": (False,), "openai_gelu": (False,), "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (), "qk_l2_norm": (False,), "attention_output_gate": (False,),
    "multi_latent_attention": (False,), "apply_residual_connection_post_layernorm": (False,),
    "experimental_attention_variant": (), "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": ("",), "is_hybrid_model": (False,),
    "hybrid_layer_pattern": (), "hybrid_override_pattern": (), "use_mup": (False,), "mtp_num_layers": (0,),
}  # fmt: skip
"""Arguments of Megatron-LM (0.16 to 0.19) that change what a model computes, and of which the families have
only None and these values. Those of training alone (dropout, capacities, losses) are not among them."""
PLAIN_EXPERTS = {
    "moe_router_score_function": ("softmax",), "moe_router_topk_scaling_factor": (1.0,),
    "moe_router_enable_expert_bias": (False,), "moe_router_num_groups": (), "moe_router_group_topk": (),
    "moe_router_topk_limited_devices": (), "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (), "moe_shared_expert_intermediate_size": (0,),
    "moe_shared_expert_gate": (False,), "moe_apply_probs_on_input": (False,), "moe_latent_size": (),
}  # fmt: skip
"""The same of a model with experts."""
ROUTING = {"sinkhorn", "quantile_balancing"}
"""Kinds of load balancing that choose experts in another way than the most likely."""


def check_plain(model: Model, args: Namespace, place: str) -> None:
    """Raise :class:`ConfigError` where a checkpoint's arguments compute what its family cannot express."""
    for name, known in (PLAIN | PLAIN_EXPERTS if model.experts else PLAIN).items():
        value = getattr(args, name, None)
        if name == "window_size" and value is not None and value[0] == -1:
            continue  # as far as there is
        if value is not None and value not in known:
            _inexpressible(model, place, name, value)
    scale = getattr(args, "softmax_scale", None)
    if scale is not None and not math.isclose(scale, model.head_dim**-0.5, rel_tol=1e-6):
        _inexpressible(model, place, "softmax_scale", scale)
    if not model.experts:
        return
    layers = getattr(args, "moe_layer_freq", None)
    if layers is not None and set(layers if isinstance(layers, list) else [layers]) != {1}:
        _inexpressible(model, place, "moe_layer_freq", layers)
    routing = getattr(args, "moe_router_load_balancing_type", None)
    if ROUTING & set(routing if isinstance(routing, list) else [routing]):
        _inexpressible(model, place, "moe_router_load_balancing_type", routing)


def _inexpressible(model: Model, place: str, name: str, value) -> None:
    raise ConfigError(
        f"{place}: {name} is {value}, which a {model.family.architecture} cannot express: it would be "
        "another model"
    )


def check_same(model: Model, args: Namespace, place: str, like: str) -> None:
    """Raise :class:`ConfigError` where a checkpoint's arguments are another model's.

    What they do not say is not compared; sizes of tensors are, elsewhere.
    """
    check_plain(model, args, place)
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
