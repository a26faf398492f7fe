# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reading files that a user names: regular files of a bounded size; opening one never waits."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path

from .errors import ConfigError

LIMIT = 64 << 20
"""Bytes of a file that is read as a whole: config.json, indexes of weights."""
OPEN_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths of what the shell has opened: pipes whose other end exists."""
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def check_name(path: Path) -> None:
    """Raise :class:`ConfigError` for a path that no file can have: too long, or with a null byte."""
    try:
        os.lstat(path)
    except ValueError:
        raise ConfigError(f"{path} is not a valid file name: it has a null byte") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise ConfigError(f"{path} is not a valid file name: {error.strerror}") from None


def size_of(path: Path, why: str) -> int:
    """The bytes of a regular file that another library will open.

    Args:
        why: it is needed, for the message if it is missing.

    Raises:
        ConfigError: it is missing or no regular file.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise ConfigError(
            f"{path} is missing; {why}" if missing else _failed(path, error)
        ) from None
    _check_regular(found.st_mode, str(path))
    return found.st_size


def _check_regular(mode: int, name: str) -> None:
    kind = next((word for test, word in KINDS if test(mode)), None)
    if kind is not None:
        raise ConfigError(
            f"{name} cannot be read: it is {kind}, and a regular file is needed; save it to one"
        )


def _failed(name: object, error: Exception) -> str:
    return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


def read_bytes(path: Path, name: str, limit: int = LIMIT, pipes: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        name: what messages call the file: its option and path, or its path.
        limit: the largest size in bytes that makes sense.
        pipes: also read standard input and other pipes that the shell has opened (``<(command)``).

    Raises:
        ConfigError: it cannot be read, is no regular file, or is larger.
    """
    piped = pipes and str(path).startswith(OPEN_ALREADY)
    try:
        # Opening a pipe that nobody writes to would wait for ever.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if piped else os.O_NONBLOCK))
    except (OSError, ValueError) as error:
        raise ConfigError(_failed(name, error)) from None
    try:
        if not piped:
            _check_regular(os.fstat(number).st_mode, name)
        file = os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise
    with file:
        try:
            content = bytearray()  # by parts: read(n) takes n bytes of memory at once
            while len(content) <= limit and (part := file.read(1 << 20)):
                content += part
        except OSError as error:
            raise ConfigError(_failed(name, error)) from None
    if len(content) > limit:
        raise ConfigError(
            f"{name} cannot be read: it has more than {limit >> 20} MiB, too many for such a file; is it the "
            "right one?"
        )
    return bytes(content)


def lone_surrogate(text: str) -> str | None:
    """What is wrong with a text from JSON that has half of a surrogate pair; None if it has none.

    JSON can escape such a half, but it is no character, and UTF-8 and tokenizers do not have it.
    """
    found = re.search("[\ud800-\udfff]", text)
    return found and f"\\u{ord(found[0]):04x} in it is half of a surrogate pair, and no character"


def decoded(content: bytes) -> str:
    """Text in UTF-8, with the line breaks that Python's text files have."""
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: Path, name: str, limit: int = LIMIT, pipes: bool = False) -> str:
    """The text of a regular file in UTF-8; arguments and errors as for :func:`read_bytes`."""
    try:
        return decoded(read_bytes(path, name, limit, pipes))
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
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be read") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is not a JSON object")
    return found
