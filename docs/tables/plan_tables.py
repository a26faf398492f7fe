# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Steps as ``mtraining plan layouts`` predicts them, beside measured ones."""

from __future__ import annotations

import statistics
from functools import cache

from benchmarks.lib.planned import newest, planned
from megatron_mtraining.tools.plan.layouts import DENSE, OURS, Asked, Layout, fitting
from megatron_mtraining.tools.plan.rates import GPUS
from megatron_mtraining.tools.plan.shapes import shape_of
from megatron_mtraining.tools.plan.step_time import Hosts

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


@cache
def _published() -> tuple[Layout, Layout]:
    """The fastest layouts of the setting that MTraining's paper publishes, sparse and dense."""
    asked = Asked(shape_of("qwen2.5-3b"), 2**19, 32, GPUS["a100-40g"], Hosts(8, 25), 1, 0.15)
    sparse, dense = (
        [each for each in fitting(asked, backend) if each.setting.cp == 32]
        for backend in (OURS, DENSE[0])
    )
    return sparse[0], dense[0]


def _of_published(which: int) -> str:
    return f"{_published()[which].time.total:.1f} s"


FIGURES = {
    "plan_published": lambda: _of_published(0),
    "plan_published_dense": lambda: _of_published(1),
    "plan_published_ratio": lambda: (
        f"{_published()[1].time.total / _published()[0].time.total:.1f}"
    ),
    "plan_published_attention": lambda: cell(
        "{x:.0%}", x=_published()[1].time.attention / _published()[1].time.total
    ),
    "plan_median": lambda: f"{100 * statistics.median(_errors()):.1f}%",
    "plan_worst": lambda: f"{100 * max(_errors()):.1f}%",
}
