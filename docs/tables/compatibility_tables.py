# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What trains with which Megatron-LM (``benchmarks/matrix.py``)."""

from __future__ import annotations

from .common import Row, Table, grouped, markdown

SHOWN = {"equal": "yes", "refused": "refused", "missing": "–"}
"""Of outcomes; others are shown as they are."""


def _by_case(found: list[Row]) -> list[Row]:
    """A row of each case, with those of all versions; cases of a group together."""
    cases = grouped(found, lambda row: (row["group"], row["case"]))
    groups = list(dict.fromkeys(group for group, _ in cases))
    return [
        {**used[0], "used": tuple(used), "of": {row["megatron"]: row for row in used}}
        for _, used in sorted(cases.items(), key=lambda case: groups.index(case[0][0]))
    ]


def _columns(cases: list[Row]) -> dict:
    versions = sorted({version for case in cases for version in case["of"]}, key=_number)

    def outcome(version: str):
        def of_case(case: Row) -> str:
            row = case["of"].get(version)
            return "" if row is None else SHOWN.get(row["outcome"], row["outcome"])

        return of_case

    return {"": "{group}", "case": "{case}", **{each: outcome(each) for each in versions}}


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


matrix = Table(
    "compatibility",
    _columns,
    newest=("megatron", "group", "case"),
    find=_by_case,
    origin="torch {torch}",
)


def refusals() -> str:
    """The refused options, from the code's own table."""
    from megatron_mtraining.megatron.checks import REFUSALS

    rows = [[f"`{each.given(True)}`", each.why, each.advice] for each in REFUSALS]
    return markdown(["option", "why", "instead"], rows)
