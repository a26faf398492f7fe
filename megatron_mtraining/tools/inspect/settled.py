# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The recommended settings, measured: each head with its own, and the heads that are drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ...config import MTrainingConfig
from ...models.types import LayerInput
from .head_pictures import attention_picture, density_picture
from .measure import LayerPattern, for_search, patterns_of, recall_of_patterns
from .results import Recommendation


class Settled:
    """A visitor of all layers, in order.

    Attributes:
        recall, density: float64 ``[h]`` of each measured layer; dense heads have 1.
        drawn: dense attention and pattern of the heads that are to be drawn, by (place, head): float32
            ``[cells, cells]`` on the CPU.
    """

    def __init__(
        self,
        settings: Recommendation,
        rows: Tensor,
        layers: list[int],
        draw: set[tuple[int, int]],
        progress: tqdm,
    ):
        """
        Args:
            rows: the evaluated rows.
            layers: the measured layers.
            draw: (place, head) of the heads to draw, by the place of the layer in ``layers``.
            progress: counts the measured layers.
        """
        self.settings, self.rows, self.layers, self.draw = settings, rows, layers, draw
        self.progress = progress
        self.recall: list[np.ndarray] = []
        self.density: list[np.ndarray] = []
        self.drawn: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, given: LayerInput) -> None:
        if given.layer not in self.layers:
            return
        given = for_search(given)
        place = self.layers.index(given.layer)
        length, _, heads, _ = given.query.shape
        own = [self.settings.setting_of(place, head) for head in range(heads)]
        distinct = [each for number, each in enumerate(own) if each and each not in own[:number]]
        recall, density = np.ones(heads), np.ones(heads)
        patterns: list[LayerPattern] = []
        if distinct:
            configs = [MTrainingConfig.from_options(**each) for each in distinct]
            block, device = configs[0].block_size, given.query.device
            # The patterns of all query blocks, for the pictures.
            patterns = list(
                patterns_of(given, configs, torch.arange(0, length, block, device=device))
            )
            kept = recall_of_patterns(given, patterns, self.rows.to(device), block)
            for head, setting in enumerate(own):
                if setting is not None:
                    number = distinct.index(setting)
                    recall[head] = kept[number, head]
                    density[head] = patterns[number].density[head]
        self.recall.append(recall)
        self.density.append(density)
        for at, head in sorted(self.draw):
            if at == place:
                pattern = None if own[head] is None else patterns[distinct.index(own[head])]
                self.drawn[at, head] = (
                    attention_picture(given, head),
                    density_picture(pattern, head, length, given.query.device),
                )
        self.progress.update()
