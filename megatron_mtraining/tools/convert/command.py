# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The subcommands of ``mtraining convert``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from ...errors import ConfigError
from ...requirements import require
from ..common.atomic_output import atomic_file, refuse_to_replace_input

DTYPES = ("float32", "bfloat16", "float16")
OUTER = ("command", "direction")
"""Arguments that say which function to call; the others are its options."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands, and their options."""
    directions = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    what = "convert a Hugging Face folder to a checkpoint that pretrain_gpt.py loads"
    command = directions.add_parser("hf-to-megatron", help=what, description=what)
    add = command.add_argument
    _add_common(command, "Hugging Face folder with safetensors", "checkpoint folder to write")
    what = "rows of Megatron's embedding; rows beyond the vocabulary are zero (default: vocab_size)"
    add("--padded-vocab-size", type=POSITIVE, metavar="N", help=what)
    what = "RoPE base to train with (default: the model's)"
    add("--rotary-base", type=POSITIVE, metavar="BASE", help=what)
    what = "extend the model's positions by this factor with YaRN"
    add("--yarn", type=FACTOR, metavar="FACTOR", help=what)
    what = "longest sequence (default: the model's positions, times --yarn)"
    add("--max-position-embeddings", type=POSITIVE, metavar="N", help=what)

    what = "convert a Megatron checkpoint (torch_dist) to a Hugging Face folder"
    command = directions.add_parser("megatron-to-hf", help=what, description=what)
    add = command.add_argument
    _add_common(
        command, "checkpoint folder, or the folder of one iteration", "Hugging Face folder to write"
    )
    what = (
        "Hugging Face folder of the model that training started from, for config.json and tokenizer "
        "(default: hf/ in a converted checkpoint)"
    )
    add("--like", type=Path, metavar="HF_FOLDER", help=what)
    what = "rows of the embedding to write (default: vocab_size of config.json)"
    add("--vocab-size", type=POSITIVE, metavar="N", help=what)
    what = "largest size of a file (default: %(default)s)"
    add("--shard-size", type=size, default="5GB", metavar="SIZE", help=what)

    what = "write the prices that a run with a target recall has reached as a settings file"
    command = directions.add_parser("prices", help=what, description=what)
    add = command.add_argument
    what = "checkpoint folder, or the folder of one iteration"
    add("source", type=Path, metavar="SRC", help=what)
    add("target", type=Path, metavar="DST", help="file to write: .json, .yaml or .yml")
    what = "the run's own settings file, if it had one that has moved (default: where it was)"
    add("--settings", type=Path, metavar="FILE", help=what)
    add("--overwrite", action="store_true", help="replace DST")

    what = "compare the logits of a Hugging Face model and of a Megatron checkpoint on a text"
    command = directions.add_parser("verify", help=what, description=what)
    add = command.add_argument
    add("source", type=Path, metavar="SRC", help="Hugging Face folder or Megatron checkpoint")
    add("target", type=Path, metavar="DST", help="the other of the two")
    what = "text, or token ids (.npy) (default: the source of Python's argparse)"
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help=what)
    what = "number of tokens (default: the whole text, up to the models' positions)"
    add("--seq", type=POSITIVE, metavar="N", help=what)
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the computation (default: %(default)s)",
    )
    what = (
        "pass if both models have the same top-1 token in this fraction of positions (default: 0.99, or "
        "0.9 in 16 bits)"
    )
    add("--min-agreement", type=FRACTION, metavar="FRACTION", help=what)
    add("--device", help="cpu or cuda (default: a GPU if there is one)")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--overwrite", action="store_true", help="replace the file of --output")


def _add_common(command: argparse.ArgumentParser, source: str, target: str) -> None:
    add = command.add_argument
    add("source", type=Path, metavar="SRC", help=source)
    add("target", type=Path, metavar="DST", help=target)
    add("--dtype", choices=DTYPES, help="dtype of the weights written (default: unchanged)")
    add("--allow-dtype-loss", action="store_true", help="allow --dtype to round")
    add("--overwrite", action="store_true", help="replace a checkpoint or model in DST")


