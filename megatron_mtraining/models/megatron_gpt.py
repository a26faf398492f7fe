# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A GPTModel in one process, with the weights of a checkpoint saved for any parallelism.

The model has Megatron-Core's local layers, which can load what Transformer Engine layers have saved.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import ConfigError
from ..megatron.rotary_options import DROPPED, passed_on
from ..requirements import first_line
from .megatron_folder import reason
from .types import ModelOptions, Shape
from .untrusted import nothing_runs

CONFIG_FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "rotary_interleaved", "softmax_scale",
    "apply_residual_connection_post_layernorm", "no_rope_freq", "attention_output_gate",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
)  # fmt: skip
"""Fields of TransformerConfig that change what a model computes up to and in its attention, and have the same
name among the arguments. Fields that change only how it is computed (parallelism, fusions, precision) are
left out."""

OTHER_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
}
"""Arguments that have had another name than their field."""

ROUTING = {"sinkhorn", "quantile_balancing"}
"""Values of moe_router_load_balancing_type that do not route to the experts of the highest score."""

UNFUSED = dict(
    use_cpu_initialization=True,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    persist_layer_norm=False,
    gradient_accumulation_fusion=False,
    apply_rope_fusion=False,
)
"""Fields of TransformerConfig for a machine without GPU, apex and Transformer Engine, which fusions need.
Weights that are drawn on the CPU are the same on every machine."""


def arg(args: Namespace, name: str, default=None):
    """An argument of the training run; the default if it is missing or None."""
    value = getattr(args, name, None)
    return default if value is None else value


def rope_scaling_factor(args: Namespace, label: str, known: float | None = None) -> float:
    """The factor of ``--use-rope-scaling`` in the model that a run trained.

    Args:
        label: what messages call the arguments' checkpoint.
        known: the factor of the model's config.json, if it has one.

    Raises:
        ConfigError: it is unknown whether the model had the factor of the arguments.
    """
    name, default = DROPPED["rope_scaling_factor"]
    value = arg(args, name, default)
    if not arg(args, "use_rope_scaling", False) or value in (default, arg(args, passed_on(name))):
        return value
    if known == default:
        return known
    raise ConfigError(
        f"{label} has {name} {value:g}, but was not trained with attention backend mtraining, and "
        f"Megatron-LM drops --rope-scaling-factor: it was trained with {default:g}. megatron-to-hf converts "
        f"it if --like has a config.json with factor {default:g}; if it was only converted, convert it again"
    )


def interpolation_factor(args: Namespace) -> int | None:
    """``--rotary-seq-len-interpolation-factor`` of the model that a run trained.

    Megatron-LM before 0.19, whose arguments have none of YaRN's, drops the option.
    """
    name, _ = DROPPED["seq_len_interpolation_factor"]
    value = arg(args, name)
    passed = hasattr(args, "yarn_beta_fast") or arg(args, passed_on(name)) == value
    return value if passed else None


