# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options of ``inspect`` and ``eval`` that say which model runs, and how; checked before it is read."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import ConfigError


def add_model_arguments(parser: argparse.ArgumentParser, *, tokenizer: str, dtype: str) -> None:
    """Add ``MODEL``, ``--tokenizer``, ``--yarn``, ``--device`` and ``--dtype``.

    Args:
        tokenizer, dtype: help of these two.
    """
    add = parser.add_argument
    what = "a Hugging Face folder, a .gguf file or a Megatron checkpoint's folder"
    add("model", type=Path, metavar="MODEL", help=what)
    add("--tokenizer", type=Path, metavar="PATH", help=tokenizer)
    what = "extend the model's positions by this factor with YaRN"
    add("--yarn", type=float, metavar="FACTOR", help=what)
    add("--device", help="cuda or cpu (cuda if there is a GPU)")
    add("--dtype", choices=("bf16", "float32", "fp16"), help=dtype)


def check_model_arguments(values: argparse.Namespace) -> None:
    """Raise :class:`ConfigError` for files of these options, ``--text`` and ``--output`` that cannot be, and
    for a factor of YaRN that extends nothing."""
    for path in getattr(values, "text", ()):
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "does not exist"
            raise ConfigError(f"--text is {path}, which {problem}: give a text file")
    for name in ("tokenizer", "like", "evaluator"):
        path = getattr(values, name, None)
        if path is not None and not path.exists():
            raise ConfigError(f"--{name} is {path}, which does not exist")
    if values.output.exists() and not values.output.is_dir():
        raise ConfigError(f"--output is {values.output}, which is a file: name a folder")
    if values.yarn is not None and not 1 < values.yarn < 1e6:  # as of mtraining convert
        raise ConfigError(f"--yarn is {values.yarn:g}: use a factor above 1, such as 4")
