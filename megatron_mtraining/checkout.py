# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a Megatron-LM checkout says of itself, read as text: its version, and the Python that it needs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from .files import read_bytes

PACKAGE_INFO = Path("megatron/core/package_info.py")
PYTHON = (((0, 17), (3, 12)), ((0, 16), (3, 10)))
"""Megatron-Core versions and the first Python that each needs (requires-python of its pyproject.toml)."""


def read_version(root: Path) -> dict[str, int] | None:
    """MAJOR, MINOR and PATCH of the Megatron-Core in the checkout ``root``, as far as it says them.

    Returns:
        None if ``root`` has no ``megatron/core/package_info.py``.

    Raises:
        ConfigError: the file cannot be read.
    """
    info = root / PACKAGE_INFO
    if not info.is_file():
        return None
    text = read_bytes(info, str(info)).decode("utf-8", errors="replace")
    found = re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d{1,9})\b", text, re.MULTILINE)
    return {name: int(number) for name, number in found}


def python_mismatch(version: dict[str, int] | None, python: tuple[int, int] | None = None) -> str:
    """Why this Python cannot run that Megatron-LM; empty if it can, or if the version is not known.

    Args:
        version: from :func:`read_version`.
        python: major and minor version; by default of the Python that runs.
    """
    if not version or not {"MAJOR", "MINOR"} <= version.keys():
        return ""
    python = python or sys.version_info[:2]
    for first, needed in PYTHON:
        if (version["MAJOR"], version["MINOR"]) >= first:
            if python >= needed:
                return ""
            return (
                f"Megatron-LM {_dotted(first)} and later need Python {_dotted(needed)}; this is "
                f"{_dotted(python)}"
            )
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
