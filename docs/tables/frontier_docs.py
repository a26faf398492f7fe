# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The frontier of accuracy and speed: joined rows of ``benchmarks.model.frontier``."""

from __future__ import annotations

from benchmarks.model import frontier_tables

from .common import Row, rows, source


def frontier_rows() -> list[Row]:
    """The joined rows."""
    return list(rows("frontier"))


def untrained() -> str:
    """The model as it is, by each policy and density."""
    found = [row for row in frontier_rows() if row["zero_over_dense"] is not None]
    return frontier_tables.untrained_table(found) + source(_apart(found), "frontier")


def after_training() -> str:
    """The model after training, own attention and judged dense."""
    found = [row for row in frontier_rows() if row["steps"]]
    return frontier_tables.trained_table(found) + source(_apart(found), "frontier")


def chosen() -> Row:
    """The row of policy price at 15%, with most seeds, of the shortest training."""
    found = [row for row in frontier_rows() if (row["policy"], row["wanted"]) == ("price", 0.15)]
    return min(
        (row for row in found if row["steps"]), key=lambda row: (-row["seeds"], row["steps"])
    )


def _apart(found: list[Row]) -> list[Row]:
    """A row for each commit, as a joined row may name several."""
    return [{**row, "commit": commit} for row in found for commit in row["commit"].split(", ")]
