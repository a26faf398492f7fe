# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The file of ``--mtraining-settings``: settings of the run, and policies that differ for layers and heads.

Two formats, JSON or YAML each: an object with names of options and ``layers``, or a best-pattern file as
MInference publishes it, which has a policy for every head: a list of layers, each an object of heads, each a
list of a pattern's name, its numbers, and a score that is not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ..errors import ConfigError
from .options import BY_NAME, check_known, policy_from, policy_values
from .policies import Policy, has_price
from .schedule import SCHEDULES
from .settings import DENSE, MTrainingConfig
from .settings_content import read, shown, times_read
from .validation import option

OF_RUN = ("target_scope", *SCHEDULES)
"""Options of a policy that all of its heads share."""
PER_HEAD = {"policy", "dense"} | {
    each.name for each in BY_NAME.values() if each.policies and each.name not in OF_RUN
}
"""Settings that can differ from head to head."""


def head_policies(
    config: MTrainingConfig, layer: int, num_layers: int | None, num_heads: int
) -> tuple[Policy, ...] | None:
    """The policy of each query head of a layer, or None if all have ``config.policy``.

    Args:
        layer: from 0, in the whole model.
        num_layers: of the whole model; None if that is not known.

    Raises:
        ConfigError: the file cannot be read, or does not fit the model; names the file, the layer and
            the head.
    """
    if config.settings is None:
        return None
    return _policies(config, num_layers, num_heads).get(layer)


def check_settings_file(
    config: MTrainingConfig,
    num_layers: int | None,
    num_heads: int,
    layers: Sequence[int] | None = None,
) -> None:
    """Raise :class:`ConfigError` if the settings file of a run does not fit the model.

    Args:
        layers: those that have attention without a sliding window; None for all.
    """
    if config.settings is None:
        return
    for layer in _policies(config, num_layers, num_heads):
        if layers is not None and layer not in layers:
            raise ConfigError(
                f"{shown(config.settings)} has settings of layer {layer}, which has no attention, or a "
                "sliding window: layers are numbered from 0 over all kinds of layers, and those with a "
                f"pattern are {', '.join(map(str, layers))}"
            )


def lookahead_warning(
    config: MTrainingConfig, num_layers: int | None, num_heads: int
) -> str | None:
    """What to say if later tokens of a block change the pattern of some head (``block_lookahead``)."""
    by_layer = {} if config.settings is None else _policies(config, num_layers, num_heads)
    policies = {config.policy}.union(*by_layer.values())
    if not any(getattr(policy, "lookahead", False) for policy in policies):
        return None
    return (
        f"{option('block_lookahead')}: outputs and the loss depend on up to a block of later tokens, so the "
        "loss is lower than that of a model that writes"
    )


def changed_policy(policy: Policy, changes: dict[str, object]) -> Policy:
    """``policy`` with flat options changed, which may select another policy; ``dense`` keeps everything.

    Raises:
        ConfigError: an option of another policy, or a value that cannot work.
    """
    changes = dict(changes)
    if changes.pop("dense", False):
        return DENSE
    name = changes.get("policy")
    if name is None and {"vertical", "slash"} & changes.keys():
        name = "fixed"
    name = name or policy.name
    base = {}
    # A price of 0 keeps everything: caps and target of the run do not hold, those beside it are refused.
    if name == policy.name and not (name == "price" and changes.get("price") == 0):
        values = policy_values(policy)
        base = {
            key: value
            for key, value in values.items()
            if value is not None and key not in SCHEDULES
        }
    return policy_from({**base, **changes, "policy": name})


def _policies(
    config: MTrainingConfig, num_layers: int | None, num_heads: int
) -> dict[int, tuple[Policy, ...]]:
    """By layer, as the file was when it was last read: a run does not read it again, but settings that a
    notebook makes of a changed file do."""
    return _policies_by_layer(config, num_layers, num_heads, times_read(config.settings or ""))


@lru_cache(maxsize=8)
def _policies_by_layer(
    config: MTrainingConfig, num_layers: int | None, num_heads: int, _: int
) -> dict[int, tuple[Policy, ...]]:
    assert config.settings is not None
    name = shown(config.settings)
    content = read(config.settings, name)
    if isinstance(content, list):
        return dict(enumerate(_of_published(config, content, num_layers, num_heads, name)))
    return _of_object(config, content, num_layers, num_heads, name)


