# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plans and balancers that several tests of tuning start from."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.megatron.balance.balancer import Balancer, Layout


class Plans:
    """A planner of one step again and again: visible pairs and density ``[M, dp]``; ms are attended pairs."""

    elasticity, known = 0.7, 0

    def __init__(self, pairs, density, recall=0.95):
        self.pairs, self.density = np.asarray(pairs, float), np.asarray(density, float)
        self.recall = np.full_like(self.density, recall)
        self.observed: list[tuple] = []

    def begun(self, step):
        pairs = self.pairs[..., None]
        return SimpleNamespace(
            step=step, pairs=pairs, density=self.density, recall=self.recall,
            predicted_ms=self.predict(pairs[..., 0], self.density),
        )  # fmt: skip

    def knows(self, step):
        return step >= self.known

    def predict(self, pairs, density):
        return pairs * density

    def observe(self, step, density, recall, multipliers):
        self.observed.append((step, density, recall, multipliers))


class Given(Balancer):
    """A balancer of one rank that plans given multipliers for step 0, and none for others."""

    def __init__(self, multipliers, mass, observe):
        self.now = 0
        count = 2 if multipliers is None else len(multipliers)
        self.plans = Plans(np.ones((count, 1)), np.full((count, 1), 0.1))
        max_mass = None if observe else 0.01
        super().__init__(
            Layout(), lambda: count, lambda: self.plans, max_mass, 1.0, lambda: self.now
        )
        self._given = None if multipliers is None else np.asarray(multipliers, float)
        self._given_mass = mass
        self.end_step(0, RankGroup(None))
        self._unread = None  # there was no step before

    def _plan(self, step, count):
        planned = super()._plan(step, count)
        if step or self._given is None:
            return None
        return {**planned, "multipliers": self._given, "mass": np.asarray(self._given_mass)}

    def end_step(self, step, ranks, price=None):
        super().end_step(step, ranks, price)
        self.now = step


def balancer_for(multipliers, mass=((0.25,), (0.25,)), observe=False) -> Given:
    """A balancer whose step 0, of two micro-batches, has these multipliers, ``[2, 1]``; None for no plan."""
    return Given(multipliers, mass, observe)
