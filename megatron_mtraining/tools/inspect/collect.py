# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gathers recall and density of all settings, layer by layer."""

from __future__ import annotations

import sys
import time

import numpy as np
from torch import Tensor
from tqdm import tqdm

from ...config import ConfigError, MTrainingConfig
from ...models.types import LayerInput
from .kept_layers import KeptLayers
from .measure import LayerRecall
from .results import Measured
from .sweep import Series

WORTH_SAYING = 30.0
"""An estimate of fewer seconds is not printed."""
LONG = 300.0
"""With an estimate of more seconds, options that take less time are named."""


class Collector:
    """A visitor of all layers, in order, that measures some; as a context it shows its progress."""

    def __init__(
        self,
        series: list[Series],
        configs: list[MTrainingConfig],
        rows: Tensor,
        layers: list[int],
        kept: KeptLayers,
    ):
        """
        Args:
            configs: all settings of all series.
            rows: the evaluated rows.
            layers: the layers to measure, ascending.
            kept: those that were measured before; the others are added.
        """
        self.series, self.configs, self.rows = series, configs, rows
        self.layers, self.kept = layers, kept
        self.recall: list[np.ndarray] = []  # of each measured layer, [settings, h]
        self.density: list[np.ndarray] = []
        self.progress = tqdm(total=len(layers), desc="inspect", unit="layer", file=sys.stderr)
        self._ended: tuple[float, float] | None = None  # when a layer was done, and what it took

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *raised) -> None:
        self.progress.close()

    def __call__(self, given: LayerInput) -> None:
        if given.layer not in self.layers:
            return
        self._say_estimate(given.layer)
        found = self.kept.load(given.layer)
        if found is None:
            started = time.perf_counter()
            measured = LayerRecall(given, self.configs, self.rows)
            found = measured.recall.numpy(), measured.density.numpy()
            self.kept.save(given.layer, *found)
            if len(self.recall) < 2:  # the second says how long layers take
                self._ended = time.perf_counter(), time.perf_counter() - started
        for all_layers, of_layer in zip((self.recall, self.density), found):
            all_layers.append(of_layer)
        here, first = found[0].shape[1], self.recall[0].shape[1]
        if here != first:
            raise ConfigError(
                f"layer {given.layer} has {here} heads and layer {self.layers[0]} has {first}: all layers "
                "must have the same number of heads"
            )
        self.progress.set_postfix(recall=f"{found[0].mean():.1%}", refresh=False)
        self.progress.update()

    def _say_estimate(self, layer: int) -> None:
        if self._ended is None or len(self.recall) != 1:
            return
        ended, measuring = self._ended
        between = layer - self.layers[0]
        running = (time.perf_counter() - ended) / between  # the model itself, a layer
        left = len(self.layers) - len(self.recall)
        # The model runs over what remains, and once more with the recommended settings.
        seconds = left * measuring + running * 2 * (self.layers[-1] + 1)
        if seconds < WORTH_SAYING:
            return
        text = (
            f"About {max(1, round(seconds / 60))} min for {len(self.layers)} layers, "
            f"{measuring:.1f} s each"
        )
        if seconds > LONG:
            text += "; --layers 8 samples 8 of them. If interrupted, the same command continues"
        self.progress.write(text, file=sys.stderr)

    def measured(self, target: float) -> list[Measured]:
        """What was measured of each series."""
        recall, density = np.stack(self.recall, 1), np.stack(self.density, 1)
        ends = np.cumsum([len(one.settings) for one in self.series])
        slices = [slice(end - len(one.settings), end) for one, end in zip(self.series, ends)]
        return [
            Measured(one, recall[of], density[of], target, self.layers)
            for one, of in zip(self.series, slices)
        ]
