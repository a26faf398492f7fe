# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The arguments of a run that ``--mtraining-batching`` and ``--mtraining-tuning`` check and read."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ...balance.coefficients import CPU, H200
from ...balance.latency import AttentionShape, predict
from ...balance.plan import PlanSizes, Predict
from ...config import (
    ConfigError,
    MTrainingConfig,
    has_price,
    head_policies,
    option,
)
from ...files import read_bytes
from ..checks import show
from ..document_options import masks_documents
from ..layer_pattern import layers_with_attention

PLANNED = "plans are made for global batches of one size; leave it out"
REFUSED = dict.fromkeys(
    ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"), PLANNED
) | {
    "sft": "the lengths of its samples are known only when they are read; leave it out",
    "mtp_use_repeated_layer": "one layer runs several times in a micro-batch; leave it out",
}
"""Megatron's options that batching and tuning do not work with; :data:`..checks.REFUSALS` has more."""


def balancing_option(config: MTrainingConfig) -> str:
    """The option that balances, with its value, for a message."""
    name = "batching" if config.batching != "off" else "tuning"
    return f"{option(name)} {getattr(config, name)}"


def _has_price_to_tune(args, config: MTrainingConfig) -> bool:
    """Whether the settings file, if there is one, leaves a head of the model a price."""
    layers = getattr(args, "num_layers", None)
    if config.settings is None or layers is None:
        return True
    heads = args.num_attention_heads
    attend = layers_with_attention(args)
    own = (head_policies(config, layer, layers, heads) for layer in attend)
    return any(policies is None or any(map(has_price, policies)) for policies in own)


def check_balance(args, config: MTrainingConfig) -> None:
    """Refuse runs whose ranks cannot be balanced.

    Raises:
        ConfigError: names the option, its value and what to do.
    """
    config.check_tuning()
    if not config.balances:
        return
    asked = balancing_option(config)
    if config.settings is not None:  # now: checkpoints name the file as it is when the run starts
        _digest(config.settings)
    if config.tuning == "on" and not _has_price_to_tune(args, config):
        raise ConfigError(
            f"{option('tuning')} is on, but {option('settings')} {config.settings} leaves no head with a "
            "price to tune: leave one of them out"
        )
    kind = getattr(args, "dataloader_type", None)
    if kind not in (None, "single"):
        raise ConfigError(
            f"{asked} does not work with --dataloader-type {kind}: it needs the sample order of "
            f"--dataloader-type single; use it, or leave {asked.split()[0]} out"
        )
    for name, why in REFUSED.items():
        value = getattr(args, name, None)
        if value:
            flag = "--" + name.replace("_", "-")
            given = flag if value is True else f"{flag} {show(value)}"
            raise ConfigError(f"{asked} does not work with {given}: {why}")
    _check_kinds_of_samples(args, config, asked)
    _check_normalization(args, config)


def _check_kinds_of_samples(args, config: MTrainingConfig, asked: str) -> None:
    """Refuse runs whose samples are all alike, where there is nothing to balance."""
    if masks_documents(args):
        path = getattr(args, "object_storage_cache_path", None)
        if path is not None and not getattr(args, "dataloader_inter_document_masking", False):
            raise ConfigError(
                f"{asked} does not work with --object-storage-cache-path {path} and --reset-attention-mask: "
                "each rank would fetch the tokens of the whole global batch to find end-of-document tokens; "
                "copy the data to a file system"
            )
        return
    apart = "--reset-attention-mask, or --dataloader-inter-document-masking where Megatron has it"
    if config.batching == "length":
        raise ConfigError(
            f"{asked} has nothing to place by: attention crosses documents, so that all samples have equally "
            f"many visible query-key pairs; use {apart}, or {option('batching')} cost"
        )
    if getattr(args, "mock_data", False):
        raise ConfigError(
            f"{asked} has nothing to balance with --mock-data: all samples are of one kind and length; "
            f"use {apart}"
        )


