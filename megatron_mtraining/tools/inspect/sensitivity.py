# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which layers' or heads' attention the predictions depend on, and what each is to keep.

Measured: how far predictions move when one layer's attention, or one head's, is sparse and all other is
dense. What moves them is to keep more, the rest less, with the same mean (:func:`targets_of`).
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

from ...attention import attend
from ...config import ConfigError, MTrainingConfig
from ...models.dense_attention import dense_attention
from ...models.types import LayerInput, Score, Shape
from ...pattern import choose_index
from ...pattern.steering import SLOPE
from ...ring import Ring
from ..report.table import table
from .options import Options

PRICES = (1e-3, 30.0)
"""Between which each head's price is looked for."""
HALVINGS = 10
FALL = 0.55 / SLOPE
"""b: a density is about ``c x lost ** -b``, over trained models' heads."""
EXPONENT = 1 / (1 + FALL)
"""See :func:`targets_of`."""
LOST = (0.1, 4.0)
"""The least and the most attention that a layer or head may lose, over the mean; and each keeps at least half
the target."""
LEAST = 0.02
"""Each is taken to move predictions at least by this share of the mean."""


class Outcome(NamedTuple):
    """All layers sparse at once; density and recall are means over all heads."""

    loss: float
    divergence: float
    density: float
    recall: float


@dataclass(frozen=True)
class Sensitivity:
    """What the predictions depend on. "Each": each layer, or each head.

    Attributes:
        of: layers or heads.
        dense: loss with dense attention, nats a token.
        alone: each one sparse, all other attention dense; float ``[layers, n]``, n 1 for layers.
        density: of each there, ``[layers, n]``.
        targets: recall that each is to keep, ``[layers, n]``.
        same, own: all sparse, with the same target and with ``targets``.
        prices: the heads' median price in ``same`` and in ``own``.
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
        """Whether targets of their own move the predictions less than the same for all would at their
        density: more pairs alone, at the same recall everywhere, would do some of it (:data:`FALL`)."""
        denser = self.own.density / self.same.density
        return self.own.divergence < self.same.divergence * denser ** (-1 / FALL)

    def settings_file(self, base: dict) -> dict:
        """Fields of MTrainingConfig for a run that follows these targets."""
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
        """What is printed: of heads, their layers' sums, and the most sensitive one."""
        header = ["layer", "divergence", "density", "target by this"]
        header += ["most sensitive head"] if self.of == "heads" else []
        rows = []
        for at, (scores, density, targets) in enumerate(
            zip(self.alone, self.density, self.targets)
        ):
            moved = [score.divergence for score in scores]
            row = [str(at), f"{1e3 * sum(moved):.3f}", f"{sum(density) / len(density):.1%}"]
            row.append(f"{sum(targets) / len(targets):.1%}")
            if self.of == "heads":
                most = moved.index(max(moved))
                row.append(f"{most}: {1e3 * moved[most]:.3f}, {targets[most]:.1%}")
            rows.append(row)
        lines = [
            f"\nHow far predictions move (1e-3 nats a token) with the attention of one of the {self.of} at a "
            f"recall of {self.target:.1%}, all other dense"
            + ("; sums over a layer's heads:" if self.of == "heads" else ":"),
            table(header, rows),
            f"\nLoss of the next token with dense attention: {self.dense:.4f}",
        ]
        for name, outcome in (("the same target", self.same), ("each its own target", self.own)):
            lines.append(
                f"All layers sparse, {name}: {outcome.loss / self.dense - 1:+.2%}, at a recall of "
                f"{outcome.recall:.1%} and a density of {outcome.density:.1%}; predictions move by "
                f"{1e3 * outcome.divergence:.1f}"
            )
        what = "each its own target" if self.helps else "the same target for all"
        lines.append(
            f"In place of what is recommended above, the settings file has {what}, which a price of each "
            "head follows"
        )
        return "\n".join(lines)

    def numbers(self) -> dict:
        """Everything, as JSON takes it."""
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


def targets_of(moved: list[float], density: list[float], target: float) -> list[float]:
    """The recall that each is to keep, their mean ``target``.

    What is added to the loss is taken to be the sum of ``s x lost``, and the density of each to be
    ``c x lost ** -b`` (:data:`FALL`). The least loss for a density then has ``lost`` go with
    ``(c / s) ** (1 / (1 + b))``; within :data:`LOST` times the mean.

    Args:
        moved: divergence with each alone at ``target``, 0 or more; density: of each there.
    """
    mean = sum(moved) / len(moved)
    if mean <= 0:
        return [target] * len(moved)
    weights = [(kept / max(one, LEAST * mean)) ** EXPONENT for one, kept in zip(moved, density)]
    low, high = (share * (1 - target) for share in LOST)
    high = min(high, 1 - target / 2)

    def lost(scale: float) -> list[float]:
        return [min(max(scale * weight, low), high) for weight in weights]

    bounds = [math.log(low / max(weights)), math.log(high / min(weights))]
    for _ in range(60):  # the mean goes up with the scale
        middle = sum(bounds) / 2
        bounds[sum(lost(math.exp(middle))) > (1 - target) * len(weights)] = middle
    return [round(1 - share, 4) for share in lost(math.exp(sum(bounds) / 2))]


