# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data`` and its subcommand ``prepare``."""

from __future__ import annotations

import argparse
import os

from . import options
from .output import PARTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to ``parser``."""
    subparsers = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    what = (
        "tokenize documents and pack them into Megatron's indexed dataset, in samples of exactly "
        "--seq-length tokens"
    )
    options.add_arguments(subparsers.add_parser("prepare", help=what, description=what))


def run(args) -> int:
    """Run with parsed arguments; returns the exit status.

    Raises:
        ConfigError: the input, the tokenizer or an option cannot work.
    """
    from .prepare import prepare

    prepare(options.options_from(args))
    return 0


def when_ended(args) -> str:
    """What a run leaves that is interrupted."""
    parts = f"{args.output}{PARTS}"
    if not os.path.isdir(parts):
        return "nothing was written"
    return f"{parts} has what is done, and the same command goes on from there"
