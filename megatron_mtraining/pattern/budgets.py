# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings that differ from layer to layer and head to head, read from a file.

Two kinds: this project's own (``--mtraining-overrides``, JSON or YAML), and the best-pattern files that
MInference publishes (``--mtraining-budgets``): a list of layers, each an object of heads, each a list of a
pattern's name, its budgets, and a score that is not looked at.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from ..config import OF_POLICY, OPTIONAL, ConfigError, MTrainingConfig, option

PUBLISHED = ("vertical_and_slash", "flex_vertical_and_slash")
OF_A_HEAD = {"policy", "dense"}.union(
    *OF_POLICY.values(), OPTIONAL["price"]
) - {"target_density", "target_scope", "price_start"}  # fmt: skip
"""What can differ from head to head: the other settings are of all."""


def heads_of_layer(config: MTrainingConfig, layer: int, layers: int | None, heads: int):
    """The settings of each head of a layer, or None if all have ``config``.

    Args:
        layer: from 0, in the whole model.
        layers, heads: how many the model has; ``layers`` None if that is not known.

    Raises:
        ConfigError: the file cannot be read, or does not fit the model; names the file, the layer and
            the head.
    """
    if config.overrides is not None:
        found = _of_overrides(config, layers, heads)
        return found.get(layer)
    if config.budgets is not None:
        return _of_budgets(config, layers, heads)[layer]
    return None


def settings_of_run(overrides: str) -> dict:
    """What a file of overrides says of all layers: settings by name.

    Raises:
        ConfigError: the file cannot be read.
    """
    content = _read(overrides, f"{option('overrides')} {overrides}")
    known = {field.name for field in fields(MTrainingConfig)}
    found = content if isinstance(content, dict) else {}
    return {name: value for name, value in found.items() if name in known}


def check_files(config: MTrainingConfig, layers: int | None, heads: int) -> None:
    """Raise :class:`ConfigError` if the files of a run's settings do not fit the model."""
    if config.overrides is not None:
        _of_overrides(config, layers, heads)
    elif config.budgets is not None:
        _of_budgets(config, layers, heads)


def with_changes(config: MTrainingConfig, changes: dict) -> MTrainingConfig:
    """Settings of a head: ``config`` with changes of a file, which may choose another policy."""
    changes = dict(changes)
    if changes.pop("dense", False):
        return config.dense()
    policy = changes.get("policy")
    if policy is None and {"vertical", "slash"} & changes.keys():
        policy = "fixed"
    elif policy is None and "coverage" in changes:
        policy = "coverage"
    if policy in (None, config.policy):
        return replace(config, **changes)
    return config.shared(**{**changes, "policy": policy})


@lru_cache(maxsize=8)
def _of_overrides(config: MTrainingConfig, layers: int | None, heads: int) -> dict[int, tuple]:
    name = f"{option('overrides')} {config.overrides}"
    content = _read(config.overrides, name)
    config = replace(config, overrides=None)
    # What is recommended may be settings of the run alone.
    if not isinstance(content, dict) or not isinstance(content.get("layers", {}), dict):
        raise ConfigError(f'{name} must be an object with "layers", an object by layer number')
    if not content:
        raise ConfigError(f'{name} is empty: give settings, or "layers" with settings of theirs')
    other = content.keys() - {"layers"} - {field.name for field in fields(MTrainingConfig)}
    if other:
        raise ConfigError(f"{name} has {sorted(other)[0]!r}, which is no setting: leave it out")
    for setting in content.keys() - {"layers"}:
        if content[setting] != getattr(config, setting):
            raise ConfigError(
                f"{name} has {setting} {content[setting]!r}, but the run {getattr(config, setting)!r}: make "
                f"them the same, or leave one out"
            )
    found = {}
    for number, of_layer in content.get("layers", {}).items():
        place = f"{name}: layer {number}"
        layer = _number(number, layers, place, "layers")
        if not isinstance(of_layer, dict):
            raise ConfigError(f"{place} must be an object of settings")
        of_layer = dict(of_layer)
        of_heads = of_layer.pop("heads", {})
        if not isinstance(of_heads, dict):
            raise ConfigError(f'{place} has "heads", which must be an object by head number')
        base = _changed(config, of_layer, place)
        settings = [base] * heads
        for head, changes in of_heads.items():
            where = f"{place}, head {head}"
            at = _number(head, heads, where, "query heads")
            if not isinstance(changes, dict):
                raise ConfigError(f"{where} must be an object of settings")
            settings[at] = _changed(base, changes, where)
        found[layer] = tuple(settings)
    return found


