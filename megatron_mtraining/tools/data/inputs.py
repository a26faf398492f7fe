# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which files are read, as what, and in which parts: the same for every number of workers."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ...errors import ConfigError
from ...requirements import first_line, require
from . import shards
from .options import Options
from .output import Output

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KINDS = {
    **{
        f"{name}{suffix}": "jsonl" for name in (".jsonl", ".ndjson") for suffix in ("", *COMPRESSED)
    },
    ".parquet": "parquet",
    ".mds": "mds",
}
_CONVERT = "convert it to jsonl or parquet"
_MEGATRON = "if it is Megatron's dataset already, give it to --data-path"
REFUSED = {
    **dict.fromkeys((".arrow", ".feather", ".csv", ".tsv"), _CONVERT),
    **dict.fromkeys((".bin", ".idx"), _MEGATRON),
}
"""What is not read, and should be neither left out in silence nor taken for a source file."""
PACKED = re.compile(
    r"\.(jsonl?|ndjson|parquet|mds|csv|tsv)\.(gz|bz2|xz|zstd?|zip|lzma|z|br|lz4|lzo|snappy|sz|7z|tar|tgz)\Z"
)
"""The same: data in a compression that is not read."""
NAMED = 100
"""Files left out that the report names."""


@dataclass(frozen=True)
class File:
    """A file of the input, as it was when it was found.

    Attributes:
        kind: jsonl, parquet, text or mds.
        named: given by name, not found in a folder.
        joined: of text: the INPUT folder whose files are one document, or "" for a document of its own.
        size: bytes.
        changed: time, in nanoseconds.
    """

    path: str
    kind: str
    named: bool
    joined: str = ""
    size: int = 0
    changed: int = 0


@dataclass(frozen=True)
class Part:
    """A stretch of the input that one worker reads.

    Attributes:
        files: of one kind; several only of text.
        size: bytes, for the progress bar.
        start, stop: bytes of a jsonl file where lines begin, row groups of a parquet file; (0, -1) is all.
    """

    files: tuple[File, ...]
    size: int
    start: int = 0
    stop: int = -1

    @property
    def kind(self) -> str:
        return self.files[0].kind


@dataclass
class Inputs:
    """The files that are read, in order, their parts, and what was found in folders and is not read; files
    of this run's own output are not counted.

    Attributes:
        others: hidden files, links to what is there too or nowhere, pipes, devices, and parts of interrupted
            runs.
    """

    files: list[File] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def find(options: Options, output: Output) -> Inputs:
    """All files of the input, in parts.

    Raises:
        ConfigError: one is missing, unreadable, empty, given twice or of a kind that is not supported.
    """
    found, seen = Inputs(), set()
    for given in options.inputs:
        named = not os.path.isdir(given)  # not Path's, which raises for a name that is too long
        if named and output.holds(given):
            raise ConfigError(
                f"INPUT is {given}, which --output {output.prefix} would replace or remove: name another "
                "prefix"
            )
        try:
            paths = [given] if named else _in_folder(given, output, found.others)
        except OSError as error:
            raise _unreadable(error.filename, error) from None
        if not paths:
            left_out = f"; {len(found.others)} are left out" if found.others else ""
            raise ConfigError(f"INPUT is {given}, a folder without files{left_out}")
        join = str(given) if given in options.join and not named else ""
        files = []
        for path in paths:
            real = os.path.realpath(path)
            if real in seen:
                raise ConfigError(f"INPUT has {path} twice: name it, or a folder it is in, once")
            seen.add(real)
            kind = _kind(path, options.format, named)
            try:
                file = File(str(path), kind, named, join if kind == "text" else "", *_state(path))
            except OSError as error:
                raise _unreadable(path, error) from None
            if not file.size and (kind != "text" or named):
                raise ConfigError(f"INPUT has {path}, which is empty: leave it out")
            files.append(file)
        found.files += _together(files)
    _check(options, found.files)
    for text, some in groupby(found.files, key=lambda file: file.kind == "text"):
        found.parts += (_texts if text else _records)(list(some), options.part_bytes)
    return found


def _together(files: list[File]) -> list[File]:
    """The files of an INPUT; those that --join makes a document in order of path, where the first was."""
    joined = sorted((file for file in files if file.joined), key=lambda file: Path(file.path).parts)
    others = [file for file in files if not file.joined]
    place = next((n for n, file in enumerate(files) if file.joined), 0)
    return others[:place] + joined + others[place:]


def _state(path: Path) -> tuple[int, int]:
    """Size and time of a file that is there and can be read.

    Raises:
        OSError: it cannot.
        ConfigError: it is a pipe or a device, which cannot be read twice, and may have no end.
    """
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(
            f"INPUT is {path}, a pipe or a device: write it into a file, and give that"
        )
    with open(path, "rb"):
        return about.st_size, about.st_mtime_ns


