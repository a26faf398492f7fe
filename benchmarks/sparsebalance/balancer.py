# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One mode's plans over measured steps, what it learns from them, and its row."""

from __future__ import annotations

import numpy as np

from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.balance.plan import PlanSizes, Samples, StepPlan, plan_step
from megatron_mtraining.balance.tuning import TuningBounds

from .modes import MODES, balance, tuned


class Balancer:
    """One mode's plans, what it learns, and what its steps gave."""

    def __init__(self, name: str, sizes: PlanSizes, predict, options):
        self.name, self.mode, self.sizes, self.predict = name, MODES[name], sizes, predict
        self.options, self.estimates = options, DensityEstimates()
        self.bounds = TuningBounds(max_mass=options.mass)
        self.steps: list[dict] = []

    def plan(self, step: int, samples: Samples) -> tuple[StepPlan, np.ndarray, np.ndarray]:
        """The plan, the multipliers of the price, and predicted milliseconds, ``[M, dp]`` each."""
        plan = plan_step(
            step, samples, self.sizes, self.mode.batching, self.estimates, self.predict
        )
        self.mass = np.zeros(plan.density.shape)
        if not (self.mode.tuning and step):  # nothing is known before the first
            return plan, np.ones(plan.density.shape), plan.predicted_ms
        found = tuned(
            plan, self.estimates.elasticity, self.bounds, self.options.price, self.predict
        )
        self.mass = found.mass
        return plan, found.multipliers.astype(np.float64), found.predicted_ms

    def take(self, plan: StepPlan, multipliers, predicted, found: np.ndarray) -> None:
        """Learn from a measured step, and keep it."""
        times, density, recall = found
        untuned = recall + self.mass
        self.estimates.observe(plan.kinds, density, np.clip(untuned, 0, 1), multipliers, plan.pairs)
        # What the model says of the density that was found: errors of the estimates left out.
        informed = self.predict(plan.pairs.sum(-1), density)
        over, idle = balance(times.sum(0))
        self.steps.append(
            dict(
                over=over, idle=idle, slowest=times.sum(0).max(), density=density.mean(),
                recall=recall.mean(), error=np.abs(predicted / times - 1).ravel(),
                informed=np.abs(informed / times - 1).ravel(),
                bias=float(predicted.sum() / times.sum()),
                multipliers=[float(multipliers.min()), float(multipliers.max())],
                times=np.round(times, 3).tolist(), predicted=np.round(predicted, 3).tolist(),
            )
        )  # fmt: skip

    def row(self, chosen: str) -> dict:
        """Means over the steps that count."""
        steps = self.steps[self.options.learn :]

        def mean(name):
            return round(float(np.mean([step[name] for step in steps])), 5)

        errors = {
            name: np.concatenate([step[name] for step in steps]) for name in ("error", "informed")
        }
        return dict(
            source="measured", set=chosen, gpus=self.sizes.dp_size, dp=self.sizes.dp_size, cp=1, pp=1,
            microbatches=self.sizes.num_microbatches, waits="step", mode=self.name,
            price=self.options.price, max_over_mean=mean("over"), attention_ms=mean("slowest"),
            step_ms=mean("slowest"), idle_share=mean("idle"), recall=mean("recall"),
            density=mean("density"), predicted_over_measured=mean("bias"),
            error_median=round(float(np.median(errors["error"])), 4),
            error_worst=round(float(errors["error"].max()), 4),
            error_median_at_density=round(float(np.median(errors["informed"])), 4),
            error_worst_at_density=round(float(errors["informed"].max()), 4),
            multipliers=[
                min(step["multipliers"][0] for step in steps),
                max(step["multipliers"][1] for step in steps),
            ],
            steps=len(steps), every=self.options.every, max_mass=self.options.mass,
            last_step=dict(measured_ms=steps[-1]["times"], predicted_ms=steps[-1]["predicted"]),
        )  # fmt: skip


def samples_of(samples: Samples, numbers: np.ndarray) -> Samples:
    return Samples(numbers, *(each[numbers] for each in samples[1:]))
