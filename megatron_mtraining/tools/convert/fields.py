# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Values in config.json and in the arguments of a checkpoint: one error if they cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import ConfigError, short
from ...requirements import first_line


def required(config: dict, name: str, file: Path, kind: type | tuple[type, ...] = int):
    """The value of a field that must be present: a number above 0, of this kind."""
    value = config.get(name)
    if value is None:
        raise ConfigError(f"{file}: {name} is missing")
    if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
        what = "integer" if kind is int else "number"
        raise ConfigError(f"{file}: {name} is {short(value)}, which is not a positive {what}")
    return value


@contextmanager
def wrong_types_refused(place: Path | str) -> Iterator[None]:
    """An error in one line for values of types that neither transformers nor Megatron-LM writes.

    Args:
        place: where they are, for messages.
    """
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"{place} has a value of the wrong type: {first_line(error)}") from None
