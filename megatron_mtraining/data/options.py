# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options of ``mtraining data prepare``, checked before any input is read."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..config import ConfigError

EXTRA = "megatron-mtraining[data]"
FORMATS = ("auto", "jsonl", "parquet", "text", "mds")
PACKS = ("best-fit", "in-order", "as-is")
LONGER = ("cut", "drop", "error")
PART_BYTES = 32 * 2**20
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
    join: bool
    """Text files of a folder are one document."""
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
    overwrite: bool
    keep_parts: bool

    @property
    def parts(self) -> Path:
        """The folder of what is done so far."""
        return beside(self.output, ".parts")


def beside(prefix: Path, suffix: str) -> Path:
    """A file whose name is the prefix's, as it stands, and ``suffix``."""
    return prefix.with_name(prefix.name + suffix)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add = parser.add_argument
    what = "jsonl (.gz, .zst), parquet, text or MDS files, and folders of these or of source files"
    add("inputs", type=Path, nargs="+", metavar="INPUT", help=what)
    what = "a Hugging Face folder, a .gguf file or a sentencepiece .model"
    add("--tokenizer", type=Path, required=True, metavar="PATH", help=what)
    what = "tokens of a sample: --seq-length of the training"
    add("--seq-length", type=int, required=True, metavar="N", help=what)
    what = (
        "PREFIX.bin, PREFIX.idx and the report PREFIX.json are written: --data-path of the training"
    )
    add("--output", type=Path, required=True, metavar="PREFIX", help=what)
    what = "of all files; auto goes by their names (%(default)s)"
    add("--format", choices=FORMATS, default="auto", help=what)
    what = "of records: text, or a list of token ids (text, or input_ids where there is no text)"
    add("--text-field", metavar="NAME", help=what)
    what = "the text files of each INPUT folder, such as a repository, are one document"
    add("--join", action="store_true", help=what)
    what = (
        "the end-of-document token, where the tokenizer's own is missing or another one is wanted"
    )
    add("--eod", metavar="TOKEN", help=what)
    what = (
        "how documents fill samples. best-fit: looking for those that fit; in-order: one after the other; "
        "as-is: each is a sample already (%(default)s)"
    )
    add("--pack", choices=PACKS, default="best-fit", help=what)
    what = "documents longer than a sample: cut into several, leave out, or stop (%(default)s)"
    add("--longer", choices=LONGER, default="cut", help=what)
    what = "leave out documents with fewer tokens (%(default)s)"
    add("--long-only", type=int, default=0, metavar="MIN", help=what)
    what = "keep the documents in the order of the input"
    add("--no-shuffle", dest="shuffle", action="store_false", help=what)
    add("--seed", type=int, default=1234, help="of the shuffling (%(default)s)")
    what = "documents that shuffling chooses among at a time (%(default)s)"
    add("--buffer", type=int, default=100000, metavar="N", help=what)
    add("--workers", type=int, metavar="N", help="processes that tokenize (one a core)")
    what = "of input that are tokenized, or lost by an interruption, at a time (%(default)s)"
    add("--part-bytes", type=int, default=PART_BYTES, metavar="N", help="bytes " + what)
    add("--overwrite", action="store_true", help="replace a dataset that is there")
    what = "keep PREFIX.parts, to pack the same documents again in another way"
    add("--keep-parts", action="store_true", help=what)


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: a value that cannot work, or an output that exists.
    """
    least = {"seq_length": 2, "long_only": 0, "buffer": 1, "workers": 1, "part_bytes": 1}
    for name, low in least.items():
        value = getattr(values, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: use {low} or more")
    if values.seq_length > INT32:
        raise ConfigError(
            f"--seq-length is {values.seq_length}: Megatron's index holds {INT32} at most"
        )
    if values.pack == "as-is":
        given = {"--long-only": values.long_only, "--longer": values.longer != "cut"}
        for name in [name for name, value in given.items() if value]:
            raise ConfigError(f"{name} has no meaning with --pack as-is: leave one of the two out")
    fields = dict(vars(values))
    fields = {name: fields[name] for name in Options.__dataclass_fields__}
    fields["workers"] = values.workers or _cores()
    options = Options(**fields)
    _check_output(options)
    return options


def _cores() -> int:
    """That this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_output(options: Options) -> None:
    output = options.output
    if not output.name or str(output).endswith(os.sep):
        raise ConfigError(f"--output is {output}: give a prefix of files, such as data/books")
    for suffix in (".bin", ".idx"):
        if output.suffix == suffix:
            raise ConfigError(f"--output is {output}: leave {suffix} out, both files get their own")
    if not output.parent.is_dir():
        raise ConfigError(f"--output is {output}, but the folder {output.parent} does not exist")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output is {output}, but {output.parent} cannot be written to")
    # A .bin without .idx is what an interruption leaves at the very end, if the parts are there too.
    there = [beside(output, ".idx")]
    there += [] if options.parts.is_dir() else [beside(output, ".bin")]
    for path in there:
        if path.exists() and not options.overwrite:
            raise ConfigError(
                f"--output is {output}, but {path} exists: name another prefix, or replace it with "
                "--overwrite"
            )


def require(*names: str) -> None:
    """Raise :class:`ConfigError` unless these packages are installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed: pip install '{EXTRA}'")
