# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The folder that a conversion leaves: whole, or not at all."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...config import ConfigError
from . import leftovers
from .hf_folder import KEPT, TEMPLATES, WEIGHTS

SLACK = 64 << 20
"""Bytes of disk beside the tensors: indexes, tokenizer files."""


@dataclass(frozen=True)
class Kind:
    """What may be replaced: a folder that has ``mark``, and nothing but what a conversion writes.

    Attributes:
        files: a pattern of its files' paths, from the folder on.
    """

    name: str
    mark: str
    files: re.Pattern


_HF = "|".join((*map(re.escape, KEPT), r"config\.json", rf"{TEMPLATES}/[^/]+\.jinja"))
MODEL = Kind("model", "config.json", re.compile(rf"{_HF}|{WEIGHTS.pattern}"))
CHECKPOINT = Kind(
    "converted checkpoint",
    "latest_checkpointed_iteration.txt",
    re.compile(
        r"latest_checkpointed_iteration\.txt|megatron_args\.sh|"
        rf"release/(\.metadata|metadata\.json|common\.pt|__\d+_\d+\.distcp)|hf/({_HF})"
    ),
)


class Target:
    """A folder to be made.

    Args:
        path: where, as it was given; messages call it so.
        overwrite: replace what is there, if it is of that kind.
        kind: what will be made.
        sources: folders that are read, none of which may be in it, or it in one.

    Raises:
        ConfigError: there can be no such folder, or something in it may not be replaced.
    """

    def __init__(self, path: Path, overwrite: bool, kind: Kind, *sources: Path):
        self.given, self.overwrite, self.kind = path, overwrite, kind
        # Without dots and links, but for one that it is itself.
        plain = path.name not in ("", "..")
        self.path = _real(path.parent) / path.name if plain else _real(path)
        self.check_place(*sources)
        try:
            leftovers.clear(self.path)
        except OSError as error:
            raise self._cannot("made", error) from None
        self._check_content()

    def _cannot(self, what: str, error: OSError) -> ConfigError:
        reason = error.strerror or error
        return ConfigError(f"DST is {self.given}, which cannot be {what}: {reason}")

    def check_place(self, *sources: Path) -> None:
        """Raise :class:`ConfigError` where a folder cannot be made, of what is read from these."""
        if os.path.ismount(self.path):
            raise ConfigError(f"DST is {self.given}, a mount point: name a folder in it")
        here = _real(Path())
        if self.path == here or self.path in here.parents:
            raise ConfigError(
                f"DST is {self.given}, which is the current directory or has it inside: name another folder"
            )
        target = _real(self.path)
        for source in sources:
            read = _real(source)
            if target == read or target in read.parents or read in target.parents:
                how = "the same folder" if target == read else "one inside the other"
                raise ConfigError(
                    f"DST is {self.given}, and {source} is read: they are {how}; name a folder elsewhere"
                )

    def _check_content(self) -> None:
        path, given = self.path, self.given
        if not path.exists() and not path.is_symlink():
            return
        if not path.is_dir() or path.is_symlink():
            raise ConfigError(f"DST is {given}, which exists and is no folder: name another")
        if not any(path.iterdir()):
            return
        if not self.overwrite:
            raise ConfigError(
                f"DST is {given}, which exists: name another folder, or --overwrite it"
            )
        other = next(
            (
                file.relative_to(path)
                for file in path.rglob("*")
                if (file.is_symlink() or not file.is_dir())
                and not self.kind.files.fullmatch(file.relative_to(path).as_posix())
            ),
            None,
        )
        if other is not None or not (path / self.kind.mark).is_file():
            why = f"no {self.kind.mark}" if other is None else f"{other} in it"
            raise ConfigError(
                f"DST is {given}, which has {why}: --overwrite replaces a {self.kind.name} "
                "with nothing else in its folder; name another, or remove it yourself"
            )

    @contextmanager
    def whole(self, size: int):
        """A new folder beside the target, which takes its name if the context ends well.

        Args:
            size: bytes that will be written.

        Raises:
            ConfigError: the disk has too little room, or writing failed; all is as it was then.
        """
        self._check_content()
        new = [parent for parent in self.path.parents if not parent.exists()]
        try:
            self._check_room(size, self.path.parents[len(new)])
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                partial = leftovers.make(self.path, "partial")
            except OSError as error:
                raise self._cannot("made", error) from None
            try:
                yield partial
                self._put(partial)
            except OSError as error:
                named = error.filename
                if isinstance(named, str) and partial not in Path(named).parents:
                    reason = error.strerror or error
                    raise ConfigError(f"{named} cannot be read: {reason}") from None
                raise self._cannot("written", error) from None
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except BaseException:
            for parent in new:
                try:
                    parent.rmdir()
                except OSError:
                    break  # not made, or in use by another
            raise

    def _check_room(self, size: int, place: Path) -> None:
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            raise self._cannot("made", error) from None
        if size + SLACK > free:
            raise ConfigError(
                f"DST is {self.given}, which takes {(size + SLACK) / 2**30:.2f} GiB, and {free / 2**30:.2f} "
                "GiB are free there: make room, or name another disk"
            )

    def _put(self, partial: Path) -> None:
        """Give the new folder the target's name; the old one is there until it has."""
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o777 & ~mask)  # mkdtemp's is for this user alone
        if not self.path.exists():
            partial.rename(self.path)
            return
        old = leftovers.make(self.path, "old")
        try:
            self.path.rename(old)
            partial.rename(self.path)
        except BaseException:
            if not self.path.exists():
                old.rename(self.path)
            raise
        finally:
            if old.exists() and partial.exists():
                old.rmdir()  # nothing was moved
            elif old.exists():
                old.rename(partial)  # to be removed: of this name it is never put back


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises where links go round


class Progress:
    """A bar of bytes on standard error, where that is a terminal and tqdm is installed."""

    def __init__(self, what: str, size: int):
        self.bar = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self.bar = tqdm(
            total=size,
            desc=what,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=sys.stderr,
            disable=None,  # where it is no terminal
        )

    def advance(self, size: int) -> None:
        if self.bar is not None:
            self.bar.update(size)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.bar is not None:
            self.bar.close()
