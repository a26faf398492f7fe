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
DOCUMENT_BYTES = 32 * 2**20
MOST_WORKERS = 256
SEED, BUFFER = 1234, 100000
INT32 = 2**31 - 1
LEAST = dict(seq_length=2, long_only=0, buffer=1, workers=1, part_bytes=1024, document_bytes=1)


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
    overwrite: bool
    keep_parts: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""

    def add(name: str, what: str, **how) -> None:
        parser.add_argument(name, help=what, **how)

    what = "jsonl (.gz, .bz2, .xz, .zst), parquet, text or MDS files, and folders of these or of source files"
    add("inputs", what, type=_path, nargs="*", metavar="INPUT")
    what = "a Hugging Face folder, a .gguf file or a sentencepiece .model"
    add("--tokenizer", what, type=_path, required=True, metavar="PATH")
    what = "tokens in a sample: the --seq-length of the training run"
    add("--seq-length", what, type=int, required=True, metavar="N")
    # Not a Path, which would drop a slash at the end.
    what = (
        "write PREFIX.bin, PREFIX.idx and the report PREFIX.json; PREFIX is the run's --data-path"
    )
    add("--output", what, required=True, metavar="PREFIX")
    what = "format of all files; auto decides by file name (%(default)s)"
    add("--format", what, choices=FORMATS, default="auto")
    what = (
        "field of a record that has the text or a list of token ids (text; without it, input_ids)"
    )
    add("--text-field", what, metavar="NAME")
    what = "more INPUT folders, such as repositories, each of whose text files are joined into one document; "
    what += "without FOLDER, all INPUT folders"
    add("--join", what, type=_path, nargs="*", metavar="FOLDER")
    add("--eod", "end-of-document token (the tokenizer's eos_token)", metavar="TOKEN")
    what = "how documents fill samples. best-fit: search for documents that fit; in-order: in input order; "
    what += "as-is: each document is one sample already (%(default)s)"
    add("--pack", what, choices=PACKS, default="best-fit")
    what = "what to do with documents longer than a sample: cut them into several samples, drop them, or "
    what += "stop with an error (%(default)s)"
    add("--longer", what, choices=LONGER, default="cut")
    what = "drop documents with fewer tokens than MIN (%(default)s)"
    add("--long-only", what, type=int, default=0, metavar="MIN")
    what = "keep the documents in the order of the input"
    add("--no-shuffle", what, dest="shuffle", action="store_false")
    add("--seed", f"seed of the shuffling ({SEED})", type=int, metavar="N")
    add("--buffer", f"documents in the shuffle buffer ({BUFFER})", type=int, metavar="N")
    add("--workers", "tokenizing processes (one per core)", type=int, metavar="N")
    what = "bytes of input in a part; an interruption loses the parts in progress (%(default)s)"
    add("--part-bytes", what, type=int, default=PART_BYTES, metavar="N")
    what = "refuse longer documents, because tokenizing takes 150 times their memory (%(default)s)"
    add("--document-bytes", what, type=int, default=DOCUMENT_BYTES, metavar="N")
    add("--overwrite", "replace an existing dataset", action="store_true")
    what = "keep PREFIX.parts, to pack the same token ids again with other options"
    add("--keep-parts", what, action="store_true")


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: values that cannot work; names all of them.
    """
    problems = [
        f"--{name.replace('_', '-')} is {value}: use {low} or more"
        for name, low in LEAST.items()
        if (value := getattr(values, name)) is not None and value < low
    ]
    if values.workers is not None and values.workers > MOST_WORKERS:
        problems.append(f"--workers is {values.workers}: use {MOST_WORKERS} or fewer")
    if values.seq_length > INT32:
        problems.append(
            f"--seq-length is {values.seq_length}: Megatron's index holds {INT32} at most"
        )
    if values.pack == "as-is":
        for name, given in {
            "long-only": values.long_only,
            "longer": values.longer != "cut",
        }.items():
            if given:
                problems.append(
                    f"--{name} has no meaning with --pack as-is: leave one of the two out"
                )
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
    problems += [
        f"INPUT is {path}, which does not exist" for path in inputs if not os.path.exists(path)
    ]
    if not os.path.exists(values.tokenizer):
        problems.append(f"--tokenizer is {values.tokenizer}, which does not exist")
    if problems:
        raise ConfigError("; ".join(problems))
    fields = {name: getattr(values, name) for name in Options.__dataclass_fields__}
    fields |= {
        "inputs": inputs,
        "join": inputs if values.join == [] else join,
        "workers": values.workers or min(_cores(), MOST_WORKERS),
        "seed": SEED if values.seed is None else values.seed,
        "buffer": values.buffer or BUFFER,
        "output": output,
    }
    return Options(**fields)


def _path(text: str) -> Path:
    """A path that is given; an empty one, of a shell variable that is not set, would be this folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a file or a folder")
    if "://" in text and not os.path.exists(text):
        raise argparse.ArgumentTypeError(
            f"is {text}: download it, and name the file or folder here"
        )
    return Path(text)


def _cores() -> int:
    """That this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