def _of_object(config, content, num_layers, num_heads, name) -> dict[int, tuple[Policy, ...]]:
    if not isinstance(content, dict) or not isinstance(content.get("layers", {}), dict):
        raise ConfigError(
            f'{name} must be an object with "layers", an object by layer number, or a list of layers as '
            "MInference publishes it"
        )
    if not content:
        raise ConfigError(f'{name} is empty: give settings, or "layers" with settings by layer')
    _check_settings_of_run(config, content, name)
    found = {}
    for layer, of_layer in _numbered(
        content.get("layers", {}), num_layers, f"{name}: layer", "layers"
    ):
        place = f"{name}: layer {layer}"
        if not isinstance(of_layer, dict):
            raise ConfigError(f"{place} must be an object of settings")
        of_layer = dict(of_layer)
        of_heads = of_layer.pop("heads", {})
        if not isinstance(of_heads, dict):
            raise ConfigError(f'{place} has "heads", which must be an object by head number')
        base = _changed(config, config.policy, of_layer, place)
        # A head's own settings win over a dense layer: it starts from the layer's other settings then.
        left = {k: v for k, v in of_layer.items() if k != "dense" and (k, v) != ("price", 0)}
        start = base if left == of_layer else _changed(config, config.policy, left, place)
        policies = [base] * num_heads
        for head, changes in _numbered(of_heads, num_heads, f"{place}, head", "query heads"):
            where = f"{place}, head {head}"
            if not isinstance(changes, dict):
                raise ConfigError(f"{where} must be an object of settings")
            if changes:
                policies[head] = _changed(config, start, changes, where)
        found[layer] = tuple(policies)
    if num_layers is not None and len(found) == num_layers:
        _check_is_followed(config, content, found, name)
    return found


def _check_settings_of_run(config: MTrainingConfig, content: dict, name: str) -> None:
    """Raise :class:`ConfigError` unless a file's settings of all layers equal the run's: the command
    line and :meth:`MTrainingConfig.from_options` take them for options that are not given."""
    flat = config.options()
    for setting in sorted(content.keys() - {"layers"}, key=str):
        check_known(setting, name)
        if setting == "settings":
            raise ConfigError(f"{name} has {setting!r}, which is not a setting: leave it out")
        if not _is_of_run(config, setting, content[setting]):
            raise ConfigError(
                f"{name} has {setting} {content[setting]!r}, but the run {flat[setting]!r}: make them the "
                "same, or leave one out"
            )


def _is_of_run(config: MTrainingConfig, setting: str, value: object) -> bool:
    """Whether a run with this value is the same run."""
    flat = {name: each for name, each in config.options().items() if each is not None}
    # A schedule replaces a price, but heads' own prices are relative to it.
    if value == {**flat, **policy_values(config.policy)}.get(setting):
        return True
    try:
        return MTrainingConfig.from_options(**{**flat, setting: value}) == config
    except ConfigError:
        return False


def _check_is_followed(config: MTrainingConfig, content: dict, found: dict, name: str) -> None:
    """Raise :class:`ConfigError` if the run has a target or a schedule, and no head a price that follows it;
    or if it has an option of a policy that no head has."""
    every = [policy for policies in found.values() for policy in policies]
    for mover in ("schedule", "target_schedule", "target_recall"):
        value = getattr(config.policy, mover)
        if value is not None and not any(map(has_price, every)):
            raise ConfigError(
                f"{option(mover)} is {value}, but {name} leaves no head with policy price and a price above "
                "0, and only such heads follow it: leave one of them out"
            )
    if any(policy.name == config.policy.name for policy in every):
        return
    for setting, value in _not_default(config.policy).items():
        if setting not in content:  # where the file has both, it says what its heads have instead
            raise ConfigError(
                f"{option(setting)} is {value}, but {name} gives every head another policy than "
                f"{config.policy.name}: leave one of them out"
            )


