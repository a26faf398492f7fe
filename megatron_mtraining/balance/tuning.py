# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparsity tuning: multipliers of the price that reduce waiting and use idle time for recall.

SparseBalance (arXiv 2604.13847) tunes sparsity in both directions: ranks that others wait for become sparser,
and ranks that wait become denser. Here the price moves. A slow rank raises the price: its pattern loses the
slashes and columns with the least attention mass per unit of cost. An idle rank lowers the price: its pattern
gains the best slashes and columns that were left out. All layers and heads of a micro-batch have one
multiplier. At one price, the last selected candidate has the same mass per cost in every layer and head, so
no other way to save the same pairs loses less mass.

Two models predict the effect of a multiplier ``m``. Density follows ``D0 * m ** -elasticity``. The mass that
moves between densities D0 and D1 is ``(p0 + p1) / 2 * |D1 - D0|``: a candidate that the policy takes at price
p1 and not at p0 has a mass per cost between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .plan import StepPlan

FARTHEST = 16.0
"""The largest multiplier, and the inverse of the smallest: a power law does not hold farther out."""
NEAR = 0.01
"""A rank keeps its price if its time is at most this share from the time that it aims at: a change would cost
mass and save almost no time."""
_HALVINGS = 20
Floats = NDArray[np.float64]
LatencyOfDensity = Callable[[Floats], Floats]


@dataclass(frozen=True)
class TunedStep:
    """The result of tuning for the ``M`` micro-batches of each of ``dp`` data-parallel ranks in a step.

    Attributes:
        multipliers: multipliers of the price, float32 ``[M, dp]``; 1 where nothing changes.
        predicted_ms: attention time at the tuned prices, float64 ``[M, dp]``.
        mass: the share of attention mass given up (positive) or taken (negative), float64 ``[M, dp]``.
    """

    multipliers: NDArray[np.float32]
    predicted_ms: Floats
    mass: Floats


class Group:
    """The times that are compared, because ranks wait for each other.

    By default, ranks wait for each other at the end of a step: a member of the group is a rank, and its
    micro-batches are its cells, which run one after the other.

    Args:
        shape: ``M`` micro-batches and ``dp`` data-parallel ranks.
        pipeline: each micro-batch of each rank is a member: a pipeline is as slow as its slowest
            micro-batch.
    """

    def __init__(self, shape: tuple[int, int], pipeline: bool = False):
        self.shape, self.pipeline = shape, pipeline

    def split(self, cells: np.ndarray) -> np.ndarray:
        """Values of micro-batches, ``[M, dp]``, as ``[members, cells]``."""
        return cells.reshape(-1, 1) if self.pipeline else cells.T

    def spread(self, members: np.ndarray) -> np.ndarray:
        """A value of each member, ``[members]``, for each of its cells: ``[M, dp]``."""
        if self.pipeline:
            return members.reshape(self.shape)
        return np.broadcast_to(members, self.shape)

    def slowest(self, times: np.ndarray) -> float:
        """Attention time of a step whose members wait for the slowest.

        Args:
            times: times of micro-batches, ``[M, dp]``; values that are not finite count as 0.
        """
        of_members = self.split(np.where(np.isfinite(times), times, 0.0)).sum(-1)
        return float(of_members.max()) * (self.shape[0] if self.pipeline else 1)

    def max_over_mean(self, times: np.ndarray) -> float:
        """The largest time / the mean time; 1 if all times are 0.

        Args:
            times: as for :meth:`slowest`.
        """
        of_members = self.split(np.where(np.isfinite(times), times, 0.0)).sum(-1)
        mean = of_members.mean()
        return float(of_members.max() / mean) if mean > 0 else 1.0


