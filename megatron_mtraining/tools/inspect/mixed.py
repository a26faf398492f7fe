# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Heads that take lists of blocks where these keep more for their pairs than vertical-slash at a price.

A price is a share of attention for a share of the pairs, so each head takes what has the most ``recall -
price x density``: its pattern at that price, or one of the lists that were tried. The rows that judge decide,
too.
"""

from __future__ import annotations

import numpy as np

from ...config import BLOCK_POLICY_NAMES
from .results import Measured, Point, reach


class Mixed:
    """Vertical-slash at a price, or lists, of each head.

    Attributes:
        lists: settings of the heads that take lists, by (layer, head): fields of MTrainingConfig that differ
            from the others'.
        dense: heads that are better left dense either way, bool ``[layers, h]``.
        recall, density: what is expected, means over all heads.
        reached: whether the target is.
    """

    def __init__(self, slashes: Measured, lists: list[Measured]):
        self.slashes = slashes
        self.dense = np.logical_and.reduce([one.dense_heads() for one in (slashes, *lists)])
        recall = np.concatenate([one.recall for one in lists])
        density = np.concatenate([one.density for one in lists])
        settings = [
            _own(setting, slashes.series.settings[0])
            for one in lists
            for setting in one.series.settings
        ]
        curve, choices = [], []
        for at, setting in enumerate(slashes.series.settings):
            price = setting["price"]
            worth = recall - price * density
            best = worth.argmax(0)
            takes = worth.max(0) > slashes.recall[at] - price * slashes.density[at]
            takes &= ~self.dense
            choices.append((takes, best))
            curve.append(self._all(slashes.recall[at], recall, takes, best).mean())
        self.point: Point = reach(np.array(curve), slashes.target)
        takes, best = choices[self.point.denser]
        self.recall, self.density = (
            self._all(self.point.of(own), listed, takes, best).mean()
            for own, listed in ((slashes.recall, recall), (slashes.density, density))
        )
        self.reached = self.point.reached
        self.lists = {
            (int(layer), int(head)): settings[best[layer, head]]
            for layer, head in np.argwhere(takes)
        }

    def _all(self, slashes, listed, takes, best) -> np.ndarray:
        """Of each head, its own kind's recall, or density: 1 of a dense one."""
        of_best = np.take_along_axis(listed, best[None], 0)[0]
        return np.where(self.dense, 1.0, np.where(takes, of_best, slashes))

    def settings_file(self) -> dict:
        """Fields of MTrainingConfig, and under ``layers`` the heads that differ."""
        settings = self.slashes.series.between(self.point.before, self.point.share)
        layers: dict[str, dict] = {}
        for layer, head in np.ndindex(self.dense.shape):
            own = {"dense": True} if self.dense[layer, head] else self.lists.get((layer, head))
            if own:
                heads = layers.setdefault(str(layer), {"heads": {}})["heads"]
                heads[str(head)] = own
        return settings | ({"layers": layers} if layers else {})

    def summary(self) -> str:
        """A line on it."""
        short = "" if self.reached else " (the densest tried)"
        return (
            f"With lists of blocks in {len(self.lists)} of {self.dense.size} heads, vertical-slash in the "
            f"others, each what keeps more for its pairs: a recall of {self.recall:.1%} at a density of "
            f"{self.density:.1%}{short}"
        )

    def numbers(self) -> dict:
        """Everything, as JSON takes it."""
        return {
            "heads_with_lists": len(self.lists),
            "reached": self.reached,
            "mean_recall": round(float(self.recall), 5),
            "mean_density": round(float(self.density), 5),
            "settings": self.settings_file(),
        }


def mixed_of(measured: list[Measured]) -> Mixed | None:
    """The mix of what was measured; None without policy price with samples of all rows, or without lists."""
    slashes = [
        one for one in measured if (one.series.policy, one.series.estimator) == ("price", "strata")
    ]
    lists = [one for one in measured if one.series.policy in BLOCK_POLICY_NAMES]
    return Mixed(slashes[0], lists) if slashes and lists else None


def _own(setting: dict, base: dict) -> dict:
    """What a head's own settings must say beside the others'."""
    return {name: value for name, value in setting.items() if base.get(name) != value}
