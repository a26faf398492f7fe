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
import stat
import zlib
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
RECORD = "inputs"
"""In PREFIX.parts: the states of the files that its parts are of."""
OURS = re.compile(
    rf"{LOCK}|new\.(bin|json|idx)|({RECORD}|[0-9a-f]{{32}}\.(tokens|lengths|json))(\.partial)?"
)
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
    if "\0" in text:
        raise ConfigError(f"--output is {text!r}, which has a zero byte: name another prefix")
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
        """Make the folder of the prefix, and hold PREFIX.parts. At the end, PREFIX.parts is removed unless
        parts of the input are done, and folders that were made and are empty are removed, too.

        Raises:
            ConfigError: another run holds it, a file is there that may not be replaced, or cannot be written.
        """
        self._overwrite = overwrite
        with self._folder():
            try:
                self._refuse_foreign()
                with locked_folder(self.parts, "--output"):
                    try:
                        self._remove_unfinished()
                        self._refuse_existing()
                        yield
                    finally:
                        if self.parts.is_dir():
                            self._remove_unfinished()
                            if not any(path.suffix == ".json" for path in self.parts.iterdir()):
                                self.remove_parts()
            except OSError as error:
                if not self._is_about(error):
                    raise  # another file, or standard output
                raise ConfigError(
                    f"--output is {self.prefix}, which cannot be written: {error.strerror or error}; "
                    "parts that are done are kept for the next run: make room, or name another prefix"
                ) from error

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

    def _refuse_foreign(self) -> None:
        foreign = _foreign(self.parts)
        if foreign is not None:
            raise ConfigError(
                f"--output is {self.prefix}, but {foreign} is not of an earlier run, and {self.parts} would "
                "be removed at the end: name another prefix, or move it"
            )

    def _is_about(self, error: OSError) -> bool:
        """Whether it comes from writing here, and not from some file that was read meanwhile."""
        if isinstance(error, BrokenPipeError):
            return False
        if not isinstance(error.filename, str | os.PathLike):  # of an open file
            return True
        file = Path(error.filename)
        ours = (*self.final.values(), self.parts, self.prefix)
        return file in (*ours, self.prefix.parent) or not {*ours}.isdisjoint(file.parents)

    def _refuse_existing(self) -> None:
        output, report = self.prefix, self.final[".json"]
        is_dataset = _is_report(report) or _is_index(self.final[".idx"])
        for file in filter(os.path.lexists, reversed(self.final.values())):
            if file.is_dir():
                raise ConfigError(
                    f"--output is {output}, but {file} is a folder: name another prefix"
                )
            if not self._overwrite:
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

        Raises:
            ConfigError: another program has written a file there meanwhile that may not be replaced.
        """
        self._refuse_existing()
        # Not through a link: what is there may be of another dataset.
        ours = not any(os.path.islink(path) for path in (self.cache, *self.cache.parents[:2]))
        cached = list(self.cache.glob(CACHED)) if ours else []
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
            kept = (LOCK, RECORD, *but) if but is not None else (LOCK,)
            if OURS.fullmatch(path.name) and path.stem not in kept:
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
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            counts = None
        return counts if _are_counts(counts) else None

    def is_whole(self, number: int, counts: dict) -> bool:
        """Whether the files of a part that is done are those that were written, to the byte."""
        try:
            return all(_sum(self._path(number, name)) == counts["sums"][name] for name in SUMMED)
        except OSError:
            return False

    def changed(self, files: dict) -> list[str]:
        """Files of the run before that are others now, by path; and remember ``files`` for the next run.

        Args:
            files: states by path.
        """
        record = self.folder / RECORD
        now = {path: list(vars(state).values()) for path, state in files.items()}
        try:
            before = json.loads(record.read_bytes())
        except (OSError, ValueError, RecursionError):
            before = {}
        before = before if isinstance(before, dict) else {}
        with self._written(record) as file:
            file.write(json.dumps(now).encode())
        return [path for path, state in now.items() if before.get(path, state) != state]

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
        lengths, total = [], 0
        with self._written(self._path(number, ".tokens")) as file:
            for ids in documents:
                data = ids.tobytes()
                file.write(data)
                total = zlib.crc32(data, total)
                lengths.append(len(ids))
        data = np.array(lengths, np.int64).tobytes()
        with self._written(self._path(number, ".lengths")) as file:
            file.write(data)
        counts["sums"] = {".tokens": total, ".lengths": zlib.crc32(data)}
        with self._written(self._path(number, ".json")) as file:
            file.write(json.dumps(counts).encode())

    @contextmanager
    def _written(self, path: Path):
        partial = path.with_name(f"{path.name}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with open(os.open(partial, flags, 0o666), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


SUMMED = (".tokens", ".lengths")


def _sum(file: Path) -> int:
    """A checksum against accidents: a part of a disk that is full, or fails."""
    total = 0
    with open(file, "rb") as opened:
        while data := opened.read(2**20):
            total = zlib.crc32(data, total)
    return total


def _are_counts(counts) -> bool:
    """Whether a file's content is what :meth:`Parts.write` has written."""
    if not isinstance(counts, dict):
        return False
    names, sums = counts.get("skipped_names"), counts.get("sums")
    return (
        all(_is_count(counts.get(name)) for name in ("empty", "with_eod", "skipped"))
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and isinstance(sums, dict)
        and all(_is_count(sums.get(name)) for name in SUMMED)
        and all(_is_place(counts.get(name, 0)) for name in ("shortest", "longest"))
    )


def _is_count(value) -> bool:
    return type(value) is int and value >= 0


def _is_place(value) -> bool:
    """Tokens, file, number and document of one, or nothing where there is no document."""
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != 4 or not isinstance(value[1], str):
        return False
    return _is_count(value[0]) and _is_count(value[2]) and (value[3] is None or _is_count(value[3]))
