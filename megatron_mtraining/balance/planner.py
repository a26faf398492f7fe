# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plans of a run's steps, made ahead of time in a thread.

Each rank that loads data makes every plan itself, and all ranks must make the same plan. A plan may therefore
only use what all ranks know at a fixed step, whatever the timing: the estimates after a fixed earlier step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import ConfigError
from .estimates import DensityEstimates
from .plan import PlanSizes, Predict, Samples, StepPlan, plan_step

LookUp = Callable[[np.ndarray], Samples]
"""Returns properties of samples by their numbers in the dataset; called in the thread."""
KEPT = 8
"""Number of plans of past steps that are kept if nothing is observed."""


def lag_of(num_workers: int, prefetch_factor: int, num_microbatches: int) -> int:
    """Steps between an observed step and the first step whose plan uses the observations.

    A data loader asks for samples as many micro-batches ahead as its workers prefetch: R steps, rounded up.
    It asks for step n's plan in step n - R, and the thread makes it in step n - R - 1. Observations of a
    step arrive at the end of the next step. The latest available observations are then of step n - R - 3.
    """
    ahead = num_workers * prefetch_factor
    return -(-ahead // num_microbatches) + 3


class Planner:
    """The plans of a run from ``first_step`` on, in order.

    Args:
        first_step: the step that begins with sample ``first_sample`` of the dataset.
        first_sample, num_samples: samples consumed so far, and samples of the dataset.
        sizes, batching: see :func:`.plan.plan_step`.
        look_up: returns properties of samples.
        predict: milliseconds by visible pairs and density; None predicts none.
        estimates: as they are before ``first_step``; :meth:`observe` changes them.
        lag: see :func:`lag_of`.
    """

    def __init__(
        self,
        first_step: int,
        first_sample: int,
        num_samples: int,
        sizes: PlanSizes,
        batching: str,
        look_up: LookUp,
        predict: Predict | None,
        estimates: DensityEstimates | None = None,
        lag: int = 3,
    ):
        self.first_step, self.first_sample, self.num_samples = first_step, first_sample, num_samples
        self.sizes, self.batching, self.lag = sizes, batching, lag
        self.estimates = estimates or DensityEstimates()
        self.predict = predict
        self._look_up = look_up
        self._plans: dict[int, Future[StepPlan | None]] = {}
        # Plans before are made from priors alone.
        self._first_known = first_step + (0 if self.estimates.state()["kinds"] else lag)
        # No thread runs before the first plan is asked for: by then a data loader has forked its workers.
        self._thread = ThreadPoolExecutor(1, "mtraining-plan")
        self._begun = False

    @property
    def elasticity(self) -> float:
        """Elasticity of density to price, by the latest estimates."""
        return self.estimates.elasticity

    def knows(self, step: int) -> bool:
        """Whether anything was observed before the plan of a step is made, in this run or before its
        checkpoint."""
        return step >= self._first_known

    @property
    def end_step(self) -> int:
        """The first step that has no whole global batch."""
        return self.first_step + (self.num_samples - self.first_sample) // self.sizes.samples

    def samples_from(self, step: int) -> int:
        """The number of a step's first sample in Megatron's order."""
        return self.first_sample + (step - self.first_step) * self.sizes.samples

    def begun(self, step: int) -> StepPlan | None:
        """The plan of a step whose making has begun, once it is made; None else. Begins nothing, so that the
        first rank, which asks before the others, cannot begin it from other estimates than theirs.

        Raises:
            ConfigError: the samples cannot be read or placed.
        """
        return self._plans[step].result() if step in self._plans else None

    def plan_of(self, step: int) -> StepPlan | None:
        """The plan of a step, for its data loader; waits until it is made. None if no whole global batch is
        left. All ranks must ask for the same steps between the same observations.

        Raises:
            ConfigError: the step is over, or the samples cannot be read or placed.
        """
        if step >= self.end_step:
            return None
        if not self._begun:
            self._begun = True
            for each in range(self.first_step, self.first_step + self.lag):
                self._start(each)
        if step not in self._plans:
            if step < self.first_step or (self._plans and step < min(self._plans)):
                raise ConfigError(f"the plan of step {step} is not kept any more")
            # The step whose observations it needs was left out (--iterations-to-skip), or nothing has been
            # observed for long. All ranks are at the same place of the same program.
            self._start(step)
        found = self._plans[step].result()
        self._forget(step - self.lag - KEPT)
        return found

    def observe(self, step: int, density, recall, multipliers=None) -> None:
        """Update the estimates with the observations of a step, and start the plan that needs them. All ranks
        must call it for the same steps, in order. A step without a plan is left out: one at the end of the
        data, and one whose plan was forgotten because many steps were skipped after it.

        Args:
            density, recall, multipliers: of each micro-batch and rank, ``[M, dp]``: see
                :meth:`.estimates.DensityEstimates.observe`.
        """
        plan = self.begun(step)
        if plan is None:
            return
        self.estimates.observe(plan.kinds, density, recall, multipliers, plan.pairs)
        self._start(step + self.lag)
        self._forget(step)

    def state(self) -> dict[str, Any]:
        """The state of the estimates, for a checkpoint."""
        return self.estimates.state()

    def _start(self, step: int) -> None:
        if step not in self._plans and step < self.end_step:
            estimates = copy.deepcopy(self.estimates)  # as they are now, whenever the thread runs
            self._plans[step] = self._thread.submit(self._make, step, estimates)

    def _make(self, step: int, estimates: DensityEstimates) -> StepPlan:
        begin = self.samples_from(step)
        samples = self._look_up(np.arange(begin, begin + self.sizes.samples))
        return plan_step(step, samples, self.sizes, self.batching, estimates, self.predict)

    def _forget(self, before: int) -> None:
        for step in [step for step in self._plans if step < before]:
            del self._plans[step]
