# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which layers of a model have attention: all, or those that ``--hybrid-layer-pattern`` (``HybridModel``) or
``--linear-attention-freq`` (``GPTModel``) says. Layers are numbered over all of them."""

from __future__ import annotations

HYBRID = (0, 18)
"""The first Megatron with ``HybridModel``; earlier ones have ``MambaModel``, which is refused."""
ATTENTION, MLP, EXPERTS = "*", "-", "E"
STAGES, MULTI_TOKEN = "|", "/"
"""Megatron's symbols in a pattern: of layers, between pipeline stages, and before multi-token prediction."""


def is_supported(pattern: str) -> bool:
    """Whether all layers of a pattern run with the backend, and some are attention."""
    return set(pattern) <= {ATTENTION, MLP, EXPERTS, STAGES} and ATTENTION in pattern


def attention_layers(settings) -> int:
    """Layers of the decoder, and those of multi-token prediction after them.

    Args:
        settings: Megatron-LM's arguments, or a TransformerConfig.
    """
    return settings.num_layers + (getattr(settings, "mtp_num_layers", None) or 0)


def layers_with_attention(args) -> list[int]:
    """Numbers, from 0, of a model's layers that have attention, by Megatron-LM's arguments. Layers of
    multi-token prediction are numbered after the decoder's."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if not pattern:
        return list(range(attention_layers(args)))
    layers = pattern.split(MULTI_TOKEN)[0].replace(STAGES, "")
    return [number for number, kind in enumerate(layers) if kind == ATTENTION]
