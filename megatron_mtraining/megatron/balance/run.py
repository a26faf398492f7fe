# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a run has of the balance of its ranks in this process: the one object that the plug-in calls."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...balance.estimates import DensityEstimates
from ...balance.planner import Planner
from ...config import ConfigError, MTrainingConfig, Policy
from ...cp_group import RankGroup
from ..arguments import settings
from ..backend import is_active, training_arguments
from ..wrapping import log
from .balancer import Balancer, balancer_of_arguments
from .log import log_balance
from .observer import LayerObserver
from .options import origin_of_estimates


class RunBalance:
    """Does nothing where neither batching nor tuning is on.

    Args:
        step: returns the number of the step under way, from 0.

    Attributes:
        planner: the plans of steps, on ranks with a data loader; None elsewhere, and in other runs.
        restored: the state of their estimates in the checkpoint that training goes on from.
        balancer: tuning and accounting; None where ranks are not balanced. :meth:`of_run` makes it in a run
            of Megatron-LM; other training loops set it.
    """

    def __init__(self, step: Callable[[], int]):
        self._step = step
        self.planner: Planner | None = None
        self.restored: dict | None = None
        self.balancer: Balancer | None = None
        self._made = False

    def of_run(self) -> Balancer | None:
        """The balancer of a run, also on a rank without attention; None if it needs none."""
        args = training_arguments()
        if self.balancer is None and not self._made and is_active(args):
            self._made = True
            self.balancer = balancer_of_arguments(
                args, settings(), self._step, lambda: self.planner
            )
        return self.balancer

    def observer(
        self, config: MTrainingConfig, policies: tuple[Policy, ...] | None, place: str
    ) -> LayerObserver | None:
        """What a layer's attention calls in training mode; None where nothing is balanced.

        Args:
            config: the layer's settings.
            policies: of this rank's heads; None if all have those of the settings.
            place: the layer, for messages.
        """
        balancer = self.of_run()
        return None if balancer is None else balancer.observer(config, policies, place)

    def end_step(self, step: int, ranks: RankGroup, price: Callable[[], Tensor | None]) -> None:
        """End a step on all ranks, as :meth:`.Balancer.end_step`."""
        balancer = self.of_run()
        if balancer is not None:
            balancer.end_step(step, ranks, price())

    def goes_on_at(self, price: float) -> None:
        """Take the price that a target recall had reached at a checkpoint."""
        if self.balancer is not None:
            self.balancer.goes_on_at(price)

    def log(self, iteration: int) -> None:
        """Print and record the balance of the steps since the last call."""
        if self.balancer is not None:
            self.balancer.read()
            log_balance(iteration, self.balancer.interval)

    def state(self, args) -> dict | None:
        """What a checkpoint has of it, whose arguments are ``args``."""
        if self.planner is None:
            return None
        return {**self.planner.state(), "origin": origin_of_estimates(args, settings())}

    def restore(self, state: dict | None) -> None:
        """Go on from :meth:`state` of a checkpoint, if this run balances its ranks too.

        Raises:
            ConfigError: it is damaged.
        """
        if state is None or not settings().balances:
            return
        try:
            DensityEstimates().restore(state)
        except ConfigError as error:
            raise ConfigError(f"{error}; --finetune leaves them out") from None
        if state.get("origin") == origin_of_estimates(training_arguments(), settings()):
            self.restored = state
        else:
            log(
                "the checkpoint's estimates of density are of another pattern, sequence length or blend of "
                "data: this run makes its own, and tunes when it has them"
            )
