# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance over data-parallel ranks: measured steps."""

from __future__ import annotations

import statistics

from .common import Row, Table, grouped, values

MODES = {
    "off": "off",
    "length": "batching by length",
    "cost": "batching by cost",
    "tuning": "tuning alone",
    "both": "**batching by cost, tuning**",
}
LAYOUT = ("gpus", "dp", "cp", "set", "weights", "texts")


def _modes(found: list[Row]) -> list[Row]:
    """The modes of each layout and weights, beside those that they are compared with."""
    some = []
    for _, own in sorted(grouped(found, lambda row: values(row, *LAYOUT)).items()):
        modes = {row["mode"]: row for row in own}
        for mode in MODES:
            some.append({**modes[mode], "off": modes["off"], "length": modes["length"]})
    return some


def _over(base: str, field: str):
    return lambda row: f"{row[base][field] / row[field]:.2f}x"


def _multipliers(row: Row) -> str:
    low, high = row["multipliers"] or (1, 1)
    return f"{low:.2f} to {high:.2f}" if low < high else "1"


over_ranks = Table(
    "sparsebalance",
    {
        "GPUs = DP x CP": "{gpus} = {dp} x {cp}",
        "mode": lambda row: MODES[row["mode"]],
        "max/mean": "{max_over_mean:.2f}",
        "attention, slowest rank, ms": "{attention_ms:.0f}",
        "attention over off": _over("off", "attention_ms"),
        "over length": _over("length", "attention_ms"),
        "attention idle": "{idle_share:share}",
        "s / step": lambda row: f"{row['step_ms'] / 1000:.2f}",
        "step over off": _over("off", "step_ms"),
        "density": "{density:share}",
        "recall": "{recall:.3f}",
        "loss": lambda row: f"{statistics.mean(row['losses'][-row['steps'] :]):.4f}",
        "multipliers of the price": _multipliers,
        "predicted / measured": "{predicted_over_measured:–.2f}",
    },
    newest=(*LAYOUT, "mode"),
    find=_modes,
)
"""Whole steps of Megatron over data-parallel ranks. Batching by length predicts no times."""
