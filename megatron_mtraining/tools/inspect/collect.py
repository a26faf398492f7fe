# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gathers recall and density of all settings, layer by layer."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from tqdm import tqdm

from ...config import ConfigError, MTrainingConfig
from ...models.types import LayerInput
from .measure import LayerRecall
from .results import Measured
from .sweep import Series


class Collector:
    """A visitor of all layers, in order, that measures some."""

    def __init__(
        self,
        series: list[Series],
        configs: list[MTrainingConfig],
        rows: Tensor,
        layers: list[int],
        progress: tqdm,
    ):
        """
        Args:
            configs: all settings of all series.
            rows: the evaluated rows.
            layers: the layers to measure, ascending.
            progress: counts them.
        """
        self.series, self.configs, self.rows, self.layers = series, configs, rows, layers
        self.progress = progress
        self.recall: list[np.ndarray] = []  # of each measured layer, [settings, h]
        self.density: list[np.ndarray] = []

    def __call__(self, given: LayerInput) -> None:
        if given.layer not in self.layers:
            return
        measured = LayerRecall(given, self.configs, self.rows)
        self.recall.append(measured.recall.numpy())
        self.density.append(measured.density.numpy())
        here, first = self.recall[-1].shape[1], self.recall[0].shape[1]
        if here != first:
            raise ConfigError(
                f"layer {given.layer} has {here} heads and layer {self.layers[0]} has {first}: all layers "
                "must have the same number of heads"
            )
        self.progress.set_postfix(recall=f"{self.recall[-1].mean():.1%}", refresh=False)
        self.progress.update()

    def measured(self, target: float) -> list[Measured]:
        """What was measured of each series."""
        recall, density = np.stack(self.recall, 1), np.stack(self.density, 1)
        ends = np.cumsum([len(one.settings) for one in self.series])
        slices = [slice(end - len(one.settings), end) for one, end in zip(self.series, ends)]
        return [
            Measured(one, recall[of], density[of], target, self.layers)
            for one, of in zip(self.series, slices)
        ]
