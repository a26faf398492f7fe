# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Finished samples, as lines of JSON in files: a run that was ended goes on where it was, and a larger one
adds to a smaller one."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import ConfigError
from ..common.atomic_output import LOCK

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
        self.begun = self._read(overwrite)

    def _read(self, overwrite: bool) -> bool:
        """Whether the file can be added to."""
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return False
        # A process that was killed may have left a part of the last line.
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line, parse_constant=_refused) for line in whole.splitlines()]
            before = lines[0]["run"] if lines else None
            rows = {row["id"]: row for row in lines[1:]}
        except (ValueError, LookupError, TypeError):
            if overwrite:
                return False
            raise ConfigError(
                f"{self.file} is damaged: remove it, or give --overwrite to measure its samples again"
            ) from None
        if before is None:
            return False
        if before != self.run:
            if overwrite:
                return False
            raise ConfigError(
                f"--output is {self.file.parents[1]}, where {self.file.name} has {len(rows)} samples of a "
                f"run that differs in {_differences(before, self.run)}: give the same options to go on, name "
                "another folder, or --overwrite them"
            )
        self.rows = rows
        if len(whole) < len(content):
            with self.file.open("r+b") as file:
                file.truncate(len(whole))
        return True

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
        if not self.begun:
            self.file.write_text(json.dumps({"run": self.run}) + "\n", encoding="utf-8")
            self.begun = True
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.rows[row["id"]] = row


def _refused(constant: str) -> None:
    """Python's parser takes NaN and infinities for JSON; no sample has them."""
    raise ValueError(f"{constant} is not JSON")


def _differences(before: dict, now: dict) -> str:
    """The names whose values differ, with both values."""

    def shown(value) -> str:
        if value is None:
            return "none"
        return value if isinstance(value, str) else json.dumps(value)

    pairs = ((name, before.get(name), now.get(name)) for name in {**before, **now})
    return ", ".join(
        f"{name} ({shown(one)} there, {shown(other)} now)"
        for name, one, other in pairs
        if one != other
    )


def remove_if_unused(samples: Path) -> None:
    """Remove files of samples that have none, and the lock if nothing else is left.

    Args:
        samples: the folder, locked by this process. What others have put there stays.
    """
    for file in samples.glob("*.jsonl"):
        if file.is_symlink() or not file.is_file():
            continue
        with file.open("rb") as lines:
            header = lines.readline()
            if header.startswith(b'{"run": ') and header.endswith(b"\n") and not lines.read(1):
                file.unlink()
    if [path.name for path in samples.iterdir()] == [LOCK]:
        (samples / LOCK).unlink()


def number_kept(output: Path) -> int:
    """The samples that earlier runs have kept."""
    total = 0
    for file in (output / FOLDER).glob("*.jsonl"):
        with file.open("rb") as lines:
            total += max(0, sum(line.endswith(b"\n") for line in lines) - 1)
    return total