def tune(
    plan: StepPlan,
    elasticity: float,
    max_mass: float,
    price: float,
    *,
    latency: LatencyOfDensity,
    pipeline: bool = False,
) -> TunedStep:
    """Multipliers of the price that bring the predicted attention times of a step together.

    All times aim at their mean. If the bound keeps a rank above it, the others stop at the time of
    this rank: no rank gives up mass to be faster than the slowest. Predicted max/mean therefore never rises.
    Ranks without work and ranks whose predictions are not finite are not changed and do not count.

    Args:
        plan: ``density`` and ``recall`` of the plan are read: expected values at the untuned price, float
            ``[M, dp]``.
        elasticity: elasticity of density to price, positive.
        max_mass: the largest share of attention mass that may be added to or taken from a micro-batch.
        price: the untuned price.
        latency: predicted attention time in ms, ``[M, dp]``, of densities ``[M, dp]``; rises with density.
        pipeline: as for :class:`Group`.

    Returns:
        The result. Equal arguments give bitwise equal results.
    """
    density = np.asarray(plan.density, np.float64)
    recall = np.asarray(plan.recall, np.float64)
    group = Group((len(density), density.shape[1]), pipeline)
    before = np.asarray(latency(density), np.float64)
    known = np.isfinite(before) & np.isfinite(density)
    works = group.split(known).all(-1) & (group.split(np.where(known, before, 0.0)).sum(-1) > 0)
    can_move = np.isfinite(elasticity) and elasticity > 0 and np.isfinite(price) and price > 0
    moves = group.spread(works) & (before > 0) & (density > 0) & can_move
    start = np.where(moves, density, 1.0)
    low, high = _limits(start, recall, elasticity if can_move else 1.0, max_mass, price, moves)

    def density_at(logs: Floats) -> Floats:
        return np.where(moves, start * np.exp(-elasticity * logs), density)

    def times(logs: Floats) -> Floats:
        cells = np.asarray(latency(density_at(logs)), np.float64)
        return group.split(np.where(known, cells, 0.0)).sum(-1)

    now, fastest = times(np.zeros_like(low)), times(high)
    target = np.where(works, now, 0.0).sum() / max(works.sum(), 1)
    level = max(target, np.max(fastest, where=works, initial=0.0))
    level = min(level, np.max(now, where=works, initial=0.0))
    logs = _meet(now, level, works, low, high, times, group)
    multipliers = np.exp(logs).astype(np.float32)
    logs = np.log(multipliers.astype(np.float64))
    mass = np.where(moves, np.sign(logs) * _mass(logs, start, elasticity, price), 0.0)
    return TunedStep(multipliers, np.asarray(latency(density_at(logs)), np.float64), mass)


def _mass(logs: Floats, density: Floats, elasticity: float, price: float) -> Floats:
    """The share of attention mass that moves, either way; rises with the distance of ``logs`` from 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        return price * (1 + np.exp(logs)) / 2 * density * np.abs(np.expm1(-elasticity * logs))


def _limits(
    density: Floats,
    recall: Floats,
    elasticity: float,
    max_mass: float,
    price: float,
    moves: NDArray[np.bool_],
) -> tuple[Floats, Floats]:
    """The logarithms of the smallest and the largest multiplier of each micro-batch."""
    given = np.clip(np.where(np.isfinite(recall), recall, 1.0), 0.0, max_mass)
    room = np.log(np.maximum(1.0 / density, 1.0)) / elasticity
    farthest = np.log(FARTHEST)
    ends = []
    for sign, limit, allowed in (
        (-1.0, np.minimum(room, farthest), max_mass),
        (1.0, farthest, given),
    ):
        inside, outside = np.zeros_like(density), np.where(moves, limit, 0.0)
        fits = _mass(sign * outside, density, elasticity, price) <= allowed
        inside = np.where(fits, outside, inside)
        for _ in range(2 * _HALVINGS):
            middle = (inside + outside) / 2
            fits = _mass(sign * middle, density, elasticity, price) <= allowed
            inside, outside = np.where(fits, middle, inside), np.where(fits, outside, middle)
        ends.append(sign * inside)
    return ends[0], ends[1]


def _meet(
    now: Floats,
    level: float,
    works: NDArray[np.bool_],
    low: Floats,
    high: Floats,
    times: LatencyOfDensity,
    group: Group,
) -> Floats:
    """Logarithms of multipliers ``[M, dp]`` at which each member is at the level, or at its bounds.

    A member has one multiplier; each of its cells follows it as far as its own bounds allow. The search by
    halves ends with an interval, and its end nearer to a multiplier of 1 is used, so no member crosses the
    level.
    """
    slower = works & (now > level * (1 + NEAR))
    faster = works & (now < level * (1 - NEAR))
    sign = slower.astype(np.float64) - faster
    farthest = np.where(slower, group.split(high).max(-1), -group.split(low).min(-1))
    farthest = np.where(slower | faster, farthest, 0.0)

    def cells(sizes: Floats) -> Floats:
        return np.clip(group.spread(sign * sizes), low, high)

    def short(sizes: Floats) -> NDArray[np.bool_]:
        """Whether members have not got to the level yet."""
        found = times(cells(sizes))
        return np.where(slower, found >= level, found <= level)

    near, far = np.zeros_like(now), farthest
    near = np.where(short(far), far, near)
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        reached = short(middle)
        near, far = np.where(reached, middle, near), np.where(reached, far, middle)
    return cells(near)
