# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows and tables of ``benchmarks/model/patterns.py``, from the recall and density of heads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import BlockListPolicy
from megatron_mtraining.tools.report.table import table

DEFAULT = ("price", "strata")


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


def summary(rows: list[dict]) -> str:
    """A line for each row, sparse ones of a series first. docs/tables/pattern_tables.py reads densities at a
    recall from them."""
    names = ("density", "recall", "recall_p10", "heads_below_0.9")
    rows = sorted(rows, key=lambda row: (row["policy"], row["estimator"], row["density"]))
    lines = [
        [row["policy"], row["estimator"], row["setting"], *(f"{row[n]:.1%}" for n in names)]
        for row in rows
    ]
    return table(["policy", "estimator", "setting", "density", "recall", "p10", "below 0.9"], lines)
