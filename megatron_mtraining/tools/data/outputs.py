# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files that a run writes: they replace nothing else, and are not read as input."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from pathlib import Path

from ...config import ConfigError
from .parts import LOCK, Parts

FINAL = (".idx", ".bin", ".json")
PARTIAL = tuple(f"{suffix}.partial" for suffix in FINAL)
PARTS = ".parts"
WRITER = "megatron_mtraining"
"""What every report has, and no file of another's."""
LARGEST_REPORT = 2**26
INDEX = b"MMIDIDX\0\0"
"""What Megatron's .idx files begin with."""
CACHED = "*-GPTDataset-*"
"""Names of what Megatron keeps of a dataset."""


def beside(prefix: Path, suffix: str) -> Path:
    """A file whose name is the prefix's, as it stands, and ``suffix``."""
    return prefix.with_name(prefix.name + suffix)


def cache(prefix: Path) -> Path:
    """Where Megatron keeps its shuffling of the dataset."""
    return prefix / "cache" / "GPTDataset_indices"


def prefix_of(text: str) -> Path:
    """The prefix that --output gives.

    Raises:
        ConfigError: it names a folder, or no dataset's files.
    """
    path = Path(text)
    if text.endswith(("/", os.sep)) or text.replace(os.sep, "/").split("/")[-1] in ("", ".", ".."):
        raise ConfigError(f"--output is {text!r}: give a prefix of files, such as data/books")
    for suffix in (".bin", ".idx"):
        if path.suffix == suffix:
            raise ConfigError(f"--output is {text}: leave {suffix} out, both files get their own")
    return path


class Output:
    """What is there under a prefix.

    Args:
        prefix: of :func:`prefix_of`.
    """

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self.files = [beside(prefix, suffix) for suffix in (*FINAL, *PARTIAL)]
        self.parts = beside(prefix, PARTS)
        self._real = {os.path.realpath(file) for file in self.files}
        # For each file of the input: nothing that takes long.
        self._parts = os.path.join(os.path.realpath(self.parts), "")
        self._cache = os.path.join(os.path.realpath(cache(prefix)), "")

    def check(self, overwrite: bool) -> None:
        """Refuse what would be lost, or cannot be written.

        Raises:
            ConfigError: a file is there and is not to be replaced, or there can be none.
        """
        try:
            self._check(overwrite)
        except OSError as error:
            raise ConfigError(
                f"--output is {self.prefix}, which cannot be used: {error.strerror}; name another prefix"
            ) from None

    def _check(self, overwrite: bool) -> None:
        output, folder = self.prefix, self.prefix.parent
        if not folder.is_dir():
            raise ConfigError(f"--output is {output}, but the folder {folder} does not exist")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--output is {output}, but {folder} cannot be written to")
        foreign = Parts.foreign(self.parts)
        if foreign is not None:
            raise ConfigError(
                f"--output is {output}, but {foreign} is not of an earlier run, and {self.parts} would be "
                "removed at the end: name another prefix, or move it"
            )
        there = [file for file in self.files if _exists(file)]
        for file in there:
            if file.is_dir():
                raise ConfigError(
                    f"--output is {output}, but {file} is a folder: name another prefix"
                )
        # What an interruption leaves at the very end, if the parts are there too.
        unfinished = [] if not Parts.begun(self.parts) else [".bin", ".json", *PARTIAL]
        allowed = {beside(output, suffix) for suffix in unfinished}
        for file in there:
            if file not in allowed and not overwrite:
                raise ConfigError(
                    f"--output is {output}, but {file} exists: name another prefix, or replace it with "
                    "--overwrite"
                )
        report = beside(output, ".json")
        if report in there and not _is_report(report):
            raise ConfigError(
                f"--output is {output}, but {report} is not the report of an earlier run, and is not "
                "replaced: name another prefix, or move it"
            )

    def holds(self, file: Path) -> bool:
        """Whether a file is one of those that this run writes, replaces or removes."""
        real = os.path.realpath(file)
        return real in self._real or self._removed(real)

    def _removed(self, real: str) -> bool:
        """Whether it is in the folder of parts, which has no others' files, or kept by Megatron."""
        if real.startswith(self._cache):
            return fnmatch(real[len(self._cache) :], CACHED)
        return real.startswith(self._parts)

    def of_another_run(self, folder: Path) -> bool:
        """Whether a folder has the parts of a run with another prefix, which was interrupted."""
        of_some_run = folder.name.endswith(PARTS) and Parts.begun(folder)
        return of_some_run and Parts.foreign(folder) is None and not self.holds(folder / LOCK)

    def is_of_a_run(self, file: Path) -> bool:
        """Whether a file that this holds is there from an earlier run, and not by chance of the same name."""
        if self._removed(os.path.realpath(file)) or Parts.begun(self.parts):
            return True
        if _is_report(beside(self.prefix, ".json")):
            return True
        try:
            with open(beside(self.prefix, ".idx"), "rb") as index:
                return index.read(len(INDEX)) == INDEX
        except OSError:
            return False


def _exists(file: Path) -> bool:
    """Also a link to nothing. Unlike ``os.path.lexists``, a name that is too long is an error."""
    try:
        file.lstat()
    except FileNotFoundError:
        return False
    return True


def _is_report(file: Path) -> bool:
    try:
        if file.stat().st_size > LARGEST_REPORT:
            return False
        about = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and WRITER in about
