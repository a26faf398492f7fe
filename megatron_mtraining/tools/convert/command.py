# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The subcommands of ``mtraining convert``."""

from __future__ import annotations

import argparse
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from ...config import ConfigError
from ..common.signals import Ended, ends_as_exceptions

__all__ = ["add_arguments", "run"]  # what megatron_mtraining.tools.cli asks of a subcommand

DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands, and their options."""
    kinds = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    to_megatron = kinds.add_parser(
        "hf-to-megatron", help="a Hugging Face folder to a checkpoint that pretrain_gpt.py loads"
    )
    _folders(to_megatron, "Hugging Face folder with safetensors", "checkpoint folder to be made")
    to_megatron.add_argument(
        "--padded-vocab-size", type=_positive, metavar="N",
        help="rows of Megatron's embedding; those beyond the model's vocabulary are zero (default: the "
        "model's own vocab_size)",
    )  # fmt: skip
    to_megatron.add_argument(
        "--rotary-base", type=_positive, metavar="BASE", help="another base for RoPE"
    )
    to_megatron.add_argument(
        "--yarn",
        type=_factor,
        metavar="FACTOR",
        help="let positions go so many times as far, with YaRN",
    )
    to_megatron.add_argument(
        "--max-position-embeddings", type=_positive, metavar="N",
        help="positions (default: the model's, times --yarn)",
    )  # fmt: skip
    to_hf = kinds.add_parser(
        "megatron-to-hf", help="a Megatron checkpoint (torch_dist) to a Hugging Face folder"
    )
    _folders(
        to_hf, "checkpoint's folder, or that of an iteration", "Hugging Face folder to be made"
    )
    to_hf.add_argument(
        "--like", type=Path, metavar="HF_FOLDER",
        help="where config.json and tokenizer come from: the model that training began from (default: hf/ "
        "of the checkpoint, if it was converted)",
    )  # fmt: skip
    to_hf.add_argument(
        "--vocab-size", type=_positive, metavar="N", help="rows to write (default: config.json's)"
    )
    to_hf.add_argument(
        "--shard-size",
        type=size,
        default="5GB",
        metavar="SIZE",
        help="most of a file (default: 5GB)",
    )
    check = kinds.add_parser("verify", help="compare the logits of both on a text")
    check.add_argument(
        "source", type=Path, metavar="SRC", help="Hugging Face folder, or the checkpoint"
    )
    check.add_argument("target", type=Path, metavar="DST", help="the other one")
    check.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE",
        help="text, or token ids (.npy) (default: the source of a module of Python's)",
    )  # fmt: skip
    check.add_argument(
        "--seq", type=_positive, metavar="N", help="tokens (default: all, up to positions)"
    )
    check.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="to compute in (default: float32)"
    )
    check.add_argument(
        "--min-agreement", type=_share, metavar="SHARE",
        help="of positions where the most likely word must be the same in both, for an exit status of 0 "
        "(default: 0.99, and 0.9 in 16 bits)",
    )  # fmt: skip
    check.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    check.add_argument("--output", type=Path, metavar="FILE", help="write the numbers, as JSON")


def _folders(parser: argparse.ArgumentParser, source: str, target: str) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help=source)
    parser.add_argument("target", type=Path, metavar="DST", help=target)
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    parser.add_argument(
        "--allow-dtype-loss", action="store_true", help="let --dtype round what it cannot hold"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint or model in DST"
    )


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a whole number of 1 or more")
    return int(word)


def _factor(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 1 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{word} is not a number above 1")
    return value


def _share(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not a share from 0 to 1")
    return value


def size(word: str) -> int:
    """Bytes, of a command line's word such as 5GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)?", word)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{word} is not a size such as 5GB or 500MB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def _require(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed: pip install 'megatron-mtraining[convert]'"
        )


def run(args) -> int:
    """Run a subcommand with parsed arguments; returns the exit status.

    Raises:
        ConfigError: a folder or an option cannot work; the target is as it was.
    """
    _require("safetensors")
    directions = {"hf-to-megatron": _to_megatron, "megatron-to-hf": _to_hf, "verify": _verify}
    try:
        with ends_as_exceptions():
            return directions[args.direction](args) or 0
    except KeyboardInterrupt:
        print("mtraining convert: interrupted; nothing was left", file=sys.stderr)
        return 130
    except Ended as end:
        print(f"mtraining convert: ended by {end.name}; nothing was left", file=sys.stderr)
        return 128 + end.number


def _to_megatron(args) -> None:
    from .dtypes import NAMES
    from .hf_folder import has_tokenizer
    from .to_megatron import ToMegatron, convert

    convert(
        ToMegatron(
            args.source,
            args.target,
            NAMES.get(args.dtype),
            args.allow_dtype_loss,
            args.padded_vocab_size,
            args.rotary_base,
            args.yarn,
            args.max_position_embeddings,
            args.overwrite,
        )
    )
    if not has_tokenizer(args.source):
        print(
            f"mtraining convert: {args.source} has no tokenizer, and megatron_args.sh names none: add "
            "--tokenizer-type and --tokenizer-model to train",
            file=sys.stderr,
        )
    print(
        f"{args.target}: load it with --load, and the flags in {args.target / 'megatron_args.sh'}"
    )


def _to_hf(args) -> None:
    from .dtypes import NAMES
    from .to_hf import ToHuggingFace, convert

    convert(
        ToHuggingFace(
            args.source,
            args.target,
            args.like,
            NAMES.get(args.dtype),
            args.allow_dtype_loss,
            args.vocab_size,
            args.shard_size,
            args.overwrite,
        )
    )
    print(f"{args.target}: load it with transformers")


def _verify(args) -> int:
    from ...models.environment import device_of
    from ...models.megatron_folder import is_checkpoint
    from .dtypes import NAMES
    from .hf_folder import write_json
    from .verify import Verify, as_json, as_text, verify

    device = device_of(args.device)
    given = [(args.source, "SRC"), (args.target, "DST")]
    for folder, name in given:
        if not folder.is_dir():
            raise ConfigError(f"{name} is {folder}, which is no folder")
    given.sort(key=lambda pair: is_checkpoint(pair[0]))
    folders, names = zip(*given)
    if [is_checkpoint(folder) for folder in folders] != [False, True]:
        raise ConfigError(
            f"SRC is {args.source} and DST is {args.target}: one must be a Hugging Face folder, and the "
            "other a Megatron checkpoint"
        )
    found = verify(
        Verify(
            *folders,
            tuple(args.text),
            args.seq,
            NAMES[args.dtype],
            device,
            args.output,
            args.min_agreement,
            names,
        )
    )
    print(as_text(found))
    if args.output is not None:
        try:
            write_json(args.output, as_json(found))
        except OSError as error:
            raise ConfigError(
                f"--output is {args.output}, which cannot be written: {error.strerror}"
            ) from None
    return 1 if found["differs"] else 0
