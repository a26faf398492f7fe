# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a run: ``PREFIX.bin``, ``PREFIX.idx``, ``PREFIX.json``, and the folder ``PREFIX.parts``.

``PREFIX.parts`` has the parts of the input that are done (see :mod:`.store`), and, while these are packed,
the new dataset. One run at a time holds its lock, under which existing files are checked. The dataset is
moved out of it at the end, the index last: without an index there is no dataset.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from ...errors import ConfigError
from ..common.atomic_output import LOCK, locked_folder
from .store import RECORD, SUFFIX

FINAL = (".bin", ".json", ".idx")
"""Suffixes of what is left at the end, in the order in which they appear."""
PARTS = ".parts"
OURS = re.compile(
    rf"{LOCK}|new\.(bin|json|idx)|({RECORD}|[0-9a-f]{{32}}{re.escape(SUFFIX)})(\.partial)?"
)
"""Names in PREFIX.parts. A folder with others is not used, and nothing else is removed."""
WRITER = "megatron_mtraining"
"""A key of every report of ours, and of no other file."""
LARGEST_REPORT = 2**26
INDEX = b"MMIDIDX\0\0"
"""What Megatron's .idx files begin with."""
CACHED = "*-GPTDataset-*"
"""Names of the indices that Megatron caches of a dataset, by its prefix and not by its content."""


def prefix_of(text: str) -> Path:
    """The prefix that --output gives.

    Raises:
        ConfigError: it names a folder, or one of the dataset's files.
    """
    path = Path(text)
    if "\0" in text:
        raise ConfigError(f"--output is {text!r}, which has a zero byte: name another prefix")
    if text.endswith(("/", os.sep)) or text.replace(os.sep, "/").split("/")[-1] in ("", ".", ".."):
        raise ConfigError(f"--output is {text!r}: give a prefix of files, such as data/books")
    for suffix in (".bin", ".idx"):
        if path.suffix == suffix:
            raise ConfigError(f"--output is {text}: leave {suffix} out, both files get their own")
    return path


class Output:
    """What is there, and will be there, under a prefix.

    Attributes:
        new: where the new dataset and its report are written.
    """

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self.final = {suffix: prefix.with_name(prefix.name + suffix) for suffix in FINAL}
        self.parts = prefix.with_name(prefix.name + PARTS)
        self.new = {suffix: self.parts / f"new{suffix}" for suffix in FINAL}
        self.cache = prefix / "cache" / "GPTDataset_indices"
        # Asked for each file of the input.
        self._real_final = {os.path.realpath(file) for file in self.final.values()}
        self._real_parts = os.path.join(os.path.realpath(self.parts), "")
        self._real_cache = os.path.join(os.path.realpath(self.cache), "")

    @contextmanager
    def replaced(self, overwrite: bool, keep_parts: bool) -> Iterator[None]:
        """Hold PREFIX.parts while the dataset is written to :attr:`new`, and give it its final names if the
        context ends without an exception.

        Then PREFIX.parts is removed but for ``keep_parts``; else it stays if parts of the input are done.
        Folders that were made and are empty are removed, too.

        Raises:
            ConfigError: another run holds it, a file is there that may not be replaced, or cannot be written.
        """
        with self._folder(), self._errors():
            if (foreign := _foreign(self.parts)) is not None:
                raise ConfigError(
                    f"--output is {self.prefix}, but {foreign} is not of an earlier run, and {self.parts} "
                    "would be removed at the end: name another prefix, or move it"
                )
            with locked_folder(self.parts, "--output"):
                moved = False
                try:
                    self._remove_unfinished()
                    self._refuse_existing(overwrite)
                    yield
                    self._refuse_existing(overwrite)  # of a program that does not ask for the lock
                    self._move()
                    moved = True
                finally:
                    if self.parts.is_dir():
                        self._remove_unfinished()
                        if (moved and not keep_parts) or not any(self.parts.glob(f"*{SUFFIX}")):
                            self._remove_parts()

    @contextmanager
    def _folder(self) -> Iterator[None]:
        """The folder of the prefix: made if it does not exist, and removed at the end if it is empty then."""
        parents = [self.prefix.parent, *self.prefix.parent.parents]
        missing = [folder for folder in parents if not os.path.lexists(folder)]
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--output is {self.prefix}, but the folder {self.prefix.parent} cannot be made: "
                f"{error.strerror or error}"
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):  # not empty: it has the dataset, or another run's
                for folder in missing:
                    folder.rmdir()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of writing here, not of some file that is read meanwhile, as one line."""
        try:
            yield
        except BrokenPipeError:  # of standard output
            raise
        except OSError as error:
            if isinstance(error.filename, str | os.PathLike):  # else it is of an open file
                file = Path(error.filename)
                ours = {*self.final.values(), self.parts, self.prefix}
                if file != self.prefix.parent and ours.isdisjoint((file, *file.parents)):
                    raise
            raise ConfigError(
                f"--output is {self.prefix}, which cannot be written: {error.strerror or error}; "
                "parts that are done are kept for the next run: make room, or name another prefix"
            ) from error

    def _refuse_existing(self, overwrite: bool) -> None:
        report = self.final[".json"]
        is_dataset = _is_report(report) or _is_index(self.final[".idx"])
        for file in filter(os.path.lexists, reversed(self.final.values())):
            if file.is_dir():
                problem = "is a folder: name another prefix"
            elif not overwrite:
                problem = "exists: name another prefix, or replace it with --overwrite"
            elif not is_dataset or (file == report and not _is_report(report)):
                problem = (
                    "is not the dataset or the report of an earlier run, and is not replaced: name another "
                    "prefix, or move it"
                )
            else:
                continue
            raise ConfigError(f"--output is {self.prefix}, but {file} {problem}")

    def _move(self) -> None:
        for path in self.new.values():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        _forget_cached(self.cache)
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

    def _remove_parts(self) -> None:
        """Remove PREFIX.parts, the lock last."""
        for path in self.parts.iterdir():
            if OURS.fullmatch(path.name) and path.name != LOCK:
                path.unlink()
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


def _forget_cached(cache: Path) -> None:
    """Remove what Megatron has cached of an earlier dataset, and would take for the new one's."""
    # Not through a link: what is there may be of another dataset.
    ours = not any(os.path.islink(path) for path in (cache, *cache.parents[:2]))
    cached = list(cache.glob(CACHED)) if ours else []
    for path in cached:
        path.unlink()
    for folder in (cache, *cache.parents[:2]) if cached else ():
        with suppress(OSError):  # it has other files
            folder.rmdir()


def _foreign(parts: Path) -> Path | None:
    """Something in a folder of parts, or in its place, that no run has written."""
    try:
        names = sorted(os.listdir(parts))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return parts
    for path in (parts / name for name in names):
        # What is gone since it was listed was removed by a run that is at work there: its lock will tell.
        if not (OURS.fullmatch(path.name) and _is_regular(path, gone=True)):
            return path
    return None


def _is_regular(file: Path, *, gone: bool = False) -> bool:
    """Neither a link, nor a pipe, which one would wait at. ``gone``: the answer if there is no such file."""
    try:
        return stat.S_ISREG(os.lstat(file).st_mode)
    except FileNotFoundError:
        return gone
    except OSError:
        return False


def _is_index(file: Path) -> bool:
    if not _is_regular(file):
        return False
    try:
        with open(file, "rb") as index:
            return index.read(len(INDEX)) == INDEX
    except OSError:
        return False


def _is_report(file: Path) -> bool:
    try:
        if not _is_regular(file) or file.stat().st_size > LARGEST_REPORT:
            return False
        about = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and WRITER in about
