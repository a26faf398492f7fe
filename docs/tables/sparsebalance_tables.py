# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance over data-parallel ranks: measured steps."""

from __future__ import annotations

import statistics

from .common import Row, last, percent, rows, source, table

MODES = {
    "off": "off",
    "length": "batching by length",
    "cost": "batching by cost",
    "tuning": "tuning alone",
    "both": "**batching by cost, tuning**",
}


def ratio(slow: Row, fast: Row, name: str) -> str:
    return f"{slow[name] / fast[name]:.2f}x"


def row_of(row: Row, off: Row, length: Row) -> list[str]:
    return [
        f"{row['max_over_mean']:.2f}",
        f"{row['attention_ms']:.0f}",
        ratio(off, row, "attention_ms"),
        ratio(length, row, "attention_ms"),
        percent(row["idle_share"]),
        f"{row['step_ms'] / 1000:.2f}",
        ratio(off, row, "step_ms"),
        percent(row["density"]),
        f"{row['recall']:.3f}",
    ]


HEAD = [
    "max/mean",
    "attention, slowest rank, ms",
    "over off",
    "over length",
    "attention idle",
    "s / step",
    "over off",
    "density",
    "recall",
]


def over_ranks() -> str:
    """Whole steps of Megatron over data-parallel ranks, the modes of each layout and weights."""
    layout = ("gpus", "dp", "cp", "set", "weights", "texts")
    some, body = last(rows("sparsebalance"), *layout, "mode"), []
    for own in sorted({key[:-1] for key in some}):
        off, length = (some[(*own, mode)] for mode in ("off", "length"))
        for mode, label in MODES.items():
            row = some[(*own, mode)]
            low, high = row["multipliers"] or (1, 1)
            shape = f"{row['gpus']} = {row['dp']} x {row['cp']}"
            cells = [shape, label, *row_of(row, off, length)]
            cells.append(f"{statistics.mean(row['losses'][-row['steps'] :]):.4f}")
            cells.append(f"{low:.2f} to {high:.2f}" if low < high else "1")
            predicted = row["predicted_over_measured"]  # batching by length predicts no times
            body.append([*cells, "–" if predicted is None else f"{predicted:.2f}"])
    header = ["GPUs = DP x CP", "mode", *HEAD, "loss", "multipliers of the price"]
    return table([*header, "predicted / measured"], body) + source(some.values(), "sparsebalance")
