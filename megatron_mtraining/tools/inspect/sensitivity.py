# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How much the predictions depend on the attention of each layer or head, and a target recall for each.

The sensitivity of a layer or head is the divergence of the predictions when its attention alone is sparse.
Sensitive ones get a higher target recall, the others a lower one, with the same mean (:func:`targets_of`).
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
from tqdm import tqdm

from ...attention import attend
from ...config import ConfigError, MTrainingConfig
from ...cp_group import CPGroup
from ...models.dense_attention import dense_attention
from ...models.types import LayerInput, Score, Shape
from ...pattern import search_pattern
from ...pattern.steering import SLOPE
from ..report.table import table
from .measure import for_search
from .options import Options

PRICES = (1e-3, 30.0)
"""Range in which each head's price is searched."""
BISECTIONS = 10
FALL = 0.55 / SLOPE
"""b: density is about ``c x lost ** -b`` in heads of trained models, where ``lost`` is 1 - recall."""
EXPONENT = 1 / (1 + FALL)
"""See :func:`targets_of`."""
LOST = (0.1, 4.0)
"""Bounds of what a layer or head may lose, over the mean; each also keeps at least half the target."""
LEAST = 0.02
"""Least sensitivity that is assumed, over the mean."""


class Outcome(NamedTuple):
    """All layers sparse at once; density and recall are means over all heads."""

    loss: float
    divergence: float
    density: float
    recall: float


@dataclass(frozen=True)
class Sensitivity:
    """Results; "each" is each layer or each head.

    Attributes:
        of: "layers" or "heads".
        dense: loss with dense attention, nats per token.
        alone: scores with each one sparse and all other attention dense, ``[layers, n]``; n is 1 for layers.
        density: density of each there, ``[layers, n]``.
        targets: target recall of each, ``[layers, n]``.
        same, own: all sparse, with the same target for all and with ``targets``.
        prices: median price over heads in ``same`` and in ``own``.
    """

    of: str
    target: float
    dense: float
    alone: list[list[Score]]
    density: list[list[float]]
    targets: list[list[float]]
    same: Outcome
    own: Outcome
    prices: tuple[float, float]

    @property
    def helps(self) -> bool:
        """Whether ``targets`` give a lower divergence than the same target for all would at their density,
        by :data:`FALL`."""
        denser = self.own.density / self.same.density
        return self.own.divergence < self.same.divergence * denser ** (-1 / FALL)

    def settings_file(self, base: dict) -> dict:
        """Options of MTrainingConfig for a run that follows these targets."""
        layers = {}
        for at, of_layer in enumerate(self.targets):
            if self.of == "layers":
                layers[str(at)] = {"target_recall": of_layer[0]}
            else:
                heads = {str(head): {"target_recall": one} for head, one in enumerate(of_layer)}
                layers[str(at)] = {"heads": heads}
        settings = {**base, "policy": "price", "target_recall": self.target}
        settings["price"] = float(f"{self.prices[self.helps]:.4g}")
        return settings | ({"layers": layers} if self.helps else {})

    def summary(self) -> str:
        """A table of the layers, and both outcomes."""
        header = ["layer", "divergence", "density", "target recall"]
        header += ["most sensitive head"] if self.of == "heads" else []
        rows = []
        for at, (scores, density, targets) in enumerate(
            zip(self.alone, self.density, self.targets)
        ):
            divergence = [score.divergence for score in scores]
            row = [str(at), f"{1e3 * sum(divergence):.3f}", f"{sum(density) / len(density):.1%}"]
            row.append(f"{sum(targets) / len(targets):.1%}")
            if self.of == "heads":
                most = divergence.index(max(divergence))
                row.append(f"{most}: {1e3 * divergence[most]:.3f}, {targets[most]:.1%}")
            rows.append(row)
        lines = [
            f"\nDivergence of the predictions (1e-3 nats per token) with one of the {self.of} at a recall of "
            f"{self.target:.1%} and all other attention dense"
            + ("; sums over each layer's heads:" if self.of == "heads" else ":"),
            table(header, rows),
            f"\nLoss of the next token with dense attention: {self.dense:.4f}",
        ]
        for name, outcome in (("the same target", self.same), ("each its own target", self.own)):
            lines.append(
                f"All layers sparse, {name}: loss {outcome.loss / self.dense - 1:+.2%} at a recall of "
                f"{outcome.recall:.1%} and a density of {outcome.density:.1%}; divergence "
                f"{1e3 * outcome.divergence:.1f}"
            )
        what = f"a target for each of the {self.of}" if self.helps else "the same target for all"
        lines.append(
            f"The settings file has {what}, and a price for each head, instead of the recommendation above"
        )
        return "\n".join(lines)

    def numbers(self) -> dict:
        """Everything, for JSON."""
        return {
            "of": self.of,
            "loss_dense": round(self.dense, 6),
            "loss_alone": [[round(score.loss, 6) for score in row] for row in self.alone],
            "divergence_alone": [[round(s.divergence, 8) for s in row] for row in self.alone],
            "density_alone": [[round(density, 5) for density in row] for row in self.density],
            "target_recall": self.targets,
            "same_target": {name: round(v, 6) for name, v in self.same._asdict().items()},
            "own_targets": {name: round(v, 6) for name, v in self.own._asdict().items()},
        }