def _unreadable(path, error: OSError) -> ConfigError:
    return ConfigError(
        f"INPUT has {path}, which cannot be read: {error.strerror}; fix that, or move it away"
    )


def _in_folder(folder: Path, output: Output, others: list[str]) -> list[Path]:
    """Its files, in each folder before its subfolders; what is left out is added to ``others``.

    Raises:
        OSError: a folder or a file cannot be looked at.
    """

    def failed(error: OSError):
        raise error

    files = []
    inside = os.path.join(os.path.realpath(folder), "")
    for path, folders, names in os.walk(folder, onerror=failed):
        kept = [name for name in sorted(folders) if _is_entered(Path(path, name), output)]
        others += [os.path.join(path, name) for name in sorted({*folders} - {*kept})]
        folders[:] = kept
        has_shards = any(name.lower().endswith(".mds") for name in names)
        for name in sorted(names):
            file = Path(path, name)
            again = file.is_symlink() and os.path.realpath(file).startswith(inside)
            if name.startswith(".") or again or not _is_regular(file):
                others.append(str(file))
            elif name == shards.INDEX and (shards.is_index(file) or has_shards):
                continue
            elif not output.holds(file):
                files.append(file)
    return files


def _is_entered(folder: Path, output: Output) -> bool:
    if folder.name.startswith(".") or os.path.islink(folder):
        return False
    return not output.is_parts_of_another(folder)


def _is_regular(file: Path) -> bool:
    """Not Path.is_file, which calls a file that cannot be looked at none."""
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except FileNotFoundError:  # a link that leads nowhere
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _kind(file: Path, format: str, named: bool) -> str:
    if format != "auto":
        return format
    name = file.name.lower()
    for suffix, what in REFUSED.items():
        if name.endswith(suffix):
            raise ConfigError(
                f"INPUT has {file}, and {suffix} files are not supported: {what}; or take all files as text "
                "with --format text"
            )
    if named and name.endswith(".json"):
        raise ConfigError(
            f"INPUT is {file}: for a JSON object a line, use --format jsonl; for a document as it is, use "
            "--format text"
        )
    for suffix, kind in KINDS.items():
        if name.endswith(suffix):
            return kind
    if packed := PACKED.search(name):
        raise ConfigError(
            f"INPUT has {file}, and {packed[0]} files are not supported: decompress it (JSON lines may be "
            "compressed with gzip or zstd), or leave it out"
        )
    return "text"


def compression(name: str) -> str:
    """The suffix of a compressed file, or nothing."""
    suffix = Path(name).suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def _check(options: Options, files: list[File]) -> None:
    """Refuse options that do not go with the files, and files whose library is missing."""
    if options.join and not any(file.joined for file in files):
        raise ConfigError(
            "--join is given, but no INPUT that it joins is a folder with text files: leave it out"
        )
    kinds = {file.kind for file in files}
    if options.text_field is not None and kinds == {"text"}:
        raise ConfigError(
            f"--text-field is {options.text_field}, but all files of the INPUT are text, which has no "
            "fields: leave it out, or say with --format what they are"
        )
    if "parquet" in kinds:
        require("pyarrow", extra="data")
    if any(compression(file.path) == ".zst" for file in files) and sys.version_info < (3, 14):
        require("backports.zstd", extra="data")
    if "mds" in kinds:
        require("streaming", extra="mds")


def _texts(files: list[File], part_bytes: int) -> list[Part]:
    """Text files in parts of about so many bytes; the files of one document stay together."""
    parts, some, size = [], [], 0
    for file, following in zip(files, [*files[1:], None]):
        some.append(file)
        size += file.size
        in_one = following and file.joined and file.joined == following.joined
        if not following or following.named != file.named or (size >= part_bytes and not in_one):
            parts.append(Part(tuple(some), size))
            some, size = [], 0
    return parts


def _records(files: list[File], part_bytes: int) -> list[Part]:
    parts = []
    for file in files:
        if file.kind == "parquet":
            parts += _row_groups(file, part_bytes)
        elif file.kind == "jsonl" and not compression(file.path):
            bounds = [*range(0, file.size, part_bytes), file.size]
            parts += [Part((file,), b - a, a, b) for a, b in zip(bounds, bounds[1:])]
        else:
            if file.kind == "mds":
                shards.entry(Path(file.path))
            parts.append(Part((file,), file.size))
    return parts


def _row_groups(file: File, part_bytes: int) -> list[Part]:
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(file.path)
    except Exception as error:
        raise ConfigError(
            f"INPUT has {file.path}, which pyarrow cannot read: {first_line(error)}"
        ) from None
    if not metadata.num_rows:
        raise ConfigError(f"INPUT has {file.path}, which is empty: leave it out")
    parts, start, size = [], 0, 0
    for number in range(metadata.num_row_groups):
        size += metadata.row_group(number).total_byte_size
        if size >= part_bytes or number + 1 == metadata.num_row_groups:
            parts.append(Part((file,), size, start, number + 1))
            start, size = number + 1, 0
    return parts