def _number(kind: type, is_valid: Callable, expected: str) -> Callable[[str], float]:
    """A type of option: numbers of a kind that are valid."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text[:80]} is not {expected}")
        return value

    return parse


MOST = 10**12
POSITIVE = _number(int, lambda value: 1 <= value <= MOST, f"a positive integer of at most {MOST}")
FACTOR = _number(float, lambda value: 1 < value < 1e6, "a number above 1")
FRACTION = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def size(text: str) -> int:
    """The bytes of a size such as 5GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)?", text)
    if not found or not 0 < float(found[1]) < MOST:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a size such as 5GB or 500MB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def run(args: argparse.Namespace) -> int:
    """Run a subcommand; returns the exit status.

    Raises:
        ConfigError: a folder or an option cannot be used; DST has not changed.
    """
    require("safetensors", "tqdm", extra="convert")
    directions = {
        "hf-to-megatron": _to_megatron, "megatron-to-hf": _to_hf, "prices": _prices, "verify": _verify,
    }  # fmt: skip
    options = {name: value for name, value in vars(args).items() if name not in OUTER}
    if options.get("dtype") is not None:
        import torch

        options["dtype"] = getattr(torch, options["dtype"])
    try:
        return directions[args.direction](**options)
    except OSError as error:  # errors in writing are ConfigErrors already
        if error.filename is None:
            raise
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error


def when_ended(args: argparse.Namespace) -> str:
    """What an interrupted run has left."""
    return "nothing was left"


def _to_megatron(source: Path, target: Path, **options) -> int:
    from .hf_folder import INDEX, SINGLE, has_tokenizer, index_is_unused
    from .megatron_args import what_megatron_drops
    from .to_megatron import convert

    args = convert(source, target, **options)
    if dropped := what_megatron_drops(args):
        print(f"mtraining convert: warning: {dropped}", file=sys.stderr)
    if index_is_unused(source):
        print(
            f"mtraining convert: {source} has {SINGLE} and {INDEX} of other files: {SINGLE} was converted, "
            "which transformers loads",
            file=sys.stderr,
        )
    if not has_tokenizer(source):
        print(
            f"mtraining convert: {source} has no tokenizer, so megatron_args.sh has no flags for one: "
            "add --tokenizer-type and --tokenizer-model to train",
            file=sys.stderr,
        )
    script = target / "megatron_args.sh"
    print(f"{target}: load it with --load and the flags in {script}")
    return 0


def _to_hf(source: Path, target: Path, **options) -> int:
    from .to_hf import convert

    convert(source, target, **options)
    print(f"{target}: load it with transformers")
    return 0


def _prices(source: Path, target: Path, *, settings: Path | None, overwrite: bool) -> int:
    from ...config import option
    from ..common.settings_bytes import settings_bytes
    from .prices import prices_of

    if not source.is_dir():
        raise ConfigError(f"SRC is {source}, which is not a folder")
    content, prices, read = prices_of(source, settings)
    refuse_to_replace_input("DST", target, [source, *([read] if read else [])])
    with atomic_file(target, option="DST", overwrite=overwrite) as file:
        file.write(settings_bytes(target, content))
    heads = sum(map(len, prices))
    print(
        f"{target}: the prices of {heads} heads in {len(prices)} layers, {content['price']:g} in the median; "
        f"train or evaluate with them by {option('settings')} or mtraining eval --settings"
    )
    return 0


def _verify(
    source: Path,
    target: Path,
    *,
    dtype,
    device: str | None,
    output: Path | None,
    overwrite: bool,
    **options,
) -> int:
    import json

    from ...models.environment import device_of
    from ...models.megatron_folder import is_checkpoint
    from ...models.types import ModelOptions
    from .verify import as_json, as_text, verify

    run_on = device_of(device)
    models = [ModelOptions(source, run_on, dtype, name="SRC")]
    models.append(ModelOptions(target, run_on, dtype, name="DST"))
    for model in models:
        if not model.path.is_dir():
            raise ConfigError(f"{model.name} is {model.path}, which is not a folder")
    models.sort(key=lambda model: is_checkpoint(model.path))
    if [is_checkpoint(model.path) for model in models] != [False, True]:
        raise ConfigError(
            f"SRC is {source} and DST is {target}: give one Hugging Face folder and one Megatron checkpoint"
        )
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ConfigError(f"--output is {output}: name a file in an existing folder")
    if output is not None:
        refuse_to_replace_input("--output", output, [source, target, *options["text"]])
    # First: whether it can be written is known before the models run.
    with atomic_file(output, overwrite=overwrite) if output else nullcontext() as file:
        found = verify(*models, **options)
        print(as_text(found))
        if file is not None:
            file.write(json.dumps(as_json(found), indent=2).encode() + b"\n")
    return 1 if found["differs"] else 0
