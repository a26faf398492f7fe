# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""CUDA graphs of the parts of a layer (``--cuda-graph-impl``): those without attention."""

from __future__ import annotations

from enum import Enum

from ..config import ConfigError
from .spelling import spelled

MODULES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
"""Attributes that say what is captured, by version: the first is from 0.18 on; the last is the second option
until Megatron has validated it."""
PARTS = {"moe_router", "moe_preprocess"}
"""Modules that are captured on their own."""
LAYERS = {"mlp", "moe"}
"""Modules for which ``local`` captures the whole layer, which in a ``HybridModel`` is nothing else."""


def check_graphs(settings, command_line: bool) -> None:
    """Raise :class:`ConfigError` for CUDA graphs that hold attention.

    Args:
        settings, command_line: as for :func:`.checks.check_settings`.
    """
    impl = getattr(settings, "cuda_graph_impl", None)
    if impl in (None, "none"):
        return
    hybrid = any(
        getattr(settings, name, None) for name in ("hybrid_layer_pattern", "is_hybrid_model")
    )
    allowed = PARTS | LAYERS if hybrid or impl == "transformer_engine" else PARTS
    name = next((name for name in MODULES if hasattr(settings, name)), MODULES[0])
    captured = sorted({each for attribute in MODULES for each in _names(settings, attribute)})
    if captured and allowed.issuperset(captured):
        return
    option = spelled(name, command_line)
    what = f"{option} is {' '.join(captured)}" if captured else f"{option} is not given"
    raise ConfigError(
        f"{spelled('cuda_graph_impl', command_line)} is {impl} and {what}, which "
        "captures attention and does not work with attention backend mtraining: the ring cannot be captured "
        f"in a CUDA graph; use {option} with some of {', '.join(sorted(allowed))}, or --cuda-graph-impl none"
    )


def _names(settings, attribute: str) -> list[str]:
    """Modules by name: Megatron has them as members of an enum, or as text until it has validated them."""
    value = getattr(settings, attribute, None) or []
    given = value.split(",") if isinstance(value, str) else value
    given = given if isinstance(given, list | tuple) else [given]
    return [each.name if isinstance(each, Enum) else each for each in given]
