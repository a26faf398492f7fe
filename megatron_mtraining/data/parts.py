# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The folder of what is done so far: token ids of each part of the input, and what was counted in it.

A part is done when its .json is there, which is written last; every file is written under another name
and then renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ..config import ConfigError

LOCK = "lock"


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
            for path in self.folder.glob("*.partial"):
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
        if not others:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        keys = set(self.keys)
        for path in self.folder.iterdir():
            if path.name != LOCK and path.stem not in keys:
                path.unlink()
