# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which files are read, as what, and in which parts: the same whatever the number of workers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ...config import ConfigError
from .options import Options, require
from .outputs import Output

RECORDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".parquet": "parquet",
    ".mds": "mds",
}
_RECOMPRESS = "decompress it, or compress it with gzip or zstd"
_CONVERT = "convert it to jsonl or parquet"
REFUSED = {
    ".jsonl.bz2": _RECOMPRESS,
    ".jsonl.xz": _RECOMPRESS,
    ".jsonl.lz4": _RECOMPRESS,
    ".json.gz": "jsonl.gz, a JSON object a line, is supported",
    ".mds.zstd": "decompress it",
    ".mds.gz": "decompress it",
    ".arrow": _CONVERT,
    ".feather": _CONVERT,
    ".csv": _CONVERT,
    ".tsv": _CONVERT,
    ".bin": "if it is Megatron's dataset already, give it to --data-path",
    ".idx": "if it is Megatron's dataset already, give it to --data-path",
}
"""What we do not read, and would not want to be left out unseen or taken for a source file."""


_COLUMNS = {
    "column_names": (str,),
    "column_encodings": (str,),
    "column_sizes": (int, type(None)),
}
"""What index.json says of the columns of a Mosaic data shard, and of which types."""


@dataclass(frozen=True)
class Part:
    """A stretch of the input that one worker reads.

    Attributes:
        kind: jsonl, parquet, text or mds.
        files: several only of text.
        start, stop: bytes of a jsonl file where lines begin, row groups of a parquet file; (0, -1) is all.
        size: bytes, for the progress bar.
        named: files were given by name, not found in a folder.
        joined: of text, for each file: the INPUT folder whose files are one document, or "" for a document
            of its own.
    """

    kind: str
    files: tuple[str, ...]
    start: int
    stop: int
    size: int
    named: bool
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """
    Attributes:
        parts: of all files, in order.
        files: path, bytes and time of change of each.
        left_out: what was found in folders and is hidden, a link to what is there too, no file, or the parts
            of a run that was interrupted. Files of this run's own output are not counted.
    """

    parts: list[Part]
    files: list[tuple[str, int, int]]
    left_out: int


def find(options: Options) -> Inputs:
    """All files of the input, in parts.

    Raises:
        ConfigError: one is missing, empty, given twice or of a kind that is not supported.
    """
    found, seen, left_out = [], set(), 0
    output = Output(options.output)
    for path in options.inputs:
        # os.path's, not Path's: they are False for a name that is too long.
        if os.path.isdir(path):
            files, others = _in_folder(path, output)
            left_out += others
            if not files:
                raise ConfigError(f"INPUT is {path}, a folder without files")
            named = False
        elif os.path.exists(path):
            if output.holds(path):
                raise _overwritten(path, output)
            files, named = [path], True
        else:
            raise ConfigError(f"INPUT is {path}, which does not exist")
        for file in files:
            real = os.path.realpath(file)
            if real in seen:
                raise ConfigError(f"INPUT has {file} twice: name it, or a folder it is in, once")
            seen.add(real)
            kind = _kind(file, options.format, named)
            joined = str(path) if options.join and kind == "text" and not named else ""
            found.append((file, kind, named, joined))
    if options.join and not any(joined for *_, joined in found):
        raise ConfigError("--join is given, but no INPUT is a folder with text files: leave it out")
    if options.text_field is not None and all(kind == "text" for _, kind, *_ in found):
        raise ConfigError(
            f"--text-field is {options.text_field}, but all files of the INPUT are text, which has no "
            "fields: leave it out, or say with --format what they are"
        )
    _check_packages(found)
    about = []
    for file, *_ in found:
        try:
            stat = file.stat()
        except OSError as error:
            raise ConfigError(f"INPUT has {file}, which cannot be read: {error.strerror}") from None
        about.append((str(file), stat.st_size, stat.st_mtime_ns))
    return Inputs(_parts(found, about, options.part_bytes), about, left_out)


def _overwritten(file: Path, output: Output) -> ConfigError:
    return ConfigError(
        f"INPUT has {file}, which --output {output.prefix} would replace or remove: name another prefix"
    )


