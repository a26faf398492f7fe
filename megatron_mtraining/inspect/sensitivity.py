# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which layers' attention the loss depends on, and what each is to keep.

Measured: the loss of the next token with one layer's attention sparse, layer after layer. Layers that cost
loss are to keep more, the others less, with the same mean (:func:`targets_of`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import attend
from ..config import MTrainingConfig
from ..pattern import choose_index
from ..pattern.steering import SLOPES
from ..report.table import table
from ..ring import Ring
from .options import Options
from .sources import LayerInput, Shape

PRICES = (1e-3, 30.0)
"""Between which each head's price is looked for."""
HALVINGS = 10
EXPONENT = 1 / (1 - SLOPES["target_density"] / SLOPES["target_recall"])
"""See :func:`targets_of`."""
LOST = (0.1, 4.0)
"""The least and the most attention that a layer may lose, over the mean."""
LEAST = 0.05
"""A layer costs at least this share of the mean layer's loss: differences are noisy."""


class Outcome(NamedTuple):
    """All layers sparse at once."""

    loss: float
    density: float
    recall: float


@dataclass(frozen=True)
class Sensitivity:
    """What the loss depends on.

    Attributes:
        dense: loss with dense attention, nats a token.
        alone: loss with each layer's attention sparse, all others dense.
        density: of each layer there, mean over its heads.
        targets: recall that each layer is to keep.
        same, own: all layers sparse, with the same target and with ``targets``.
        price: the heads' median price in ``own``.
    """

    target: float
    dense: float
    alone: list[float]
    density: list[float]
    targets: list[float]
    same: Outcome
    own: Outcome
    price: float

    @property
    def helps(self) -> bool:
        """Whether targets of layers lose less than the same in all."""
        return self.own.loss < self.same.loss

    def settings_file(self, base: dict) -> dict:
        """Fields of MTrainingConfig for a run that follows these targets."""
        layers = {str(at): {"target_recall": target} for at, target in enumerate(self.targets)}
        settings = {
            **base, "policy": "price", "target_recall": self.target, "price": float(f"{self.price:.4g}"),
        }  # fmt: skip
        return settings | ({"layers": layers} if self.helps else {})

    def summary(self) -> str:
        """What is printed."""
        rows = [
            [str(at), f"{loss / self.dense - 1:+.3%}", f"{density:.1%}", f"{target:.1%}"]
            for at, (loss, density, target) in enumerate(
                zip(self.alone, self.density, self.targets)
            )
        ]
        lines = [
            f"\nLoss of the next token: {self.dense:.4f} with dense attention. With one layer alone at a "
            f"recall of {self.target:.1%}:",
            table(["layer", "loss", "density", "target by this"], rows),
            "",
        ]
        for name, outcome in (("the same target", self.same), ("each its own target", self.own)):
            lines.append(
                f"All layers, {name}: loss {outcome.loss / self.dense - 1:+.2%} at a recall of "
                f"{outcome.recall:.1%}, density {outcome.density:.1%}"
            )
        what = "each layer's own target" if self.helps else "the same target for all layers"
        lines.append(f"The settings file has {what}, with a price of each head that follows it.")
        return "\n".join(lines)

    def numbers(self) -> dict:
        """Everything, as JSON takes it."""
        return {
            "loss_dense": round(self.dense, 6),
            "loss_of_layer_alone": [round(loss, 6) for loss in self.alone],
            "density_of_layer": [round(density, 5) for density in self.density],
            "target_recall_of_layer": self.targets,
            "same_target": {name: round(v, 6) for name, v in self.same._asdict().items()},
            "own_targets": {name: round(v, 6) for name, v in self.own._asdict().items()},
        }


def targets_of(increase: list[float], density: list[float], target: float) -> list[float]:
    """The recall that each layer is to keep, their mean ``target``.

    Loss that is added is taken to be the sum over layers of ``s x lost``, and a layer's density to be
    ``c x lost ** -b``, with b as it is over trained models' heads (:data:`~.steering.SLOPES`). The least loss
    for a density then has ``lost`` go with ``(c / s) ** (1 / (1 + b))``; within :data:`LOST` times the mean.

    Args:
        increase: of the loss with each layer alone at ``target``; density: of each there.
    """
    mean = max(sum(increase) / len(increase), 0.0)
    if mean == 0:
        return [target] * len(increase)
    weights = [
        (kept / max(added, LEAST * mean)) ** EXPONENT for added, kept in zip(increase, density)
    ]
    low, high = (share * (1 - target) for share in LOST)

    def lost(scale: float) -> list[float]:
        return [min(max(scale * weight, low), high) for weight in weights]

    bounds = [math.log(low / max(weights)), math.log(high / min(weights))]
    for _ in range(60):  # the mean goes up with the scale
        middle = sum(bounds) / 2
        bounds[sum(lost(math.exp(middle))) > (1 - target) * len(weights)] = middle
    return [round(1 - share, 4) for share in lost(math.exp(sum(bounds) / 2))]


def measure_sensitivity(
    run: Callable, tokens: Tensor, shape: Shape, options: Options
) -> Sensitivity:
    """Run a model ``layers + 4`` times over ``tokens``.

    Args:
        run: of a :class:`~megatron_mtraining.inspect.sources.Source` that is scored.
    """
    from tqdm import tqdm

    config = MTrainingConfig(**options.base, target_recall=options.target_recall)
    target, everywhere = options.target_recall, range(shape.layers)
    with tqdm(total=shape.layers + 4, desc="sensitivity", unit="run", file=sys.stderr) as progress:

        def score(visit) -> float:
            loss = run(tokens, visit)
            progress.update()
            return loss

        def sparse(prices: list[Tensor], layers) -> Outcome:
            kept: list[tuple[float, float]] = []
            loss = score(partial(_attend, config, prices, frozenset(layers), kept))
            density, recall = (sum(each) / len(each) for each in zip(*kept))
            return Outcome(loss, density, recall)

        same: list[Tensor] = []
        dense = score(partial(_find_prices, config, [target] * shape.layers, same))
        alone = [sparse(same, [layer]) for layer in everywhere]
        density = [outcome.density for outcome in alone]
        targets = targets_of([outcome.loss - dense for outcome in alone], density, target)
        own: list[Tensor] = []
        score(partial(_find_prices, config, targets, own))
        return Sensitivity(
            target, dense, [outcome.loss for outcome in alone], density, targets,
            sparse(same, everywhere), sparse(own, everywhere), torch.stack(own).median().item(),
        )  # fmt: skip


def _find_prices(config, targets: list[float], prices: list[Tensor], given: LayerInput) -> None:
    """Append the price of each of a layer's heads at which it keeps its target, float32 ``[h]``. Recall falls
    as the price goes up: by bisection."""
    query, key = _exact(given)
    low, high = (
        torch.full(query.shape[2:3], math.log(price), device=query.device) for price in PRICES
    )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        index = choose_index(
            query, key, config, Ring(None), given.softmax_scale, price=middle.exp()
        )
        enough = index.recall[0] >= targets[given.layer]
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    prices.append(low.exp())


def _attend(config, prices, layers: frozenset, kept: list, given: LayerInput) -> Tensor | None:
    """A layer's attention at its heads' prices, if it is one of ``layers``."""
    if given.layer not in layers:
        return None
    found = attend(
        *(side.contiguous() for side in (given.query, given.key, given.value)),
        config=config, softmax_scale=given.softmax_scale, price=prices[given.layer],
    )  # fmt: skip
    kept.append((found.index.density().mean().item(), found.index.recall.mean().item()))
    return found.out


def _exact(given: LayerInput) -> tuple[Tensor, Tensor]:
    """Queries and keys, in float32 on CPUs, where the choice's twins would take them to it each time."""
    if given.query.is_cuda:
        return given.query.contiguous(), given.key.contiguous()
    return given.query.float(), given.key.float()
