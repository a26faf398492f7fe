# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What layers have beside a pattern: sliding windows (``window_size``), and a softmax offset in each head
(``softmax_type``), as Megatron's ``DotProductAttention`` has them."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from ..config import ConfigError
from .windows import has_window, has_window_size

OFFSET = "softmax_offset"
"""The parameter's name in Megatron's core attentions, and so in checkpoints."""


def window_of(config, layer_number: int) -> int | None:
    """How many keys a query of a layer, from 1, sees, its own included: None for all.

    Raises:
        ConfigError: ``window_attn_skip_freq`` does not have the layer.
    """
    frequency = getattr(config, "window_attn_skip_freq", None)
    is_given = has_window_size(config) and isinstance(frequency, list)
    if is_given and layer_number > len(frequency):
        raise ConfigError(
            f"config.window_attn_skip_freq is {frequency}, which does not say whether layer {layer_number} "
            "has a sliding window: with multi-token prediction, give a number in place of a list"
        )
    return config.window_size[0] + 1 if has_window(config, layer_number - 1) else None


def window_layers(config) -> list[int]:
    """The layers of the whole model, from 0, that have a sliding window."""
    layers = range(getattr(config, "num_layers", None) or 0)
    return [layer for layer in layers if window_of(config, layer + 1) is not None]


def add_softmax_offset(attention: torch.nn.Module, num_heads: int) -> None:
    """Give a core attention its ``softmax_offset``: None, zeros, or a parameter, ``[num_heads]``, of this
    tensor-parallel rank's heads.

    Raises:
        ConfigError: Megatron has a ``softmax_type`` that is not known here.
    """
    config = attention.config
    kind = getattr(config, "softmax_type", None) or "vanilla"
    if kind == "vanilla":
        attention.softmax_offset = None
        return
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    offset = torch.zeros(num_heads, device=device, dtype=config.params_dtype)
    if kind == "off-by-one":
        attention.softmax_offset = offset  # no buffer: Megatron's is in no checkpoint
    elif kind == "learnable":
        parameter = torch.nn.Parameter(offset)
        if config.perform_initialization:
            config.init_method(parameter)
        # Each rank has heads of its own, all of which count in the norm of gradients.
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        attention.register_parameter(OFFSET, parameter)
    else:
        raise ConfigError(
            f"config.softmax_type is {kind}, which attention backend mtraining does not support: use "
            "vanilla, off-by-one or learnable"
        )


def sharded_softmax_offset(
    attention: torch.nn.Module, prefix: str, sharded_offsets: tuple, metadata: dict | None
) -> dict:
    """The sharded state of a core attention with a ``softmax_offset``, cut by heads over tensor-parallel
    ranks."""
    offset: Tensor = attention.softmax_offset
    return make_sharded_tensors_for_checkpoint(
        {OFFSET: offset},
        prefix,
        {OFFSET: 0},
        sharded_offsets,
        tp_group=attention.tp_group or parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )
