# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's options that pack documents: in which runs all layers are told of them. Without Megatron, for
plans."""

from __future__ import annotations

from ..config import ConfigError
from ..visibility import MOST_TOKENS
from .checks import is_from
from .layer_pattern import has_recurrent_layers

SFT_ON_ALL_STAGES = (0, 17)
"""The first Megatron that tells all pipeline stages of the sequences of ``--sft``."""
MTP_RECOMPUTES_SEQUENCES = (0, 19)
"""The first Megatron that can run layers of multi-token prediction again which are given packed sequences."""


APART = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")
"""Megatron-LM's arguments that ask for attention within documents."""


def masks_documents(arguments) -> bool:
    """Whether a run's arguments ask for attention within documents."""
    return asked_option(arguments) is not None


def asked_option(arguments) -> str | None:
    """The option that asks for it."""
    names = [name for name in APART if getattr(arguments, name, False)]
    return "--" + names[0].replace("_", "-") if names else None


def check_documents(args) -> None:
    """Refuse packed documents in runs that do not know where documents begin.

    Raises:
        ConfigError: names the option and what to do.
    """
    asked = asked_option(args)
    if asked is None:
        return
    if has_recurrent_layers(args):
        raise ConfigError(
            f"{asked} does not work with recurrent layers (--hybrid-layer-pattern G, M, "
            "--linear-attention-freq): they would run across documents; leave one of them out"
        )
    if args.seq_length is not None and args.seq_length > MOST_TOKENS:
        raise ConfigError(
            f"{asked} does not work with --seq-length {args.seq_length}: use at most {MOST_TOKENS}"
        )
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise ConfigError(
            f"{asked} does not work with --overlap-moe-expert-parallel-comm, which does not tell "
            "layers what is packed: leave one of them out"
        )
    if (
        getattr(args, "mtp_num_layers", None)
        and getattr(args, "recompute_granularity", None) == "full"
        and not is_from(MTP_RECOMPUTES_SEQUENCES)
    ):
        raise ConfigError(
            f"{asked} does not work with --mtp-num-layers {args.mtp_num_layers} and --recompute-granularity "
            "full: layers of multi-token prediction that this Megatron runs again cannot be told what is "
            "packed; use --recompute-granularity selective, or Megatron 0.19 or later"
        )
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    if asked != "--reset-attention-mask":
        if asked != "--sft" or not is_from(SFT_ON_ALL_STAGES):
            _check_stages(args, asked, stages)
        _check_expert_loss(args, asked)
        return
    is_told = stages == 2 and not _is_virtual(args) and getattr(args, "mtp_num_layers", None)
    if stages > 1 and not is_told:
        raise ConfigError(
            f"--reset-attention-mask does not work with --pipeline-model-parallel-size {stages}: "
            "only the first stage is given position ids, and the last one for multi-token prediction "
            "(--mtp-num-layers), so that others do not know where documents end; use 1, or two stages and, "
            "where Megatron has it, --dataloader-inter-document-masking, which finds documents in their "
            "indexed dataset"
        )
    if getattr(args, "reset_position_ids", False):
        return
    kind = getattr(args, "position_embedding_type", "rope")
    if kind not in ("rope", "yarn", "none"):
        raise ConfigError(
            f"--reset-attention-mask needs --reset-position-ids with --position-embedding-type "
            f"{kind}: documents are recognized by position ids that restart, which change what such a model "
            "learns; give both"
        )


def _is_virtual(args) -> bool:
    """Whether pipeline ranks have several stages."""
    names = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    return any((getattr(args, name, None) or 1) > 1 for name in names)


def _check_stages(args, asked: str, stages: int) -> None:
    """Refuse pipelines in which Megatron does not tell all stages where documents begin."""
    if stages == 1:
        return
    pipeline = f"--pipeline-model-parallel-size {stages}"
    if stages > 2 or _is_virtual(args):
        raise ConfigError(
            f"{asked} does not work with {pipeline}"
            f"{' and virtual stages' if stages == 2 else ''}: only the first and the last stage read data, "
            "and the others do not know where documents end; use at most 2 stages, none of them virtual"
        )
    size = getattr(args, "micro_batch_size", None) or 1
    if size > 1:
        raise ConfigError(
            f"{asked} does not work with {pipeline} and --micro-batch-size {size}: a stage sends one "
            "sequence of all samples, and the next expects them apart; use --micro-batch-size 1"
        )


def _check_expert_loss(args, asked: str) -> None:
    """Refuse a balancing loss of each sample where samples cannot be told apart."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    size, ranks = (
        getattr(args, name, None) or 1 for name in ("micro_batch_size", "context_parallel_size")
    )
    if getattr(args, "num_experts", None) and "seq_aux_loss" in kinds and size > 1 and ranks > 1:
        raise ConfigError(
            f"--moe-router-load-balancing-type seq_aux_loss does not work with {asked}, --micro-batch-size "
            f"{size} and --context-parallel-size {ranks}: it is a loss of each sample, and a rank's tokens "
            "are of all of them; use --micro-batch-size 1"
        )


def fill_in_documents(args) -> list[str]:
    """With ``--reset-attention-mask``, have the data loader's position ids say where documents begin.

    Returns:
        Lines for the log.
    """
    if not getattr(args, "reset_attention_mask", False) or getattr(
        args, "reset_position_ids", False
    ):
        return []
    args.reset_position_ids = True
    return [
        "--reset-attention-mask: position ids restart with documents (as with --reset-position-ids), "
        "which says where they are; rotary embeddings do not look at them"
    ]
