# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Results of all layers: what each head needs for the target recall, and recommended settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..report.table import table
from .sweep import Series

DENSE_ABOVE = 0.7
"""Heads that need a larger density for the target recall are recommended to be dense: sparse attention would
not be faster."""
DENSE_BELOW = 0.9
"""So are heads whose recall at the densest setting is below this fraction of the target."""


@dataclass(frozen=True)
class Point:
    """Where a series reaches the target: at a fraction of the way from a setting to the next denser one.

    Attributes:
        before: number of the setting.
        reached: False if the densest setting does not reach the target; this is the densest one then.
    """

    before: int
    fraction: float
    reached: bool

    def of(self, values: np.ndarray) -> np.ndarray:
        """Values ``[settings, ...]`` at this point, by linear interpolation."""
        if self.fraction == 0:
            return values[self.before]
        return (1 - self.fraction) * values[self.before] + self.fraction * values[self.before + 1]

    @property
    def denser(self) -> int:
        """The sparsest setting that is at least as dense as this point."""
        return self.before + (self.fraction > 0)


def reach(recall: np.ndarray, target: float) -> Point:
    """The sparsest point where recall ``[settings]``, from sparse to dense, is the target."""
    above = np.flatnonzero(recall >= target)
    if not len(above):
        return Point(len(recall) - 1, 0.0, False)
    first = int(above[0])
    if first == 0:
        return Point(0, 0.0, True)
    low, high = recall[first - 1], recall[first]
    return Point(first - 1, float((target - low) / (high - low)), True)


class Measured:
    """Recall and density of one series.

    Attributes:
        recall, density: float64 ``[settings, layers, h]``.
        needed: density at which each head reaches the target, ``[layers, h]``; that of the sparsest setting
            if this one does, infinite if none does.
        point: where the mean over all heads reaches the target.
    """

    def __init__(self, series: Series, recall: np.ndarray, density: np.ndarray, target: float):
        self.series, self.recall, self.density, self.target = series, recall, density, target
        self.needed = needed_density(recall, density, target)
        self.point = reach(recall.mean((1, 2)), target)

    @property
    def setting(self) -> dict:
        return self.series.between(self.point.before, self.point.fraction)

    def dense_heads(self) -> np.ndarray:
        """Heads that are better left dense: bool ``[layers, h]``."""
        out_of_reach = self.recall[-1] < DENSE_BELOW * self.target
        expensive = np.isfinite(self.needed) & (self.needed > DENSE_ABOVE)
        return out_of_reach | expensive


def needed_density(recall: np.ndarray, density: np.ndarray, target: float) -> np.ndarray:
    """Density at which each head's recall is the target; see :class:`Measured`."""
    needed = np.full(recall.shape[1:], np.inf)
    for place in np.ndindex(needed.shape):
        head = (slice(None), *place)
        point = reach(recall[head], target)
        if point.reached:
            needed[place] = point.of(density[head])
    return needed


def by_difficulty(needed: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Heads from easy to hard: by the density they need, ties by their recall. Both are ``[h]``."""
    return np.lexsort((-recall, needed))


class Recommendation:
    """The series that needs the least density for the target, with some heads left dense.

    Attributes:
        measured: the series.
        dense: bool ``[layers, h]``.
        point: where the mean over all heads reaches the target, counting dense heads as 1.
        recall, density: expected means over all heads.
    """

    def __init__(self, measured: list[Measured]):
        options = [self._of(one) for one in measured]
        # If none reaches the target, the one that comes closest.
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
        return self.measured.series.between(self.point.before, self.point.fraction)

    def settings_file(self) -> dict:
        """Options of MTrainingConfig, and under ``layers`` the layers and heads that stay dense."""
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
    """A table of the series, one of the layers, and the recommendation."""
    rows = []
    for one in measured:
        point = one.point
        recall, density = point.of(one.recall), point.of(one.density)
        limit = "" if point.reached else " (densest tried)"
        if point.reached and point.before == 0 and point.fraction == 0:
            limit = " (sparsest tried)"
        rows.append([
            one.series.label, one.series.describe(one.setting) + limit, f"{recall.mean():.1%}",
            f"{density.mean():.1%}", f"{recall.min():.1%}", f"{density.max():.1%}",
        ])  # fmt: skip
    header = [
        "policy, estimator",
        "setting",
        "recall",
        "density",
        "lowest recall",
        "highest density",
    ]
    parts = [f"For a mean recall of {target:.1%} over all heads:", table(header, rows)]

    best = recommended.measured
    rows = []
    for layer in range(best.needed.shape[0]):
        # A head that no setting is enough for needs all pairs.
        means = [np.minimum(one.needed[layer], 1).mean() for one in measured]
        hardest = int(by_difficulty(best.needed[layer], best.point.of(best.recall)[layer])[-1])
        needed = best.needed[layer, hardest]
        shown = f"{needed:.1%}" if np.isfinite(needed) else "not reached"
        rows.append([str(layer), *(f"{mean:.1%}" for mean in means), f"{hardest}: {shown}"])
    header = [
        "layer",
        *(one.series.label for one in measured),
        f"hardest head ({best.series.label})",
    ]
    parts += [
        f"\nDensity needed for a recall of {target:.1%}, mean over each layer's heads:",
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
    """Everything that was measured, for JSON; densities that are out of reach are null."""
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
        "series": [
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
                "settings": [
                    {
                        "settings": setting,
                        "mean_recall": _round(recall.mean()),
                        "mean_density": _round(density.mean()),
                        "recall": _round(recall),
                        "density": _round(density),
                    }
                    for setting, recall, density in zip(
                        one.series.settings, one.recall, one.density
                    )
                ],
            }
            for one in measured
        ],
    }


def _round(values):
    if np.ndim(values):
        return [_round(value) for value in values]
    return round(float(values), 5) if np.isfinite(values) else None
