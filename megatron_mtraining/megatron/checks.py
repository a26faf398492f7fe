# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the backend refuses, and what to do instead: one table, applied early on every rank.

The same table reads Megatron-LM's arguments (when they are validated) and a megatron-core
``TransformerConfig`` (when a layer is built), because most settings have one name in both. A name
that a Megatron version does not have is passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import ConfigError
from ..config import option as mtraining_option
from ..kernels.limits import HEAD_DIMS
from ..layout import inner_size
from .cuda_graphs import check_graphs
from .layer_pattern import (
    GATED_DELTA_NET,
    GATED_OVER_RANKS,
    HYBRID,
    has_gated_layers,
    is_supported,
)
from .spelling import spelled
from .windows import check_window_layers, is_causal_window


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot run with the backend."""

    name: str
    """Attribute of the arguments or of the TransformerConfig."""
    works: Callable[[Any], bool]
    """Whether a value can run."""
    why: str
    advice: str
    option: str = ""
    """The command-line option, where it is not the name with hyphens."""

    def given(self, command_line: bool) -> str:
        """The setting as it is given: the option, or the attribute of the TransformerConfig."""
        if self.option and command_line:
            return self.option
        return spelled(self.name, command_line)


def unset(value) -> bool:
    """Whether an option was left out, or says that it is off."""
    return value is None or value is False or value == 0 or value == [] or value == ""


def is_p2p(value) -> bool:
    """Whether ways of communication, of all layers or of one, are the ring, or left out."""
    kinds = value if isinstance(value, list | tuple) else [value]
    return all(kind in (None, "p2p") for kind in kinds)


def is_two_sizes(value) -> bool:
    """Whether ``value`` is an inner and an outer size."""
    listed = isinstance(value, list | tuple) and len(value) == 2
    return listed and all(type(size) is int and size > 0 for size in value)


LEAVE_OUT = "leave it out"
SCHEDULE_PLAN = (
    "layers are then run one by one, and attention backend mtraining changes the layout of tokens where they "
    "are run as one"
)
DEPRECATED = "Megatron itself has deprecated it"
THD = "the batches that it packs were not compared with sequences one by one"

OF_CHECKPOINTS = ("attention_dropout",)
"""Of :data:`REFUSALS`, arguments that --use-checkpoint-args takes from the checkpoint, whatever is given."""
REFUSALS = (
    Refusal(
        "attention_dropout",
        unset,
        "attention dropout is not supported, as the attention matrix is never materialized",
        "use --attention-dropout 0",
    ),
    Refusal(
        "multi_latent_attention",
        unset,
        "its keys and values have head dimensions of their own, and the kernels need one",
        LEAVE_OUT,
    ),
    Refusal(
        "experimental_attention_variant",
        lambda value: unset(value) or value in GATED_DELTA_NET,
        "layers of another kind than causal softmax attention can be gated delta nets only",
        "leave it out",
    ),
    Refusal("use_kitchen_attention", unset, "it is an attention backend of its own", LEAVE_OUT),
    Refusal(
        "window_size",
        lambda value: value is None or is_causal_window(value),
        "sliding windows must be causal",
        "give the number of keys before the query (-1 for all), and 0 for those after it",
    ),
    Refusal(
        "decoder_seq_length",
        unset,
        "pipeline stages would send each other tensors of this length, and sequences have --seq-length",
        LEAVE_OUT,
    ),
    Refusal(
        "position_embedding_type",
        lambda value: value not in ("mrope", "relative"),
        "only position embeddings that can be striped over ranks are supported",
        "use rope, yarn, learned_absolute or none",
    ),
    Refusal("rl_use_sequence_packing", unset, THD, LEAVE_OUT),
    Refusal("sequence_packing_scheduler", unset, THD, LEAVE_OUT),
    Refusal("use_varlen_dataset", unset, THD, LEAVE_OUT),
    Refusal(
        "cp_partition_mode",
        lambda value: value in (None, "zigzag"),
        "tokens are expected in zigzag order over context-parallel ranks",
        LEAVE_OUT,
    ),
    Refusal(
        "rotary_base_per_layer",
        unset,
        "layers then make rotary tables of their own, in Megatron's context-parallel layout",
        LEAVE_OUT,
    ),
    Refusal(
        "hybrid_context_parallel",
        unset,
        "each sequence is laid out over the whole context-parallel group",
        LEAVE_OUT,
    ),
    Refusal(
        "dynamic_context_parallel",
        unset,
        "each sequence is laid out over the whole context-parallel group",
        LEAVE_OUT,
    ),
    Refusal(
        "hierarchical_context_parallel_sizes",
        lambda value: unset(value) or is_two_sizes(value),
        "ring attention has two levels, within inner groups and between them",
        "give two whole numbers: the sizes of the inner and of the outer group",
    ),
    Refusal(
        "cp_comm_type",
        is_p2p,
        "the backend has a ring of its own and would ignore it",
        "use p2p or leave it out",
    ),
    Refusal(
        "mtp_hsm",
        unset,
        "it shifts hidden states by a token in layouts that were not compared with one process",
        LEAVE_OUT,
    ),
    Refusal(
        "is_hybrid_model",
        lambda value: unset(value) or is_from(HYBRID),
        "MambaModel, which Megatron before 0.18 has, is not supported",
        "leave it out, or use Megatron 0.18 or later and --hybrid-layer-pattern",
    ),
    Refusal(
        "hybrid_layer_pattern",
        lambda value: unset(value) or (is_supported(value) and is_from(HYBRID)),
        "only attention (*), MLP (-), expert (E), gated delta net (G) and Mamba (M) layers are supported, "
        "from Megatron 0.18 on, and at least one attention layer",
        "use a pattern without other layers and without multi-token prediction (/)",
    ),
    Refusal("hybrid_override_pattern", unset, DEPRECATED, "use --hybrid-layer-pattern"),
    Refusal("hybrid_attention_ratio", unset, DEPRECATED, "use --hybrid-layer-pattern"),
    Refusal("hybrid_mlp_ratio", unset, DEPRECATED, "use --hybrid-layer-pattern"),
    Refusal(
        "use_legacy_models", unset, "legacy models have no layer specs", "use megatron-core models"
    ),
    Refusal(
        "yaml_cfg",
        lambda value: value is None,
        "Megatron then drops the other command-line options, --mtraining-* too",
        "give the settings on the command line",
    ),
    Refusal(
        "cuda_graph_impl",
        lambda value: value != "full_iteration",
        "the ring cannot be captured in a CUDA graph",
        "use --cuda-graph-impl none, or graphs of modules without attention",
    ),
    Refusal("enable_cuda_graph", unset, "the ring cannot be captured in a CUDA graph", LEAVE_OUT),
    Refusal("external_cuda_graph", unset, "the ring cannot be captured in a CUDA graph", LEAVE_OUT),
    Refusal(
        "transformer_impl",
        lambda value: value != "inference_optimized",
        "inference is not supported",
        "use --transformer-impl transformer_engine or local",
    ),
    Refusal("flash_decode", unset, "inference is not supported", LEAVE_OUT),
    Refusal("perform_rl_step", unset, "inference is not supported", LEAVE_OUT),
    Refusal(
        "batch_invariant_mode",
        unset,
        "its kernels would be used for a part of each step only",
        LEAVE_OUT,
    ),
    Refusal("qk_clip", unset, "the largest attention logit is not tracked", LEAVE_OUT),
    Refusal(
        "log_max_attention_logit",
        unset,
        "the largest attention logit is not tracked",
        LEAVE_OUT,
    ),
    Refusal("flash_attention_version", unset, "it would be ignored", LEAVE_OUT),
    Refusal(
        "inprocess_restart",
        unset,
        "prices, plans and process groups of the run before would stay",
        "leave it out, and restart the process",
    ),
    Refusal(
        "fp8_dot_product_attention",
        unset,
        "attention runs in bf16, fp16 or fp32",
        "leave it out; --fp8-format for the linear layers can stay",
    ),
    Refusal(
        "fp8_multi_head_attention",
        unset,
        "attention runs in bf16, fp16 or fp32",
        "leave it out; --fp8-format for the linear layers can stay",
    ),
)


PER_TOKEN_EXPERTS = (0, 19)
"""The first Megatron whose auxiliary losses of experts are right with ``--calculate-per-token-loss``."""


def check_settings(settings, command_line: bool) -> None:
    """Raise :class:`ConfigError` for the first entry of :data:`REFUSALS` that ``settings`` hold, and for head
    numbers that do not go with the backend.

    Args:
        settings: Megatron-LM's arguments, or a TransformerConfig.
        command_line: whether to name the option, or the attribute of the TransformerConfig.
    """
    for refusal in REFUSALS:
        value = getattr(settings, refusal.name, None)
        if refusal.works(value):
            continue
        advice = refusal.advice
        if refusal.name in OF_CHECKPOINTS and getattr(settings, "use_checkpoint_args", False):
            advice = (
                "the checkpoint has it, and --use-checkpoint-args prefers its arguments: leave that out, and "
                "give the model's options"
            )
        raise ConfigError(
            f"{refusal.given(command_line)} is {show(value)}, which does not work with attention backend "
            f"mtraining: {refusal.why}; {advice}"
        )
    check_graphs(settings, command_line)
    check_head_dim(settings, command_line)
    _check_groups(settings, command_line)
    check_window_layers(settings, command_line)
    size = getattr(settings, "context_parallel_size", None) or 1
    ranks = f"{spelled('context_parallel_size', command_line)} {size}"
    if getattr(settings, "overlap_moe_expert_parallel_comm", False) and size > 1:
        overlap = spelled("overlap_moe_expert_parallel_comm", command_line)
        raise ConfigError(f"{overlap} does not work with {ranks}: {SCHEDULE_PLAN}; {LEAVE_OUT}")
    # Megatron-LM's arguments always have it.
    is_given = getattr(settings, "cp_comm_type", None) is not None
    if size > 1 and is_given and has_gated_layers(settings) and not is_from(GATED_OVER_RANKS):
        raise ConfigError(
            f"gated delta nets do not work with {ranks}: this Megatron gives them cp_comm_type, which they "
            "do not take; use Megatron 0.19 or later"
        )


def _check_groups(settings, command_line: bool) -> None:
    """Raise :class:`ConfigError` unless query heads can be shared out to heads of keys."""
    heads = getattr(settings, "num_attention_heads", None)
    groups = getattr(settings, "num_query_groups", None)
    if not getattr(
        settings, "group_query_attention", True
    ):  # Megatron-LM then has one for each head
        return
    if not heads or groups is None:
        return
    if groups < 1 or heads % groups:
        raise ConfigError(
            f"{spelled('num_query_groups', command_line)} is {groups}, which does not divide the {heads} "
            "attention heads: use a divisor"
        )


def warning_of_loss(args) -> str | None:
    """What Megatron's own normalization of losses gets wrong on several ranks, with any attention.

    Without ``--calculate-per-token-loss``, ``forward_step_calc_loss`` divides a context-parallel rank's loss
    by its own loss tokens, and gradients are means over ranks. With it, ``TopKRouter`` before 0.19 scales
    auxiliary losses by the tokens of one tensor- and context-parallel rank.
    """
    size = args.context_parallel_size or 1
    if not getattr(args, "calculate_per_token_loss", False):
        # Of real data Megatron masks the tokenizer's padding, which often is the end of documents, too.
        masked = getattr(args, "eod_mask_loss", False) or not getattr(args, "mock_data", True)
        if size == 1 or not masked:
            return None
        return (
            f"--context-parallel-size is {size}, and Megatron divides the loss of each context-parallel "
            "rank by that rank's own loss tokens: where their numbers differ (--eod-mask-loss, labels that "
            f"are the tokenizer's padding), gradients are up to {size} times too small, though the logged "
            "loss is right; add --calculate-per-token-loss"
        )
    size *= getattr(args, "tensor_model_parallel_size", None) or 1
    given = []
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = getattr(args, name, None)
        if any(value if isinstance(value, list | tuple) else [value]):
            given.append("--" + name.replace("_", "-"))
    if size == 1 or not getattr(args, "num_experts", None) or not given:
        return None
    if is_from(PER_TOKEN_EXPERTS):
        return None
    from megatron.core import __version__

    return (
        f"with --calculate-per-token-loss, Megatron-Core {__version__} makes gradients of auxiliary losses "
        f"of experts {size} times too small (tensor- times context-parallel ranks): give "
        f"{' and '.join(given)} {size} times as large, or use Megatron 0.19 or later"
    )


def is_from(version: tuple[int, int]) -> bool:
    """Whether the Megatron-Core that is installed is this one or a later one."""
    from megatron.core import __version__

    return tuple(int(part) for part in __version__.split(".")[:2]) >= version


def inner_group_size(settings, cp_size: int, gathered: int, command_line: bool) -> int:
    """Size of the inner group, whose keys are gathered: the first of the hierarchical sizes, or ``gathered``
    (``MTrainingConfig.gathered_ranks``), or :func:`~megatron_mtraining.layout.inner_size`.

    Raises:
        ConfigError: the sizes do not make ``cp_size`` ranks, or contradict each other.
    """
    sizes = getattr(settings, "hierarchical_context_parallel_sizes", None)
    if not sizes:
        if gathered and cp_size % gathered:
            raise ConfigError(
                f"{mtraining_option('gathered_ranks')} is {gathered}, which does not divide the {cp_size} "
                "context-parallel ranks: use a divisor, or leave it out"
            )
        return inner_size(cp_size, gathered or None)
    if gathered not in (0, sizes[0]):
        raise ConfigError(
            f"{mtraining_option('gathered_ranks')} is {gathered}, but "
            f"--hierarchical-context-parallel-sizes gives inner groups of {sizes[0]}: leave one of them out"
        )
    if sizes[0] * sizes[1] != cp_size:
        name = spelled("hierarchical_context_parallel_sizes", command_line)
        raise ConfigError(
            f"{name} is {show(sizes)}, which makes {sizes[0] * sizes[1]} ranks, but there are {cp_size} "
            "context-parallel ranks: give an inner and an outer size whose product is the number "
            "of context-parallel ranks"
        )
    return sizes[0]


def check_head_dim(settings, command_line: bool) -> None:
    """Raise :class:`ConfigError` unless there are kernels for the head dimension."""
    head_dim = getattr(settings, "kv_channels", None)
    hidden = getattr(settings, "hidden_size", None)
    heads = getattr(settings, "num_attention_heads", None)
    name = spelled("kv_channels", command_line)
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    if head_dim is not None and head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"the head dimension ({name}, by default hidden size / attention heads) is {head_dim}, "
            f"for which attention backend mtraining has no kernels: use one of {HEAD_DIMS}"
        )


def show(value) -> str:
    """A value as one would give it on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
