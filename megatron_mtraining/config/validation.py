# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checks of single values, by the name of the option that gives them."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ..errors import ConfigError

TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def option(name: str) -> str:
    """The command-line option of a flat option name."""
    return "--mtraining-" + name.replace("_", "-")


def check_type(name: str, value, kind: type) -> None:
    """Raise :class:`ConfigError` unless ``value`` is of type ``kind``; whole numbers are numbers."""
    allowed = (int, float) if kind is float else kind
    wrong = not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool)
    # A whole number may be too large for a float, or for a tensor.
    if wrong or (kind is float and not abs(value) <= sys.float_info.max):
        raise ConfigError(f"{option(name)} must be {TYPE_NAMES[kind]}, but is {value!r}")
    if kind is int and abs(value) >= 2**63:
        raise ConfigError(f"{option(name)} is {value}: use less than 2^63")


def check_at_least(name: str, value: int | float, low: int | float, kind: type = int) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a number of ``low`` or more."""
    check_type(name, value, kind)
    if value < low:
        raise ConfigError(f"{option(name)} is {value}: use {low} or more")


def check_share(name: str, value: float) -> None:
    """Raise :class:`ConfigError` unless ``value`` is above 0 and at most 1."""
    check_type(name, value, float)
    if not 0 < value <= 1:
        raise ConfigError(f"{option(name)} is {value}: use a share, above 0 and at most 1")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of ``choices``."""
    check_type(name, value, str)
    if value not in choices:
        raise ConfigError(f"{option(name)} is {value}: use one of {', '.join(choices)}")
