# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows of ``benchmarks/results/*.jsonl``, and the one way in which they become a Markdown table."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Row = dict


@cache
def read(name: str) -> tuple[Row, ...]:
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines() if line)


def rows(name: str) -> tuple[Row, ...]:
    """The rows of ``results/NAME.jsonl``, oldest first."""
    return read(name)


def values(row: Row, *fields: str) -> tuple:
    """What a row has in some fields; None where it has not."""
    return tuple(map(row.get, fields))


def last(found: Iterable[Row], *fields: str) -> list[Row]:
    """Of rows with the same values of ``fields``, the last."""
    return list({json.dumps(values(row, *fields)): row for row in found}.values())


def grouped(found: Iterable[Row], key: Callable[[Row], object]) -> dict:
    """Rows by their key, in order."""
    groups: dict = {}
    for row in found:
        groups.setdefault(key(row), []).append(row)
    return groups


def mean(found: Iterable[Row], field: str) -> float:
    some = [row[field] for row in found]
    return sum(some) / len(some)


# Cells.


class _Cells(string.Formatter):
    """``str.format`` of a row, with format specs of its own:

    - ``K``: tokens, as 128K or 1M; ``gpu``: ``H100`` of ``NVIDIA H100 80GB HBM3``;
    - ``share`` with a number of digits (1): percent, 100% without digits;
    - ``over`` with a number of digits (2): percent with its sign.

    None is empty, and ``–`` if the spec begins with that.
    """

    def format_field(self, value, spec: str) -> str:
        own = re.fullmatch("(–?)(share|over|K|gpu)?(.*)", spec)
        assert own is not None
        dash, kind, rest = own.groups()
        if value is None:
            return dash
        if kind == "K":
            return f"{value // 1024}K" if value < 2**20 else f"{value // 2**20}M"
        if kind == "gpu":
            return value.removeprefix("NVIDIA ").partition(" ")[0]
        if kind == "share":
            return "100%" if value == 1 else f"{100 * value:.{rest or 1}f}%"
        if kind == "over":
            return f"{100 * value:+.{rest or 2}f}%".replace("-", "−")
        return format(value, rest)


def cell(text: str, row: Row | None = None, /, **more) -> str:
    """A text with fields of a row in it, as ``{seq:K}``; :class:`_Cells` says the formats."""
    return _Cells().vformat(text, (), {**(row or {}), **more})


Column = str | Callable[[Row], object]
"""A cell of each row: a text with fields (:func:`cell`), or what a function gives."""
Columns = dict[str, Column]


def filled(column: Column, row: Row) -> str:
    """A column's cell."""
    said = cell(column, row) if isinstance(column, str) else column(row)
    return "" if said is None else str(said)


@dataclass(frozen=True)
class Table:
    """A table, from rows of a file.

    Attributes:
        files: the file of the rows and others that they are from, by name, with spaces between.
        columns: by header, or what makes them from the rows that are shown. Empty columns are left out.
        where: which rows of the file count.
        newest: of rows with the same values of these fields, the last counts.
        find: what makes the rows that are shown from those that count. It may give rows a field ``used``: the
            rows of files that they are from, for the line below the table.
        order: the key by which they are sorted.
        origin: what the line below says of the rows' fields, each once.
    """

    files: str
    columns: Columns | Callable[[list[Row]], Columns]
    where: Callable[[Row], object] | None = None
    newest: tuple[str, ...] = ()
    find: Callable[[list[Row]], Iterable[Row]] | None = None
    order: Callable[[Row], tuple] | None = None
    origin: str = "{gpu}, torch {torch}, Triton {triton}"

    def shown(self) -> list[Row]:
        """The rows of the table."""
        found = [row for row in rows(self.files.split()[0]) if not self.where or self.where(row)]
        found = last(found, *self.newest) if self.newest else found
        found = list(self.find(found)) if self.find else found
        return sorted(found, key=self.order) if self.order else found

    def __call__(self) -> str:
        """Markdown, and the line that says where the rows are from."""
        found = self.shown()
        columns = self.columns(found) if callable(self.columns) else self.columns
        body = [[filled(column, row) for column in columns.values()] for row in found]
        used = [each for row in found for each in row.get("used", (row,))]
        names = ", ".join(f"`{file}.jsonl`" for file in self.files.split())
        said = {name: all_of(used, name) for name in used[0]}
        below = f"Rows: {names}; {self.origin.format_map(said)}; commit {said['commit']}."
        return f"{markdown(list(columns), body)}\n\n{below}"


def markdown(header: list[str], body: list[list[str]]) -> str:
    """Without columns that have nothing in any row."""
    shown = [at for at in range(len(header)) if any(line[at] for line in body)]
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line[at] for at in shown)} |" for line in lines)


def all_of(found: Iterable[Row], name: str) -> str:
    """What rows say, each once; a joined row says what several do."""
    each = (value for row in found for value in str(row.get(name)).split(", "))
    return ", ".join(dict.fromkeys(each)).replace("none", "no GPU" if name == "gpu" else "none")
