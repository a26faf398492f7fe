# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Token ids of parts of the input, kept until all are packed: an interrupted run goes on from them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SUFFIX = ".part"
"""Of a part's file: token ids of one document after those of the other, then what was counted in it, as JSON
with the documents' lengths, and its size. It gets this name when it is whole and on the disk."""
SIZE = struct.Struct("<Q")


class Parts:
    """Parts that are done, in a folder.

    Args:
        keys: a name for each part, a hash of all that its token ids depend on: a part of a changed file,
            or tokenized in another way, is not found.
    """

    def __init__(self, folder: Path, keys: list[str]):
        self.folder, self.keys = folder, keys

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.keys[number]}{SUFFIX}"

    def save(self, number: int, documents: Iterator[np.ndarray], counts: dict) -> None:
        """Write the token ids of a part; ``counts`` may be filled in while ``documents`` are read."""
        lengths = []
        with self._written(self._path(number)) as file:
            for ids in documents:
                file.write(ids.tobytes())
                lengths.append(len(ids))
            about = json.dumps({**counts, "lengths": lengths}).encode()
            file.write(about + SIZE.pack(len(about)))

    def load(self, number: int) -> dict | None:
        """What was counted in a part, and ``lengths``: tokens of each document. None if it is not done."""
        try:
            file = open(self._path(number), "rb")
        except FileNotFoundError:
            return None
        with file:
            file.seek(-SIZE.size, os.SEEK_END)
            (size,) = SIZE.unpack(file.read(SIZE.size))
            file.seek(-size - SIZE.size, os.SEEK_CUR)
            return json.loads(file.read(size))

    def tokens(self, number: int):
        """The open file of a part, which begins with its token ids."""
        return open(self._path(number), "rb", buffering=0)

    def remove_others(self) -> None:
        """Remove parts that are not of this run."""
        ours = set(self.keys)
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path.stem not in ours:
                path.unlink()

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
