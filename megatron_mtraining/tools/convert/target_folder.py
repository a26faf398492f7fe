# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The folder that a conversion writes: where it may be, and what it may replace."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ..common.atomic_output import atomic_folder
from .hf_folder import COPIED, TEMPLATES, WEIGHTS

SLACK = 64 << 20
"""Bytes of disk for what is written beside the tensors: indexes, tokenizer files."""


@dataclass(frozen=True)
class Kind:
    """A kind of folder that may be replaced: one with the file ``mark`` and only files of a conversion.

    Attributes:
        files: a pattern of the files' paths, relative to the folder.
    """

    name: str
    mark: str
    files: re.Pattern


_HF = "|".join((*map(re.escape, COPIED), r"config\.json", rf"{TEMPLATES}/[^/]+\.jinja"))
MODEL = Kind("model", "config.json", re.compile(rf"{_HF}|{WEIGHTS.pattern}"))
CHECKPOINT = Kind(
    "converted checkpoint",
    "latest_checkpointed_iteration.txt",
    re.compile(
        r"latest_checkpointed_iteration\.txt|megatron_args\.sh|"
        rf"release/(\.metadata|metadata\.json|common\.pt|integrity\.json|__\d+_\d+\.distcp)|hf/({_HF})"
    ),
)


class Target:
    """A folder to write.

    Args:
        path: as it was given; messages name it so.
        overwrite: replace a folder of the same kind.
        kind: what will be written.
        sources: folders that are read. None may contain the target, or lie in it.

    Raises:
        ConfigError: no folder can be written there, or what is there may not be replaced.
    """

    def __init__(self, path: Path, overwrite: bool, kind: Kind, *sources: Path):
        self.given, self.overwrite, self.kind = path, overwrite, kind
        # Its parents are resolved, but not the path itself: a link there is refused.
        named = path.name not in ("", "..")
        self.path = _real(path.parent) / path.name if named else _real(path)
        self.check_place(*sources)
        self._check_content()

    def check_place(self, *sources: Path) -> None:
        """Raise :class:`ConfigError` if the target may not be there, given that these folders are read."""
        target = _real(self.path)
        for source in sources:
            read = _real(source)
            if target == read or target in read.parents or read in target.parents:
                how = "the same folder" if target == read else "one inside the other"
                raise ConfigError(
                    f"DST is {self.given}, and {source} is read: they are {how}; name another folder"
                )

    def _check_content(self) -> None:
        path, given = self.path, self.given
        if not os.path.lexists(path):
            return
        if not path.is_dir() or path.is_symlink():
            raise ConfigError(f"DST is {given}, which exists and is not a folder: name another")
        if not any(path.iterdir()):
            return
        if not self.overwrite:
            raise ConfigError(
                f"DST is {given}, which exists: name another folder, or replace it with --overwrite"
            )
        for name in self._files():
            if not self.kind.files.fullmatch(name):
                self._refuse_to_replace(f"contains {name}")
        if not (path / self.kind.mark).is_file():
            self._refuse_to_replace(f"has no {self.kind.mark}")

    def _files(self) -> Iterator[str]:
        """Paths in the target of all that is no folder."""
        for folder, folders, files in os.walk(self.path):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in (*files, *links):
                yield os.path.relpath(os.path.join(folder, name), self.path)

    def _refuse_to_replace(self, why: str) -> None:
        raise ConfigError(
            f"DST is {self.given}, which {why}: --overwrite replaces a {self.kind.name} with nothing else in "
            "its folder; name another folder, or remove it yourself"
        )

    @contextmanager
    def written(self, size: int) -> Iterator[Path]:
        """A new folder to write into, which becomes the target if the context ends without an exception.

        Args:
            size: bytes that will be written.

        Raises:
            ConfigError: there is too little disk space, or writing failed; nothing has changed then.
        """
        parent = next(path for path in self.path.parents if path.exists())
        free = shutil.disk_usage(parent).free
        if size + SLACK > free:
            raise ConfigError(
                f"DST is {self.given}, which needs {(size + SLACK) / 2**30:.2f} GiB, and {free / 2**30:.2f} "
                "GiB are free there: make room, or name a folder on another disk"
            )

        def check(path: Path) -> None:
            self._check_content()

        with atomic_folder(self.path, option="DST", check=check) as folder:
            yield folder


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for circular links


def progress(what: str, size: int):
    """A tqdm bar of bytes on standard error, if that is a terminal."""
    from tqdm import tqdm

    unit = dict(unit="B", unit_scale=True, unit_divisor=1024)
    return tqdm(total=size, desc=what, disable=None, **unit)
