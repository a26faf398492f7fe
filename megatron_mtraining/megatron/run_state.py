# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the layers of a run share in this process: the steering of their prices, the balance of ranks, and the
training step."""

from __future__ import annotations

from ..balance.planner import Planner
from ..config import ConfigError, MTrainingConfig
from ..cp_group import RankGroup
from ..pattern import Steering
from .arguments import settings
from .backend import is_active, training_arguments
from .balancing import Balancer, balancer_of_arguments


class RunState:
    """Steering objects by settings and model shape, and the training step that all of them are at.

    Layers with the same settings share one: the model chunks of a pipeline stage have configs of their own,
    and ranks of a stage without attention take part in the sums too. So do two models of one shape in a
    process; another setting, such as a start price that differs a little, gives them prices of their own.

    Attributes:
        step: the training step under way, from 0.
        balance: the plans of steps, on ranks with a data loader; None elsewhere, and in other runs.
        restored_balance: the state of their estimates in the checkpoint that training goes on from.
        logged: whether a step of this process has been logged.
        computed: the share of attention's dense operations that logged steps computed; 1 before the first.
        warned_of_density: whether this run was told that its price leaves nothing out.
        balancer: tuning and accounting; None where neither batching nor tuning is on. :meth:`balancer_of_run`
            makes it in a run of Megatron-LM; other training loops set it.
    """

    def __init__(self):
        self.step = 0
        self.balance: Planner | None = None
        self.restored_balance: dict | None = None
        self.logged = False
        self.computed = 1.0
        self.warned_of_density = False
        self.balancer: Balancer | None = None
        self._balancer_made = False
        self._steerings: dict[tuple, Steering] = {}

    def steering_of(self, config: MTrainingConfig, num_layers: int, num_heads: int) -> Steering:
        """The steering of these settings, for a model with these numbers of layers and heads."""
        at = config, (num_layers, num_heads)
        if at not in self._steerings:
            self._steerings[at] = Steering(config, self.step, (num_layers, num_heads))
        return self._steerings[at]

    def steering_of_run(self, config: MTrainingConfig | None = None) -> Steering:
        """The steering of a run of Megatron-LM, also on a rank without attention.

        Args:
            config: a layer's settings; None for the command line's.
        """
        args = training_arguments()
        return self.steering_of(config or settings(), args.num_layers, args.num_attention_heads)

    @property
    def steerings(self) -> list[Steering]:
        """All that there are."""
        return list(self._steerings.values())

    def restore_prices(self, prices: list) -> None:
        """Go on from a checkpoint's prices, which were of all steerings with a target, in the order of the
        layers.

        Raises:
            ConfigError: there are others now, or it has no prices.
        """
        of_run = self.steering_of_run()
        steerings = [each for each in self.steerings if each.moves]
        if not steerings:  # they are looked at, and not needed
            steerings, prices = [of_run], prices[:1]
        if len(prices) == 1:  # checkpoints used to have the first one's alone
            steerings = steerings[:1]
        if len(prices) != len(steerings):
            raise ConfigError(
                f"the checkpoint has prices of {len(prices)} target recalls, of layers with settings of "
                f"their own, but this model has {len(steerings)}"
            )
        for steering, price in zip(steerings, prices):
            steering.restore(price)

    def price_of_step(self) -> float | None:
        """The price of the step under way, the median of the heads; None without one."""
        prices = (steering.now() for steering in self.steerings)
        return next((price for price in prices if price is not None), None)

    def balancer_of_run(self) -> Balancer | None:
        """The balancer of a run, also on a rank without attention; None if it needs none."""
        args = training_arguments()
        if self.balancer is None and not self._balancer_made and is_active(args):
            self._balancer_made = True
            self.balancer = balancer_of_arguments(
                args, settings(), self.step_now, lambda: self.balance
            )
        return self.balancer

    def step_now(self) -> int:
        """The training step under way, from 0: Megatron-LM skips those of ``--iterations-to-skip`` without an
        end."""
        return getattr(training_arguments(), "curr_iteration", self.step)

    def step_is_logged(self) -> bool:
        """Whether the training step under way may end with a line of the log: always outside Megatron-LM,
        where nothing is known of it."""
        return not is_active(training_arguments()) or self.is_logged(self.step_now() + 1)

    def is_logged(self, iteration: int) -> bool:
        """Whether Megatron-LM logs ``iteration``: the first one of a process, and each at
        ``--log-interval``."""
        return not self.logged or iteration % training_arguments().log_interval == 0

    def resume(self, step: int) -> None:
        """Training goes on after ``step`` steps, from a checkpoint."""
        self.step = step
        for steering in self.steerings:
            steering.step = step
            price = steering.now() if steering.moves else None
            if self.balancer is not None and price is not None:
                self.balancer.goes_on_at(price)

    def advance(self, step: int) -> None:
        """End a training step on all ranks: ``step`` steps are done. A collective where there are targets,
        and one where ranks are balanced."""
        self.step = step
        ranks = RankGroup.everyone()
        for steering in self.steerings:
            steering.advance(step, ranks)
        balancer = self.balancer_of_run()
        if balancer is not None:
            prices = (steering.typical() for steering in self.steerings)
            balancer.end_step(step, ranks, next((p for p in prices if p is not None), None))


RUN = RunState()
"""The run of this process. Steps of Megatron-LM end themselves; other training loops call :func:`advance`."""


def advance(step: int) -> None:
    """End a training step on all ranks: ``step`` steps are done; targets count by it. For
    training loops other than Megatron-LM's."""
    RUN.advance(step)
