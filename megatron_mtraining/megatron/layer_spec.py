# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Layer specs: put :class:`MTrainingAttention` where self-attention has its core attention.

A spec is a tree of dataclasses (``ModuleSpec``, ``TransformerBlockSubmodules``, ...), lists and
``functools.partial``. Specs are shared, between models and between layers: what changes is copied.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from ..config import ConfigError

REPLACED = ("DotProductAttention", "TEDotProductAttention")
"""Core attentions, by class name, that compute what we compute: causal softmax attention."""


def replace_core_attention(spec: Any, ours: Any = None) -> Any:
    """A copy of ``spec`` in which every self-attention has our core attention.

    Args:
        spec: what ``GPTModel`` takes as ``transformer_layer_spec``.
        ours: what builds it; None for :class:`MTrainingAttention`.

    Raises:
        ConfigError: something in it cannot be replaced (named, with its place in the spec), or
            there is nothing to replace although there are layers.
    """
    from .core_attention import MTrainingAttention

    places: list[str] = []
    result = _walk(spec, type(spec).__name__, places, ours or MTrainingAttention)
    layers = getattr(spec, "layer_specs", None)
    no_layers = isinstance(layers, list) and not layers  # a pipeline stage without layers
    if not places and not no_layers:
        raise ConfigError(
            f"the layer spec ({_name(spec)}) holds no self-attention whose core_attention "
            "attention backend mtraining could replace: choose another backend, or a spec with "
            "SelfAttentionSubmodules"
        )
    return result


def _walk(node: Any, place: str, places: list[str], ours: Any) -> Any:
    if isinstance(node, SelfAttentionSubmodules):
        changed = copy.copy(node)
        changed.core_attention = _ours(node.core_attention, place, ours)
        places.append(place)
        return changed
    if isinstance(node, TransformerLayerSubmodules):
        check_layer(node, place)
        if module_of(node.self_attention) is GatedDeltaNet:  # as it is
            places.append(place)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        if hasattr(node, "core_attention"):
            raise ConfigError(
                f"{place} is {type(node).__name__}: attention backend mtraining works with "
                "self-attention (SelfAttentionSubmodules) only"
            )
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        old = {name: getattr(node, name) for name in names}
        new = {name: _walk(value, f"{place}.{name}", places, ours) for name, value in old.items()}
        changes = {name: value for name, value in new.items() if value is not old[name]}
        if not changes:
            return node
        changed = copy.copy(node)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed
    if isinstance(node, partial):
        positional = [
            _walk(part, f"{place}[{i}]", places, ours) for i, part in enumerate(node.args)
        ]
        named = {
            name: _walk(part, f"{place}.{name}", places, ours)
            for name, part in node.keywords.items()
        }
        if _same(positional, node.args) and _same(named.values(), node.keywords.values()):
            return node
        return partial(node.func, *positional, **named)
    if isinstance(node, dict):
        new = {key: _walk(part, f"{place}[{key!r}]", places, ours) for key, part in node.items()}
        return node if _same(new.values(), node.values()) else new
    if type(node) in (list, tuple):
        new = [_walk(part, f"{place}[{i}]", places, ours) for i, part in enumerate(node)]
        return node if _same(new, node) else type(node)(new)
    return node


def _same(new, old) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _ours(core_attention: Any, place: str, ours: Any) -> Any:
    """``ours`` in place of ``core_attention``, if that is one that may be replaced."""
    module = module_of(core_attention)
    if module is module_of(ours):
        return ours
    params = getattr(core_attention, "params", None) or getattr(core_attention, "keywords", None)
    if getattr(module, "__name__", None) not in REPLACED or params:
        shown = _name(core_attention) + (f" with {params}" if params else "")
        raise ConfigError(
            f"{place}.core_attention is {shown}, which attention backend mtraining does not know "
            f"how to replace (it replaces {' and '.join(REPLACED)}, without parameters of their "
            "own): choose another backend or another spec"
        )
    return ours


def check_layer(layer: TransformerLayerSubmodules, place: str) -> None:
    """Refuse a layer that mixes tokens in a way that is not ours."""
    cross = module_of(layer.cross_attention)
    if cross not in (IdentityOp, IdentityFuncOp, None):
        raise ConfigError(
            f"{place}.cross_attention is {_name(cross)}: attention backend mtraining does not "
            "support cross attention"
        )
    module = module_of(layer.self_attention)
    name = getattr(module, "__name__", "")
    attends = isinstance(module, type) and issubclass(module, SelfAttention)
    attends = attends or module is GatedDeltaNet
    # Heterogeneous models have layers without attention: nothing there mixes tokens.
    without = module in (IdentityOp, IdentityFuncOp, None) or "Linear" in name.split("Gathered")[0]
    if not attends and not without:
        raise ConfigError(
            f"{place}.self_attention is {_name(module)}: attention backend mtraining works with "
            "SelfAttention and GatedDeltaNet only"
        )


def module_of(spec: Any) -> Any:
    """The class that a spec builds: of a ``ModuleSpec``, a partial or a class method, or itself."""
    if isinstance(spec, ModuleSpec):
        return module_of(spec.module)
    if isinstance(spec, partial):
        return module_of(spec.func)
    owner = getattr(spec, "__self__", None)
    return owner if isinstance(owner, type) else spec


def _name(spec: Any) -> str:
    module = module_of(spec)
    return getattr(module, "__name__", None) or type(module).__name__
