# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Optional packages: an error that says what to install, and other libraries' errors in one line."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from .errors import ConfigError

DISTRIBUTIONS = {
    "backports": "backports.zstd",
    "megatron": "megatron-core",
    "streaming": "mosaicml-streaming",
    "yaml": "pyyaml",
}
"""Names on PyPI of modules that are called otherwise; of a submodule, its top-level package counts."""


def require(*modules: str, extra: str) -> None:
    """Refuse to go on without these modules.

    Args:
        modules: names to import, such as ``megatron.core``.
        extra: the extra of this package that brings them.

    Raises:
        ConfigError: some are missing.
    """
    missing = [
        DISTRIBUTIONS.get(name.partition(".")[0], name) for name in modules if not _is_found(name)
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed: pip install 'megatron-mtraining[{extra}]'"
        )


def absent(error: ModuleNotFoundError, extra: str) -> ConfigError:
    """What an import that failed means for the user.

    Args:
        extra: the extra of this package that brings it, or "".

    Raises:
        ModuleNotFoundError: it is none of another package.
    """
    name = (error.name or "").partition(".")[0]
    if not name or name in sys.stdlib_module_names or name == __name__.partition(".")[0]:
        raise error
    whole = f"megatron-mtraining[{extra}]" if extra else "megatron-mtraining"
    return ConfigError(
        f"{DISTRIBUTIONS.get(name, name)} is not installed: pip install '{whole}', or that package alone"
    )


def first_line(error: BaseException) -> str:
    """The type of a library's error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _is_found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package
        return False
