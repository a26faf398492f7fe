# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What follows from the recall and density of all layers: tables, numbers, recommended settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..report.table import table
from .sweep import Series

DENSE_ABOVE = 0.7
"""A head that takes a larger density than this for the target recall is named dense: its attention with a
pattern is no faster than without."""
DENSE_BELOW = 0.9
"""So is one that keeps less than this share of the target with the densest of the settings."""


@dataclass(frozen=True)
class Point:
    """Where a series reaches the target: ``share`` of the way from a setting to the next denser one."""

    before: int
    share: float
    reached: bool
    """Whether it does; if not, this is the densest setting."""

    def of(self, values: np.ndarray) -> np.ndarray:
        """Values ``[settings, ...]`` at this point, on the line between the two settings."""
        if self.share == 0:
            return values[self.before]
        return (1 - self.share) * values[self.before] + self.share * values[self.before + 1]

    @property
    def denser(self) -> int:
        """The sparsest setting that was tried and is as dense."""
        return self.before + (self.share > 0)


def reach(recall: np.ndarray, target: float) -> Point:
    """The sparsest point at which a recall ``[settings]``, from sparse to dense, is the target."""
    above = np.flatnonzero(recall >= target)
    if not len(above):
        return Point(len(recall) - 1, 0.0, False)
    first = int(above[0])
    if first == 0:
        return Point(0, 0.0, True)
    low, high = recall[first - 1], recall[first]
    return Point(first - 1, float((target - low) / (high - low)), True)


class Measured:
    """Recall and density of one series' settings.

    Attributes:
        recall, density: float64 ``[settings, layers, h]``.
        needed: density that each head takes for the target recall, ``[layers, h]``; infinite where the
            densest setting does not reach it. A head that the sparsest setting is enough for has its density.
        point: where the mean over all heads reaches the target.
    """

    def __init__(self, series: Series, recall: np.ndarray, density: np.ndarray, target: float):
        self.series, self.recall, self.density, self.target = series, recall, density, target
        self.needed = needed_density(recall, density, target)
        self.point = reach(recall.mean((1, 2)), target)

    @property
    def setting(self) -> dict:
        return self.series.between(self.point.before, self.point.share)

    def dense_heads(self) -> np.ndarray:
        """Heads that are better left dense: bool ``[layers, h]``."""
        out_of_reach = self.recall[-1] < DENSE_BELOW * self.target
        expensive = np.isfinite(self.needed) & (self.needed > DENSE_ABOVE)
        return out_of_reach | expensive


def needed_density(recall: np.ndarray, density: np.ndarray, target: float) -> np.ndarray:
    """Density at which each head's recall is the target; see :class:`Measured`."""
    shape = recall.shape[1:]
    needed = np.full(shape, np.inf)
    for place in np.ndindex(shape):
        here = (slice(None), *place)
        point = reach(recall[here], target)
        if point.reached:
            needed[place] = point.of(density[here])
    return needed


