# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reading files that a user names: one error that names the file if it cannot be read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from .errors import ConfigError


def size_of(path: Path, why: str) -> int:
    """The bytes of a file that another library will open.

    Args:
        why: it is needed, for the message if it is missing.

    Raises:
        ConfigError: it is missing, or cannot be looked at.
    """
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {why}") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(name: object, error: OSError) -> ConfigError:
    return ConfigError(f"{name} cannot be read: {error.strerror}")


def read_bytes(path: Path, name: str) -> bytes:
    """The content of a file.

    Args:
        name: what messages call the file: its option and path, or its path.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(name, error) from None


def lone_surrogate(text: str) -> str | None:
    """What is wrong with a text from JSON that has half of a surrogate pair; None if it has none.

    JSON can escape such a half, but it is no character, and UTF-8 and tokenizers do not have it.
    """
    found = re.search("[\ud800-\udfff]", text)
    return found and f"\\u{ord(found[0]):04x} in it is half of a surrogate pair, and no character"


def decoded(content: bytes) -> str:
    """Text in UTF-8, with the line breaks that Python's text files have."""
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: Path, name: str) -> str:
    """The text of a file in UTF-8; arguments and errors as for :func:`read_bytes`."""
    try:
        return decoded(read_bytes(path, name))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None


def read_json(path: Path, name: str = "") -> dict:
    """The object in a JSON file.

    Raises:
        ConfigError: the file cannot be read, or has no object.
    """
    name = name or str(path)
    try:
        found = json.loads(read_text(path, name))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is not a JSON object")
    return found