def _in_folder(folder: Path, output: Output) -> tuple[list[Path], int]:
    files, left_out = [], 0
    inside = os.path.join(os.path.realpath(folder), "")
    for path, folders, names in os.walk(folder):
        kept = [name for name in sorted(folders) if not name.startswith(".")]
        kept = [name for name in kept if not os.path.islink(os.path.join(path, name))]
        kept = [name for name in kept if not output.of_another_run(Path(path, name))]
        left_out += len(folders) - len(kept)
        folders[:] = kept
        shards = any(name.lower().endswith(".mds") for name in names)
        for name in sorted(names):
            file = Path(path, name)
            again = file.is_symlink() and os.path.realpath(file).startswith(inside)
            if name.startswith(".") or again or not file.is_file():
                left_out += 1
            elif output.holds(file):
                if not output.is_of_a_run(file):
                    raise _overwritten(file, output)
            elif not (shards and name == "index.json"):  # which says how to read them
                files.append(file)
    return files, left_out


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
    for suffix, kind in RECORDS.items():
        if name.endswith(suffix):
            return kind
    return "text"


def compression(name: str | Path) -> str:
    """The suffix of a compressed file, or nothing."""
    suffix = Path(name).suffix.lower()
    return suffix if suffix in (".gz", ".zst") else ""


def _check_packages(found) -> None:
    if any(kind == "parquet" for _, kind, *_ in found):
        require("pyarrow")
    if any(kind == "jsonl" and compression(file) == ".zst" for file, kind, *_ in found):
        require("zstandard")


def _parts(found, about, part_bytes: int) -> list[Part]:
    parts: list[Part] = []
    texts: list[tuple[str, str]] = []
    size = 0

    def end_texts():
        nonlocal texts, size
        if texts:
            names, folders = zip(*texts)
            parts.append(Part("text", names, 0, -1, size, named, folders))
        texts, size = [], 0

    named = False
    for (file, kind, by_name, joined), (name, length, _) in zip(found, about):
        in_one = bool(texts) and joined != "" and joined == texts[-1][1]
        if kind != "text" or by_name != named or (size >= part_bytes and not in_one):
            end_texts()
        named = by_name
        if not length and (kind != "text" or named):
            raise ConfigError(f"INPUT has {file}, which is empty: leave it out")
        if kind == "text":
            texts.append((name, joined))
            size += length
        elif kind == "parquet":
            parts += _row_groups(name, named, part_bytes)
        elif kind == "mds":
            shard_entry(file)
            parts.append(Part(kind, (name,), 0, -1, length, named))
        elif compression(file):
            parts.append(Part(kind, (name,), 0, -1, length, named))
        else:
            for start in range(0, length, part_bytes):
                stop = min(length, start + part_bytes)
                parts.append(Part(kind, (name,), start, stop, stop - start, named))
    end_texts()
    return parts


def _row_groups(name: str, named: bool, part_bytes: int) -> list[Part]:
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(name)
    except Exception as error:
        raise ConfigError(f"INPUT has {name}, which pyarrow cannot read: {error}") from None
    if not metadata.num_rows:
        raise ConfigError(f"INPUT has {name}, which is empty: leave it out")
    parts, start, size = [], 0, 0
    for number in range(metadata.num_row_groups):
        size += metadata.row_group(number).total_byte_size
        if size >= part_bytes or number + 1 == metadata.num_row_groups:
            parts.append(Part("parquet", (name,), start, number + 1, size, named))
            start, size = number + 1, 0
    return parts


def shard_entry(file: Path) -> dict:
    """What the index.json beside an MDS shard says of it.

    Raises:
        ConfigError: there is none, it cannot be read, or the shard is not as it says.
    """
    index = file.with_name("index.json")
    try:
        shards = json.loads(index.read_bytes())["shards"]
        (entry,) = [one for one in shards if one["raw_data"]["basename"] == file.name]
        size = entry["raw_data"]["bytes"]
        known = (entry["format"], entry["version"]) == ("mds", 2)
        for name, types in _COLUMNS.items():
            if type(entry[name]) is not list or any(type(v) not in types for v in entry[name]):
                raise ValueError(f"{name} is {entry[name]!r}")
        if type(entry["samples"]) is not int:
            raise ValueError(f"samples is {entry['samples']!r}")
        complete = len({len(entry[name]) for name in _COLUMNS}) == 1
    except FileNotFoundError:
        raise ConfigError(f"INPUT has {file} without {index.name} beside it") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"INPUT has {file}, but {index} does not say how to read it ({error!r})"
        ) from None
    if not (known and complete):
        raise ConfigError(
            f"INPUT has {file}, which is no MDS of version 2: that is what is supported"
        )
    if file.stat().st_size != size:
        raise ConfigError(
            f"INPUT has {file} of {file.stat().st_size} bytes, but {index} says {size}: it is broken"
        )
    return entry
