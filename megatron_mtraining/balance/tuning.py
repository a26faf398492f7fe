# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparsity tuning: multipliers of the price, so that no rank waits and the wait becomes accuracy.

SparseBalance (arXiv 2604.13847) tunes sparsity in both directions: ranks that others wait for become sparser,
and ranks that wait become denser. Here the price moves. A rank that raises it gives up the slashes and
columns with the least attention mass per unit of cost, and one that lowers it takes the best that it had left
out. One multiplier holds for all layers and heads of a micro-batch: at one price the mass per cost of the
last candidate is the same in all of them, so that no other way to save the same pairs loses less mass.

Two models say what a multiplier ``m`` does. Density follows ``D0 * m ** -elasticity``. The mass that moves
between densities D0 and D1 is ``(p0 + p1) / 2 * |D1 - D0|``: a candidate that the policy takes at price p1
and not at p0 has a mass per cost between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..config.options import ANCHORS
from ..errors import ConfigError

if TYPE_CHECKING:
    from .plan import StepPlan

FARTHEST = 16.0
"""The largest multiplier, and the inverse of the smallest: a power law does not hold farther out."""
NEAR = 0.01
"""A rank whose time is this near to its group's, as a share of it, stays as it is: it would give up mass for
nothing."""
BALANCED = 0.05
"""A group is balanced if all its times are this near to the time aimed at."""
_HALVINGS = 20
Floats = NDArray[np.float64]
LatencyOfDensity = Callable[[Floats], Floats]


@dataclass(frozen=True)
class TuningBounds:
    """How far tuning goes.

    Attributes:
        anchor: what the predicted times of a group meet at: their mean, min or max.
        max_mass: the largest share of a micro-batch's attention mass that may move, either way.
        min_recall: no micro-batch is made sparser than this recall.
        max_density: no micro-batch is made denser than this.

    Raises:
        ConfigError: a value that is none.
    """

    anchor: str = "mean"
    max_mass: float = 0.01
    min_recall: float = 0.0
    max_density: float = 1.0

    def __post_init__(self):
        if self.anchor not in ANCHORS:
            raise ConfigError(f"the anchor of tuning is {self.anchor!r}: use one of {ANCHORS}")
        for name in ("max_mass", "min_recall", "max_density"):
            value = getattr(self, name)
            if not 0 <= value <= 1:  # not a number either
                raise ConfigError(f"{name} of tuning is {value}: use a number from 0 to 1")


@dataclass(frozen=True)
class TunedStep:
    """What tuning does to the ``M`` micro-batches of each of ``dp`` data-parallel ranks in a step.

    Attributes:
        multipliers: of the price, float32 ``[M, dp]``; 1 where nothing changes.
        predicted_ms: attention time at these, float64 ``[M, dp]``.
        density, recall: expected at these, float64 ``[M, dp]``.
        mass: the share of attention mass given up (positive) or taken (negative), float64 ``[M, dp]``.
        target_ms: the anchor of each group that waits, float64 ``[G]``.
        level_ms: what the group meets at within the bounds, float64 ``[G]``; more than ``target_ms`` where
            the slowest cannot reach that.
        met: whether all groups are balanced at their anchor.
    """

    multipliers: NDArray[np.float32]
    predicted_ms: Floats
    density: Floats
    recall: Floats
    mass: Floats
    target_ms: Floats
    level_ms: Floats
    met: bool


class Groups:
    """Who waits for whom in a step.

    Without more, ranks wait for each other at the end of a step, for the sums over their micro-batches.

    Args:
        shape: ``M`` micro-batches and ``dp`` data-parallel ranks.
        per_microbatch: they wait for each other in each micro-batch (expert parallelism).
        pipeline: all micro-batches of all ranks wait for each other: a pipeline is as slow as the slowest.
    """

    def __init__(
        self, shape: tuple[int, int], per_microbatch: bool = False, pipeline: bool = False
    ):
        self.shape = shape
        self._kind = "pipeline" if pipeline else "microbatch" if per_microbatch else "step"

    def split(self, cells: np.ndarray) -> np.ndarray:
        """Values of micro-batches, ``[M, dp]``, as ``[G, members, cells]``: members of a group wait for each
        other, and the cells of a member run one after the other."""
        if self._kind == "step":
            return cells.T[None]
        return cells.reshape(1, -1, 1) if self._kind == "pipeline" else cells[..., None]

    def spread(self, members: np.ndarray) -> np.ndarray:
        """A value of each member, ``[G, members]``, for each of its cells: ``[M, dp]``."""
        if self._kind == "step":
            return np.broadcast_to(members, self.shape)
        return members.reshape(self.shape)

    def slowest(self, times: np.ndarray) -> float:
        """How long a step takes if every group waits for its slowest member: of times ``[M, dp]``, those that
        are not finite counting as 0."""
        of_members = self.split(np.where(np.isfinite(times), times, 0.0)).sum(-1)
        rounds = self.shape[0] if self._kind == "pipeline" else 1
        return float(of_members.max(-1).sum()) * rounds

    def max_over_mean(self, times: np.ndarray) -> float:
        """How long groups take, over how long they would take if nobody waited: of times ``[M, dp]``, those
        that are not finite counting as 0. 1 if there are none."""
        of_members = self.split(np.where(np.isfinite(times), times, 0.0)).sum(-1)
        mean = of_members.mean(-1).sum()
        return float(of_members.max(-1).sum() / mean) if mean > 0 else 1.0


