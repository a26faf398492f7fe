# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Whether all ranks of a run were started alike."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ..agreement import check_agreement
from ..config import option
from ..cp_group import ProcessGroup, RankGroup
from .arguments import settings
from .backend import training_arguments

ARGUMENTS = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "context_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers",
    "mtp_num_layers",
    "hybrid_layer_pattern",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "hierarchical_context_parallel_sizes",
    "params_dtype",
    "reset_attention_mask",
    "recompute_granularity",
)
"""Megatron-LM's arguments that layout, pattern and collectives follow from."""
OF_PLANS = (
    "expert_model_parallel_size",
    "num_workers",
    "seed",
    "dataloader_inter_document_masking",
    "reset_position_ids",
)
"""Those that the plans of balanced steps follow from, too."""
FIELDS = (
    "context_parallel_size",
    "num_layers",
    "mtp_num_layers",
    "num_attention_heads",
    "params_dtype",
)
"""Those of a TransformerConfig, for training loops other than Megatron-LM's."""
PACKAGES = ("megatron-mtraining", "megatron-core", "torch", "triton", "transformer-engine")

_compared: WeakSet[ProcessGroup] = WeakSet()


def check_ranks(config) -> None:
    """Raise :class:`~..config.ConfigError`, on every rank, unless all ranks have the same settings, versions
    and layout. A collective over all ranks as the first model is built.

    Args:
        config: the model's TransformerConfig.
    """
    everyone = RankGroup.everyone()
    if everyone.group is None or everyone.world == 1 or everyone.group in _compared:
        return
    _compared.add(everyone.group)
    check_agreement(everyone, given_to_rank(config), "the ranks of a run")


def given_to_rank(config) -> dict[str, Any]:
    """What this rank was started with, by the name that the user knows it by."""
    ours = settings(config)
    given: dict[str, Any] = ours.given()
    if ours.settings is not None:
        content = Path(ours.settings).read_bytes()
        name = f"the content (SHA-256) of {option('settings')}"
        given[name] = hashlib.sha256(content).hexdigest()[:16]
    arguments = training_arguments()
    names = FIELDS if arguments is None else ARGUMENTS
    if ours.balances and arguments is not None:
        names = names + OF_PLANS
    for name in names:
        value = getattr(config if arguments is None else arguments, name, None)
        given[f"--{name.replace('_', '-')}"] = str(value)
    for package in PACKAGES:
        try:
            given[f"the version of {package}"] = version(package)
        except PackageNotFoundError:
            given[f"the version of {package}"] = "none"
    return given
