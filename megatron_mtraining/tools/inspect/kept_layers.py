# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Results of layers, kept until a run is complete: one that was ended goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ...errors import ConfigError
from ..common.atomic_output import LOCK, locked_folder

FOLDER = ".layers"
"""In the output folder."""
RUN = "run.json"
"""What the run is, in that folder."""


class KeptLayers:
    """Recall and density of the layers that are measured, in files."""

    def __init__(self, folder: Path):
        self.folder = folder

    def numbers(self) -> list[int]:
        """The layers that are there."""
        return sorted(int(path.stem) for path in self.folder.glob("*.npz"))

    def load(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Recall and density, float64 ``[settings, h]`` each; None if they are not there."""
        try:
            with np.load(self.folder / f"{layer}.npz", allow_pickle=False) as file:
                return file["recall"], file["density"]
        except FileNotFoundError:
            return None

    def save(self, layer: int, recall: np.ndarray, density: np.ndarray) -> None:
        new = self.folder / "new"
        with new.open("wb") as file:
            np.savez(file, recall=recall, density=density)
        os.replace(new, self.folder / f"{layer}.npz")

    def clear(self) -> None:
        """Remove all files but the lock."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                path.unlink()


@contextmanager
def kept_layers(output: Path, run: dict, *, overwrite: bool) -> Iterator[KeptLayers]:
    """Open what an earlier run with the same output has kept. It is removed if the context ends without an
    exception, or if no layer was measured.

    Args:
        run: all that the results depend on, for JSON, by the name that the command gives it.
        overwrite: begin again if the earlier run was another.

    Raises:
        ConfigError: the earlier run was another, or another process uses the output.
    """
    folder = output / FOLDER
    run = json.loads(json.dumps(run))
    with locked_folder(folder, "--output"):
        kept = KeptLayers(folder)
        try:
            _check_same(kept, run, overwrite)
            if kept.numbers():
                print(
                    f"{len(kept.numbers())} layers were measured before: going on", file=sys.stderr
                )
            (folder / RUN).write_text(json.dumps(run), encoding="utf-8")
            yield kept
        except BaseException:
            if not kept.numbers():
                _remove(folder)
            raise
        _remove(folder)


def measured_before(output: Path) -> int:
    """The number of layers that a run has kept, which was ended."""
    return len(KeptLayers(output / FOLDER).numbers())


def _check_same(kept: KeptLayers, run: dict, overwrite: bool) -> None:
    layers = kept.numbers()
    try:
        before = json.loads((kept.folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if before == run:
        return
    if layers and not overwrite:
        other = [name for name in run if (before or {}).get(name) != run[name]]
        raise ConfigError(
            f"--output is {kept.folder.parent}, which has {len(layers)} measured layers of an "
            f"interrupted run with another {other[0]}: give the same options to continue, name another "
            "folder, or --overwrite it"
        )
    kept.clear()


def _remove(folder: Path) -> None:
    with suppress(OSError):  # the next run says what is wrong there
        shutil.rmtree(folder)
