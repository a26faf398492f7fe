# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings, prices, and means of density and recall of one transformers model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..config import ConfigError, MTrainingConfig, Policy, head_policies
from ..cp_group import RankGroup
from ..pattern import PatternIndex, Steering

ATTRIBUTE = "mtraining_state"
"""The attribute of attention modules that holds their model's state."""


class PatternMeans(NamedTuple):
    """Means over the calls of each layer since the last :func:`take_means`."""

    density: Tensor
    """Fraction of the visible query-key pairs that is attended to: float32 ``[layers, heads]``, on
    the CPU; NaN for a layer that has not run."""
    recall: Tensor
    """Share of the attention mass that the pattern holds, on held-out rows: shape and NaN as ``density``."""


class PatternState:
    """State that the attention layers of a model share.

    Args:
        config: the settings.
        num_layers, num_heads: layers of the model, and query heads of each layer.

    Raises:
        ConfigError: a settings file that does not fit the model.
    """

    def __init__(self, config: MTrainingConfig, num_layers: int, num_heads: int):
        self.config = config
        self.shape = num_layers, num_heads
        self.steering = Steering(config, shape=self.shape)
        self._policies = [
            head_policies(config, i, num_layers, num_heads) for i in range(num_layers)
        ]
        # By whether the model trains, and by layer: float32 [3, heads] of density, recall, calls.
        self._sums: dict[bool, dict[int, Tensor]] = {True: {}, False: {}}

    def policies(self, layer: int) -> tuple[Policy, ...] | None:
        """The policy of each head of a layer; None if all heads have the policy of the run."""
        return self._policies[layer]

    def price(self, layer: int, device: torch.device) -> Tensor | None:
        """The layer's prices in this step, float32 ``[]`` or ``[heads]``; None: the prices of the
        settings."""
        return self.steering.price(device, layer, 0, self.shape[1])

    def observe(self, layer: int, index: PatternIndex, training: bool) -> None:
        """Add the pattern of one call to the means, and in training to the target recall. Does not wait for
        the device."""
        density = index.density().detach()
        # Without recall everything is kept.
        recall = torch.ones_like(density) if index.recall is None else index.recall.detach()
        own = torch.stack((density, recall, torch.ones_like(density))).sum(1)
        sums = self._sums[training]
        sums[layer] = sums[layer] + own if layer in sums else own
        if training:
            self.steering.observe(recall, layer)

    def take(self, training: bool = True) -> PatternMeans:
        """The means since the last call of this method, over forwards in training mode or over other
        forwards. Waits for the device."""
        means = torch.full((2, *self.shape), torch.nan)
        for layer, sums in self._sums[training].items():
            means[:, layer] = (sums[:2] / sums[2]).cpu()
        self._sums[training] = {}
        return PatternMeans(*means)


def state_of(model: nn.Module) -> PatternState:
    """The state that :func:`~.interface.configure` has given a model.

    Raises:
        ConfigError: it has none.
    """
    for module in model.modules():
        state = getattr(module, ATTRIBUTE, None)
        if state is not None:
            return state
    raise ConfigError(
        f"{type(model).__name__} has no settings of attention mtraining: call "
        "megatron_mtraining.transformers.configure(model, config) first"
    )


def take_means(model: nn.Module, training: bool = True) -> PatternMeans:
    """Density and recall of a model's layers and heads in this process, since the last call of this function.

    Args:
        training: whether to return the means of forwards in training mode, or of other forwards (prefill;
            decoding is dense and does not count).
    """
    return state_of(model).take(training)


def advance(model: nn.Module) -> None:
    """End a training step: a target recall moves the prices. With a target and several processes, this is a
    collective over all processes. :class:`~.callback.PatternCallback` calls it."""
    steering = state_of(model).steering
    steering.advance(steering.step + 1, RankGroup.everyone())