@lru_cache(maxsize=8)
def _of_budgets(config: MTrainingConfig, layers: int | None, heads: int) -> list[tuple]:
    name = f"{option('budgets')} {config.budgets}"
    content = _read(config.budgets, name)
    config = replace(config, budgets=None)
    if not isinstance(content, list) or not all(isinstance(layer, dict) for layer in content):
        raise ConfigError(f"{name} must be a list of layers, each an object by head number")
    if layers is not None and len(content) != layers:
        raise ConfigError(f"{name} has {len(content)} layers, but the model {layers}")
    found = []
    for layer, of_layer in enumerate(content):
        if {str(head) for head in of_layer} != {str(head) for head in range(heads)}:
            raise ConfigError(
                f"{name}: layer {layer} has {len(of_layer)} heads ({', '.join(list(of_layer)[:4])}, ...), "
                f"but the model {heads}, from 0"
            )
        found.append(
            tuple(
                _published(config, of_layer[str(head)], f"{name}: layer {layer}, head {head}")
                for head in range(heads)
            )
        )
    return found


def _published(config: MTrainingConfig, entry, place: str) -> MTrainingConfig:
    if not isinstance(entry, list) or len(entry) < 3:
        raise ConfigError(f"{place} is {entry!r}: expected a pattern's name and two budgets")
    kind, vertical, slash = entry[:3]
    if kind not in PUBLISHED:
        raise ConfigError(f"{place} is {kind!r}: only {' and '.join(PUBLISHED)} are supported")
    if kind == "vertical_and_slash":
        return _changed(config, dict(policy="fixed", vertical=vertical, slash=slash), place)
    for budget in (vertical, slash):
        if not isinstance(budget, list) or len(budget) != 2:
            raise ConfigError(f"{place} is {entry!r}: expected pairs of a coverage and a cap")
    if vertical[0] != slash[0]:
        raise ConfigError(
            f"{place} has coverage {vertical[0]} of columns and {slash[0]} of diagonals: give both the same"
        )
    changes = dict(
        policy="coverage", coverage=vertical[0], vertical_cap=vertical[1], slash_cap=slash[1]
    )
    return _changed(config, changes, place)


def _changed(config: MTrainingConfig, changes: dict, place: str) -> MTrainingConfig:
    for setting in changes:
        if setting not in OF_A_HEAD:
            known = ", ".join(sorted(OF_A_HEAD))
            raise ConfigError(f"{place} has {setting!r}, which cannot differ there: use {known}")
    if "target_recall" in changes and config.target_scope != "head":
        raise ConfigError(
            f"{place} has target_recall {changes['target_recall']!r}, which is for runs whose heads have "
            f"prices of their own: use {option('target_recall')} with {option('target_scope')} head"
        )
    if not isinstance(changes.get("dense", False), bool):
        raise ConfigError(f"{place} has dense {changes['dense']!r}: use true or false")
    try:
        return with_changes(config, changes)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _number(text, count: int | None, place: str, what: str) -> int:
    try:
        number = int(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {text!r} is no number") from None
    if number < 0 or (count is not None and number >= count):
        raise ConfigError(f"{place}: the model has {count} {what}, from 0")
    return number


def _read(path: str, name: str):
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    if Path(path).suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise ConfigError(
                f"{name} is YAML, for which pyyaml is missing: pip install pyyaml, or use JSON"
            ) from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name} is not valid YAML: {error}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
