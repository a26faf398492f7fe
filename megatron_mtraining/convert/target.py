# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The folder that a conversion leaves: whole, or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from ..config import ConfigError

SLACK = 64 << 20
"""Bytes of disk beside the tensors: indexes, tokenizer files."""
OURS = ("latest_checkpointed_iteration.txt", "config.json")
"""What a folder has that may be replaced."""


@contextmanager
def whole(target: Path, size: int, overwrite: bool):
    """A new folder beside ``target``, which takes its name if the context ends well.

    Args:
        size: bytes that will be written.
        overwrite: replace a checkpoint or model that is there.

    Raises:
        ConfigError: the target exists, cannot be made, or the disk has too little room; nothing has
            changed then.
    """
    check(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise ConfigError(f"DST is {target}, which cannot be made: {error.strerror}") from None
    if size + SLACK > free:
        raise ConfigError(
            f"DST is {target}, which takes {(size + SLACK) / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are "
            "free there: make room, or name another disk"
        )
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"DST is {target}, which cannot be made: {error.strerror}") from None
    try:
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o777 & ~mask)  # mkdtemp's is for this user alone
        old = None
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
            target.replace(old)
        partial.replace(target)
        if old is not None:
            shutil.rmtree(old)
    except OSError as error:
        raise ConfigError(
            f"DST is {target}, which cannot be written: {error.strerror or error}"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check(target: Path, overwrite: bool) -> None:
    """Raise :class:`ConfigError` if there is something in ``target`` that may not be replaced."""
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise ConfigError(f"DST is {target}, which exists and is no folder: name another")
    content = [path.name for path in target.iterdir()]
    if not content:
        return
    if not overwrite:
        raise ConfigError(f"DST is {target}, which exists: name another folder, or --overwrite it")
    if not set(OURS) & set(content):
        raise ConfigError(
            f"DST is {target}, which has neither {' nor '.join(OURS)}: --overwrite replaces checkpoints and "
            "models only"
        )


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