def build_model(
    args: Namespace,
    shape: Shape,
    options: ModelOptions,
    output_layer: bool,
    prepare: Callable[[object], None] | None,
):
    """A GPTModel in the shape that a run's arguments give, on the device, its weights not initialised.

    Args:
        output_layer: build it with an output layer.
        prepare: called with the TransformerConfig before the model is built.

    Raises:
        ConfigError: Megatron-Core's local layers do not support it.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    kind = arg(args, "position_embedding_type", "learned_absolute")
    tied = not arg(args, "untie_embeddings_and_output_weights", False)
    try:
        config = transformer_config(args, shape, options)
        if prepare is not None:
            prepare(config)
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization
            )
        else:
            spec = get_gpt_layer_local_spec(
                qk_layernorm=config.qk_layernorm,
                normalization=config.normalization,
                qk_l2_norm=config.qk_l2_norm,
            )
        model = GPTModel(
            config,
            spec,
            vocab_size=shape.vocabulary,
            max_sequence_length=arg(args, "max_position_embeddings"),
            post_process=output_layer,
            share_embeddings_and_output_weights=output_layer and tied,
            position_embedding_type="yarn" if options.yarn_factor else kind,
            rotary_percent=arg(args, "rotary_percent", 1.0),
            rotary_base=arg(args, "rotary_base", 10000),
            rope_scaling=arg(args, "use_rope_scaling", False),
            rope_scaling_factor=rope_scaling_factor(args, options.label),
            seq_len_interpolation_factor=interpolation_factor(args),
        )
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{options.label} cannot be built of Megatron-Core's local layers: {first_line(error)}"
        ) from error
    return model.to(options.device).eval()


def transformer_config(args: Namespace, shape: Shape, options: ModelOptions):
    """The TransformerConfig that a run's arguments give, for one process without fused kernels."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    known = {field.name for field in fields(TransformerConfig)}
    values = {
        name: getattr(args, name)
        for name in CONFIG_FIELDS
        if name in known and arg(args, name) is not None
    }
    for name, other in OTHER_NAMES.items():
        if arg(args, other) is not None:
            values.setdefault(name, arg(args, other))
    values["num_query_groups"] = shape.kv_heads
    if arg(args, "swiglu"):
        values |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    elif arg(args, "squared_relu"):
        values["activation_func"] = squared_relu
    elif arg(args, "quick_geglu"):
        values |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    config = TransformerConfig(
        **values,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        fp16=options.dtype == torch.float16,
        perform_initialization=False,
        attention_backend=AttnBackend.auto,
        **UNFUSED,
    )
    for name, value in _yarn(args, options.yarn_factor).items():
        setattr(config, name, value)
    return config


def _yarn(args: Namespace, factor: float | None) -> dict:
    """YaRN's settings: of ``--yarn``, else of a model trained with it."""
    if factor is None and arg(args, "position_embedding_type") != "yarn":
        return {}
    if factor is None:
        factor = arg(args, "rotary_scaling_factor", 1.0)
        original = arg(args, "yarn_original_max_position_embeddings", 4096)
    else:
        original = arg(args, "max_position_embeddings")
    rounded = "yarn_correction_range_round_to_int"
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": arg(args, "yarn_beta_fast", 32.0),
        "yarn_beta_slow": arg(args, "yarn_beta_slow", 1.0),
        "yarn_mscale": arg(args, "mscale", 1.0),
        "yarn_mscale_all_dim": arg(args, "mscale_all_dim", 0.0),
        rounded: arg(args, rounded, True),
    }


def load_weights(model, folder: Path, keys: set[str], content: dict | None, label: str) -> None:
    """Load a checkpoint's weights into a model.

    Args:
        keys: names of the checkpoint's entries.
        content: its ``content_metadata``, which says how keys are named; older versions save none.

    Raises:
        ConfigError: they cannot be read, or belong to another model.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    try:
        wanted = model.sharded_state_dict(metadata=content)
    except TypeError:  # this version has no such parameter
        wanted = model.sharded_state_dict()
    # Transformer Engine saves objects beside tensors, which local layers do not have.
    _, wanted = extract_matching_values(wanted, lambda value: isinstance(value, ShardedObject))
    missing = sorted({entry.key for entry in _leaves(wanted)} - keys)
    if missing:
        found = sorted(key for key in keys if key.startswith(("decoder", "embedding", "model")))
        raise ConfigError(
            f"{label} lacks {len(missing)} of the tensors that such a model has, {missing[0]} for "
            f"one; among those it has are {', '.join(found[:5]) or 'none of a model'}"
        )
    try:
        with nothing_runs():
            loaded = dist_checkpointing.load(
                {"model": wanted}, str(folder), validate_access_integrity=False
            )
    except ConfigError:
        raise
    except (Exception, CheckpointException) as error:
        raise ConfigError(f"the weights of {label} cannot be loaded: {reason(error)}") from error
    left = model.load_state_dict(loaded["model"], strict=False)
    absent = [name for name in left.missing_keys if not name.endswith("_extra_state")]
    if absent or left.unexpected_keys:
        raise ConfigError(
            f"the weights of {label} do not fit: {(absent + left.unexpected_keys)[0]}"
        )


def _leaves(tree) -> Iterator:
    """The leaves of nested dicts and lists."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree
