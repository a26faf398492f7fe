# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What changes from step to step: dense steps at the start, the price, when slashes are chosen anew.

A target is met by feedback: each step's mean recall (or density), over all layers, heads and ranks, moves the
price for the next. All of it stays on the device.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MTrainingConfig

GAIN = 0.3
"""How much of what is missing to the target a step makes up for: less follows slower, more is noisier."""
SLOPES = {"target_recall": 0.75, "target_density": -0.55}
"""About how the logarithms of what is lost, and of the density, go with the price's in trained models.
Feedback makes up for the rest."""
MOST = 0.5
"""The farthest that a step moves the price's logarithm."""
RANGE = (1e-4, 1e4)
LOST = 0.02
"""A fall of recall, since slashes were chosen, at which they are chosen again before their time."""


class Steering:
    """The price of a run.

    Attributes:
        step: the training step under way, from 0.
        config: the run's settings.
    """

    def __init__(self, config: MTrainingConfig, step: int = 0):
        self.config = config
        self.step = step
        self._target = next((n for n in SLOPES if getattr(config, n) is not None), None)
        self._log_price: Tensor | None = None
        self._start = config.price
        self._seen: Tensor | None = None
        self._chosen_at: float | None = None
        self._early = False

    @property
    def dense(self) -> bool:
        """Whether attention is dense in this step."""
        return self.step < self.config.dense_steps

    @property
    def moves(self) -> bool:
        """Whether the price is not the settings' in each step."""
        return self._target is not None or self.config.price_start is not None

    @property
    def chooses_slashes(self) -> bool:
        """Whether slashes are chosen anew in this step."""
        since = self.step - self.config.dense_steps
        return self._early or since % self.config.slash_refresh == 0

    def price(self, device) -> Tensor | None:
        """This step's price, float32 ``[]``; None for the settings'."""
        if self._target is not None:
            return self._logarithm(device).exp()
        config = self.config
        if config.price_start is None:
            return None
        return torch.tensor(self._scheduled(), dtype=torch.float32, device=device)

    def _scheduled(self) -> float:
        config = self.config
        done = min(1.0, max(0, self.step - config.dense_steps) / config.price_steps)
        return config.price_start * (config.price / config.price_start) ** done

    def _logarithm(self, device) -> Tensor:
        if self._log_price is None:
            start = min(max(self._start, RANGE[0]), RANGE[1])
            self._log_price = torch.tensor(math.log(start), dtype=torch.float32, device=device)
        return self._log_price

    def observe(self, density: Tensor, recall: Tensor | None) -> None:
        """Count a call's density and recall, float32 ``[b, h]``, for the target."""
        if self._target is None or self.dense:
            return
        value = density if self._target == "target_density" else recall
        if value is None:  # all is kept
            value = torch.ones_like(density)
        seen = torch.stack((value.sum(), value.new_full((), value.numel())))
        self._seen = seen if self._seen is None else self._seen + seen

    def advance(self, step: int, device=None) -> None:
        """End a step: ``step`` is the next one. A collective over all ranks if there is a target."""
        if self._target is not None and not self.dense:
            if self._log_price is not None:
                device = self._log_price.device
            seen = torch.zeros(2, device=device) if self._seen is None else self._seen
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(seen)
            self._move(seen)
        self._seen, self._early, self.step = None, False, step

    def _move(self, seen: Tensor) -> None:
        target = getattr(self.config, self._target)
        value = seen[0] / seen[1].clamp(min=1)
        if self._target == "target_recall":
            value, target = 1 - value, 1 - target
        # What is lost, or the density, is too much by this; the price makes up for a part of it.
        over = (value.clamp(min=1e-5) / target).log()
        by = (-GAIN * over / SLOPES[self._target]).clamp(-MOST, MOST)
        by = torch.where(seen[1] > 0, by, 0.0)  # no attention has run
        low, high = map(math.log, RANGE)
        self._log_price = (self._logarithm(seen.device) + by).clamp(low, high)

    def watch(self, recall: float | None) -> bool:
        """Look at the recall that was read for the log; True if slashes are chosen again for what it lost."""
        if recall is None or self.config.slash_refresh == 1:
            return False
        best = recall if self._chosen_at is None else max(self._chosen_at, recall)
        self._early = recall < best - LOST
        self._chosen_at = None if self._early else best
        return self._early

    def state(self) -> float | None:
        """The price to go on from after a checkpoint; reads it from the device. None if nothing moves it."""
        if self._target is None:
            return None
        return self._start if self._log_price is None else math.exp(self._log_price.item())

    def restore(self, price: float) -> None:
        """Go on from a checkpoint's price."""
        self._start, self._log_price = price, None

    def now(self) -> float | None:
        """This step's price, read from the device; None without one."""
        if self.config.policy != "price":
            return None
        if self._target is not None:
            return self.state()
        return self._scheduled() if self.config.price_start is not None else self.config.price


_STEERINGS: dict[MTrainingConfig, Steering] = {}
_step = 0


def steering_of(config: MTrainingConfig) -> Steering:
    """The one of a run's settings, which all its layers share."""
    if config not in _STEERINGS:
        _STEERINGS[config] = Steering(config, _step)
    return _STEERINGS[config]


def steerings() -> list[Steering]:
    """All there are."""
    return list(_STEERINGS.values())


def begin_at(step: int) -> None:
    """Training goes on after ``step`` steps, from a checkpoint."""
    global _step
    _step = step
    for steering in _STEERINGS.values():
        steering.step = step


def advance(step: int, device=None) -> None:
    """End a training step on all ranks: ``step`` steps are done. For training loops other than Megatron-LM's,
    whose steps end themselves; schedules, targets and the refresh of slashes count by it."""
    global _step
    _step = step
    for steering in _STEERINGS.values():
        steering.advance(step, device)
