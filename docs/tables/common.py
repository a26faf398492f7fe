# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows of ``benchmarks/results/*.jsonl``, and how they become Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Row = dict


@cache
def rows(name: str) -> tuple[Row, ...]:
    """The rows of ``results/NAME.jsonl``, oldest first."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines() if line)


NOT_MEASURED = "Not measured yet."
"""In place of a table whose file of rows is not there yet."""


def is_measured(name: str) -> bool:
    """Whether there is a file ``results/NAME.jsonl``."""
    return (RESULTS / f"{name}.jsonl").is_file()


def last(found: Iterable[Row], *fields: str) -> dict[tuple, Row]:
    """By the values of ``fields``, the last row that has them."""
    return {tuple(row.get(field) for field in fields): row for row in found}


def last_two(found: Iterable[Row], *fields: str) -> list[tuple[Row, Row]]:
    """Of rows with the same values of ``fields``, the last one of an earlier commit and the last of all; none
    of what one commit alone has measured."""
    measured: dict[tuple, list[Row]] = {}
    for row in found:
        measured.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    pairs = []
    for same in measured.values():
        earlier = [row for row in same if row["commit"] != same[-1]["commit"]]
        if earlier:
            pairs.append((earlier[-1], same[-1]))
    return pairs


def table(header: list[str], body: Iterable[list]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def source(found: Iterable[Row], *files: str) -> str:
    """The line below a table: files, GPU, versions and commits of its rows."""
    found = list(found)
    where = "no GPU" if all_of(found, "gpu") == "none" else measured_on(found)
    names = ", ".join(f"`{file}.jsonl`" for file in files)
    return f"\n\nRows: {names}; {where}; commit {all_of(found, 'commit')}."


def all_of(found: Iterable[Row], name: str) -> str:
    """What rows say, each once; a joined row says what several do."""
    each = (value for row in found for value in str(row[name]).split(", "))
    return ", ".join(dict.fromkeys(each))


def measured_on(found: list[Row]) -> str:
    """GPU and versions of rows."""
    return (
        f"{all_of(found, 'gpu')}, torch {all_of(found, 'torch')}, Triton {all_of(found, 'triton')}"
    )


def tokens(count: int) -> str:
    return f"{count // 1024}K" if count < 2**20 else f"{count // 2**20}M"


def percent(share: float, digits: int = 1) -> str:
    return "100%" if share == 1 else f"{100 * share:.{digits}f}%"


def gpu_name(gpu: str) -> str:
    """``H100`` of ``NVIDIA H100 80GB HBM3``."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]