def _not_default(policy: Policy) -> dict[str, object]:
    """The options of a run's policy that differ from the defaults, the one that selects the policy last."""
    values, default = policy_values(policy), policy_values(type(policy)())
    chosen = values.pop("policy")
    if values.get("target_schedule") is not None:
        values |= {"target_recall": None, "target_scope": None}  # follow from it
    found = {name: value for name, value in values.items() if value != default[name]}
    # A short sequence lowers the default.
    if found.get("vertical_cap", 0) <= default.get("vertical_cap", 0):
        found.pop("vertical_cap", None)
    return found if chosen == MTrainingConfig().policy.name else {**found, "policy": chosen}


def _of_published(config, content, num_layers, num_heads, name) -> list[tuple[Policy, ...]]:
    for setting, value in _not_default(config.policy).items():
        raise ConfigError(
            f"{option(setting)} is {value}, but {name} has the policies of all heads: leave one of them out"
        )
    if not all(isinstance(layer, dict) for layer in content):
        raise ConfigError(f"{name} must be a list of layers, each an object by head number")
    if num_layers is not None and len(content) != num_layers:
        raise ConfigError(f"{name} has {len(content)} layers, but the model {num_layers}")
    found = []
    for layer, of_layer in enumerate(content):
        place = f"{name}: layer {layer}"
        if len(of_layer) != num_heads:
            first = ", ".join(map(str, list(of_layer)[:4]))
            raise ConfigError(
                f"{place} has {len(of_layer)} heads ({first}, ...), but the model {num_heads}, from 0"
            )
        entries = dict(_numbered(of_layer, num_heads, f"{place}, head", "query heads"))
        found.append(
            tuple(
                _published(config, entries[head], f"{place}, head {head}")
                for head in range(num_heads)
            )
        )
    return found


def _published(config: MTrainingConfig, entry, place: str) -> Policy:
    if not isinstance(entry, list) or len(entry) < 3:
        raise ConfigError(f"{place} is {entry!r}: expected a pattern's name and two numbers")
    kind, vertical, slash = entry[:3]
    if kind != "vertical_and_slash":
        raise ConfigError(
            f"{place} is {kind!r}, which is not supported: use vertical_and_slash with numbers of columns "
            "and diagonals, or policy price without the file"
        )
    changes = dict(policy="fixed", vertical=vertical, slash=slash)
    return _changed(config, config.policy, changes, place)


def _changed(config: MTrainingConfig, policy: Policy, changes: dict, place: str) -> Policy:
    """``policy`` with ``changes`` of a file, which must go with the settings of the run."""
    for setting in changes:
        if setting not in PER_HEAD:
            check_known(setting, place)
            known = ", ".join(sorted(PER_HEAD))
            raise ConfigError(
                f"{place} has {setting!r}, which layers and heads cannot set: use {known}"
            )
        if changes[setting] is None:  # would stand for the default
            raise ConfigError(f"{place} has {setting} null: give a value")
    if "target_recall" in changes and config.policy.target_scope != "head":
        raise ConfigError(
            f"{place} has target_recall {changes['target_recall']!r}, which needs a price for "
            f"each head: use {option('target_recall')} with {option('target_scope')} head"
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
        changed = config.with_policy(changed_policy(policy, changes)).policy
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    if changes.get("dense") is False and changed.price == 0:
        raise ConfigError(
            f"{place} has dense false, but a price of 0 keeps everything: give a price"
        )
    return changed


def _numbered(entries: dict, count: int | None, place: str, what: str):
    """(number, value) for the entries of an object whose keys are numbers below ``count``. YAML has keys 1
    and "1"; "01" is not a number."""
    found = {}
    for key, value in entries.items():
        where = f"{place} {key}"
        if isinstance(key, bool) or not re.fullmatch("0|[1-9][0-9]{0,8}", str(key), re.ASCII):
            raise ConfigError(f"{where}: {key!r} is not a number such as 0 or 12")
        number = int(key)
        if count is not None and number >= count:
            raise ConfigError(f"{where}: the model has {count} {what}, from 0")
        if number in found:
            raise ConfigError(f"{where} is there twice: leave one out")
        found[number] = value
    return found.items()