def by_difficulty(needed: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Numbers of heads from easy to hard: by the density they need and, where that is the same or out of
    reach, by a recall that they have. Both ``[h]``."""
    return np.lexsort((-recall, needed))


class Recommendation:
    """The series that takes the least density for the target, some heads left dense.

    Attributes:
        measured: of the series.
        dense: bool ``[layers, h]``.
        point: where the mean over all heads, with the dense ones at 1, is the target.
        recall, density: what is expected there, means over all heads.
    """

    def __init__(self, measured: list[Measured]):
        options = [self._of(one) for one in measured]
        # Where none reaches the target, the closest.
        best = min(options, key=lambda o: (not o[2].reached, o[4] if o[2].reached else -o[3]))
        self.measured, self.dense, self.point, self.recall, self.density = best

    @staticmethod
    def _of(measured: Measured):
        dense = measured.dense_heads()
        recall = np.where(dense, 1.0, measured.recall)
        density = np.where(dense, 1.0, measured.density)
        point = reach(recall.mean((1, 2)), measured.target)
        return measured, dense, point, point.of(recall).mean(), point.of(density).mean()

    @property
    def setting(self) -> dict:
        return self.measured.series.between(self.point.before, self.point.share)

    def settings_file(self) -> dict:
        """Fields of MTrainingConfig, and under ``layers`` the layers and heads that stay dense."""
        settings = dict(self.setting)
        layers = {}
        for layer, dense in enumerate(self.dense):
            if dense.all():
                layers[str(layer)] = {"dense": True}
            elif dense.any():
                heads = {str(head): {"dense": True} for head in np.flatnonzero(dense)}
                layers[str(layer)] = {"heads": heads}
        return settings | ({"layers": layers} if layers else {})


def summary(measured: list[Measured], recommended: Recommendation, target: float) -> str:
    """What is printed: a table of the series, one of the layers, and what is recommended."""
    rows = []
    for one in measured:
        point = one.point
        recall, density = point.of(one.recall), point.of(one.density)
        short = "" if point.reached else " (densest tried)"
        if point.reached and point.before == 0 and point.share == 0:
            short = " (sparsest tried)"
        rows.append([
            one.series.label, one.series.describe(one.setting) + short, f"{recall.mean():.1%}",
            f"{density.mean():.1%}", f"{recall.min():.1%}", f"{density.max():.1%}",
        ])  # fmt: skip
    header = ["policy, estimator", "setting", "recall", "density", "least recall", "most density"]
    parts = [f"For a mean recall of {target:.1%} over all heads:", table(header, rows)]

    best = recommended.measured
    rows = []
    for layer in range(best.needed.shape[0]):
        # Where even the densest setting is not enough, all pairs are.
        means = [np.minimum(one.needed[layer], 1).mean() for one in measured]
        hardest = int(by_difficulty(best.needed[layer], best.point.of(best.recall)[layer])[-1])
        most = _share(best.needed[layer, hardest])
        rows.append([str(layer), *(f"{mean:.1%}" for mean in means), f"{hardest}: {most}"])
    header = [
        "layer",
        *(one.series.label for one in measured),
        f"hardest head ({best.series.label})",
    ]
    parts += [
        f"\nDensity that a head takes for a recall of {target:.1%}, mean over the layer's heads:",
        table(header, rows),
    ]

    dense = int(recommended.dense.sum())
    heads = f"{dense} of {recommended.dense.size} heads dense, " if dense else ""
    parts.append(
        f"\nRecommended: {best.series.label}, {best.series.describe(recommended.setting)}, {heads}"
        f"for a recall of {recommended.recall:.1%} at a density of {recommended.density:.1%}"
    )
    if not recommended.point.reached:
        parts.append(f"No setting that was tried reaches {target:.1%}: this is the closest")
    return "\n".join(parts)


def numbers(measured: list[Measured], recommended: Recommendation, about: dict) -> dict:
    """Everything that was measured, as JSON takes it; densities that are out of reach are null."""
    series = []
    for one in measured:
        settings = []
        for setting, recall, density in zip(one.series.settings, one.recall, one.density):
            settings.append(
                {
                    "settings": setting,
                    "mean_recall": _round(recall.mean()),
                    "mean_density": _round(density.mean()),
                    "recall": _round(recall),
                    "density": _round(density),
                }
            )
        series.append(
            {
                "policy": one.series.policy,
                "estimator": one.series.estimator,
                "at_target": {
                    "reached": one.point.reached,
                    "settings": one.setting,
                    "mean_recall": _round(one.point.of(one.recall).mean()),
                    "mean_density": _round(one.point.of(one.density).mean()),
                },
                "density_needed": _round(one.needed),
                "settings": settings,
            }
        )
    return {
        **about,
        "layout": "recall, density and density_needed are [layer][head]",
        "recommended": {
            "policy": recommended.measured.series.policy,
            "estimator": recommended.measured.series.estimator,
            "reached": recommended.point.reached,
            "mean_recall": _round(recommended.recall),
            "mean_density": _round(recommended.density),
            "settings": recommended.settings_file(),
        },
        "series": series,
    }


def _share(value: float) -> str:
    return f"{value:.1%}" if np.isfinite(value) else "not reached"


def _round(values):
    if np.ndim(values):
        return [_round(value) for value in values]
    return round(float(values), 5) if np.isfinite(values) else None