def targets_of(divergence: list[float], density: list[float], target: float) -> list[float]:
    """A target recall for each layer or head, with mean ``target``.

    The increase of the loss is modelled as the sum of ``s x lost`` over all, and the density of each as
    ``c x lost ** -b`` (:data:`FALL`). The least loss for a density then has ``lost`` proportional to
    ``(c / s) ** (1 / (1 + b))``, here within :data:`LOST` times the mean.

    Args:
        divergence: with each one alone at ``target``, 0 or more.
        density: of each there.
    """
    mean = sum(divergence) / len(divergence)
    if mean <= 0:
        return [target] * len(divergence)
    weights = [
        (kept / max(one, LEAST * mean)) ** EXPONENT for one, kept in zip(divergence, density)
    ]
    low, high = (factor * (1 - target) for factor in LOST)
    high = min(high, 1 - target / 2)

    def lost(scale: float) -> list[float]:
        return [min(max(scale * weight, low), high) for weight in weights]

    bounds = [math.log(low / max(weights)), math.log(high / min(weights))]
    for _ in range(60):  # bisection: the mean grows with the scale
        middle = sum(bounds) / 2
        bounds[sum(lost(math.exp(middle))) > (1 - target) * len(weights)] = middle
    return [round(1 - one, 4) for one in lost(math.exp(sum(bounds) / 2))]


def check_sensitivity(options: Options, seq_length: int) -> None:
    """Raise :class:`ConfigError` if there is nothing to measure."""
    if options.policies is not None and "price" not in options.policies:
        raise ConfigError(
            f"--policy is {' '.join(options.policies)}, but --sensitivity sets targets for policy price: "
            "add price to --policy, or leave --sensitivity out"
        )
    config = _config(options)
    if config.keeps_all(seq_length):
        raise ConfigError(
            f"--window is {config.window}, and the text has {seq_length} tokens: attention is dense, so that "
            "--sensitivity has nothing to measure; use a smaller --window"
        )


def _config(options: Options) -> MTrainingConfig:
    return MTrainingConfig.from_options(**options.base, target_recall=options.target_recall)


