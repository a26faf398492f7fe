# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gathers what is measured, layer by layer; patterns and pictures only of the heads that may be drawn."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from tqdm import tqdm

from ...config import ConfigError, MTrainingConfig
from ...models.types import LayerInput
from .measure import HeadPattern, LayerRecall
from .options import Options
from .results import Measured, by_difficulty, needed_density
from .sweep import Series


@dataclass(frozen=True)
class DrawnHead:
    """A head that may be drawn.

    Attributes:
        picture: see :class:`~megatron_mtraining.tools.inspect.measure.LayerRecall`, ``[cells, cells]``.
        patterns: its pattern in each setting.
    """

    layer: int
    head: int
    picture: Tensor
    patterns: list[HeadPattern]


class Collector:
    """A visitor of all layers, in order; as a context it shows its progress.

    Attributes:
        drawn: the easiest, middle and hardest head of each layer, and those asked for.
    """

    def __init__(
        self,
        options: Options,
        series: list[Series],
        configs: list[MTrainingConfig],
        rows: Tensor,
        layers: int,
    ):
        """
        Args:
            configs: all settings of all series.
            rows: the evaluated rows.
            layers: the number of layers.
        """
        self.options, self.series, self.configs, self.rows = options, series, configs, rows
        self.recall: list[np.ndarray] = []  # of each layer, [settings, h]
        self.density: list[np.ndarray] = []
        self.drawn: list[DrawnHead] = []
        self.progress = tqdm(total=layers, desc="inspect", unit="layer", file=sys.stderr)

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *raised) -> None:
        self.progress.close()

    def __call__(self, given: LayerInput) -> None:
        found = LayerRecall(given, self.configs, self.rows)
        self.recall.append(found.recall.numpy())
        self.density.append(found.density.numpy())
        here, first = self.recall[-1].shape[1], self.recall[0].shape[1]
        if here != first:
            raise ConfigError(
                f"layer {given.layer} has {here} heads and layer 0 has {first}: all layers must have the "
                "same number of heads"
            )
        for head in self._heads_to_draw(given.layer):
            patterns = [pattern.head(head) for pattern in found.patterns]
            picture = found.picture[head].clone()
            self.drawn.append(DrawnHead(given.layer, head, picture, patterns))
        self.progress.set_postfix(recall=f"{found.recall.mean():.1%}", refresh=False)
        self.progress.update()

    def _heads_to_draw(self, layer: int) -> list[int]:
        recall, density = self.recall[-1], self.density[-1]
        target = self.options.target_recall
        needed = [needed_density(recall[of], density[of], target) for of in self._slices()]
        order = by_difficulty(np.minimum(needed, 1).mean(0), recall.mean(0))
        chosen = {int(order[0]), int(order[len(order) // 2]), int(order[-1])}
        return sorted(chosen | {head for at, head in self.options.heads if at == layer})

    def _slices(self) -> list[slice]:
        """The settings of each series among all."""
        ends = np.cumsum([len(one.settings) for one in self.series])
        return [slice(end - len(one.settings), end) for one, end in zip(self.series, ends)]

    def measured(self) -> list[Measured]:
        """What was measured of each series."""
        recall, density = np.stack(self.recall, 1), np.stack(self.density, 1)
        return [
            Measured(one, recall[of], density[of], self.options.target_recall)
            for one, of in zip(self.series, self._slices())
        ]
