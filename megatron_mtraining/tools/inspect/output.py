# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files that a run leaves: all of them, or none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from ...config import ConfigError


@contextmanager
def all_or_nothing(folder: Path):
    """A new folder to write into, whose files appear in ``folder`` if the context ends well.

    What was there under the same names is replaced then; otherwise nothing changes.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Inside, so that moving is renaming.
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    except OSError as error:
        raise ConfigError(
            f"--output is {folder}, which cannot be written to ({error.strerror}): name another folder"
        ) from None
    try:
        yield partial
        for path in sorted(partial.iterdir()):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_settings(path: Path, settings: dict) -> None:
    """Write a settings file, YAML or JSON by its name, in one step.

    Raises:
        ConfigError: it cannot be written there.
    """
    if path.suffix in (".yaml", ".yml"):
        import yaml

        text = yaml.safe_dump(settings, sort_keys=False)
    else:
        text = json.dumps(settings, indent=1) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--settings is {path}, which cannot be written: {error.strerror}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
