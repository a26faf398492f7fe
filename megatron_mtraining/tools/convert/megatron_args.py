# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's arguments for a model: in its checkpoint, and as the flags of megatron_args.sh."""

from __future__ import annotations

import math
import shlex
from argparse import Namespace

from ...errors import ConfigError
from ...megatron.rotary_options import DROPPED, passed_on
from .families import Model


def namespace(model: Model, positions: dict) -> Namespace:
    """``args`` of the checkpoint, of plain values only: Megatron loads nothing else.

    Args:
        positions: the arguments about positions, from :mod:`.rope`.
    """
    factor, _ = DROPPED["rope_scaling_factor"]
    if positions.get("use_rope_scaling"):
        positions = positions | {passed_on(factor): positions[factor]}
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
    """Megatron-LM's command-line flags for a model's arguments, converted or of a run, in lines."""

    def line(names: str) -> list[str]:
        words = []
        for name in names.split():
            value = getattr(args, name, None)
            if name == "norm_epsilon" and value is None:
                value = args.layernorm_epsilon  # where the option --norm-epsilon puts it
            if value is None:  # an option that a run has not given
                continue
            if value is not False:
                words.append("--" + name.replace("_", "-"))
            if not isinstance(value, bool):
                # repr has all digits of a float: the way back compares it with config.json.
                words.append(repr(value) if isinstance(value, float) else str(value))
        return words

    lines = [
        line("num_layers hidden_size ffn_hidden_size"),
        line(
            "num_attention_heads kv_channels group_query_attention"
            + (" num_query_groups" if args.group_query_attention else "")
        ),
        line("normalization norm_epsilon"),
        [*line("swiglu"), "--disable-bias-linear", *line("add_qkv_bias qk_layernorm")],
        line("padded_vocab_size untie_embeddings_and_output_weights"),
        ["--attention-dropout", "0", "--hidden-dropout", "0"],
    ]
    if args.num_experts:
        lines.append(line("num_experts moe_router_topk moe_ffn_hidden_size moe_router_pre_softmax"))
    lines.append(line("position_embedding_type rotary_base max_position_embeddings"))
    if args.use_rope_scaling:
        lines.append(line("use_rope_scaling rope_scaling_factor"))
    if args.position_embedding_type == "yarn":
        lines.append(line("rotary_scaling_factor yarn_original_max_position_embeddings"))
        lines.append(line("yarn_beta_fast yarn_beta_slow mscale mscale_all_dim"))
        if args.yarn_correction_range_round_to_int is False:
            lines[-1].append("--no-yarn-correction-range-round-to-int")
        # Transformer Engine's fused RoPE cannot scale; Megatron would warn and fall back.
        lines.append(["--no-rope-fusion"])
    return lines


def what_megatron_drops(args: Namespace) -> str:
    """A warning of a flag that Megatron-LM parses and drops where attention backend mtraining passes it on;
    empty if there is none."""
    name, default = DROPPED["rope_scaling_factor"]
    factor = getattr(args, name, default)
    if not args.use_rope_scaling or factor == default:
        return ""
    return (
        f"--rope-scaling-factor {factor:g} has an effect with --attention-backend mtraining alone: without "
        f"it, Megatron-LM (0.16 to main) drops the flag and trains the model with {default:g}, which is wrong"
    )


def script(args: Namespace, source: str, tokenizer: bool) -> str:
    """megatron_args.sh, for bash to source: ``MEGATRON_ARGS`` for pretrain_gpt.py.

    Args:
        source: what the model was converted from.
        tokenizer: whether hf/ beside the file has one.
    """
    notes = []
    if args.position_embedding_type == "yarn":
        notes.append("# Flags for YaRN are in Megatron-LM 0.19 and later.\n")
    if dropped := what_megatron_drops(args):
        # Not only a comment: a run without the plug-in reads nothing else.
        notes.append(f"echo {shlex.quote(f'megatron_args.sh: {dropped}')} >&2\n")
    lines = "\n".join("  " + shlex.join(line) for line in flags(args))
    source = " ".join(source.split())  # without line breaks: it is in a comment
    tokenizer_flags = '  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$CONVERTED/hf"\n'
    if not tokenizer:
        tokenizer_flags = ""
        notes.append("# The model has no tokenizer: add --tokenizer-type and --tokenizer-model.\n")
    return (
        f"# Megatron-LM's arguments for {source}: source this file, and run\n"
        '#   pretrain_gpt.py "${MEGATRON_ARGS[@]}"\n'
        f"{''.join(notes)}"
        # With CDPATH, cd may print where it goes, or go elsewhere.
        'CONVERTED=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]:-$0}")" && pwd)\n'
        f"MEGATRON_ARGS=(\n{lines}\n{tokenizer_flags}"
        '  --load "$CONVERTED" --ckpt-format torch_dist\n)\n'
    )


