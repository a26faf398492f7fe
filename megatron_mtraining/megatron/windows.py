# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's options of sliding windows: which values say what a query sees, and in which layers."""

from __future__ import annotations

from typing import Any

from ..config import ConfigError
from .spelling import spelled


def is_causal_window(value: Any) -> bool:
    """Whether ``window_size`` says how many keys before its own a query sees (-1: all), and that it sees none
    after it."""
    listed = isinstance(value, list | tuple) and len(value) == 2
    return listed and all(type(size) is int for size in value) and value[0] >= -1 and value[1] == 0


def has_window_size(settings: Any) -> bool:
    """Whether some layers may have a sliding window: -1 is Megatron's infinite one."""
    size = getattr(settings, "window_size", None)
    return bool(size) and size[0] >= 0


def has_window(settings: Any, layer: int) -> bool:
    """Whether a layer, from 0, has a sliding window: Megatron's ``is_layer_window_attention`` says the same,
    but a plan must not import it. False where ``settings`` do not say which layers.

    Args:
        settings: as of :func:`check_window_layers`, after it.
    """
    if not has_window_size(settings) or not hasattr(settings, "window_attn_skip_freq"):
        return False
    given = settings.window_attn_skip_freq
    if isinstance(given, int):
        return (layer + 1) % given != 0
    return given is None or layer >= len(given) or bool(given[layer])


def check_window_layers(settings: Any, command_line: bool) -> None:
    """Raise :class:`ConfigError` unless ``window_attn_skip_freq`` says which layers have a window.

    Args:
        settings, command_line: as of :func:`~.checks.check_settings`.
    """
    given = getattr(settings, "window_attn_skip_freq", None)
    layers = getattr(settings, "num_layers", None)
    if not getattr(settings, "window_size", None) or given is None:
        return
    if isinstance(given, list) and (not layers or len(given) == layers):
        return
    if type(given) is not int or given < 1:
        raise ConfigError(
            f"{spelled('window_attn_skip_freq', command_line)} is {given}, but there are {layers} layers: "
            "give a number N for full attention in every N-th layer, or a list with 1 for "
            "each layer with a window, and 0 for each other"
        )
