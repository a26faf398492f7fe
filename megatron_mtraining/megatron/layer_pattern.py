# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which layers of a model have attention: all, or those that ``--hybrid-layer-pattern`` (``HybridModel``) or
``--linear-attention-freq`` (``GPTModel``) says. Layers are numbered over all of them."""

from __future__ import annotations

HYBRID = (0, 18)
"""The first Megatron with ``HybridModel``; earlier ones have ``MambaModel``, which is refused."""
ATTENTION, MLP, EXPERTS, GATED, MAMBA = "*", "-", "E", "G", "M"
GATED_DELTA_NET = ("gated_delta_net", "gdn")
"""Values of ``--experimental-attention-variant``, by version."""
GATED_OVER_RANKS = (0, 19)
"""The first Megatron-LM that can build them with context parallelism."""
STAGES, MULTI_TOKEN = "|", "/"
"""Megatron's symbols in a pattern: of layers, between pipeline stages, and before multi-token prediction."""


def is_supported(pattern: str) -> bool:
    """Whether all layers of a pattern run with the backend, and some are attention."""
    kinds = {ATTENTION, MLP, EXPERTS, GATED, MAMBA, STAGES}
    return kinds.issuperset(pattern) and ATTENTION in pattern


def attention_layers(settings) -> int:
    """Layers of the decoder, and those of multi-token prediction after them.

    Args:
        settings: Megatron-LM's arguments, or a TransformerConfig.
    """
    depths = getattr(settings, "mtp_num_layers", None) or 0
    repeats = getattr(settings, "mtp_use_repeated_layer", False)
    return settings.num_layers + (min(depths, 1) if repeats else depths)


def layers_with_attention(args) -> list[int]:
    """Numbers, from 0, of a model's layers that have attention, by Megatron-LM's arguments. Layers of
    multi-token prediction are numbered after the decoder's."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern:
        layers = pattern.split(MULTI_TOKEN)[0].replace(STAGES, "")
        return [number for number, kind in enumerate(layers) if kind == ATTENTION]
    every = range(attention_layers(args))
    if not has_recurrent_layers(args):
        return list(every)
    # As Megatron reads it: the last of so many, or where the list has no 1.
    given = args.linear_attention_freq
    is_recurrent = [(layer + 1) % given for layer in every] if isinstance(given, int) else given
    # Multi-token prediction has layers as the decoder's last.
    depths = [is_recurrent[args.num_layers - 1]] * (len(every) - args.num_layers)
    kinds = [*is_recurrent[: args.num_layers], *depths]
    return [layer for layer, recurs in enumerate(kinds) if not recurs]


def has_recurrent_layers(args) -> bool:
    """Whether some layers are gated delta nets or Mamba layers, which go through a sequence in order."""
    return has_gated_layers(args) or MAMBA in (getattr(args, "hybrid_layer_pattern", None) or "")


def has_gated_layers(args) -> bool:
    """Whether some layers are gated delta nets."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern:
        return GATED in pattern
    return (
        getattr(args, "experimental_attention_variant", None) in GATED_DELTA_NET
        and getattr(args, "linear_attention_freq", None) is not None
    )
