# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gated delta nets and Mamba layers among ours, in the striped layout.

With context parallelism such a layer of Megatron's brings all tokens of some heads to each rank, puts them
into the order of the sequence, which its recurrence needs, and goes back after it. It takes the order of
ranks' tokens for zigzag; here it is the striped one. Nothing else in the layer depends on it.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from ..config import ConfigError
from ..relayout import striped_owner
from .backend import is_active
from .borders import Borders

_borders: ContextVar[Borders | None] = ContextVar("mtraining_recurrent_layer", default=None)


def stripe_layers(model) -> None:
    """Tell the recurrent layers of a model that is built in which order they get tokens.

    Raises:
        ConfigError: one recomputes its output's order on its own.
    """
    for layer in model.modules():
        if not isinstance(layer, GatedDeltaNet | MambaMixer):
            continue
        if model.mtraining_borders is not None and getattr(layer, "recompute_norm_out", False):
            raise ConfigError(
                "config.recompute_modules has gdn_norm_out (--recompute-modules), which attention backend "
                "mtraining does not support with context parallelism: leave it out"
            )
        layer.mtraining_borders = model.mtraining_borders


def wrap_forward(original):
    """``GatedDeltaNet.forward`` or ``MambaMixer.forward`` of tokens in the striped layout."""

    def forward(self, *args, **kwargs):
        if not is_active(self.config):
            return original(self, *args, **kwargs)
        if kwargs.get("packed_seq_params") is not None:
            raise ConfigError(
                f"the {type(self).__name__} of layer {self.layer_number} is given packed documents, and "
                "attention backend mtraining does not tell it where they end: it would run across them; "
                "train without packed documents"
            )
        token = _borders.set(getattr(self, "mtraining_borders", None))
        try:
            return original(self, *args, **kwargs)
        finally:
            _borders.reset(token)

    return forward


def wrap_undo(original):
    """``_undo_attention_load_balancing``: ``[s, ...]``, rank after rank, into the order of the sequence."""
    return _wrap_order(original, 0)


def wrap_redo(original):
    """``_redo_attention_load_balancing``, the inverse."""
    return _wrap_order(original, 1)


def _wrap_order(original, which: int):
    def ordered(input_, *args, **kwargs):
        borders = _borders.get()
        if borders is None:
            return original(input_, *args, **kwargs)
        return input_.index_select(0, _orders(borders, len(input_), input_.device)[which])

    return ordered


@functools.lru_cache(maxsize=4)  # training and evaluation
def _orders(borders: Borders, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each token of the sequence is, rank after rank, and the inverse; int64 ``[length]``."""
    size = borders.cp.world
    with torch.inference_mode(False):  # kept for training, too
        rank, at = striped_owner(length, size, borders.block_size, borders.inner, device)
        places = rank * (length // size) + at
        return places, places.argsort()
