# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Standard output and error: full, closed, or given names that they have no characters for."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import contextmanager, suppress


@contextmanager
def any_name_can_be_written():
    """Have standard output escape what it cannot encode, such as names of files that are not UTF-8.

    Standard error does so by itself.
    """
    stream = sys.stdout
    before = getattr(stream, "errors", None)
    if not hasattr(stream, "reconfigure"):  # closed, or a stand-in
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        try:
            stream.reconfigure(errors=before)
        except (OSError, ValueError):  # closed, or it cannot be written
            pass


class Parser(argparse.ArgumentParser):
    """A parser that fails where its help cannot be written: argparse's own passes over that."""

    def _print_message(self, message: str, file=None) -> None:
        stream = file or sys.stderr
        if message and stream is not None:
            stream.write(message)


class _Forgiving:
    """Standard error whose failures are passed over."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def progress_may_be_lost():
    """Go on where standard error cannot be written, as on a full disk: it has progress bars and notices."""
    before = sys.stderr
    if before is None:
        yield
        return
    sys.stderr = ours = _Forgiving(before)
    try:
        yield
    finally:
        if sys.stderr is ours:
            sys.stderr = before


def what_failed(error: OSError) -> str:
    """An error of the system that no part of a run knows more about."""
    reason = error.strerror or str(error)
    if error.filename is None:  # of an open file
        return f"standard output or another open file cannot be written: {reason}"
    name = error.filename if isinstance(error.filename, int) else os.fsdecode(error.filename)
    return f"{name} cannot be read or written: {reason}"


def drop_stdout() -> None:
    """Write what is left for standard output nowhere: to try again at the end would fail again."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # none, or not of the system
        return
    if descriptor != 1:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def end_quietly() -> None:
    """Before the process ends: what other libraries fail at from now on is not the last line."""
    sys.unraisablehook = lambda *_: None
