# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Log of the balance of ranks: measured and predicted attention times of steps, and waits of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...balance.tuning import Group


@dataclass(frozen=True)
class StepRecord:
    """One step, by micro-batch and data-parallel rank: float64 ``[M, dp]`` each.

    Attributes:
        step: its number, from 0.
        measured_ms: attention time of all layers on one rank, forward and backward.
        density, recall: observed, means over layers and heads; NaN where no attention has run.
        planned: whether there was a plan. The attributes below come from the plan.
        predicted_ms, expected_density, expected_recall: at the untuned price; NaN without a plan, and times
            also where none are predicted.
        tuned_ms: predicted time at the tuned price.
        multipliers: multipliers of the price.
        mass: the share of attention mass that tuning takes away (negative: adds).
    """

    step: int
    measured_ms: np.ndarray
    density: np.ndarray
    recall: np.ndarray
    planned: bool
    predicted_ms: np.ndarray
    tuned_ms: np.ndarray
    multipliers: np.ndarray
    expected_density: np.ndarray
    expected_recall: np.ndarray
    mass: np.ndarray

    @classmethod
    def of(
        cls, step: int, seen: dict[str, np.ndarray], planned: dict[str, np.ndarray] | None
    ) -> StepRecord:
        """The record of a step, from the rows of its table and the rows of the previous table, which had its
        plan."""
        calls = seen["calls"]
        with np.errstate(invalid="ignore", divide="ignore"):
            density = seen["density_sum"] / calls
            recall = np.minimum(seen["recall_sum"] / calls, 1.0)  # shares are rounded up, too
        unknown = np.full_like(calls, np.nan)
        plan = planned or dict.fromkeys(("predicted_ms", "tuned_ms", "density", "recall"), unknown)
        return cls(
            step, seen["measured_ms"], density, recall, planned is not None,
            plan["predicted_ms"], plan["tuned_ms"],
            plan.get("multipliers", np.ones_like(calls)),
            plan["density"], plan["recall"],
            plan.get("mass", np.zeros_like(calls)),
        )  # fmt: skip

    def figures(self, group: Group) -> dict[str, float]:
        """Numbers of the step, by name. Milliseconds are times of the slowest rank, for which the
        others wait. ``idle-share`` is the mean share of the time that ranks wait, ``1 - mean / max``."""
        values = {}
        times = dict(measured=self.measured_ms)
        if self.planned and np.isfinite(self.predicted_ms).any():
            times.update(untuned=self.predicted_ms, predicted=self.tuned_ms)
        for name, cells in times.items():
            ratio = group.max_over_mean(cells)
            values[f"{name}-ms"] = group.slowest(cells)
            values[f"{name}-max-over-mean"] = ratio
            values[f"{name}-idle-share"] = 1 - 1 / ratio
        both = ("density", self.density), ("recall", self.recall)
        expected = self.expected_density, self.expected_recall
        for (name, cells), before in zip(both, expected):
            values[name] = _mean(cells)
            if self.planned:
                values[f"{name}-untuned"] = _mean(before)
        if self.planned:
            values["multiplier-lowest"] = float(self.multipliers.min())
            values["multiplier-highest"] = float(self.multipliers.max())
            values["mass-moved"] = float(np.abs(self.mass).mean())
        return values


def _mean(cells: np.ndarray) -> float:
    cells = cells[np.isfinite(cells)]
    return float(cells.mean()) if cells.size else float("nan")


class Interval:
    """The steps since the last line of the log: sums of their figures, and the last step."""

    def __init__(self):
        self.last: StepRecord | None = None
        self._sums: dict[str, list[float]] = {}

    def add(self, record: StepRecord, group: Group) -> None:
        """Count a step."""
        self.last = record
        for name, value in record.figures(group).items():
            if np.isfinite(value):
                entry = self._sums.setdefault(name, [0.0, 0])
                entry[0] += value
                entry[1] += 1

    def take(self) -> dict[str, float]:
        """Mean figures of the steps since the last call; empty if there were none."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means


def log_balance(iteration: int, interval: Interval) -> None:
    """Print and record the balance of the steps since the last call."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_last

    figures = interval.take()
    if not figures:
        return
    print_rank_last(line(iteration, figures))
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    values = {f"mtraining-balance/{name}": value for name, value in figures.items()}
    for name, value in values.items() if writer else ():
        writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)


def line(iteration: int, figures: dict[str, float]) -> str:
    """The line of the training log."""

    def time(name: str) -> str:
        return (
            f"{figures[f'{name}-ms']:.4g} ms (max/mean {figures[f'{name}-max-over-mean']:.3f}, "
            f"idle {figures[f'{name}-idle-share']:.1%})"
        )

    said = [
        f" [mtraining] iteration {iteration} | attention of the slowest rank: measured {time('measured')}"
    ]
    if "predicted-ms" in figures:
        said.append(f"predicted {time('predicted')}, untuned {time('untuned')}")
    if "density-untuned" in figures:
        for name in ("density", "recall"):
            seen = figures.get(name, float("nan"))
            said.append(
                f"{name} {figures[f'{name}-untuned']:.4f} expected untuned, {seen:.4f} seen"
            )
        said.append(
            f"price times {figures['multiplier-lowest']:.3g} to {figures['multiplier-highest']:.3g}"
        )
    return " | ".join(said)
