# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How prices follow a target recall.

The logarithm of a price is an integral: a step adds a part of what is missing to the target. An integral
winds up while nothing answers to it. A local head loses nothing at any price: its price would rise without an
end, and need as many steps to come back once the head attends further, with a low recall until then. So the
slope of the loss with the price is measured. Where it is none, a price rises only a little above the last one
at which there was a slope, and goes back there to try again. That takes little away: candidates between two
prices hold at least the lower one times their share of the pairs, so where no attention is lost, hardly any
pairs are saved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GAIN = 0.3
"""How much of what is missing to the target a step makes up for: less follows slower, more is noisier."""
SLOPE = 0.75
"""About how the logarithm of the attention that is lost goes with the price's in trained models. Feedback
makes up for the rest."""
STEEP = 4 * SLOPE
"""The slope of the steepest loss that is followed as it is measured."""
MAX_LOG_STEP = 0.5
"""The farthest that a step moves the price's logarithm down; twice that if the step before went as far, and
so on, for prices that are far too high."""
RANGE = (1e-4, 100.0)
"""At the highest price, all that a target of 0.95 allows to lose would save 0.05% of the pairs."""
FREE = 0.25
"""The price up to which it rises in any case: a head may lose nothing because it keeps all pairs."""
REACH = 1.0
"""How far the price's logarithm rises without a slope."""
LEAST_SLOPE = SLOPE / 4
NEAR = 0.9
"""A mean loss of this share of what is allowed is as good as a slope: the price is where it should be."""
NOTHING = 2e-3
"""A loss below this share of what is allowed is not told from none: recall has errors of rounding."""
RATE = 1 / 40
"""The weight of one step in the means that give the slope."""
PRIOR = 0.5
"""What :data:`SLOPE` counts for in these, as a sum of squares of the price's logarithm: of a price that has
hardly moved, all other slopes are noise."""
MEMORY = 0.98
"""The share of the largest weight of a step that is left after the next one."""
KEPT = (
    "log_prices", "_anchor", "_limit", "_most_seen", "_mean_price", "_mean_loss", "_squares", "_products",
)  # fmt: skip
"""The attributes that the next moves follow from."""