def _check_normalization(args, config: MTrainingConfig) -> None:
    """Refuse losses that depend on which samples share a micro-batch: Megatron's default is the mean over
    micro-batches of means over tokens, and masks leave samples different numbers of tokens."""
    size = getattr(args, "micro_batch_size", None) or 1
    if config.batching == "off" or size == 1 or getattr(args, "calculate_per_token_loss", False):
        return
    raise ConfigError(
        f"{option('batching')} is {config.batching} with --micro-batch-size {size}: Megatron takes the mean "
        "loss of each micro-batch, so that the gradient would depend on which samples share one; use "
        "--calculate-per-token-loss, or --micro-batch-size 1"
    )


def lines_of_balance(args, config: MTrainingConfig) -> list[str]:
    """Lines for the log of a balanced run, whose arguments Megatron has validated."""
    if not config.balances:
        return []
    lines = []
    if config.predicts and gpu_name() not in ("NVIDIA H200", "CPU"):
        lines.append(
            f"warning: times of attention are predicted from those of an NVIDIA H200, and this is a "
            f"{gpu_name()}: relative times may differ; {option('batching')} length needs none"
        )
    if getattr(args, "data_parallel_size", None) == 1 and config.batching != "off":
        lines.append(
            f"warning: {option('batching')} is {config.batching}, but there is one data-parallel rank: it "
            "only orders the micro-batches"
        )
    return lines


def gpu_name() -> str:
    """Torch's name of this process's GPU; "CPU" without a GPU, also if CPU tensors replace CUDA tensors."""
    try:
        return str(torch.cuda.get_device_name())
    except (RuntimeError, AssertionError, ValueError, AttributeError):
        return "CPU"


@lru_cache(maxsize=4)
def _digest(path: str) -> str:
    """Of the content of the settings file, as it was when the run read it."""
    content = read_bytes(Path(path), f"{option('settings')} {path}")
    return hashlib.sha256(content).hexdigest()[:16]


DATA = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
"""Megatron's options that say which datasets are in the blend, and in which order."""


def origin_of_estimates(args, config: MTrainingConfig) -> list[str]:
    """What estimates of density by kind of data belong to: the pattern, the length of a sample, the blend.
    Another pattern has other densities, and another blend other datasets under the same numbers."""
    found = [repr(config.policy), f"blocks of {config.block_size}", f"window {config.window}"]
    if config.settings is not None:
        found.append(f"settings {_digest(config.settings)}")
    data = [str(getattr(args, name, None)) for name in DATA]
    return [*found, f"{args.seq_length} tokens", *data]


def sizes_of(args, dp_size: int) -> PlanSizes:
    """The sizes of a run's steps."""
    micro_batch = args.micro_batch_size
    return PlanSizes(dp_size, args.global_batch_size // (dp_size * micro_batch), micro_batch)


def predictor(args, config: MTrainingConfig, seq_length: int) -> Predict | None:
    """Milliseconds of attention of all layers, also those of other pipeline stages, on one rank, by visible
    pairs and density of a sample of ``seq_length`` tokens; None where nothing needs them."""
    if not config.predicts:
        return None
    heads = args.num_attention_heads
    groups = heads
    if getattr(args, "group_query_attention", False):
        groups = args.num_query_groups
    tensor = getattr(args, "tensor_model_parallel_size", 1) or 1
    head_dim = args.kv_channels or args.hidden_size // heads
    shape = AttentionShape(heads // tensor, max(groups // tensor, 1), head_dim)
    kind = "block_lists" if config.policy.has_block_lists else "vertical_slash"
    if config.keeps_all(seq_length):
        kind = "dense"
    if ("dense", head_dim) not in H200:
        raise ConfigError(
            f"{balancing_option(config)} predicts times of attention, which are not measured for heads of "
            f"dimension {head_dim}: leave it out"
        )
    coefficients = (CPU if gpu_name() == "CPU" else H200)[kind, head_dim]
    packed = masks_documents(args)  # samples of one document have document masks, too
    twice = config.recompute_attention and getattr(args, "recompute_granularity", None) is not None

    def of_model(pairs: np.ndarray, density: np.ndarray) -> np.ndarray:
        found = predict(
            coefficients, seq_length, pairs, density, shape, kind=kind,
            cp_size=args.context_parallel_size, packed=packed,
        )  # fmt: skip
        again = found.forward_ms if twice else 0.0
        return np.asarray((found.total_ms + again) * len(layers_with_attention(args)))

    return of_model