def tune(
    plan: StepPlan,
    elasticity: float,
    bounds: TuningBounds,
    price: float,
    *,
    per_microbatch: bool,
    latency: LatencyOfDensity,
    pipeline: bool = False,
) -> TunedStep:
    """Multipliers of the price that bring the predicted attention times of a step together.

    The times of a group meet at the anchor, or above it where the bounds keep a rank from becoming so fast:
    nobody gives up mass to be faster than that rank. So the largest time over the mean never rises. Ranks
    without work, and those whose predictions are not numbers, are left alone and do not count.

    Args:
        plan: its ``density`` and ``recall``, float ``[M, dp]``, are read: those expected at the untuned
            price.
        elasticity: of density to price, positive.
        price: the untuned price.
        per_microbatch, pipeline: as for :class:`Groups`.
        latency: predicted attention time in ms, ``[M, dp]``, of densities ``[M, dp]``; rises with density.

    Returns:
        The same for the same arguments, bit by bit.
    """
    density = np.asarray(plan.density, np.float64)
    recall = np.asarray(plan.recall, np.float64)
    groups = Groups((len(density), density.shape[1]), per_microbatch, pipeline)
    before = np.asarray(latency(density), np.float64)
    known = np.isfinite(before) & np.isfinite(density)
    works = groups.split(known).all(-1) & (groups.split(np.where(known, before, 0.0)).sum(-1) > 0)
    can_move = np.isfinite(elasticity) and elasticity > 0 and np.isfinite(price) and price > 0
    moves = groups.spread(works) & (before > 0) & (density > 0) & can_move
    start = np.where(moves, density, 1.0)
    low, high = _limits(start, recall, elasticity if can_move else 1.0, bounds, price, moves)

    def density_at(logs: Floats) -> Floats:
        return np.where(moves, start * np.exp(-elasticity * logs), density)

    def times(logs: Floats) -> Floats:
        cells = np.asarray(latency(density_at(logs)), np.float64)
        return groups.split(np.where(known, cells, 0.0)).sum(-1)

    now, fastest = times(np.zeros_like(low)), times(high)
    target = _anchor(now, works, bounds.anchor)
    level = np.maximum(target, np.max(fastest, -1, where=works, initial=0.0))
    level = np.minimum(level, np.max(now, -1, where=works, initial=0.0))
    logs = _meet(now, level[:, None], works, low, high, times, groups)
    multipliers = np.exp(logs).astype(np.float32)
    logs = np.log(multipliers.astype(np.float64))
    after = density_at(logs)
    mass = np.where(moves, np.sign(logs) * _mass(logs, start, elasticity, price), 0.0)
    reached = np.where(works, times(logs), level[:, None])
    balanced = np.abs(reached - target[:, None]) <= BALANCED * target[:, None]
    return TunedStep(
        multipliers,
        np.asarray(latency(after), np.float64),
        after,
        np.minimum(recall - mass, np.maximum(recall, 1.0)),
        mass,
        target,
        level,
        bool(balanced.all()),
    )


def _mass(logs: Floats, density: Floats, elasticity: float, price: float) -> Floats:
    """The share of attention mass that moves, either way; rises with the distance of ``logs`` from 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        return price * (1 + np.exp(logs)) / 2 * density * np.abs(np.expm1(-elasticity * logs))


def _limits(
    density: Floats,
    recall: Floats,
    elasticity: float,
    bounds: TuningBounds,
    price: float,
    moves: NDArray[np.bool_],
) -> tuple[Floats, Floats]:
    """The logarithms of the smallest and the largest multiplier of each micro-batch."""
    spare = np.where(np.isfinite(recall), recall - bounds.min_recall, 0.0)
    if bounds.min_recall == 0:
        spare = np.where(np.isfinite(recall), spare, 1.0)
    given = np.clip(spare, 0.0, bounds.max_mass)
    taken = np.full_like(density, bounds.max_mass)
    room = np.log(np.maximum(bounds.max_density / density, 1.0)) / elasticity
    farthest = np.log(FARTHEST)
    ends = []
    for sign, limit, allowed in ((-1.0, np.minimum(room, farthest), taken), (1.0, farthest, given)):
        inside, outside = np.zeros_like(density), np.where(moves, limit, 0.0)
        fits = _mass(sign * outside, density, elasticity, price) <= allowed
        inside = np.where(fits, outside, inside)
        for _ in range(2 * _HALVINGS):
            middle = (inside + outside) / 2
            fits = _mass(sign * middle, density, elasticity, price) <= allowed
            inside, outside = np.where(fits, middle, inside), np.where(fits, outside, middle)
        ends.append(sign * inside)
    return ends[0], ends[1]


def _anchor(now: Floats, works: NDArray[np.bool_], anchor: str) -> Floats:
    """The time that each group aims at, ``[G]``; 0 where nobody works."""
    count = works.sum(-1)
    if anchor == "mean":
        return np.where(works, now, 0.0).sum(-1) / np.maximum(count, 1)
    if anchor == "max":
        return np.max(now, -1, where=works, initial=0.0)
    return np.where(count > 0, np.min(now, -1, where=works, initial=np.inf), 0.0)


def _meet(
    now: Floats,
    level: Floats,
    works: NDArray[np.bool_],
    low: Floats,
    high: Floats,
    times: LatencyOfDensity,
    groups: Groups,
) -> Floats:
    """Logarithms of multipliers ``[M, dp]`` at which each member is at the level, or at its bounds.

    A member has one multiplier, which its cells follow as far as their own bounds. Of the two ends of the
    last interval the one nearer to 1 is taken, so that no member crosses the level.
    """
    slower = works & (now > level * (1 + NEAR))
    faster = works & (now < level * (1 - NEAR))
    sign = slower.astype(np.float64) - faster
    farthest = np.where(slower, groups.split(high).max(-1), -groups.split(low).min(-1))
    farthest = np.where(slower | faster, farthest, 0.0)

    def cells(sizes: Floats) -> Floats:
        return np.clip(groups.spread(sign * sizes), low, high)

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
