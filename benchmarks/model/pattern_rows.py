# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows and tables of ``benchmarks/model/patterns.py``, from the recall and density of heads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import BlockListPolicy
from megatron_mtraining.tools.report.table import table

DEFAULT = ("price", "strata")
TARGETS = (0.9, 0.95, 0.98)
FALL = 0.002
"""A fall of recall with rising density that is pointed out."""


class Case(NamedTuple):
    """One setting of all heads."""

    policy: str
    estimator: str
    setting: str
    how: MTrainingConfig | BlockListPolicy
    """Settings of the search; a policy to select key blocks by alone."""

    @property
    def series(self) -> tuple[str, str]:
        return self.policy, self.estimator


class Measured(NamedTuple):
    """What all layers gave."""

    cases: list[Case]
    recall: np.ndarray  # float64 [cases, layers, 2, h], by half of the rows
    density: np.ndarray  # float64 [cases, layers, h]

    def numbers(self, *series: tuple[str, str]) -> list[int]:
        """Which cases are of these series."""
        return [number for number, case in enumerate(self.cases) if case.series in series]


def best_of(
    measured: Measured, options: list[int], price: float, same_rows: bool
) -> tuple[np.ndarray, ...]:
    """In each head, the case of ``options`` with the most ``recall - price x density``.

    Args:
        same_rows: whether the rows that judge decide too; else one half does, and the other judges, both ways
            around, and numbers are means of the two.

    Returns:
        Recall and density, float64 ``[layers, h]``, and the numbers of the cases, ``[2, layers, h]``.
    """
    recall, density = measured.recall[options], measured.density[options]
    decides = recall.mean(2, keepdims=True).repeat(2, 2) if same_rows else recall[:, :, ::-1]
    # [2, layers, h]: by the half that judges.
    place = (decides - price * density[:, :, None]).argmax(0).swapaxes(0, 1)
    of_half = np.moveaxis(recall, 2, 1)
    taken = np.take_along_axis(of_half, place[None], 0)[0].mean(0)
    pairs = np.take_along_axis(density[:, None].repeat(2, 1), place[None], 0)[0].mean(0)
    return taken, pairs, np.array(options)[place]


def row_of(policy, estimator, setting, recall, density) -> dict:
    """What a row says of all heads' recall and density, ``[layers, h]``."""
    return {
        "estimator": estimator,
        "policy": policy,
        "setting": setting,
        "density": round(float(density.mean()), 5),
        "recall": round(float(recall.mean()), 5),
        "recall_p10": round(float(np.quantile(recall, 0.1)), 5),
        "heads_below_0.9": round(float((recall < 0.9).mean()), 5),
    }


def rows_of(measured: Measured) -> list[dict]:
    """A row for each case, and those of heads that choose among cases."""
    cases, recall = measured.cases, measured.recall.mean(2)
    rows = [
        row_of(*case[:3], recall[number], measured.density[number])
        for number, case in enumerate(cases)
    ]
    lists = measured.numbers(("xattention", "own"))
    slashes = measured.numbers(DEFAULT)
    kinds = {
        "mixed": (True, False),
        "mixed, oracle choice": (True, True),
        "xattention, priced": (False, False),
    }
    for name, (with_slashes, same_rows) in kinds.items() if lists else ():
        for number in slashes:
            options = [number, *lists] if with_slashes else lists
            price = cases[number].how.policy.price
            *found, taken = best_of(measured, options, price, same_rows)
            row = row_of(name, "strata" if with_slashes else "own", f"price {price:g}", *found)
            rows.append({**row, "lists": round(float((taken != number).mean()), 5)})
    return rows


def series_of(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Rows by (policy, estimator), sparse ones first."""
    found: dict = {}
    for row in rows:
        found.setdefault((row["policy"], row["estimator"]), []).append(row)
    return {name: sorted(some, key=lambda row: row["density"]) for name, some in found.items()}


def at_recall(rows: list[dict], target: float) -> dict | None:
    """Density, ``recall_p10`` and ``heads_below_0.9`` where a series, sparse settings first, first has a
    recall of ``target``; None where its settings are all on one side of it."""
    for low, high in zip(rows, rows[1:]):
        if low["recall"] < target <= high["recall"]:
            lost = [np.log(max(1 - r, 1e-6)) for r in (low["recall"], target, high["recall"])]
            share = (lost[0] - lost[1]) / (lost[0] - lost[2])
            point = {
                name: float(low[name] + share * (high[name] - low[name]))
                for name in ("recall_p10", "heads_below_0.9")
            }
            log = np.log([low["density"], high["density"]])
            density = float(np.exp(log[0] + share * (log[1] - log[0])))
            return {"density": density, **point}
    return None


def _percent(value: float) -> str:
    return f"{value:.1%}"


def summary(rows: list[dict]) -> str:
    """Tables of the rows of one model, text and length."""
    series = series_of(rows)
    default = series[DEFAULT]
    lines = []
    for (policy, estimator), some in series.items():
        if policy == "fixed":
            continue
        for target in TARGETS:
            point, ours = at_recall(some, target), at_recall(default, target)
            line = [policy, estimator, f"{target:.0%}"]
            if point is None:
                first = some[0]["recall"] >= target
                line += [f"<{_percent(some[0]['density'])}" if first else "not reached", "", "", ""]
            else:
                line += [_percent(point[name]) for name in point]
                line.append(f"{point['density'] / ours['density']:.2f}" if ours else "")
            lines.append(line)
    head = ["policy", "estimator", "recall", "density", "p10", "below 0.9", "of default"]
    text = table(head, lines)
    lines = []
    for (policy, estimator), some in series.items():
        if policy != "fixed":
            continue
        for row in some:
            ours = at_recall(default, row["recall"])
            numbers = [row[n] for n in ("recall", "density", "recall_p10", "heads_below_0.9")]
            ratio = f"{row['density'] / ours['density']:.2f}" if ours else ""
            lines.append([estimator, row["setting"], *map(_percent, numbers), ratio])
    if lines:
        head = ["estimator", "fixed", "recall", "density", "p10", "below 0.9", "of default"]
        text += "\n\n" + table(head, lines)
    return "\n".join([text, *falls(series)])


def falls(series: dict[tuple[str, str], list[dict]]) -> list[str]:
    """Where recall falls as density rises, in words."""
    found = []
    for (policy, estimator), some in series.items():
        for low, high in zip(some, some[1:]):
            if policy != "fixed" and high["recall"] < low["recall"] - FALL:
                found.append(
                    f"{policy}, {estimator}: recall falls from {low['recall']:.4f} ({low['setting']}) to "
                    f"{high['recall']:.4f} ({high['setting']})"
                )
    return found
