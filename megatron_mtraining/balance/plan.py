# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The plan of one step: the rank and micro-batch of each sample, and the expected cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from .estimates import DensityEstimates, kinds_of
from .placement import megatron_order, place

Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Returns milliseconds of attention on one rank, forward and backward of the whole model, of samples with
these visible pairs and densities (attended / visible pairs); vectorized over samples."""


class Samples(NamedTuple):
    """Properties of the samples of a global batch, in Megatron's order, known without reading the samples."""

    numbers: np.ndarray
    """int64 ``[n]``: numbers of the samples in the dataset."""
    datasets: np.ndarray
    """int32 ``[n]``: the number of each one's dataset in the blend."""
    longest: np.ndarray
    """int64 ``[n]``: tokens of the longest document."""
    pairs: np.ndarray
    """float64 ``[n]``: visible query-key pairs, the sum of l (l + 1) / 2 over documents of l tokens."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Placement and expectations of one step, of M micro-batches of mbs samples on each of dp ranks.

    Attributes:
        step: number of the step, from 0.
        order: int64 ``[M, dp, mbs]``: numbers of samples in the dataset.
        kinds: int32 ``[M, dp, mbs, 2]``: see :mod:`.estimates`.
        pairs: float64 ``[M, dp, mbs]``: visible query-key pairs.
        predicted_ms: float64 ``[M, dp]``: attention of the whole model on one rank, forward and backward, at
            the untuned price; NaN where times are not predicted.
        density: float64 ``[M, dp]``: expected share of the visible pairs that is attended, at the same price.
        recall: float64 ``[M, dp]``: expected recall at the untuned price. Density and recall are means over
            the samples of a micro-batch, weighted by their pairs.
    """

    step: int
    order: np.ndarray
    kinds: np.ndarray
    pairs: np.ndarray
    predicted_ms: np.ndarray
    density: np.ndarray
    recall: np.ndarray


@dataclass(frozen=True)
class PlanSizes:
    """The sizes of a step.

    Attributes:
        dp_size, num_microbatches, micro_batch_size: of a global batch.
    """

    dp_size: int
    num_microbatches: int
    micro_batch_size: int

    @property
    def samples(self) -> int:
        """Of a global batch."""
        return self.dp_size * self.num_microbatches * self.micro_batch_size


def plan_step(
    step: int,
    samples: Samples,
    sizes: PlanSizes,
    batching: str,
    estimates: DensityEstimates,
    predict: Predict | None,
) -> StepPlan:
    """The plan of one step.

    Args:
        samples: of the global batch, in Megatron's order.
        batching: ``off``: Megatron's order; ``length``: by visible pairs; ``cost``: by predicted time.
        predict: None predicts no times, which placing by length does not need.

    Raises:
        ConfigError: another ``batching``, another number of samples, or a cost that is not finite.
    """
    kinds = kinds_of(samples.datasets, samples.longest)
    pairs = np.asarray(samples.pairs, np.float64)
    density, recall = estimates.density(kinds), estimates.recall(kinds)
    predicted = np.full(len(pairs), np.nan)
    if predict is not None:
        predicted = np.asarray(predict(pairs, density), np.float64)
    shape = sizes.dp_size, sizes.num_microbatches, sizes.micro_batch_size
    if len(pairs) != sizes.samples:
        raise ConfigError(
            f"there are {len(pairs)} samples: a global batch has {sizes.samples} = "
            f"{sizes.num_microbatches} x {sizes.dp_size} x {sizes.micro_batch_size}"
        )
    if batching == "off":
        order = megatron_order(*shape)
    elif batching in ("length", "cost"):
        costs = pairs if batching == "length" else predicted
        order = place(costs, *shape)
    else:
        raise ConfigError(f"batching is {batching!r}: use off, length or cost")
    weights = pairs[order] / pairs[order].sum(-1, keepdims=True)
    return StepPlan(
        step=step,
        order=np.asarray(samples.numbers, np.int64)[order],
        kinds=kinds[order],
        pairs=pairs[order],
        predicted_ms=predicted[order].sum(-1),
        density=(density[order] * weights).sum(-1),
        recall=(recall[order] * weights).sum(-1),
    )
