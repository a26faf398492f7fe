# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a run: ``PREFIX.bin``, ``PREFIX.idx``, ``PREFIX.json``, and the folder ``PREFIX.parts``.

``PREFIX.parts`` has the token ids of each part of the input that is done, and, while it is packed, the new
dataset. One run at a time holds its lock, under which existing files are checked. The dataset is moved out
of it at the end, the index last: without an index there is no dataset.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from ...errors import ConfigError
from ..common.atomic_output import LOCK, locked_folder

FINAL = (".bin", ".json", ".idx")
"""Suffixes of what is left at the end, in the order in which they appear."""
PARTS = ".parts"
OURS = re.compile(rf"{LOCK}|new\.(bin|json|idx)|[0-9a-f]{{32}}\.(tokens|lengths|json)(\.partial)?")
"""Names in PREFIX.parts. A folder with others is not used, and nothing else is removed."""
WRITER = "megatron_mtraining"
"""A key of every report of ours, and of no other file."""
LARGEST_REPORT = 2**26
INDEX = b"MMIDIDX\0\0"
"""What Megatron's .idx files begin with."""
CACHED = "*-GPTDataset-*"
"""Names of the indices that Megatron caches of a dataset, by its prefix and not by its content."""


def beside(prefix: Path, suffix: str) -> Path:
    """The file of this prefix and suffix."""
    return prefix.with_name(prefix.name + suffix)


def prefix_of(text: str) -> Path:
    """The prefix that --output gives.

    Raises:
        ConfigError: it names a folder, or one of the dataset's files.
    """
    path = Path(text)
    if text.endswith(("/", os.sep)) or text.replace(os.sep, "/").split("/")[-1] in ("", ".", ".."):
        raise ConfigError(f"--output is {text!r}: give a prefix of files, such as data/books")
    for suffix in (".bin", ".idx"):
        if path.suffix == suffix:
            raise ConfigError(f"--output is {text}: leave {suffix} out, both files get their own")
    return path


