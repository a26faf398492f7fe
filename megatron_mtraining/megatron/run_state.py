# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the layers of a run share in this process: the steering of their prices, the balance of ranks, and the
training step."""

from __future__ import annotations

from weakref import WeakSet

from torch import Tensor

from ..config import ConfigError, MTrainingConfig, Span, option
from ..cp_group import RankGroup
from ..pattern import Steering
from .arguments import length_of, settings
from .backend import is_active, training_arguments
from .balance.run import RunBalance
from .layer_pattern import attention_layers, layers_with_attention
from .options import attribute


def has_schedule(args) -> bool:
    """Whether prices, or target recalls, change over a run of Megatron-LM with this backend."""
    names = ("schedule", "target_schedule")
    return is_active(args) and any(getattr(args, attribute(name), None) for name in names)


class RunState:
    """Steering objects by settings and model shape, and the training step that all of them are at.

    Layers with the same settings share one: the model chunks of a pipeline stage have configs of their own,
    and ranks of a stage without attention take part in the sums too. So do two models of one shape in a
    process; another setting, such as a start price that differs a little, gives them prices of their own.

    Attributes:
        step: the training step under way, from 0.
        span: what a schedule is over, in samples or iterations; None if it is not known yet.
        restored_span: :meth:`span_state` of the checkpoint that training goes on from.
        balance: what the run has of the balance of its ranks.
        logged: whether a step of this process has been logged.
        computed: the share of attention's dense operations that logged steps computed; 1 before the first.
        has_attention: whether an attention was built in this process.
        has_run_dense: whether dense attention has run, so that its kernels are compiled.
        warned: names of the warnings (:func:`..advice.warnings_of`) that this run has printed.
        meters: of density, one for each layer that there is (:mod:`.density`).
    """

    def __init__(self):
        self.step = 0
        self.span: Span | None = None
        self.restored_span: list | None = None
        self._share: tuple[tuple, float] | None = None
        self.balance = RunBalance(self.step_now)
        self.logged = False
        self.computed = 1.0
        self.has_attention = False
        self.has_run_dense = False
        self.warned: set[str] = set()
        self.meters: WeakSet = WeakSet()
        self._steerings: dict[tuple, Steering] = {}

    def steering_of(
        self,
        config: MTrainingConfig,
        num_layers: int,
        num_heads: int,
        layers: list[int] | None = None,
    ) -> Steering:
        """The steering of these settings, for a model with these numbers of layers and heads, of which
        ``layers``, or all, have attention."""
        at = config, (num_layers, num_heads)
        if at not in self._steerings:
            shape = num_layers, num_heads
            self._steerings[at] = Steering(config, self.step, shape, self.share, layers)
        return self._steerings[at]

    def share(self) -> float:
        """The share of a schedule's run that is done where the step under way begins. The same in evaluations
        after the step, when Megatron-LM has counted its samples already.

        Raises:
            ConfigError: nothing says how long the run is.
        """
        if self.span is None:
            self.resume_span(None)
        step = self.step_now()
        at = step, self.span
        if self._share is None or self._share[0] != at:
            self._share = at, self.span.share(self._done(step))
        return self._share[1]

    def begin_forward(self) -> None:
        """Before a forward of a model: a schedule's share becomes that of the step's begin on all ranks, also
        on those without attention."""
        if has_schedule(training_arguments()):
            self.share()

    def unfinished(self) -> str | None:
        """What to say where training ends now, before the end of its schedule."""
        if self.span is None or not has_schedule(training_arguments()):
            return None
        return self.steering_of_run().unfinished(self.span.share(self._done(self.step)))

    def _done(self, step: int) -> int:
        """Samples, or iterations, that are done after ``step`` steps, which is now."""
        args = training_arguments()
        by_samples = is_active(args) and length_of(args)[0] == "--train-samples"
        return args.consumed_train_samples if by_samples else step

    def resume_span(self, saved: list | None) -> None:
        """Say what a schedule is over, in a run that goes on from a checkpoint.

        Args:
            saved: :meth:`span_state` of the checkpoint; None if it has none, or there is no checkpoint.

        Raises:
            ConfigError: the run has another length than the checkpoint's, and no option says what that means;
                or it is not known.
        """
        args = training_arguments()
        if not is_active(args):
            raise ConfigError(
                f"{option('schedule')} is given, but nothing says how long the run is: call "
                "megatron_mtraining.megatron.advance(0, num_steps) before the first step"
            )
        name, end = length_of(args)
        extension = getattr(settings().policy, "schedule_extension", None)
        span = None if saved is None else Span(*saved[1:])
        same = saved is None or saved[0] == name
        self.span = Span.of_run(
            self._done(self.step_now()),
            end,
            span,
            extension,
            f"{name} is {end}",
            None if same else saved[0],
        )

    def span_state(self) -> list | None:
        """What a checkpoint has of a schedule: the option that gives the run's length, and the span."""
        if self.span is None or not is_active(training_arguments()):
            return None
        return [length_of(training_arguments())[0], self.span.begin, self.span.end]

    def steering_of_run(self, config: MTrainingConfig | None = None) -> Steering:
        """The steering of a run of Megatron-LM, also on a rank without attention.

        Args:
            config: a layer's settings; None for the command line's.
        """
        args = training_arguments()
        shape = attention_layers(args), args.num_attention_heads
        return self.steering_of(config or settings(), *shape, layers_with_attention(args))

    def target(self) -> float | None:
        """The target recall of all heads; None without one, if it changes, or if a file has others."""
        given = settings()
        is_one = given.settings is None and given.policy.target_schedule is None
        return given.policy.target_recall if is_one else None

    @property
    def steerings(self) -> list[Steering]:
        """All that there are."""
        return list(self._steerings.values())

    def restore_prices(self, prices: list, histories: list) -> None:
        """Go on from a checkpoint's prices, which were of all steerings with a target, in the order of the
        layers.

        Args:
            histories: what led to them; none of checkpoints from before they had any.

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
        histories = histories or [None] * len(prices)
        for steering, price, history in zip(steerings, prices, histories, strict=True):
            steering.restore(price, history)

    def price_of_step(self) -> float | None:
        """The price of the step under way, the median of the heads; None without one."""
        prices = (steering.now() for steering in self.steerings)
        return next((price for price in prices if price is not None), None)

    def _typical_price(self) -> Tensor | None:
        """The price that a target recall has moved, float32 ``[]`` on the device; None without one."""
        prices = (steering.typical() for steering in self.steerings)
        return next((price for price in prices if price is not None), None)

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
        if has_schedule(training_arguments()):
            self.resume_span(self.restored_span)
        for steering in self.steerings:
            steering.step = step
            price = steering.now() if steering.moves else None
            if price is not None:
                self.balance.goes_on_at(price)

    def advance(self, step: int) -> None:
        """End a training step on all ranks: ``step`` steps are done. A collective where there are targets,
        and one where ranks are balanced."""
        self.step = step
        ranks = RankGroup.everyone()
        for steering in self.steerings:
            steering.advance(step, ranks)
        self.balance.end_step(step, ranks, self._typical_price)


RUN = RunState()
"""The run of this process. Steps of Megatron-LM end themselves; other training loops call :func:`advance`."""


def advance(step: int, num_steps: int | None = None) -> None:
    """End a training step on all ranks: ``step`` steps are done; targets and schedules count by it. For
    training loops other than Megatron-LM's.

    Args:
        num_steps: steps of the run, which a schedule is over: given once, before the first step, with the
            number of steps that are done.

    Raises:
        ConfigError: the run has no step.
    """
    if num_steps is not None:
        if num_steps < 1:
            raise ConfigError(
                f"num_steps is {num_steps}: give the number of the run's steps, 1 or more"
            )
        RUN.span = Span(0, num_steps)
    RUN.advance(step)
