# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Steps as ``mtraining plan layouts`` predicts them, beside measured ones."""

from __future__ import annotations

import statistics

from benchmarks.lib.planned import newest, planned

from .common import Row, Table, cell, rows


def _errors() -> list[float]:
    return [abs(_error(row)) for row in _predicted(list(rows("pretrain")))]


def _predicted(found: list[Row]) -> list[Row]:
    return [dict(row, predicted=planned(row).total) for row in newest(found)]


def _error(row: Row) -> float:
    return row["predicted"] / (row["iter_ms"] / 1000) - 1


def _attention(row: Row) -> str:
    if row["attention"] != "mtraining":
        return "dense, Transformer Engine"
    again = ", run twice" if "--mtraining-recompute-attention" in row["command"] else ""
    return cell("{density:share}", row) + again


predicted = Table(
    "pretrain",
    {
        "model": "{model}",
        "tokens": "{seq:K}",
        "sequences": "{batch}",
        "GPUs": "{world} {gpu:gpu}",
        "attention": _attention,
        "s / step": lambda row: f"{row['iter_ms'] / 1000:.2f}",
        "predicted": "{predicted:.2f}",
        "error": lambda row: f"{100 * _error(row):+.1f}%".replace("-", "−"),
    },
    find=_predicted,
    order=lambda row: (row["model"], row["seq"], row["world"], row["gpu"], row["density"]),
)

FIGURES = {
    "plan_median": lambda: f"{100 * statistics.median(_errors()):.1f}%",
    "plan_worst": lambda: f"{100 * max(_errors()):.1f}%",
}
