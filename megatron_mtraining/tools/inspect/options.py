# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options of ``mtraining inspect``, checked before a model is read."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ...config import BLOCK_POLICY_NAMES, ConfigError, MTrainingConfig
from ...models.environment import DTYPES, default_dtype, device_of
from ...requirements import require

ROWS = 512
"""Query rows that patterns are judged by, unless told otherwise."""


@dataclass(frozen=True)
class Options:
    """One run of ``mtraining inspect``; sizes in tokens."""

    model: Path
    text: list[Path]
    tokenizer: Path | None
    seq_length: int | None
    yarn: float | None
    target_recall: float
    rows: int | None
    """None for as many as :data:`ROWS`, if there are so many."""
    policies: list[str] | None
    sensitivity: str | None
    """Of what to measure how much predictions depend on its attention: layers, heads."""
    mixed: bool
    """Whether heads take lists of blocks in the settings file."""
    heads: list[tuple[int, int]]
    """(layer, head) of those to draw beside the ones that are chosen."""
    base: dict
    """Fields of MTrainingConfig that hold for all settings, without those left at their default."""
    device: torch.device
    dtype: torch.dtype
    seed: int
    output: Path
    settings: Path
    """The file of recommended settings."""

    @property
    def block_size(self) -> int:
        return MTrainingConfig.from_options(**self.base).block_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add = parser.add_argument
    what = "a Hugging Face folder, a .gguf file or a Megatron checkpoint's folder"
    add("model", type=Path, metavar="MODEL", help=what)
    what = (
        "UTF-8 text to run over, one file after the other, or token ids: .npy, or Megatron's .bin"
    )
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help=what)
    what = "a Hugging Face folder, a .gguf file or a sentencepiece .model (the model's own)"
    add("--tokenizer", type=Path, metavar="PATH", help=what)
    what = "tokens to run over (all of the text, up to the model's positions)"
    add("--seq", type=int, metavar="N", help=what)
    what = "let the model's positions go so many times as far, by YaRN"
    add("--yarn", type=float, metavar="FACTOR", help=what)
    what = "share of the true attention to be kept (%(default)s)"
    add("--target-recall", type=float, default=0.95, metavar="SHARE", help=what)
    add("--rows", type=int, help=f"query rows to judge patterns by ({ROWS}, or all there are)")
    add("--policy", nargs="+", metavar="NAME", help="policies to try (all there are)")
    what = (
        "measure how far each of these, sparse alone, moves predictions; gives each a target by it"
    )
    add("--sensitivity", choices=("layers", "heads"), help=what)
    what = (
        "heads for which lists of blocks keep more for their pairs take them, in the settings file"
    )
    add("--mixed", action="store_true", help=what)
    what = "draw this head too, counted from 0; may be given several times"
    add("--head", action="append", default=[], metavar="LAYER:HEAD", help=what)
    add("--window", type=int, help="local window of all settings")
    add("--block-size", type=int, help="64 or 128, of all settings")
    add("--device", help="cuda where there is a GPU, else cpu")
    what = "of the model (bf16 on GPUs and on CPUs that multiply in it, else float32, and with --sensitivity)"
    add("--dtype", choices=sorted(DTYPES), help=what)
    add("--seed", type=int, default=0, help="of the rows (%(default)s)")
    what = "for pictures, numbers and settings (%(default)s)"
    add("--output", type=Path, default=Path("inspect-out"), metavar="FOLDER", help=what)
    what = "recommended settings, YAML if it ends in .yaml, else JSON (FOLDER/settings.json)"
    add("--settings", type=Path, metavar="FILE", help=what)


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: a value that cannot work, or a package that is missing.
    """
    require("matplotlib", "tqdm", extra="inspect")
    if not 0 < values.target_recall < 1:
        raise ConfigError(
            f"--target-recall is {values.target_recall:g}: use a share between 0 and 1, such as 0.95"
        )
    if values.rows is not None and values.rows < 1:
        raise ConfigError(f"--rows is {values.rows}: use 1 or more")
    if values.seq is not None and values.seq < 1:
        raise ConfigError(f"--seq is {values.seq}: use 1 or more")
    if values.yarn is not None and not (values.yarn > 1 and math.isfinite(values.yarn)):
        raise ConfigError(f"--yarn is {values.yarn:g}: use a factor above 1, such as 4")
    if not -(2**63) <= values.seed < 2**64:  # what torch's generators take
        raise ConfigError(f"--seed is {values.seed}: use a number of at most 64 bits, such as 0")
    given = {"window": values.window, "block_size": values.block_size}
    base = {name: value for name, value in given.items() if value is not None}
    try:
        MTrainingConfig.from_options(**base)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--mtraining-", "--")) from None
    for path in values.text:
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "does not exist"
            raise ConfigError(f"--text is {path}, which {problem}: give a text file")
    if values.tokenizer is not None and not values.tokenizer.exists():
        raise ConfigError(f"--tokenizer is {values.tokenizer}, which does not exist")
    _check_mixed(values)
    device = device_of(values.device)
    settings = values.settings or values.output / "settings.json"
    if settings.suffix in (".yaml", ".yml"):
        require("yaml", extra="inspect")
    if settings.is_dir() or (values.settings and not settings.parent.is_dir()):
        raise ConfigError(f"--settings is {settings}: name a file in a folder that exists")
    if values.output.exists() and not values.output.is_dir():
        raise ConfigError(f"--output is {values.output}, which is a file: name a folder")
    return Options(
        model=values.model,
        text=values.text,
        tokenizer=values.tokenizer,
        seq_length=values.seq,
        yarn=values.yarn,
        target_recall=values.target_recall,
        rows=values.rows,
        policies=values.policy,
        sensitivity=values.sensitivity,
        mixed=values.mixed,
        heads=[_head(word) for word in values.head],
        base=base,
        device=device,
        dtype=_dtype(values.dtype, device, values.sensitivity is not None),
        seed=values.seed,
        output=values.output,
        settings=settings,
    )


def _dtype(name: str | None, device: torch.device, exact: bool) -> torch.dtype:
    """The dtype to run in. Exact: bf16's rounding moves predictions as far as a layer's sparse attention."""
    if name is not None:
        return DTYPES[name]
    return torch.float32 if exact else default_dtype(device)


def _check_mixed(values: argparse.Namespace) -> None:
    if not values.mixed:
        return
    if values.sensitivity is not None:
        raise ConfigError(
            "--mixed and --sensitivity each write the settings file: give one of them"
        )
    if values.policy and not (
        "price" in values.policy and {*BLOCK_POLICY_NAMES} & {*values.policy}
    ):
        raise ConfigError(
            f"--policy is {' '.join(values.policy)}, but --mixed chooses between price and "
            f"{' or '.join(BLOCK_POLICY_NAMES)}: add them to --policy, or leave it out"
        )


def _head(word: str) -> tuple[int, int]:
    layer, _, head = word.partition(":")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ConfigError(f"--head is {word}: use LAYER:HEAD, counted from 0, such as 3:5")
    return int(layer), int(head)