class PriceFeedback:
    """Prices that move to a target, element by element. Nothing is read back to the host.

    Args:
        log_prices: logarithms of the prices to start from, float32, any shape; within :data:`RANGE`.

    Attributes:
        log_prices: those of the step under way.
    """

    def __init__(self, log_prices: Tensor):
        self.log_prices = log_prices
        self._anchor = log_prices  # the last ones to which the loss has answered
        self._limit = torch.full_like(log_prices, MAX_LOG_STEP)
        self._most_seen = torch.zeros_like(log_prices)
        self._is_restored = False
        # Of the slope: means of the logarithms of price and loss, sums of squares and of products.
        self._mean_price = log_prices
        self._mean_loss = torch.full_like(log_prices, math.nan)
        self._squares = torch.full_like(log_prices, PRIOR)
        self._products = SLOPE * self._squares

    def move(self, lost: Tensor, weight: Tensor, allowed: Tensor) -> None:
        """Move the prices by what a step has lost.

        Args:
            lost: sums of the lost shares of attention, over rows that could lose some.
            weight: how many rows that were. A step moves a price by its weight, relative to the largest of
                late: steps with little to lose would buy a low recall of the others.
            allowed: the share that may be lost, above 0; NaN where no price is to move.
        """
        loss = lost / weight / allowed
        # Nothing could be lost, or attention was not a number: the price would be none in all steps after. Or
        # there is no price to move: the recall of a dense head depends on none.
        known = (weight > 0) & loss.isfinite()
        if self._is_restored:  # of a run that may have had many more sequences a step
            share = (weight / self._most_seen).nan_to_num().max()
            self._most_seen = torch.where(share < 0.5, share, 1.0) * self._most_seen
            self._is_restored = False
        self._most_seen = torch.maximum(self._most_seen * MEMORY, weight)
        enough = known & (weight >= self._most_seen / 2)
        by = self._step(loss, enough) * (weight / self._most_seen)
        has_slope = self._measure(loss, enough)

        prices, anchor = self.log_prices, self._anchor
        risen = enough & (prices - anchor >= REACH)
        # Noise or a restart may have raised the anchor: it comes down again as long as there is no slope.
        lower = (anchor - REACH).clamp(min=math.log(FREE)).minimum(anchor)
        anchor = torch.where(risen & ~has_slope, lower, anchor)
        moved = torch.where(risen & ~has_slope, anchor, prices + by)
        highest = torch.where(enough & has_slope, math.inf, anchor + REACH + GAIN / SLOPE)
        moved = torch.where(known, moved.minimum(highest), prices).clamp(*map(math.log, RANGE))
        is_near = self._mean_loss >= math.log(NEAR)
        settled = (has_slope & (risen | enough & (is_near | (loss >= 1)))) | (moved < anchor)
        self._anchor = torch.where(settled | (moved <= math.log(FREE)), moved, anchor)
        self.log_prices = moved

    def _step(self, loss: Tensor, enough: Tensor) -> Tensor:
        """How far the logarithms of prices move, by the loss as a share of what is allowed."""
        # The price makes up for a part of what is too much. Of a share, not of a logarithm, noise leaves the
        # mean where it is. But it does not fall beyond where the target should be.
        slope = (self._products / self._squares).clamp(SLOPE, STEEP)  # steps too long would swing
        by = GAIN * (1 - loss) / slope
        limited = enough & (by <= -self._limit)
        by = torch.maximum(by, -loss.clamp(min=1).log() / slope).maximum(-self._limit)
        limit = torch.where(limited, 2 * self._limit, MAX_LOG_STEP)
        self._limit = torch.where(enough, limit, self._limit)
        return by

    def _measure(self, loss: Tensor, enough: Tensor) -> Tensor:
        """Whether the loss goes with the price, or is as it should be."""
        loss = loss.clamp(min=NOTHING).log()
        from_price = torch.where(enough, self.log_prices - self._mean_price, 0.0)
        from_loss = torch.where(enough, loss - self._mean_loss, 0.0).nan_to_num()
        # The first loss is its mean.
        mean_loss = torch.where(enough & self._mean_loss.isnan(), loss, self._mean_loss)
        self._mean_price = self._mean_price + RATE * from_price
        self._mean_loss = mean_loss + RATE * from_loss
        rate = RATE * enough
        squares, products = self._squares + from_price**2, self._products + from_price * from_loss
        self._squares = squares - rate * (squares - PRIOR)
        self._products = products - rate * (products - SLOPE * PRIOR)
        answers = self._products >= LEAST_SLOPE * self._squares
        return answers | (self._mean_loss >= math.log(NEAR))

    def settled(self) -> Tensor:
        """The logarithms of the prices to go on from without :meth:`state`: of one that has risen far without
        a slope, the one before, or runs that stop and go on would wind it up."""
        return torch.where(self.log_prices - self._anchor < REACH, self.log_prices, self._anchor)

    def state(self) -> dict[str, list[float | None]]:
        """By name, what the next moves follow from, of each price, for JSON: None is not a number. Reads from
        the device."""
        rows = torch.stack([getattr(self, name) for name in KEPT]).flatten(1).tolist()
        return {
            name.lstrip("_"): [None if math.isnan(each) else each for each in row]
            for name, row in zip(KEPT, rows)
        }

    def restore(self, state: dict[str, list[float | None]]) -> None:
        """Go on from a state of as many prices."""
        for name in KEPT:
            row = [math.nan if each is None else each for each in state[name.lstrip("_")]]
            value = torch.tensor(row, dtype=torch.float32, device=self.log_prices.device)
            setattr(self, name, value.reshape(self.log_prices.shape))
        self._is_restored = True


def is_state(state: object, count: int) -> bool:
    """Whether this is a state of so many prices. Only a mean of no loss yet is not a number."""
    rows = state if isinstance(state, dict) else {}
    names = {name.lstrip("_") for name in KEPT}
    return names <= rows.keys() and all(
        isinstance(rows[name], list)
        and len(rows[name]) == count
        and all(
            name == "mean_loss" if each is None else isinstance(each, float) and math.isfinite(each)
            for each in rows[name]
        )
        for name in names
    )
