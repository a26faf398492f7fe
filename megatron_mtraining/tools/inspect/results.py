# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Results of all layers: what each head needs for the target recall, and recommended settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..report.table import table
from .sweep import Series

DENSE_ABOVE = 0.7
"""Heads that need a larger density for the target recall are recommended to be dense: sparse attention would
not be faster."""
DENSE_BELOW = 0.9
"""So are heads whose recall at the densest setting is below this fraction of the target."""
LITTLE_TO_GAIN = 0.5
"""From this density on, training dense is the better choice (docs/settings.md)."""


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
        layers: the layers that were measured; arrays have one place for each.
        recall, density: float64 ``[settings, layers, h]``.
        needed: density at which each head reaches the target, ``[layers, h]``: the lowest density if the
            sparsest setting does, infinite if no setting does.
        point: where the mean over all heads reaches the target.
    """

    def __init__(
        self,
        series: Series,
        recall: np.ndarray,
        density: np.ndarray,
        target: float,
        layers: Sequence[int] | None = None,
    ):
        """
        Args:
            layers: None for all.
        """
        self.series, self.recall, self.density, self.target = series, recall, density, target
        self.layers = list(range(recall.shape[1]) if layers is None else layers)
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

    def setting_of(self, place: int, head: int) -> dict | None:
        """Options of MTrainingConfig for a head; None if it is dense.

        Args:
            place: of the layer among those that were measured.
        """
        return None if self.dense[place, head] else self.setting

    def settings_file(self) -> dict:
        """Options of MTrainingConfig, and under ``layers`` the layers and heads that stay dense."""
        settings = dict(self.setting)
        layers = {}
        for layer, dense in zip(self.measured.layers, self.dense):
            if dense.all():
                layers[str(layer)] = {"dense": True}
            elif dense.any():
                heads = {str(head): {"dense": True} for head in np.flatnonzero(dense)}
                layers[str(layer)] = {"heads": heads}
        return settings | ({"layers": layers} if layers else {})


def summary(measured: list[Measured], recommended: Recommendation, target: float) -> str:
    """A table of the series, and one of the layers."""
    rows = []
    for one in measured:
        point = one.point
        recall, density = point.of(one.recall), point.of(one.density)
        limit = "" if point.reached else " (densest tried)"
        if point.reached and point.before == 0 and point.fraction == 0:
            limit = " (sparsest tried)"
        rows.append([
            one.series.policy, one.series.describe(one.setting) + limit, f"{recall.mean():.1%}",
            f"{density.mean():.1%}", f"{recall.min():.1%}", f"{density.max():.1%}",
        ])  # fmt: skip
    header = [
        "policy",
        "setting",
        "recall",
        "density",
        "lowest recall",
        "highest density",
    ]
    parts = [f"For a mean recall of {target:.1%} over all heads:", table(header, rows)]

    best = recommended.measured
    rows = []
    for place, layer in enumerate(best.layers):
        # A head that no setting is enough for needs all pairs.
        means = [np.minimum(one.needed[place], 1).mean() for one in measured]
        hardest = int(by_difficulty(best.needed[place], best.point.of(best.recall)[place])[-1])
        needed = best.needed[place, hardest]
        shown = f"{needed:.1%}" if np.isfinite(needed) else "not reached"
        rows.append([str(layer), *(f"{mean:.1%}" for mean in means), f"{hardest}: {shown}"])
    header = [
        "layer",
        *(one.series.policy for one in measured),
        f"hardest head ({best.series.policy})",
    ]
    parts += [
        f"\nDensity needed for a recall of {target:.1%}, mean over each layer's heads:",
        table(header, rows),
    ]

    return "\n".join(parts)


def recommendation(
    recommended: Recommendation, recall: np.ndarray, density: np.ndarray, total_layers: int
) -> str:
    """The recommended settings, what was measured with them, and whether they are worth it.

    Args:
        recall, density: of each measured layer's heads with these settings, ``[layers, h]``.
    """
    best, dense = recommended.measured, int(recommended.dense.sum())
    heads = f"{dense} of {recommended.dense.size} heads dense, " if dense else ""
    lines = [
        f"\nRecommended: {best.series.policy}, {best.series.describe(recommended.setting)}, {heads}"
        f"recall {recall.mean():.1%} at density {density.mean():.1%} (measured with these settings)"
    ]
    if not recommended.point.reached:
        lines.append(f"No setting that was tried reaches {best.target:.1%}: this is the closest")
    if len(best.layers) < total_layers:
        lines.append(
            f"{len(best.layers)} of {total_layers} layers were measured. The others get the same setting, "
            "and none of their heads is dense; --layers all measures all"
        )
    if density.mean() >= LITTLE_TO_GAIN:
        lines.append(_why_dense(recommended))
    return "\n".join(lines)


def _why_dense(recommended: Recommendation) -> str:
    """Why a model on this text has little to gain from sparse attention."""
    best = recommended.measured
    sparsest, density = best.recall[0].mean(), best.density[0].mean()
    lines = (
        f"Sparse attention gains little here: train this model dense, or on longer text. "
        f"{best.dense_heads().mean():.0%} of the heads need more than {DENSE_ABOVE:.0%} of the pairs. "
    )
    if density >= 0.25:
        return lines + (
            f"The sequence is short: the local window and the sink columns alone, with the sparsest "
            f"setting, are {density:.0%} of the pairs. Use a larger --seq"
        )
    if sparsest < 2 * density:
        return lines + (
            f"Attention is nearly even, as with untrained weights: {density:.1%} of the pairs have "
            f"{sparsest:.1%} of it"
        )
    return lines + (
        f"Attention is spread widely: the sparsest setting has {sparsest:.1%} of it in {density:.1%} of the "
        f"pairs, and the last percents need most of the others. A lower --target-recall takes fewer"
    )


def numbers(
    measured: list[Measured],
    recommended: Recommendation,
    recall: np.ndarray,
    density: np.ndarray,
    about: dict,
) -> dict:
    """Everything that was measured, for JSON; densities that are out of reach are null.

    Args:
        recall, density: as of :func:`recommendation`.
    """
    return {
        **about,
        "layout": "recall, density and density_needed are [layer][head], of the layers in measured_layers",
        "measured_layers": recommended.measured.layers,
        "recommended": {
            "policy": recommended.measured.series.policy,
            "reached": recommended.point.reached,
            "expected_recall": _round(recommended.recall),
            "expected_density": _round(recommended.density),
            "settings": recommended.settings_file(),
        },
        "measured": {
            "settings": recommended.settings_file(),
            "mean_recall": _round(recall.mean()),
            "mean_density": _round(density.mean()),
            "recall": _round(recall),
            "density": _round(density),
        },
        "series": [
            {
                "policy": one.series.policy,
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
