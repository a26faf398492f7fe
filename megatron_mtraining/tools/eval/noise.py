# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How far a mean over samples may be off: percentile bootstrap over the samples, the same in each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95


class Mean(NamedTuple):
    """A mean, and the interval of :data:`LEVEL` around it; None for the interval of a single sample."""

    value: float
    low: float | None
    high: float | None
    samples: int

    def numbers(self) -> dict:
        """For JSON."""
        return {"mean": self.value, "low": self.low, "high": self.high, "samples": self.samples}


def mean_of(values: Sequence[float], weights: Sequence[float] | None = None) -> Mean:
    """The mean of samples' values.

    Args:
        values: one or more.
        weights: of the samples, such as their numbers of tokens; they are drawn together with the values.
    """
    found = np.asarray(values, dtype=np.float64)
    weight = np.ones_like(found) if weights is None else np.asarray(weights, dtype=np.float64)
    mean = float((found * weight).sum() / weight.sum())
    if len(found) < 2:
        return Mean(mean, None, None, 1)
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(found), (RESAMPLES, len(found)))
    means = (found * weight)[drawn].sum(1) / weight[drawn].sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Mean(mean, float(low), float(high), len(found))
