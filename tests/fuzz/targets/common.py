# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What every target uses: its kind, its faults, and whole commands."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_mtraining.tools import cli

LONGEST = 2200
"""Characters of a message, with what the command line adds to a ConfigError's."""


class Refused(Exception):
    """A command has ended with status 2 and one line, and has left nothing."""


class Fault(AssertionError):
    """A promise that does not hold."""


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        run: takes an input and a folder.
        seeds: valid inputs, to be changed. None for targets that take values.
        tokens: bytes that mean something in this format.
    """

    run: Callable[[object, Path], None]
    seeds: Callable[[], list[bytes]] | None = None
    tokens: tuple[bytes, ...] = ()


def check_message(message: str) -> None:
    """Raise :class:`Fault` unless an error is one line that a terminal can show."""
    if not message or not message.isprintable() or len(message) > LONGEST:
        raise Fault(f"not one line of at most {LONGEST} characters: {message[:5000]!r}")


def command(words: list, out: Path, named: str = "") -> None:
    """Run the console command; raises :class:`Refused` or :class:`Fault` if it does not succeed.

    Args:
        out: what it writes; whatever is beside it of that name is left over.
        named: what the error must contain.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape") as file:
        with contextlib.redirect_stderr(file), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = cli.main([str(word) for word in words])
            except SystemExit as end:  # argparse's
                status = end.code
        file.seek(0)
        lines = file.read().splitlines()
    if status == 0:
        return
    if status != 2 or not lines:
        raise Fault(f"exit status {status}: {lines[-3:]}")
    if any("Traceback" in line for line in lines):
        raise Fault("a traceback: " + " | ".join(lines[-20:]))
    check_message(lines[-1])
    if not lines[-1].startswith("mtraining "):
        raise Fault(f"the last line is none of ours: {lines[-1]!r}")
    if named not in lines[-1]:
        raise Fault(f"the error does not name {named}: {lines[-1]}")
    left = sorted(path.name for path in out.parent.iterdir() if out.name in path.name)
    if left:
        raise Fault(f"left over: {left} after {lines[-1]}")
    raise Refused(lines[-1])


def folder_of_this_process() -> Path:
    """A new folder, which goes when this process ends, and not when one forked from it does."""
    folder = Path(tempfile.mkdtemp(prefix="mtraining-fuzz-"))
    process = os.getpid()

    def remove():
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
