# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Running estimates of density and recall for each kind of data, and of how density follows the price.

A kind is the number of the dataset in the blend, and the length of the sample's longest document in powers of
two: the pattern search finds other densities in code than in prose, and in long documents than in short ones.
All ranks keep equal estimates: they observe the same sums and restore the same state.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ConfigError

PRIOR_DENSITY, PRIOR_RECALL = 0.18, 0.95
"""Estimates before the first observation, from text and code in benchmarks/results/patterns.jsonl at price
0.25."""
PRIOR_ELASTICITY = 0.7
"""Density is proportional to price to the power of minus the elasticity, which is 0.4 to 1 in these rows."""
PRIOR_WEIGHT = 1.0
"""Weight of the prior elasticity, in squared logarithms of multipliers. The weight of an observation is 0.2
if the price was raised by half, and 0.5 if it was lowered by half."""
ELASTICITY_BOUNDS = 0.1, 2.0
RATE = 0.1
"""Weight of one step's mean in the estimate of a kind, once it has been seen in 10 steps."""
FORGETTING = 0.98
"""Factor by which each step reduces the weight of earlier observations of elasticity."""
VERSION = 1


def kinds_of(datasets, longest) -> np.ndarray:
    """The kinds of samples.

    Args:
        datasets: whole numbers of datasets in the blend, ``[n]``.
        longest: tokens of each sample's longest document, ``[n]``.

    Returns:
        int32 ``[n, 2]``.
    """
    longest = np.maximum(np.asarray(longest, np.int64), 1)
    # frexp is exact where log2 may round up to the next power of two.
    buckets = np.frexp(longest.astype(np.float64))[1] - 1
    return np.stack((np.asarray(datasets, np.int64), buckets), -1).astype(np.int32)


