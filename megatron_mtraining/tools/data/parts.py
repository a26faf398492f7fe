# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The folder of what is done so far: token ids of each part of the input, and what was counted in it.

A part is done when its .json is there, which is written last; every file is written under another name
and then renamed. Files of other names are not ours: a folder with one is not used, and none is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ...config import ConfigError

LOCK = "lock"
_OURS = re.compile(r"[0-9a-f]{32}\.(tokens|lengths|json)(\.partial)?")


@contextmanager
def written(path: Path, what: str = "--output"):
    """A binary file to write, which appears as ``path`` if the context ends well, and not at all otherwise.

    Raises:
        ConfigError: it cannot be written, as when the disk is full.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error, what) from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def cannot_write(path: Path, error: OSError, what: str = "--output") -> ConfigError:
    """What an OSError in writing ``path`` means."""
    return ConfigError(
        f"{path} ({what}) cannot be written: {error.strerror or error}; what was half written is removed, "
        "and parts that are done are kept for the next run"
    )


class Parts:
    """The folder, opened by one run at a time.

    Args:
        keys: a name for each part, of all that its token ids depend on: with another file, tokenizer or
            option it has another, and what was done before is not found.
    """

    def __init__(self, folder: Path, keys: list[str]):
        self.folder, self.keys = folder, keys

    @staticmethod
    def begun(folder: Path) -> bool:
        """Whether a run has opened the folder, and none removed it."""
        return os.path.isfile(folder / LOCK)

    @staticmethod
    def foreign(folder: Path) -> Path | None:
        """What is there and no run has written: something in the folder, or a file in its place."""
        try:
            names = sorted(os.listdir(folder))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            return folder
        for path in (folder / name for name in names):
            ours = path.name == LOCK or _OURS.fullmatch(path.name)
            if not (ours and path.is_file()):
                return path
        return None

    def _ours(self) -> list[Path]:
        """Files of parts: of this run, or of another before it."""
        return [path for path in self.folder.iterdir() if _OURS.fullmatch(path.name)]

    @contextmanager
    def opened(self):
        """Make the folder ready and hold it.

        Raises:
            ConfigError: another run holds it, or it cannot be written to.
        """
        try:
            self.folder.mkdir(exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise cannot_write(self.folder, error) from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.folder} is in use by another run with the same --output: wait for it, or name "
                    "another prefix"
                ) from None
            for path in self._ours():
                if path.suffix == ".partial":
                    path.unlink()
            yield self
        finally:
            os.close(lock)

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{self.keys[number]}{suffix}"

    def done(self, number: int) -> dict | None:
        """What was counted in a part, or None if it is not done."""
        try:
            counts = json.loads(self._path(number, ".json").read_bytes())
            whole = all(
                self._path(number, suffix).stat().st_size == size
                for suffix, size in counts["bytes"].items()
            )
        except (OSError, ValueError, KeyError):
            return None
        return counts if whole else None

    def lengths(self, number: int) -> np.ndarray:
        """Tokens of each document of a part: int64 ``[documents]``."""
        return np.fromfile(self._path(number, ".lengths"), np.int64)

    def tokens(self, number: int):
        """The open file of a part's token ids, one document's after the other's."""
        return open(self._path(number, ".tokens"), "rb", buffering=0)

    @contextmanager
    def writing(self, number: int):
        """A function that takes token ids of a document after the other, and a dict for what is counted."""
        lengths, counts = [], {}
        names = {suffix: self._path(number, suffix) for suffix in (".tokens", ".lengths", ".json")}
        with written(names[".tokens"], "a part") as file:

            def add(ids: np.ndarray) -> None:
                file.write(ids.tobytes())
                lengths.append(len(ids))

            yield add, counts
        with written(names[".lengths"], "a part") as file:
            file.write(np.array(lengths, np.int64).tobytes())
        sizes = {suffix: names[suffix].stat().st_size for suffix in (".tokens", ".lengths")}
        with written(names[".json"], "a part") as file:
            file.write(json.dumps({**counts, "bytes": sizes}).encode())

    def remove(self, others: bool = False) -> None:
        """Remove the folder, or only ``others``: what is of no part of this run."""
        keys = set(self.keys) if others else set()
        for path in self._ours():
            if path.stem not in keys:
                path.unlink()
        if not others:
            (self.folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # somebody has put a file there since
                self.folder.rmdir()
