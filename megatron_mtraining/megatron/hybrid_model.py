# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``HybridModel`` (``--hybrid-layer-pattern``) with attention backend ``mtraining``: its attention layers,
rotary embedding and output layer. Its stack of layers is a decoder as :mod:`.decoder` has it."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

from megatron.core.ssm.mamba_mixer import MambaMixer

from ..config import ConfigError
from . import packed_documents
from .backend import is_active
from .checks import check_settings
from .gpt_model import finish_model, prepare_model
from .layer_pattern import GATED, MAMBA
from .layer_spec import check_layer, module_of, replace_core_attention
from .output_layer import chunks_loss, deferring

PATTERNS = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
)
"""Arguments of ``HybridModel``, with the names of the options."""


def wrap_hybrid_model(original):
    """``HybridModel.__init__`` with our core attention, rotary embedding and output layer."""
    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if not is_active(given["config"]):
            return original(self, *args, **kwargs)
        check_settings(SimpleNamespace(**{name: given.get(name) for name in PATTERNS}), True)
        with prepare_model(given):
            spec, pattern = given["hybrid_stack_spec"], given["hybrid_layer_pattern"]
            given["hybrid_stack_spec"] = replace_in_stack(spec, pattern)
            original(*bound.args, **bound.kwargs)
        finish_model(self)

    return __init__


def replace_in_stack(spec: Any, pattern: str) -> Any:
    """A copy of the spec of a ``HybridStack`` whose attention layers (``*``) have our core attention. Others,
    which a spec has whether or not a pattern does, stay as they are."""
    changed, layers = copy.copy(spec), copy.copy(spec.submodules)
    layers.attention_layer = replace_core_attention(layers.attention_layer)
    if GATED in pattern:
        check_layer(layers.gdn_layer.submodules, "hybrid_stack_spec.gdn_layer")
    if MAMBA in pattern:
        mixer = module_of(layers.mamba_layer.submodules.mixer)
        if mixer is not MambaMixer:  # gated delta products, for one
            raise ConfigError(
                f"hybrid_stack_spec.mamba_layer has {getattr(mixer, '__name__', mixer)}: attention backend "
                "mtraining works with MambaMixer only"
            )
    changed.submodules = layers
    return changed


def wrap_forward(original):
    """``HybridModel.forward`` with output layer and loss in chunks of tokens, and documents for the layers
    (:func:`.packed_documents.wrap_forward`)."""
    signature = inspect.signature(original)
    with_documents = packed_documents.wrap_forward(original)

    def forward(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        if not self.post_process or not chunks_loss(self, given):
            return with_documents(self, *args, **kwargs)
        with deferring(self.output_layer):
            return with_documents(self, *args, **kwargs)

    return forward