class DensityEstimates:
    """Density and recall by kind, at the untuned price: exponential moving averages over steps."""

    def __init__(
        self,
        prior_density: float = PRIOR_DENSITY,
        prior_recall: float = PRIOR_RECALL,
        prior_elasticity: float = PRIOR_ELASTICITY,
    ):
        self._prior = prior_density, prior_recall
        self._prior_elasticity = prior_elasticity
        self._kinds: dict[tuple[int, int], list[float]] = {}  # density, recall, steps
        # Sums of x y and x x, x and y being logarithms of multiplier and density.
        self._slope = [0.0, 0.0]

    @property
    def elasticity(self) -> float:
        """At ``m`` times the price, density is multiplied by ``m ** -elasticity``."""
        xy, xx = self._slope
        slope = (self._prior_elasticity * PRIOR_WEIGHT - xy) / (PRIOR_WEIGHT + xx)
        return min(max(slope, ELASTICITY_BOUNDS[0]), ELASTICITY_BOUNDS[1])

    def density(self, kinds) -> np.ndarray:
        """Expected density, at the untuned price, of samples of kinds ``[..., 2]``: float64 ``[...]``."""
        return self._look_up(kinds, 0)

    def recall(self, kinds) -> np.ndarray:
        """Expected recall, as :meth:`density`."""
        return self._look_up(kinds, 1)

    def observe(self, kinds, density, recall, multipliers=None, weights=None) -> None:
        """Update the estimates with the observations of a step. Micro-batches whose density, recall or
        multiplier is not finite or out of range change none.

        Args:
            kinds: kinds of the samples of each micro-batch, ``[..., mbs, 2]``.
            density: observed density of each micro-batch, mean over layers and heads, ``[...]``.
            recall: recall of each micro-batch at the untuned price, mean over layers and heads, ``[...]``.
            multipliers: by which the price of each micro-batch was multiplied, ``[...]``; None for 1.
            weights: weights of the samples, for example their visible pairs, ``[..., mbs]``; None: equal
                weights.
        """
        kinds = np.asarray(kinds)
        density = np.asarray(density, np.float64).ravel()
        recall = np.asarray(recall, np.float64).ravel()
        size = kinds.shape[-2]
        kinds = kinds.reshape(-1, size, 2)
        moved = np.ones_like(density)
        if multipliers is not None:
            moved = np.asarray(multipliers, np.float64).ravel()
        shares = np.ones((len(density), size))
        if weights is not None:
            shares = np.asarray(weights, np.float64).reshape(-1, size)
        with np.errstate(invalid="ignore"):
            valid = (density > 0) & (density <= 1.001) & (recall >= 0) & (recall <= 1.001)
            valid &= np.isfinite(moved) & (moved > 0)
        valid &= np.isfinite(shares).all(1)
        if not valid.any():
            return
        kinds, shares = kinds[valid], shares[valid]
        density, recall, moved = (each[valid] for each in (density, recall, moved))
        self._observe_slope(kinds, shares, density, moved)
        untuned = np.minimum(density * moved**self.elasticity, 1.0)
        rows = kinds.reshape(-1, 2)
        for kind in np.unique(rows, axis=0):
            share = np.where((kinds == kind).all(-1), shares, 0.0).sum(1)
            if share.sum() <= 0:
                continue
            means = [float((share * each).sum() / share.sum()) for each in (untuned, recall)]
            now = self._kinds.setdefault((int(kind[0]), int(kind[1])), [0.0, 0.0, 0.0])
            now[2] += 1
            rate = max(RATE, 1 / now[2])
            now[:2] = [old + rate * (new - old) for old, new in zip(now, means)]

    def _observe_slope(self, kinds, shares, density, moved) -> None:
        """Update the elasticity with micro-batches of known kinds whose price was moved."""
        x = np.log(moved)
        seen = np.array(
            [all(tuple(kind) in self._kinds for kind in each.tolist()) for each in kinds]
        )
        use = seen & (np.abs(x) > 1e-3)
        self._slope = [FORGETTING * each for each in self._slope]
        if not use.any():
            return
        weight = shares[use] / np.maximum(shares[use].sum(1, keepdims=True), 1e-300)
        expected = (weight * self.density(kinds[use])).sum(1)
        y = np.log(density[use] / expected)
        self._slope[0] += float((x[use] * y).sum())
        self._slope[1] += float((x[use] ** 2).sum())

    def _look_up(self, kinds, column: int) -> np.ndarray:
        kinds = np.asarray(kinds)
        rows, at = np.unique(kinds.reshape(-1, 2), axis=0, return_inverse=True)
        values = np.array([self._nearest(int(a), int(b))[column] for a, b in rows], np.float64)
        return values[at.reshape(-1)].reshape(kinds.shape[:-1])

    def _nearest(self, dataset: int, bucket: int) -> tuple[float, float]:
        """Density and recall of the kind. If the kind is unknown: of the nearest length in its dataset, else
        in any dataset, else the prior."""
        known = self._kinds.get((dataset, bucket))
        if known is None and self._kinds:
            of_dataset = [kind for kind in self._kinds if kind[0] == dataset]
            near = min(of_dataset or self._kinds, key=lambda kind: (abs(kind[1] - bucket), kind))
            known = self._kinds[near]
        return self._prior if known is None else (known[0], known[1])

    def state(self) -> dict[str, Any]:
        """Plain numbers in dicts and lists, for a checkpoint."""
        kinds = [[*kind, *values] for kind, values in sorted(self._kinds.items())]
        return {"version": VERSION, "kinds": kinds, "slope": list(self._slope)}

    def restore(self, state) -> None:
        """Continue from the result of :meth:`state`.

        Raises:
            ConfigError: ``state`` is not such a result.
        """
        try:
            if state["version"] != VERSION:
                raise ValueError
            kinds = {
                (int(dataset), int(bucket)): [float(density), float(recall), float(steps)]
                for dataset, bucket, density, recall, steps in state["kinds"]
            }
            xy, xx = map(float, state["slope"])
            numbers = [xy, xx, *(number for values in kinds.values() for number in values)]
            if not all(map(math.isfinite, numbers)) or xx < 0:
                raise ValueError
            if not all(0 < d <= 1 and 0 <= r <= 1.01 and n >= 1 for d, r, n in kinds.values()):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError(
                "the checkpoint's estimates of density (mtraining_balance_reached) cannot be read: they are "
                f"not of version {VERSION}, or damaged"
            ) from None
        self._kinds, self._slope = kinds, [xy, xx]
