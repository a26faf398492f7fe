# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Standard output and error: full, closed, or given names that they have no characters for."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import contextmanager


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
