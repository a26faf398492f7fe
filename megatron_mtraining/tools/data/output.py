# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a run: ``PREFIX.bin``, ``PREFIX.idx``, ``PREFIX.json``, and the folder ``PREFIX.parts``.

``PREFIX.parts`` has the parts of the input that are done (see :mod:`.store`), and, while these are packed,
the new dataset. One run at a time holds its lock, under which existing files are checked. The dataset is
moved out of it at the end, the index last: without an index there is no dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from ...errors import ConfigError
from ..common.atomic_output import LOCK, is_of_a_run, locked_folder, writing
from .store import SUFFIX

FINAL = (".bin", ".json", ".idx")
"""Suffixes of what is left at the end, in the order in which they appear."""
PARTS = ".parts"
WRITER = "megatron_mtraining"
"""A key of every report of ours, and of no other file."""
CACHED = "*-GPTDataset-*"
"""Names of the indices that Megatron caches of a dataset, by its prefix and not by its content."""


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

        Raises:
            ConfigError: another run holds it, a file is there that may not be replaced, or cannot be written.
        """
        own = (self.parts, self.cache, *self.final.values())
        with (
            writing("--output", self.prefix, self.prefix.parent, *own),
            locked_folder(self.parts, "--output"),
        ):
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

    def _refuse_existing(self, overwrite: bool) -> None:
        replaceable = overwrite and _is_report(self.final[".json"])
        for file in filter(os.path.lexists, reversed(self.final.values())):
            if file.is_dir():
                problem = "is a folder: name another prefix"
            elif not overwrite:
                problem = "exists: name another prefix, or replace it with --overwrite"
            elif not replaceable:
                problem = (
                    "has no report of an earlier run beside it, and is not replaced: name another prefix, or "
                    "move it"
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
        for path in (*self.new.values(), *self.parts.glob("*.partial")):
            path.unlink(missing_ok=True)

    def _remove_parts(self) -> None:
        """Remove PREFIX.parts, the lock last."""
        for path in (*self.parts.glob(f"*{SUFFIX}"), self.parts / LOCK):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody has put a file there
            self.parts.rmdir()

    def holds(self, file: Path) -> bool:
        """Whether a file is one of those that this run writes, replaces or removes."""
        real = os.path.realpath(file)
        if real.startswith(self._real_cache):
            return fnmatch(real[len(self._real_cache) :], CACHED)
        return real in self._real_final or real.startswith(self._real_parts)

    def is_parts_of_another(self, folder: Path) -> bool:
        """Whether a folder has the parts of a run with another prefix, which was interrupted."""
        return folder.name.endswith(PARTS) and not self.holds(folder / LOCK) and is_of_a_run(folder)


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


def _is_report(file: Path) -> bool:
    try:
        # Not of a pipe, which one would wait at.
        about = json.loads(file.read_bytes()) if file.is_file() and not file.is_symlink() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and WRITER in about
