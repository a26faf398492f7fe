# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Environment variables that choose kernels and how they are launched. They are read at each call, but
``MTRAINING_TRITON_LAUNCH``, which is read once."""

from __future__ import annotations

import os

from .errors import ConfigError

_OFF_OR_ON = ("0", "1")

SWITCHES = {
    "MTRAINING_BACKWARD": ("auto", "one_pass", "two_kernels"),
    "MTRAINING_DENSE": ("own", "flash4"),
    "MTRAINING_PORTABLE_KERNELS": _OFF_OR_ON,
    "MTRAINING_TRITON_LAUNCH": _OFF_OR_ON,
    "MTRAINING_SEARCH_GRAPH": _OFF_OR_ON,
}
"""The values that each can have."""
OTHERS = ("MTRAINING_COMMIT", "MTRAINING_TEST_")
"""How the names of variables begin that this package's own benchmarks and tests have."""


def switch(name: str) -> str | None:
    """The value of a variable; None if it is unset.

    Raises:
        ConfigError: it has another value than :data:`SWITCHES` has.
    """
    value = os.environ.get(name)
    if value is not None and value not in SWITCHES[name]:
        *others, last = SWITCHES[name]
        raise ConfigError(
            f"{name} is {value!r} in the environment: set it to {', '.join(others)} or {last}, or unset it"
        )
    return value


def given_switches() -> dict[str, str]:
    """The values of the variables that are set.

    Raises:
        ConfigError: one has another value than :data:`SWITCHES` has.
    """
    return {name: value for name in SWITCHES if (value := switch(name)) is not None}


def unknown_switches() -> list[str]:
    """Variables that are set and begin as these do, but are none: misspelled ones."""
    ours = [name for name in os.environ if name.startswith("MTRAINING_")]
    return sorted(name for name in ours if name not in SWITCHES and not name.startswith(OTHERS))
