# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options of ``mtraining data prepare``, checked before any input is read."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .output import prefix_of

FORMATS = ("auto", "jsonl", "parquet", "text", "mds")
PACKS = ("best-fit", "in-order", "as-is")
LONGER = ("cut", "drop", "error")
PART_BYTES = 32 * 2**20
LEAST_PART_BYTES = 1024
DOCUMENT_BYTES = 32 * 2**20
MOST_WORKERS = 256
SEED, BUFFER = 1234, 100000
INT32 = 2**31 - 1


@dataclass(frozen=True)
class Options:
    """One run; sizes in tokens unless said otherwise."""

    inputs: list[Path]
    tokenizer: Path
    seq_length: int
    output: Path
    format: str
    text_field: str | None
    """None for ``text``, or ``input_ids`` where there is no text."""
    join: list[Path]
    """Those of the inputs, folders, whose text files are one document each."""
    eod: str | None
    pack: str
    longer: str
    long_only: int
    """Documents with fewer tokens are left out."""
    shuffle: bool
    seed: int
    buffer: int
    """Documents."""
    workers: int
    part_bytes: int
    document_bytes: int
    """A longer document is refused: tokenizing takes up to about 150 times as much memory."""
    skip_unreadable: bool
    overwrite: bool
    keep_parts: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add = parser.add_argument
    what = "jsonl (.gz, .bz2, .xz, .zst), parquet, text or MDS files, and folders of these or of source files"
    add("inputs", type=_path, nargs="*", metavar="INPUT", help=what)
    what = "a Hugging Face folder, a .gguf file or a sentencepiece .model"
    add("--tokenizer", type=_path, required=True, metavar="PATH", help=what)
    what = "tokens in a sample: the --seq-length of the training run"
    add("--seq-length", type=int, required=True, metavar="N", help=what)
    what = (
        "write PREFIX.bin, PREFIX.idx and the report PREFIX.json; PREFIX is the run's --data-path"
    )
    # Not a Path, which would drop a slash at the end.
    add("--output", required=True, metavar="PREFIX", help=what)
    what = "format of all files; auto decides by file name (%(default)s)"
    add("--format", choices=FORMATS, default="auto", help=what)
    what = (
        "field of a record that has the text or a list of token ids (text; without it, input_ids)"
    )
    add("--text-field", metavar="NAME", help=what)
    what = "more INPUT folders, such as repositories, each of whose text files are joined into one document; "
    what += "without FOLDER, all INPUT folders"
    add("--join", type=_path, nargs="*", metavar="FOLDER", help=what)
    what = "end-of-document token (the tokenizer's eos_token)"
    add("--eod", metavar="TOKEN", help=what)
    what = (
        "how documents fill samples. best-fit: search for documents that fit; in-order: in input order; "
        "as-is: each document is one sample already (%(default)s)"
    )
    add("--pack", choices=PACKS, default="best-fit", help=what)
    what = "what to do with documents longer than a sample: cut them into several samples, drop them, or "
    what += "stop with an error (%(default)s)"
    add("--longer", choices=LONGER, default="cut", help=what)
    what = "drop documents with fewer tokens than MIN (%(default)s)"
    add("--long-only", type=int, default=0, metavar="MIN", help=what)
    what = "keep the documents in the order of the input"
    add("--no-shuffle", dest="shuffle", action="store_false", help=what)
    add("--seed", type=int, metavar="N", help=f"seed of the shuffling ({SEED})")
    what = f"documents in the shuffle buffer ({BUFFER})"
    add("--buffer", type=int, metavar="N", help=what)
    add("--workers", type=int, metavar="N", help="tokenizing processes (one per core)")
    what = "bytes of input in a part; an interruption loses the parts in progress (%(default)s)"
    add("--part-bytes", type=int, default=PART_BYTES, metavar="N", help=what)
    what = "refuse longer documents, because tokenizing takes 150 times their memory (%(default)s)"
    add("--document-bytes", type=int, default=DOCUMENT_BYTES, metavar="N", help=what)
    what = "skip and report files and folders inside an INPUT folder that cannot be read"
    add("--skip-unreadable", action="store_true", help=what)
    add("--overwrite", action="store_true", help="replace an existing dataset")
    what = "keep PREFIX.parts, to pack the same token ids again with other options"
    add("--keep-parts", action="store_true", help=what)


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: values that cannot work; names all of them.
    """
    problems = []
    least = {
        "seq_length": 2,
        "long_only": 0,
        "buffer": 1,
        "workers": 1,
        "part_bytes": LEAST_PART_BYTES,
        "document_bytes": 1,
    }
    for name, low in least.items():
        value = getattr(values, name)
        if value is not None and value < low:
            problems.append(f"--{name.replace('_', '-')} is {value}: use {low} or more")
    if values.workers is not None and values.workers > MOST_WORKERS:
        problems.append(f"--workers is {values.workers}: use {MOST_WORKERS} or fewer")
    if values.seq_length > INT32:
        problems.append(
            f"--seq-length is {values.seq_length}: Megatron's index holds {INT32} at most"
        )
    if values.pack == "as-is":
        given = {"--long-only": values.long_only, "--longer": values.longer != "cut"}
        for name in [name for name, value in given.items() if value]:
            problems.append(f"{name} has no meaning with --pack as-is: leave one of the two out")
    for name in () if values.shuffle else ("seed", "buffer"):
        if getattr(values, name) is not None:
            problems.append(
                f"--{name} is {getattr(values, name)}, which has no meaning with --no-shuffle: leave one of "
                "the two out"
            )
    try:
        output = prefix_of(os.fspath(values.output))
    except ConfigError as error:
        problems.append(str(error))
    join = values.join or []
    inputs = values.inputs + join
    if not inputs:
        problems.append("INPUT is not given: name files or folders")
    problems += [
        f"--join is {path}, which is not a folder: name it before --join"
        for path in join
        if os.path.exists(path) and not os.path.isdir(path)
    ]
    for option, paths in {"INPUT": inputs, "--tokenizer": [values.tokenizer]}.items():
        problems += [
            f"{option} is {path}, which does not exist" for path in paths if _is_absent(path)
        ]
    if problems:
        raise ConfigError("; ".join(problems))
    fields = dict(vars(values))
    fields = {name: fields[name] for name in Options.__dataclass_fields__}
    fields |= {"inputs": inputs, "join": inputs if values.join == [] else join}
    fields["workers"] = values.workers or min(_cores(), MOST_WORKERS)
    fields["seed"] = SEED if values.seed is None else values.seed
    fields["buffer"] = values.buffer or BUFFER
    fields["output"] = output
    return Options(**fields)


def _path(text: str) -> Path:
    """A path that is given; an empty one, of a shell variable that is not set, would be this folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a file or a folder")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"is {text!r}, which has a zero byte")
    if "://" in text and not os.path.exists(text):
        raise argparse.ArgumentTypeError(
            f"is {text}: download it, and name the file or folder here"
        )
    return Path(text)


def _is_absent(path: Path) -> bool:
    """Whether there is surely no such file; other errors are told where it is opened."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _cores() -> int:
    """That this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
