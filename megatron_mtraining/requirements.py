# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Optional packages: an error that says what to install, and other libraries' errors in one line."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from .errors import ConfigError

DISTRIBUTIONS = {
    "backports": "backports.zstd",
    "flash_attn": "flash-attn-4",
    "lm_eval": "lm-eval",
    "megatron": "megatron-core",
    "streaming": "mosaicml-streaming",
    "yaml": "pyyaml",
}
"""Names on PyPI of modules that are called otherwise; of a submodule, its top-level package counts."""


def require(*modules: str, extra: str) -> None:
    """Refuse to go on without these modules.

    Args:
        modules: names to import, such as ``megatron.core``.
        extra: the extra of this package that brings them; versions are taken from it.

    Raises:
        ConfigError: some are missing.
    """
    missing = [_distribution(name) for name in modules if not _is_found(name)]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed: {install_command(missing, extra)}")


def install_command(distributions: list[str], extra: str = "") -> str:
    """What installs packages, in the versions that this package asks for.

    By their own names, which works wherever this package was installed from: a checkout, a wheel or git.
    """
    wanted = []
    for name in distributions:
        versions = _versions(name, extra)
        wanted.append(shlex.quote(f"{name}{versions}"))
    return f"pip install {' '.join(wanted)}"


def installed(distribution: str) -> str:
    """The version of a package that is installed, or "not installed"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def is_too_old(distribution: str, extra: str = "") -> bool:
    """Whether an installed package is older than this package, or an extra, asks for."""
    least = re.search(r">=\s*(\d+(?:\.\d+)*)", _versions(distribution, extra))
    found = re.match(r"\d+(?:\.\d+)*", installed(distribution))
    if least is None or found is None:
        return False
    return _numbers(found[0]) < _numbers(least[1])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _distribution(module: str) -> str:
    name = module.partition(".")[0]
    return DISTRIBUTIONS.get(name, name)


def _versions(name: str, extra: str) -> str:
    """The versions of a package that an extra asks for, such as ``>=4.45``; "" if any will do."""
    try:
        lines = requires("megatron-mtraining") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return ""
    for line in lines:
        found = re.match(r"([\w.-]+)\s*([^;]*)(?:;(.*))?$", line)
        marker = found[3] or ""
        of_extra = f'extra == "{extra}"' in marker.replace("'", '"') or "extra" not in marker
        if found[1].lower() == name.lower() and of_extra:
            return found[2].strip(" ()")
    return ""


def absent(error: ModuleNotFoundError, extra: str) -> ConfigError:
    """What an import that failed means for the user.

    Args:
        extra: the extra of this package that brings it, or "".

    Raises:
        ModuleNotFoundError: re-raised if the missing module is ours or the standard library's.
    """
    name = (error.name or "").partition(".")[0]
    if not name or name in sys.stdlib_module_names or name == __name__.partition(".")[0]:
        raise error
    name = _distribution(name)
    return ConfigError(f"{name} is not installed: {install_command([name], extra)}")


def first_line(error: BaseException) -> str:
    """The type of a library's error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def last_line(text: str) -> str:
    """The last line of a process's output, in a traceback the error; "no output" if there is none."""
    return (text.strip() or "no output").splitlines()[-1].strip()


def _is_found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package
        return False