def measure_sensitivity(
    run: Callable, tokens: Tensor, shape: Shape, options: Options
) -> Sensitivity:
    """Run a model over ``tokens`` once for each layer or head, and four more times.

    Args:
        run: of a scored :class:`~megatron_mtraining.models.types.Source`.
    """
    config, target = _config(options), options.target_recall
    heads = range(shape.heads) if options.sensitivity == "heads" else [None]
    total = shape.layers * len(heads) + 4
    with tqdm(total=total, desc="sensitivity", unit="run", file=sys.stderr) as progress:

        def score(visit) -> Score:
            found = run(tokens, visit)
            progress.update()
            return found

        def prices_for(targets: list[list[float]]) -> tuple[Score, list[Tensor]]:
            """The score of dense attention, and each layer's prices for these targets."""
            prices: list[Tensor] = []
            return score(partial(_find_prices, config, targets, prices)), prices

        def all_sparse(prices: list[Tensor]) -> Outcome:
            sparse = SparseAttention(config, prices)
            return Outcome(*score(sparse), *sparse.means())

        dense, same = prices_for([[target]] * shape.layers)
        sparse, alone, density = SparseAttention(config, same), [], []
        for layer in range(shape.layers):
            found = [sparse.score_alone(score, layer, head) for head in heads]
            alone.append([score for score, _ in found])
            density.append([kept for _, kept in found])
        flat = targets_of(
            [one.divergence for row in alone for one in row],
            [one for row in density for one in row],
            target,
        )
        n = len(heads)
        targets = [flat[layer * n : (layer + 1) * n] for layer in range(shape.layers)]
        _, own = prices_for(targets)
        medians = (torch.stack(prices).median().item() for prices in (same, own))
        return Sensitivity(
            options.sensitivity, target, dense.loss, alone, density, targets,
            all_sparse(same), all_sparse(own), tuple(medians),
        )  # fmt: skip


class SparseAttention:
    """A visitor that computes sparse attention with a price for each head, in all layers or in one."""

    def __init__(self, config: MTrainingConfig, prices: list[Tensor]):
        self.config, self.prices = config, prices
        self._layer: int | None = None  # the only sparse layer
        self._head: int | None = None  # the only sparse head of that layer
        self._out: tuple[int, Tensor] | None = None  # the last layer that was alone, and its output
        self._kept: list[Tensor] = []  # density and recall of each layer, [2, h]

    def __call__(self, given: LayerInput) -> Tensor | None:
        if self._layer is None:
            return self._attend(given)
        if given.layer != self._layer:
            return None
        # The input is the same for each of its heads, because all earlier layers are dense.
        if self._out is None or self._out[0] != given.layer:
            self._out = given.layer, self._attend(given)
        if self._head is None:
            return self._out[1]
        heads_first = (x.permute(1, 2, 0, 3) for x in (given.query, given.key, given.value))
        out = dense_attention(*heads_first, given.softmax_scale).permute(2, 0, 1, 3)
        out[:, :, self._head] = self._out[1][:, :, self._head]
        return out

    def score_alone(
        self, score: Callable[[Callable], Score], layer: int, head: int | None
    ) -> tuple[Score, float]:
        """The score with only this layer sparse, or only one head of it, and its density."""
        self._layer, self._head = layer, head
        found = score(self)
        density = self._kept[-1][0]
        return found, (density.mean() if head is None else density[head]).item()

    def means(self) -> tuple[float, float]:
        """Density and recall over all layers so far."""
        return tuple(torch.stack(self._kept).mean((0, 2)).tolist())

    def _attend(self, given: LayerInput) -> Tensor:
        found = attend(
            *(side.contiguous() for side in (given.query, given.key, given.value)),
            config=self.config, softmax_scale=given.softmax_scale, price=self.prices[given.layer],
        )  # fmt: skip
        self._kept.append(torch.stack([found.index.density()[0], found.index.recall[0]]))
        return found.out


def _find_prices(
    config: MTrainingConfig, targets: list[list[float]], prices: list[Tensor], given: LayerInput
) -> None:
    """Append the price at which each of a layer's heads reaches its target, float32 ``[h]``, by bisection:
    recall falls as the price grows."""
    given = for_search(given)
    query, key = given.query.contiguous(), given.key.contiguous()
    target = torch.tensor(targets[given.layer], device=query.device)
    low, high = (
        torch.full(query.shape[2:3], math.log(price), device=query.device) for price in PRICES
    )
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        index = search_pattern(
            query, key, config, CPGroup(None), given.softmax_scale, price=middle.exp()
        )
        enough = index.recall[0] >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    prices.append(low.exp())
