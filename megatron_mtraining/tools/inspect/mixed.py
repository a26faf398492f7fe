# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block-sparse heads where that keeps more attention for its density than vertical-slash at a price.

The price weighs recall against density, so each head takes the pattern with the largest ``recall - price x
density``: vertical-slash at that price, or one of the block-sparse settings that were tried. The recall is
the one on the evaluated rows.
"""

from __future__ import annotations

import numpy as np

from ...config import BLOCK_POLICY_NAMES
from .results import Measured, reach


class Mixed:
    """Vertical-slash at one price, or a block-sparse setting, for each head.

    Attributes:
        block_sparse: options of the block-sparse heads, by (place of the layer, head).
        dense: heads that are better left dense either way, bool ``[layers, h]``.
        recall, density: expected means over all heads.
        point: the price, in the series of vertical-slash settings.
    """

    def __init__(self, slashes: Measured, lists: list[Measured]):
        self.slashes = slashes
        self.dense = np.logical_and.reduce([one.dense_heads() for one in (slashes, *lists)])
        recall = np.concatenate([one.recall for one in lists])
        density = np.concatenate([one.density for one in lists])
        means, choices = [], []
        for at, setting in enumerate(slashes.series.settings):
            price = setting["price"]
            gain = recall - price * density
            best = gain.argmax(0)
            sparse = gain.max(0) > slashes.recall[at] - price * slashes.density[at]
            choices.append((sparse & ~self.dense, best))
            means.append(self._mean(slashes.recall[at], recall, *choices[-1]))
        self.point = reach(np.array(means), slashes.target)
        sparse, best = choices[self.point.denser]
        self.recall = self._mean(self.point.of(slashes.recall), recall, sparse, best)
        self.density = self._mean(self.point.of(slashes.density), density, sparse, best)
        settings = [setting for one in lists for setting in one.series.settings]
        self.block_sparse = {
            (int(place), int(head)): settings[best[place, head]]
            for place, head in np.argwhere(sparse)
        }

    def _mean(self, slashes, lists, sparse, best) -> float:
        """The mean over all heads of recall or density, each with its own pattern."""
        of_best = np.take_along_axis(lists, best[None], 0)[0]
        return np.where(self.dense, 1.0, np.where(sparse, of_best, slashes)).mean()

    @property
    def setting(self) -> dict:
        """Options of the heads that are neither dense nor block-sparse."""
        return self.slashes.series.between(self.point.before, self.point.fraction)

    def setting_of(self, place: int, head: int) -> dict | None:
        """See :class:`.settled.Settings`."""
        if self.dense[place, head]:
            return None
        return self.block_sparse.get((place, head), self.setting)

    def settings_file(self) -> dict:
        """Options of MTrainingConfig, and under ``layers`` the options of heads that differ."""
        base = self.slashes.series.settings[0]
        layers: dict[str, dict] = {}
        for place, head in np.ndindex(self.dense.shape):
            own = {"dense": True} if self.dense[place, head] else {}
            for name, value in self.block_sparse.get((place, head), {}).items():
                if base.get(name) != value:
                    own[name] = value
            if own:
                layer = str(self.slashes.layers[place])
                layers.setdefault(layer, {"heads": {}})["heads"][str(head)] = own
        return self.setting | ({"layers": layers} if layers else {})

    def summary(self, recall: float | None = None, density: float | None = None) -> str:
        """One line.

        Args:
            recall, density: measured means with these settings; None if they are not written and only
                expected.
        """
        limit = "" if self.point.reached else " (the densest tried)"
        lists = f"{len(self.block_sparse)} of {self.dense.size} heads block-sparse"
        if recall is None or density is None:
            return (
                f"With {lists}, where that keeps more attention per density, expected: recall "
                f"{self.recall:.1%} at density {self.density:.1%}{limit} (--mixed)"
            )
        return (
            f"\nRecommended: {lists}, where that keeps more attention per density, the others "
            f"vertical-slash: recall {recall:.1%} at density {density:.1%} (measured with these settings)"
            f"{limit}: the settings file has these"
        )

    def numbers(self) -> dict:
        """Everything, for JSON."""
        return {
            "heads_with_lists": len(self.block_sparse),
            "reached": self.point.reached,
            "expected_recall": round(float(self.recall), 5),
            "expected_density": round(float(self.density), 5),
            "settings": self.settings_file(),
        }


def mixed_of(measured: list[Measured]) -> Mixed | None:
    """The mix of what was measured; None unless stratified price and a block-sparse policy are among it."""
    slashes = [
        one for one in measured if (one.series.policy, one.series.estimator) == ("price", "strata")
    ]
    lists = [one for one in measured if one.series.policy in BLOCK_POLICY_NAMES]
    return Mixed(slashes[0], lists) if slashes and lists else None
