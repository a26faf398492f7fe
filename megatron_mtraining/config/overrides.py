# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings that differ from layer to layer and head to head, read from a file.

Two kinds: this project's own (``--mtraining-overrides``, JSON or YAML), and the best-pattern files that
MInference publishes (``--mtraining-budgets``): a list of layers, each an object of heads, each a list of a
pattern's name, its budgets, and a score that is not looked at.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from . import OF_POLICY, OPTIONAL, STEERED, ConfigError, MTrainingConfig, option

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


def check_files(
    config: MTrainingConfig, layers: int | None, heads: int, seq_length: int | None = None
) -> None:
    """Raise :class:`ConfigError` if the files of a run's settings do not fit the model, or the sequence."""
    if config.overrides is not None:
        found = _of_overrides(config, layers, heads)
        if seq_length is not None:
            _check_floors(found, seq_length, f"{option('overrides')} {config.overrides}")
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
    if (policy or config.policy) == "price" and changes.get("price") == 0:
        # All is kept: caps and targets of the run do not hold, those given beside it are refused.
        policy = "price"
    elif policy in (None, config.policy):
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
        first = min(other, key=str)
        raise ConfigError(f"{name} has {first!r}, which is no setting: leave it out")
    for setting in content.keys() - {"layers"}:
        if content[setting] != getattr(config, setting):
            raise ConfigError(
                f"{name} has {setting} {content[setting]!r}, but the run {getattr(config, setting)!r}: make "
                f"them the same, or leave one out"
            )
    found = {}
    for layer, of_layer in _numbered(content.get("layers", {}), layers, f"{name}: layer", "layers"):
        place = f"{name}: layer {layer}"
        if not isinstance(of_layer, dict):
            raise ConfigError(f"{place} must be an object of settings")
        of_layer = dict(of_layer)
        of_heads = of_layer.pop("heads", {})
        if not isinstance(of_heads, dict):
            raise ConfigError(f'{place} has "heads", which must be an object by head number')
        base = _changed(config, of_layer, place)
        # What a head says of itself wins over a dense layer: it has what is left of the layer's then.
        left = {k: v for k, v in of_layer.items() if k != "dense" and (k, v) != ("price", 0)}
        usual = base if left == of_layer else _changed(config, left, place)
        settings = [base] * heads
        for head, changes in _numbered(of_heads, heads, f"{place}, head", "query heads"):
            where = f"{place}, head {head}"
            if not isinstance(changes, dict):
                raise ConfigError(f"{where} must be an object of settings")
            if changes:
                settings[head] = _changed(usual, changes, where)
        found[layer] = tuple(settings)
    if layers is not None and len(found) == layers:
        _check_steered(config, found, name)
    return found


def _check_steered(config: MTrainingConfig, found: dict[int, tuple], name: str) -> None:
    """Raise :class:`ConfigError` if the run moves a price, or keeps slashes, and no head would follow."""
    if any(head.policy == "price" and head.price > 0 for of in found.values() for head in of):
        return
    for setting, usual in STEERED.items():
        value = getattr(config, setting)
        if value != usual:
            raise ConfigError(
                f"{option(setting)} is {value}, but {name} leaves no head with policy price and a price "
                "above 0, which is all that it holds for: leave one of them out"
            )


def _check_floors(found: dict[int, tuple], seq_length: int, name: str) -> None:
    for layer, heads in found.items():
        for head, settings in enumerate(heads):
            for floor in ("vertical_floor", "slash_floor"):
                value = getattr(settings, floor)
                if value is not None and value > seq_length:
                    raise ConfigError(
                        f"{name}: layer {layer}, head {head} has {floor} {value}, more than --seq-length "
                        f"({seq_length}): use at most {seq_length}"
                    )


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
        place = f"{name}: layer {layer}"
        if len(of_layer) != heads:
            first = ", ".join(map(str, list(of_layer)[:4]))
            raise ConfigError(
                f"{place} has {len(of_layer)} heads ({first}, ...), but the model {heads}, from 0"
            )
        entries = dict(_numbered(of_layer, heads, f"{place}, head", "query heads"))
        found.append(
            tuple(
                _published(config, entries[head], f"{place}, head {head}") for head in range(heads)
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
        if changes[setting] is None:  # would stand for the default
            raise ConfigError(f"{place} has {setting} null: give a value")
    if "target_recall" in changes and config.target_scope != "head":
        raise ConfigError(
            f"{place} has target_recall {changes['target_recall']!r}, which is for runs whose heads have "
            f"prices of their own: use {option('target_recall')} with {option('target_scope')} head"
        )
    if not isinstance(changes.get("dense", False), bool):
        raise ConfigError(f"{place} has dense {changes['dense']!r}: use true or false")
    beside = sorted(changes.keys() - {"dense"})
    if changes.get("dense") and beside:
        raise ConfigError(
            f"{place} has dense true and {beside[0]} {changes[beside[0]]!r}, but dense keeps everything: "
            "leave one of them out"
        )
    try:
        changed = with_changes(config, changes)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    if changes.get("dense") is False and changed.price == 0:
        raise ConfigError(
            f"{place} has dense false, but a price of 0 keeps everything: give a price"
        )
    return changed


def _numbered(of: dict, count: int | None, place: str, what: str):
    """Pairs of a number below ``count`` and what an object has under it. YAML knows 1 and "1"; of JSON's
    texts, 1 and 01 are not the same."""
    found = {}
    for key, value in of.items():
        where = f"{place} {key}"
        if isinstance(key, bool) or not re.fullmatch("0|[1-9][0-9]{0,8}", str(key), re.ASCII):
            raise ConfigError(f"{where}: {key!r} is no number such as 0 or 12")
        number = int(key)
        if count is not None and number >= count:
            raise ConfigError(f"{where}: the model has {count} {what}, from 0")
        if number in found:
            raise ConfigError(f"{where} is there twice: leave one out")
        found[number] = value
    return found.items()


def _read(path: str, name: str):
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start}): give a JSON or YAML file, saved as UTF-8"
        ) from None
    yaml = Path(path).suffix in (".yaml", ".yml")
    try:
        return _from_yaml(text, name) if yaml else json.loads(text, object_pairs_hook=_each_once)
    except ConfigError:
        raise
    except _Twice as error:
        raise ConfigError(
            f"{name} has {error.args[0]!r} twice in one object: leave one out"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{name} is not valid {'YAML' if yaml else 'JSON'}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply: settings take four levels") from None


class _Twice(ValueError):
    """A key that one object has twice, of which parsers drop the first unseen."""


def _each_once(pairs: list[tuple]) -> dict:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise _Twice(key)
    return dict(pairs)


def _from_yaml(text: str, name: str):
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{name} is YAML, for which pyyaml is missing: pip install pyyaml, or use JSON"
        ) from None
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        # In the nodes, as they are written: what "<<" merges in may be there again.
        open_nodes, seen = [node], set()
        while open_nodes:
            each = open_nodes.pop()
            if each is None or id(each) in seen or isinstance(each, yaml.ScalarNode):
                continue
            seen.add(id(each))
            if isinstance(each, yaml.MappingNode):
                keys = [key for key, _ in each.value if isinstance(key, yaml.ScalarNode)]
                own = [key for key in keys if not key.tag.endswith((":merge", ":value"))]
                _each_once([(loader.construct_object(key), None) for key in own])
                open_nodes += [part for pair in each.value for part in pair]
            else:
                open_nodes += each.value
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    finally:
        loader.dispose()