def check_sensitivity(options: Options, seq_length: int) -> None:
    """Raise :class:`ConfigError` where nothing can be learnt from it."""
    if options.policies is not None and "price" not in options.policies:
        raise ConfigError(
            f"--policy is {' '.join(options.policies)}, but --sensitivity gives targets for policy price: "
            "add price to --policy, or leave --sensitivity out"
        )
    config = MTrainingConfig.from_options(**options.base, target_recall=options.target_recall)
    if config.keeps_all(seq_length):
        raise ConfigError(
            f"--window is {config.window}, and the text has {seq_length} tokens: everything is kept, so that "
            "--sensitivity has nothing to measure; use a smaller --window"
        )


def measure_sensitivity(
    run: Callable, tokens: Tensor, shape: Shape, options: Options
) -> Sensitivity:
    """Run a model over ``tokens`` once for each layer, or head, and four times more.

    Args:
        run: of a :class:`~megatron_mtraining.models.types.Source` that is scored.
    """
    from tqdm import tqdm

    config = MTrainingConfig.from_options(**options.base, target_recall=options.target_recall)
    target, everywhere = options.target_recall, range(shape.layers)
    each = range(shape.heads) if options.sensitivity == "heads" else [None]
    total = shape.layers * len(each) + 4
    with tqdm(total=total, desc="sensitivity", unit="run", file=sys.stderr) as progress:

        def score(visit) -> Score:
            found = run(tokens, visit)
            progress.update()
            return found

        def all_sparse(prices: list[Tensor]) -> Outcome:
            sparse = Sparse(config, prices)
            found = score(sparse)
            return Outcome(*found, *sparse.means())

        def prices_for(targets: list[list[float]]) -> tuple[Score, list[Tensor]]:
            prices: list[Tensor] = []
            return score(partial(_find_prices, config, targets, prices)), prices

        dense, same = prices_for([[target]] * shape.layers)
        one, alone, density = Sparse(config, same), [], []
        for layer in everywhere:
            one.only = layer
            found = [one.alone(score, head) for head in each]
            alone.append([score for score, _ in found])
            density.append([kept for _, kept in found])
        flat = targets_of(
            [one.divergence for row in alone for one in row],
            [one for row in density for one in row],
            target,
        )
        targets = [flat[at * len(each) :][: len(each)] for at in everywhere]
        _, own = prices_for(targets)
        return Sensitivity(
            options.sensitivity, target, dense.loss, alone, density, targets,
            all_sparse(same), all_sparse(own),
            tuple(torch.stack(prices).median().item() for prices in (same, own)),
        )  # fmt: skip


class Sparse:
    """A visitor: attention at its heads' prices, in all layers or in one, of all heads or of one.

    Attributes:
        only: the layer; None for all.
    """

    def __init__(self, config: MTrainingConfig, prices: list[Tensor]):
        self.config, self.prices = config, prices
        self.only: int | None = None
        self._head: int | None = None
        self._kept: list[Tensor] = []  # [2, h] of each layer: density, recall
        self._layer, self._out = None, None  # what the last layer alone has given

    def __call__(self, given: LayerInput) -> Tensor | None:
        if self.only is None:
            return self._attend(given)
        if given.layer != self.only:
            return None
        # All layers before are dense: it is the same for each of its heads.
        if self._layer != given.layer:
            self._layer, self._out = given.layer, self._attend(given)
        if self._head is None:
            return self._out
        sides = (side.permute(1, 2, 0, 3) for side in (given.query, given.key, given.value))
        out = dense_attention(*sides, given.softmax_scale).permute(2, 0, 1, 3)
        out[:, :, self._head] = self._out[:, :, self._head]
        return out

    def alone(self, score: Callable, head: int | None) -> tuple[Score, float]:
        """The score with layer ``only`` sparse, or its head, and the density there."""
        self._head = head
        found = score(self)
        density = self._kept[-1][0]
        return found, (density.mean() if head is None else density[head]).item()

    def means(self) -> tuple[float, float]:
        """Density and recall over all calls so far."""
        return tuple(torch.stack(self._kept).mean((0, 2)).tolist())

    def _attend(self, given: LayerInput) -> Tensor:
        found = attend(
            *(side.contiguous() for side in (given.query, given.key, given.value)),
            config=self.config, softmax_scale=given.softmax_scale, price=self.prices[given.layer],
        )  # fmt: skip
        self._kept.append(torch.stack([found.index.density()[0], found.index.recall[0]]))
        return found.out


def _find_prices(config, targets, prices: list[Tensor], given: LayerInput) -> None:
    """Append the price of each of a layer's heads at which it keeps its target, float32 ``[h]``. Recall falls
    as the price goes up: by bisection."""
    query, key = given.query.contiguous(), given.key.contiguous()
    if not query.is_cuda:  # the choice's twins would each time
        query, key = query.float(), key.float()
    target = torch.tensor(targets[given.layer], device=query.device)
    low, high = (
        torch.full(query.shape[2:3], math.log(price), device=query.device) for price in PRICES
    )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        index = choose_index(
            query, key, config, Ring(None), given.softmax_scale, price=middle.exp()
        )
        enough = index.recall[0] >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    prices.append(low.exp())
