# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What changes from step to step: the price.

A target recall is met by feedback (:mod:`.price_feedback`): each step's recall moves the price of the next
step, of each head or one for all. All of it stays on the device. A schedule says what the price, or the
target, is at each share of a run; which steps are dense is known on the host.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from ..config import (
    ConfigError,
    MTrainingConfig,
    Policy,
    has_price,
    head_policies,
    option,
    sets_every_head,
)
from ..cp_group import RankGroup
from .constants import constant
from .price_feedback import RANGE, SLOPE, PriceFeedback, is_state

__all__ = ["SLOPE", "Steering", "check_prices"]

ROUNDING = 1e-4
"""A smaller loss may be none: recall is a sum of rounded probabilities."""
UNTOLD = 1e-3
"""The weight of a call that has lost nothing, where nothing is known of what it could have lost."""


class Steering:
    """The price of a run, or the prices of its heads.

    Args:
        shape: layers and heads of the whole model, each of which may have a price (``target_scope`` head).
        layers: those that have attention, from 0; None for all.
        share: returns which share of the run is done, of 0 to 1, for a schedule: the same in all calls of a
            step, and on all ranks.

    Attributes:
        step: the training step under way, from 0.
        config: the run's settings.
    """

    def __init__(
        self,
        config: MTrainingConfig,
        step: int = 0,
        shape: tuple[int, int] = (1, 1),
        share: Callable[[], float] | None = None,
        layers: Sequence[int] | None = None,
    ):
        self.config = config
        self.step = step
        self._share = share
        policy = config.policy
        self._target = policy.target_recall
        self._schedule = config.steps
        self._heads = policy.target_scope == "head"
        self._shape = shape if self._heads else (1, 1)
        self._layers = range(shape[0]) if layers is None else layers
        # The target, or the targets of heads, NaN where a head has no price: float32 [layers, heads].
        self._aim: Tensor | None = None
        self._feedback: PriceFeedback | None = None  # of [layers, heads], or [1, 1]
        self._start = policy.price  # or a table of prices
        self._history: dict[str, list[float | None]] | None = None  # before the start
        # Float32 [2, layers, heads]: sums of lost attention, and of the rows that could lose some.
        self._seen: Tensor | None = None

    def leave_out(self, layers: Container[int]) -> None:
        """Layers, from 0, without a pattern (windows, linear attention): their prices do not count."""
        self._layers = [layer for layer in self._layers if layer not in layers]
        self._aim = None

    def take_in(self, layer: int) -> None:
        """A layer, from 0, that has a pattern, although it was left out."""
        if layer not in self._layers:
            self._layers = [*self._layers, layer]
            self._aim = None

    @property
    def moves(self) -> bool:
        """Whether feedback moves the price from step to step."""
        return self._target is not None

    @property
    def has_schedule(self) -> bool:
        """Whether the price, or the target, is another from step to step by a schedule."""
        return self._schedule is not None

    @property
    def changes(self) -> bool:
        """Whether steps differ at all: by feedback or by a schedule."""
        return self.moves or self.has_schedule

    def scheduled(self) -> float | None:
        """What a schedule has for this step: the price, or with a target 1 - recall; 0 for dense attention.
        None without one.

        Raises:
            ConfigError: nothing says how long the run is.
        """
        if self._schedule is None:
            return None
        if self._share is None:
            raise ConfigError(
                f"{option('schedule')} is given, but nothing says how long the run is: train by Megatron-LM "
                "or by a Trainer of transformers, or say it (num_steps)"
            )
        return self._schedule.at(self._share())

    @property
    def is_dense(self) -> bool:
        """Whether a schedule makes this step dense, whatever the policies of heads are."""
        return self.scheduled() == 0

    def price(self, device, layer: int = 0, first: int = 0, count: int = 1) -> Tensor | None:
        """This step's price, float32: ``[]`` for all heads, or ``[count]``, of the layer's heads from
        ``first`` on (both from 0, over the whole model); None for the settings'. Not for a dense step."""
        if self._target is None:
            price = self.scheduled()
            if price is None:
                return None
            return torch.full((), price, dtype=torch.float32, device=device)
        prices = self._prices(device).log_prices.exp()
        return prices[layer, first : first + count] if self._heads else prices[0, 0]

    def unfinished(self, share: float) -> str | None:
        """What to say if training ends after this share of the schedule; None if nothing is left of it."""
        last = 0.0 if self._schedule is None else self._schedule.last_share
        if self._schedule is None or not last or share > last:
            return None
        # Where the last point begins, no step of it has been trained.
        value = self._schedule.at(min(share, math.nextafter(last, 0)))
        end = self._schedule.points[-1][1]
        reached = (
            f"a price of {value:.4g}" if self._target is None else f"a recall of {1 - value:.4g}"
        )
        return (
            f"training ends after {share:.1%} of its schedule, at {reached}, before the "
            f"{'denser' if end else 'dense'} steps from {self._schedule.last_share:.0%} on, which bring the "
            "model back to dense attention: to end the schedule, go on from its checkpoint"
        )

    def _prices(self, device) -> PriceFeedback:
        if self._feedback is None:
            start = torch.tensor(self._start, dtype=torch.float32).clamp(*RANGE).log()
            self._feedback = PriceFeedback(start.expand(self._shape).clone().to(device))
            if self._history is not None:
                self._feedback.restore(self._history)
        return self._feedback

    def observe(
        self,
        lost: Tensor,
        layer: int = 0,
        first: int = 0,
        exposed: float | Tensor | None = None,
        policies: Sequence[Policy] | None = None,
        copies: int = 1,
    ) -> None:
        """Count the attention that one call has lost (1 - recall), float32 ``[b, h]``, for the target: of the
        heads from ``first`` on of a layer, both from 0.

        Args:
            exposed: how many of the rows could lose attention, by which the call weighs:
                ``PatternIndex.exposed``. None if that is not known: a call that has lost nothing weighs next
                to nothing then.
            policies: of these heads; None if all have the run's. Heads without a price say nothing on a price
                for all.
            copies: ranks that count this call, or their parts of it: a step weighs as much on any number, or
                a run that goes on with fewer would take its steps for ones with little to lose.
        """
        if self._target is None or self.is_dense:
            return
        if exposed is None:
            none = lost <= ROUNDING
            lost, weight = lost.masked_fill(none, 0), torch.where(none, UNTOLD, 1.0).sum(0)
        else:
            weight = exposed.sum() if isinstance(exposed, Tensor) else exposed * len(lost)
        if copies > 1:
            lost, weight = lost / copies, weight / copies
        if self._seen is None:
            with torch.inference_mode(False):  # the step may have other calls
                self._seen = torch.zeros(2, *self._shape, device=lost.device)
        if self._heads:
            heads = slice(first, first + lost.shape[1])
            self._seen[0, layer, heads] += lost.sum(0)
            self._seen[1, layer, heads] += weight
            return
        priced = [1.0] * lost.shape[1] if policies is None else map(has_price, policies)
        counts = constant(tuple(map(float, priced)), lost.device)
        self._seen[0] += (lost * counts).sum()
        self._seen[1] += (weight * counts).sum()

    def advance(self, step: int, ranks: RankGroup) -> None:
        """End a step: ``step`` is the next one. A collective if there is a target, unless the step was dense.

        Args:
            ranks: all ranks of the run, over whose calls the recall is averaged.
        """
        if self._target is not None and not self.is_dense:
            seen = self._seen
            if seen is None:  # no attention has run here
                prices = self._feedback
                device = ranks.device if prices is None else prices.log_prices.device
                seen = torch.zeros(2, *self._shape, device=device)
            lost, exposed = ranks.all_reduce(seen)
            allowed = 1 - self._aims(seen.device)
            now = self.scheduled()
            if now is not None:  # heads with targets of their own keep the ratio
                allowed = allowed * (now / (1 - self._target))
            self._prices(seen.device).move(lost, exposed, allowed.clamp(min=1e-5))
        self._seen, self.step = None, step

    def _aims(self, device) -> Tensor:
        if self._aim is None:
            layers, heads = self._shape
            aims = torch.full(self._shape, math.nan if self._heads else float(self._target))
            # Layers of multi-token prediction are not among those that a settings file numbers.
            for layer in self._layers if self._heads else ():
                aims[layer] = float(self._target)
                policies = head_policies(self.config, layer, None, heads) or ()
                for head, policy in enumerate(policies):
                    if not has_price(policy):
                        aims[layer, head] = math.nan
                    elif policy.target_recall is not None:
                        aims[layer, head] = policy.target_recall
            self._aim = aims.to(device)
        return self._aim

    def state(self) -> float | list[list[float]] | None:
        """The price to continue from after a checkpoint, or the prices of each layer's heads; None if nothing
        moves it. Those of this step, but for :meth:`.PriceFeedback.settled`. Reads from the device."""
        return self._table(None if self._feedback is None else self._feedback.settled())

    def history(self) -> dict[str, list[float | None]] | None:
        """What a checkpoint has beside :meth:`state`, for prices that move on as if the run had not stopped;
        None if nothing has moved them. Reads from the device."""
        return self._history if self._feedback is None else self._feedback.state()

    def _table(self, log_prices: Tensor | None) -> float | list[list[float]] | None:
        if self._target is None or log_prices is None:
            return self._start if self._target is not None else None
        prices = log_prices.exp().tolist()
        return prices if self._heads else prices[0][0]

    def restore(
        self,
        price: float | list[list[float]],
        history: dict[str, list[float | None]] | None = None,
    ) -> None:
        """Go on from a checkpoint's price, or prices; one stands for all, and all for one by the median of
        heads that have a price.

        Args:
            history: the checkpoint's :meth:`history`; None if it is from before there was one. It does not
                count where one price stands for all, or all for one.

        Raises:
            ConfigError: the checkpoint is of another number of layers or heads, or has no prices.
        """
        check_prices(price)
        if isinstance(price, list) != self._heads:
            history = None
        if isinstance(price, list):
            if not self._heads:
                price = _median(price, self.config, self._layers)
            elif self._shape != (len(price), len(price[0])):
                raise ConfigError(
                    f"the checkpoint has prices of {len(price)} layers and {len(price[0])} heads, but the "
                    f"model has {self._shape[0]} and {self._shape[1]}: leave the prices out, or use "
                    f"{option('target_scope')} model"
                )
        if history is not None:
            if not is_state(history, math.prod(self._shape)):
                raise ConfigError(
                    "the checkpoint has a history of prices that cannot be read: it was written by another "
                    "version of this package, or is damaged"
                )
            price = self._table(torch.tensor(history["log_prices"]).reshape(self._shape))
        self._start, self._feedback, self._history = price, None, history

    def typical(self) -> Tensor | None:
        """This step's price, the median of heads that have one: float32 ``[]``, on the device. None if
        nothing moves it, or no attention has run here."""
        if self._feedback is None:
            return None
        prices = self._feedback.log_prices
        aims = self._aims(prices.device)
        return torch.where(aims.isnan(), aims, prices).nanmedian().exp()

    def now(self) -> float | None:
        """This step's price, the median of heads that have one, read from the device; None without one."""
        config = self.config
        if config.policy.price is None:
            return None
        if config.settings is not None and sets_every_head(config.settings):
            return None
        if (scheduled := self.scheduled()) is not None and (not scheduled or self._target is None):
            return scheduled
        if self._target is None:
            return config.policy.price
        state = self._table(None if self._feedback is None else self._feedback.log_prices)
        return _median(state, config, self._layers) if isinstance(state, list) else state


def _median(table: list[list[float]], config: MTrainingConfig, layers: Sequence[int]) -> float:
    """The median of the prices of those heads of ``layers`` that have one; of all if none has, and so none
    moves."""
    found: list[float] = []
    for layer in layers:
        row = table[layer]
        policies = head_policies(config, layer, None, len(row)) or [config.policy] * len(row)
        found += [price for policy, price in zip(policies, row) if has_price(policy)]
    return statistics.median(found or [price for row in table for price in row])


def check_prices(price: float | list[list[float]]) -> None:
    """Raise :class:`ConfigError` unless it is a price, or a table of them. A checkpoint has what was written
    to it: one that is not a number would select nothing in all steps."""
    rows = price if isinstance(price, list) else [[price]]
    table = all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows)
    if not rows or not table:
        raise ConfigError(
            "the checkpoint has prices that are not a table of layers and heads: it was not written by this "
            "package, or is damaged"
        )
    for each in (each for row in rows for each in row):
        number = isinstance(each, int | float) and not isinstance(each, bool)
        if not number or not 0 < each < math.inf:
            raise ConfigError(
                f"the checkpoint has the price {each!r}, not a number above 0: it was not written by "
                "this package, or is damaged"
            )
