# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Finished samples, as lines of JSON in files: a run that was ended goes on where it was, and a larger one
adds to a smaller one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import ConfigError
from ..common.atomic_output import LOCK, locked_folder

FOLDER = "samples"
"""In the output folder."""


class KeptSamples:
    """The samples of one task with one attention, in a file whose first line says of which run they are.

    Args:
        file: the file; its folder exists and is locked.
        run: all that a sample's result depends on, by the names of options where there is one: messages have
            names and values.
        overwrite: begin again if the file is of another run.

    Raises:
        ConfigError: the file is of another run, or is damaged.
    """

    def __init__(self, file: Path, run: dict, *, overwrite: bool):
        self.file, self.run = file, json.loads(json.dumps(run))
        self.rows: dict[int, dict] = {}
        self._read(overwrite)

    def _read(self, overwrite: bool) -> None:
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return
        # A process that was killed may have left a part of the last line.
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            before = lines[0]["run"] if lines else self.run
            rows = {row["id"]: row for row in lines[1:]}
        except (ValueError, LookupError, TypeError, RecursionError):
            if overwrite:
                return
            raise ConfigError(
                f"{self.file} is damaged: remove it, or give --overwrite to measure its samples again"
            ) from None
        if before == self.run:
            self.rows = rows
            if len(whole) < len(content):
                with self.file.open("r+b") as file:
                    file.truncate(len(whole))
        elif rows and not overwrite:
            raise ConfigError(
                f"--output is {self.file.parents[1]}, where {self.file.name} has {len(rows)} samples of a "
                f"run that differs in {_differences(before, self.run)}: give the same options to go on, name "
                "another folder, or --overwrite them"
            )

    def get(self, number: int, prompt: str) -> dict | None:
        """A finished sample; None if it is not there.

        Args:
            prompt: a digest of what the model is given.

        Raises:
            ConfigError: the sample was made from something else.
        """
        row = self.rows.get(number)
        if row is not None and row["prompt"] != prompt:
            raise ConfigError(
                f"{self.file} has sample {number} with another prompt than now: its data or lm-eval have "
                "changed; name another --output, or remove the file"
            )
        return row

    def add(self, row: dict) -> None:
        """Keep a sample: numbers and texts by name, with its number as ``id`` and ``prompt``."""
        line = json.dumps(row, allow_nan=False) + "\n"
        if not self.rows:  # of this run: what is there is another's, or has no samples
            line = json.dumps({"run": self.run}) + "\n" + line
        with self.file.open("a" if self.rows else "w", encoding="utf-8") as file:
            file.write(line)
        self.rows[row["id"]] = row


def _differences(before: dict, now: dict) -> str:
    """The names whose values differ, with both values."""

    def shown(value) -> str:
        if value is None:
            return "none"
        return value if isinstance(value, str) else json.dumps(value)

    return ", ".join(
        f"{name} ({shown(before.get(name))} there, {shown(now.get(name))} now)"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    )


@contextmanager
def samples_folder(output: Path) -> Iterator[Path]:
    """The folder of samples in the output folder, locked. Both are made, and are removed again if the context
    leaves nothing in them.

    Raises:
        ConfigError: another run uses it, or it has files that no run has put there.
    """
    folder = output / FOLDER
    made = [path for path in (folder, output) if not path.exists()]
    output.mkdir(parents=True, exist_ok=True)
    try:
        with locked_folder(folder, "--output"):
            try:
                yield folder
            finally:
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
    finally:
        for path in made:
            with suppress(OSError):  # not empty
                path.rmdir()


def number_kept(output: Path) -> int:
    """The samples that earlier runs have kept."""
    total = 0
    for file in (output / FOLDER).glob("*.jsonl"):
        with file.open("rb") as lines:
            total += max(0, sum(line.endswith(b"\n") for line in lines) - 1)
    return total