EXPRESSIBLE = {
    "window_size": (), "softmax_type": ("vanilla",), "no_rope_freq": (), "mrope_section": (),
    "squared_relu": (False,), "quick_geglu": (False,), "openai_gelu": (False,), "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (), "qk_l2_norm": (False,), "attention_output_gate": (False,),
    "multi_latent_attention": (False,), "apply_residual_connection_post_layernorm": (False,),
    "experimental_attention_variant": (), "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": ("",), "is_hybrid_model": (False,),
    "hybrid_layer_pattern": (), "hybrid_override_pattern": (), "use_mup": (False,), "mtp_num_layers": (0,),
    "spec": (),
}  # fmt: skip
"""Arguments of Megatron-LM (0.16 to 0.19) that change what a model computes, and the values beside None that
the families can express. Arguments of training alone (dropout, capacities, losses) are not listed."""
EXPRESSIBLE_MOE = {
    "moe_router_score_function": ("softmax",), "moe_router_topk_scaling_factor": (1.0,),
    "moe_router_enable_expert_bias": (False,), "moe_router_num_groups": (), "moe_router_group_topk": (),
    "moe_router_topk_limited_devices": (), "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (), "moe_shared_expert_intermediate_size": (0,),
    "moe_shared_expert_gate": (False,), "moe_apply_probs_on_input": (False,), "moe_latent_size": (),
    "moe_mlp_glu_interleave_size": (),
}  # fmt: skip
"""The same for models with experts."""
COMPARED = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization",
    "norm_epsilon", "layernorm_epsilon", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "untie_embeddings_and_output_weights", "num_experts", "apply_layernorm_1p", "rotary_interleaved",
)  # fmt: skip
COMPARED_MOE = ("moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax")
"""Arguments that must agree with config.json."""


def check_expressible(model: Model, args: Namespace, folder: str) -> None:
    """Raise :class:`ConfigError` for an argument that changes what the model computes and that its family
    cannot express.

    Args:
        args: the arguments in a checkpoint.
        folder: the checkpoint's path or name, for messages.
    """

    def refuse(name: str, value) -> None:
        raise ConfigError(
            f"{folder}: {name} is {value}, which a {model.family.architecture} cannot express: it would "
            "be another model"
        )

    for name, values in (EXPRESSIBLE | (EXPRESSIBLE_MOE if model.experts else {})).items():
        value = getattr(args, name, None)
        unlimited = name == "window_size" and value is not None and value[0] == -1
        if value is not None and value not in values and not unlimited:
            refuse(name, value)
    scale = getattr(args, "softmax_scale", None)
    if scale is not None and not math.isclose(scale, model.head_dim**-0.5, rel_tol=1e-6):
        refuse("softmax_scale", scale)
    if model.experts:
        # Here, because it imports torch's checkpoints, which a plan's flags do not need.
        from ...models.megatron_gpt import ROUTING

        layers = getattr(args, "moe_layer_freq", None)
        if layers is not None and set(layers if isinstance(layers, list) else [layers]) != {1}:
            refuse("moe_layer_freq", layers)
        routing = getattr(args, "moe_router_load_balancing_type", None)
        if ROUTING & set(routing if isinstance(routing, list) else [routing]):
            refuse("moe_router_load_balancing_type", routing)


def check_same(model: Model, args: Namespace, folder: str, config: str) -> None:
    """Raise :class:`ConfigError` where a checkpoint's arguments describe another model.

    Arguments that are absent are not compared. Sizes of tensors are checked elsewhere.

    Args:
        args, folder: as for :func:`check_expressible`.
        config: the path of the config.json that ``model`` is from, for messages.
    """
    check_expressible(model, args, folder)
    expected = vars(namespace(model, {})) | {"num_query_groups": model.groups}
    found = {name: getattr(args, name, None) for name in COMPARED}
    if model.experts:
        found |= {name: getattr(args, name, None) for name in COMPARED_MOE}
    grouped = getattr(args, "group_query_attention", None)
    if grouped is not None:
        found["num_query_groups"] = (
            getattr(args, "num_query_groups", None) if grouped else model.heads
        )
    for name, value in found.items():
        other = expected[name]
        # GGUF files have float32 numbers: a config.json from one has 9.999999974752427e-07 for 1e-6.
        near = isinstance(other, float) and value is not None
        near = near and math.isclose(value, other, rel_tol=1e-6)
        if value is not None and value != other and not near:
            raise ConfigError(
                f"{folder}: {name} is {value}, but {config} describes a model with {other}: give the folder "
                "of the same model with --like"
            )
