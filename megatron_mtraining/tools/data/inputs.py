# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which files are read, as what, and in which parts: the same for every number of workers."""

from __future__ import annotations

import errno
import hashlib
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
    ".jsonl.lz4": "decompress it, or compress it with gzip or zstd",
    ".json.gz": "jsonl.gz, a JSON object a line, is supported",
    ".mds.zstd": "decompress it",
    ".mds.gz": "decompress it",
    **dict.fromkeys((".arrow", ".feather", ".csv", ".tsv"), _CONVERT),
    **dict.fromkeys((".bin", ".idx"), _MEGATRON),
}
"""What is not read, and should be neither left out in silence nor taken for a source file."""
PACKED = re.compile(
    r"\.(jsonl|ndjson|parquet|mds|csv|tsv)\.(gz|bz2|xz|zst|zip|lzma|z|br|lz4|lzo|snappy|sz|7z|tar|tgz)\Z"
)
"""The same: data in a compression that is not read."""
ENDS = 2**16
"""Bytes at the beginning and at the end of a file that tell it from another of its size and time."""
MOST_PARTS = 2**20
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
        ends: a hash of its first and last :data:`ENDS` bytes, for changes that keep size and time.
    """

    path: str
    kind: str
    named: bool
    joined: str = ""
    size: int = 0
    changed: int = 0
    ends: str = ""

    @property
    def state(self) -> list:
        """What tells it from the same one after a change, for JSON."""
        return [self.size, self.changed, self.ends]


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
        unreadable: what --skip-unreadable allows to leave out.
    """

    files: list[File] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def but(self) -> str:
        """What there was instead of files."""
        both = (self.others, "are left out"), (self.unreadable, "cannot be read")
        return "".join(f"; {len(some)} {what}, such as {some[0]}" for some, what in both if some)


def find(options: Options, output: Output) -> Inputs:
    """All files of the input, in parts.

    Raises:
        ConfigError: one is missing, unreadable, empty, given twice or of a kind that is not supported.
    """
    found, seen = Inputs(), set()
    for given in options.inputs:
        named = not os.path.isdir(given)  # not Path's, which raises for a name that is too long
        try:
            os.stat(given)
        except PermissionError as error:
            raise _unreadable(given, error) from None
        except OSError:
            raise ConfigError(f"INPUT is {given}, which does not exist") from None
        if named and output.holds(given):
            raise ConfigError(
                f"INPUT is {given}, which --output {output.prefix} would replace or remove: name another "
                "prefix"
            )
        paths = [given] if named else _in_folder(given, output, options, found)
        if not paths:
            raise ConfigError(f"INPUT is {given}, a folder without files{found.but()}")
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
                if named or not options.skip_unreadable:
                    raise _unreadable(path, error) from None
                found.unreadable.append(str(path))
                continue
            if not file.size and (kind != "text" or named):
                raise ConfigError(f"INPUT has {path}, which is empty: leave it out")
            files.append(file)
        found.files += _together(files)
    if not found.files:
        raise ConfigError(f"INPUT has no file that can be read{found.but()}")
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


def _state(path: Path) -> tuple[int, int, str]:
    """Size, time and ends of a file that is there and can be read.

    Raises:
        OSError: it cannot.
        ConfigError: it is a pipe or a device, which cannot be read twice, and may have no end.
    """
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(
            f"INPUT is {path}, a pipe or a device: write it into a file, and give that"
        )
    with open(path, "rb") as file:
        ends = hashlib.sha256(file.read(ENDS))
        if about.st_size > ENDS:
            file.seek(max(ENDS, about.st_size - ENDS))
            ends.update(file.read(ENDS))
    return about.st_size, about.st_mtime_ns, ends.hexdigest()[:16]


def _unreadable(path, error: OSError) -> ConfigError:
    return ConfigError(
        f"INPUT has {path}, which cannot be read: {error.strerror}; fix that, or leave out what is in "
        "folders and cannot be read with --skip-unreadable"
    )


def _in_folder(folder: Path, output: Output, options: Options, found: Inputs) -> list[Path]:
    """Its files, in each folder before its subfolders. Those of other types are added to ``found.others``;
    with ``--skip-unreadable``, those that cannot be read to ``found.unreadable``."""

    def failed(error: OSError):
        if not options.skip_unreadable:
            raise _unreadable(error.filename, error) from None
        found.unreadable.append(str(error.filename))

    def is_index(file: Path) -> bool:
        """Of shards, which all must be there: of a copy that was broken off, some are not."""
        listed = shards.listed(file)
        gone = shards.missing(file, listed) if options.format in ("auto", "mds") else []
        if gone and not options.skip_unreadable:
            raise ConfigError(
                f"INPUT has {file}, which lists {len(gone)} shards that are not there, such as "
                f"{gone[0][:80]}: copy the folder again, or leave out what is not there with "
                "--skip-unreadable"
            )
        found.unreadable.extend(os.path.join(file.parent, name) for name in gone)
        return bool(listed)

    files = []
    inside = os.path.join(os.path.realpath(folder), "")
    for path, folders, names in os.walk(folder, onerror=failed):
        kept = [name for name in sorted(folders) if _is_entered(Path(path, name), output)]
        found.others.extend(os.path.join(path, name) for name in sorted({*folders} - {*kept}))
        folders[:] = kept
        has_shards = any(name.lower().endswith(".mds") for name in names)
        for name in sorted(names):
            file = Path(path, name)
            try:
                regular = _is_regular(file)
                again = file.is_symlink() and os.path.realpath(file).startswith(inside)
                if name.startswith(".") or again or not regular:
                    found.others.append(str(file))
                elif name == shards.INDEX and (is_index(file) or has_shards):
                    continue
                elif not output.holds(file):
                    files.append(file)
            except OSError as error:
                failed(error)
    return files


def _is_entered(folder: Path, output: Output) -> bool:
    hidden = folder.name.startswith(".") or os.path.islink(folder)
    try:
        return not (hidden or output.is_parts_of_another(folder))
    except PermissionError:  # of a look inside: said of the folder, when that is entered
        return True


def _is_regular(file: Path) -> bool:
    """Not Path.is_file, which calls a file that cannot be looked at none in Python 3.14."""
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # a link that leads nowhere
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
            f"INPUT has {file}, and {packed[0]} files are not supported: decompress it, or leave it out"
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
    total = sum(file.size for file in files)
    if total > options.part_bytes * MOST_PARTS:  # each has a file, and is read by a job of its own
        raise ConfigError(
            f"--part-bytes is {options.part_bytes}, which divides the INPUT of {total} bytes into more than "
            f"{MOST_PARTS} parts: use {-(-total // MOST_PARTS)} or more"
        )


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