class Output:
    """What is there, and will be there, under a prefix."""

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self.final = {suffix: beside(prefix, suffix) for suffix in FINAL}
        self.parts = beside(prefix, PARTS)
        self.new = {suffix: self.parts / f"new{suffix}" for suffix in FINAL}
        self.cache = prefix / "cache" / "GPTDataset_indices"
        # Asked for each file of the input.
        self._real_final = {os.path.realpath(file) for file in self.final.values()}
        self._real_parts = os.path.join(os.path.realpath(self.parts), "")
        self._real_cache = os.path.join(os.path.realpath(self.cache), "")

    @contextmanager
    def opened(self, overwrite: bool) -> Iterator[None]:
        """Hold PREFIX.parts. At the end, it is removed unless parts of the input are done.

        Raises:
            ConfigError: another run holds it, a file is there that may not be replaced, or cannot be written.
        """
        try:
            if not self.prefix.parent.is_dir():
                raise ConfigError(
                    f"--output is {self.prefix}, but the folder {self.prefix.parent} does not exist"
                )
            self._refuse_foreign()
            with locked_folder(self.parts, "--output"):
                try:
                    self._remove_unfinished()
                    self._refuse_existing(overwrite)
                    yield
                finally:
                    if self.parts.is_dir():
                        self._remove_unfinished()
                        if not any(path.suffix == ".json" for path in self.parts.iterdir()):
                            self.remove_parts()
        except OSError as error:
            raise ConfigError(
                f"--output is {self.prefix}, which cannot be written: {error.strerror or error}; parts that "
                "are done are kept for the next run: make room, or name another prefix"
            ) from error

    def _refuse_foreign(self) -> None:
        foreign = _foreign(self.parts)
        if foreign is not None:
            raise ConfigError(
                f"--output is {self.prefix}, but {foreign} is not of an earlier run, and {self.parts} would "
                "be removed at the end: name another prefix, or move it"
            )

    def _refuse_existing(self, overwrite: bool) -> None:
        output, report = self.prefix, self.final[".json"]
        is_dataset = _is_report(report) or _is_index(self.final[".idx"])
        for file in filter(os.path.lexists, reversed(self.final.values())):
            if file.is_dir():
                raise ConfigError(
                    f"--output is {output}, but {file} is a folder: name another prefix"
                )
            if not overwrite:
                raise ConfigError(
                    f"--output is {output}, but {file} exists: name another prefix, or replace it with "
                    "--overwrite"
                )
            if not is_dataset or (file == report and not _is_report(report)):
                raise ConfigError(
                    f"--output is {output}, but {file} is not the dataset or the report of an earlier run, "
                    "and is not replaced: name another prefix, or move it"
                )

    def move(self) -> None:
        """Give the new dataset its final names, in place of an earlier one.

        What Megatron has cached of that would be taken for the new one's, and is removed.
        """
        cached = list(self.cache.glob(CACHED))
        for path in cached:
            path.unlink()
        for folder in (self.cache, self.cache.parent, self.prefix) if cached else ():
            with suppress(OSError):  # it has other files
                folder.rmdir()
        self.final[".idx"].unlink(missing_ok=True)
        for suffix in FINAL:
            os.replace(self.new[suffix], self.final[suffix])

    def _remove_unfinished(self) -> None:
        """Remove half-written files, and those of a dataset that were moved without its index."""
        if self.new[".idx"].exists() and not os.path.lexists(self.final[".idx"]):
            for suffix in (".bin", ".json"):
                if not self.new[suffix].exists():
                    self.final[suffix].unlink(missing_ok=True)
        for path in self.parts.iterdir():
            if path in self.new.values() or path.name.endswith(".partial"):
                path.unlink()

    def remove_parts(self, *, but: list[str] | None = None) -> None:
        """Remove PREFIX.parts, or only the parts in it ``but`` those with these keys."""
        for path in self.parts.iterdir():
            if OURS.fullmatch(path.name) and path.name != LOCK and path.stem not in (but or ()):
                path.unlink()
        if but is None:
            (self.parts / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # somebody has put a file there since
                self.parts.rmdir()

    def holds(self, file: Path) -> bool:
        """Whether a file is one of those that this run writes, replaces or removes."""
        real = os.path.realpath(file)
        if real.startswith(self._real_cache):
            return fnmatch(real[len(self._real_cache) :], CACHED)
        return real in self._real_final or real.startswith(self._real_parts)

    def is_parts_of_another(self, folder: Path) -> bool:
        """Whether a folder has the parts of a run with another prefix, which was interrupted."""
        if not folder.name.endswith(PARTS) or self.holds(folder / LOCK):
            return False
        return (folder / LOCK).is_file() and _foreign(folder) is None


def _foreign(parts: Path) -> Path | None:
    """Something in a folder of parts, or in its place, that no run has written."""
    try:
        names = sorted(os.listdir(parts))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return parts
    for path in (parts / name for name in names):
        if not (OURS.fullmatch(path.name) and path.is_file()):
            return path
    return None


def _is_index(file: Path) -> bool:
    try:
        with open(file, "rb") as index:
            return index.read(len(INDEX)) == INDEX
    except OSError:
        return False


def _is_report(file: Path) -> bool:
    try:
        if file.stat().st_size > LARGEST_REPORT:
            return False
        about = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and WRITER in about


class Parts:
    """Token ids of parts of the input in a folder, and what was counted in them.

    Args:
        keys: a name for each part, a hash of all that its token ids depend on: a part of a changed file,
            or tokenized in another way, is not found.
    """

    def __init__(self, folder: Path, keys: list[str]):
        self.folder, self.keys = folder, keys

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{self.keys[number]}{suffix}"

    def done(self, number: int) -> dict | None:
        """What was counted in a part, or None if it is not done."""
        try:
            counts = json.loads(self._path(number, ".json").read_bytes())
            sizes = counts["bytes"].items()
            whole = all(self._path(number, name).stat().st_size == size for name, size in sizes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return counts if whole else None

    def lengths(self, number: int) -> np.ndarray:
        """Tokens of each document of a part: int64 ``[documents]``."""
        return np.fromfile(self._path(number, ".lengths"), np.int64)

    def tokens(self, number: int):
        """The open file of a part's token ids, those of one document after those of the other."""
        return open(self._path(number, ".tokens"), "rb", buffering=0)

    def write(self, number: int, documents: Iterator[np.ndarray], counts: dict) -> None:
        """Write the token ids of a part; ``counts`` may be filled in while ``documents`` are read.

        The file with the counts is written last, and makes the part done.
        """
        lengths = []
        with self._written(number, ".tokens") as file:
            for ids in documents:
                file.write(ids.tobytes())
                lengths.append(len(ids))
        with self._written(number, ".lengths") as file:
            file.write(np.array(lengths, np.int64).tobytes())
        names = (".tokens", ".lengths")
        counts["bytes"] = {name: self._path(number, name).stat().st_size for name in names}
        with self._written(number, ".json") as file:
            file.write(json.dumps(counts).encode())

    @contextmanager
    def _written(self, number: int, suffix: str):
        path = self._path(number, suffix)
        partial = path.with_name(f"{path.name}.partial")
        try:
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
