# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A price, or a target recall, that changes over a run: from sparse to dense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError
from .validation import option

SCHEDULES = ("schedule", "target_schedule", "schedule_extension")
"""Options of a policy, which hold for all of its heads."""
NAMED = {
    "schedule": {"anneal": "0:0.62,0.9:0.15", "anneal-low": "0:0.31,0.9:0.1"},
    "target_schedule": {},
}
"""By option, the points that a name stands for (measured: docs/frontier.md, "Schedules")."""
EXTENSIONS = ("continue", "restart")
"""What a schedule does if a run that goes on from a checkpoint has another length."""


@dataclass(frozen=True)
class Schedule:
    """Values at shares of a run, geometric between them.

    Attributes:
        points: shares of the run, in order from 0 on, and the value from there on: a price, or 1 - recall; 0
            for dense attention. Before a 0 the value stays; of two points at one share the second holds.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, share: float) -> float:
        """The value when this share of the run is done, of 0 to 1."""
        after = next((i for i, (at, _) in enumerate(self.points) if at > share), len(self.points))
        start, value = self.points[max(0, after - 1)]
        if after == len(self.points) or not value or not self.points[after][1]:
            return value
        end, to = self.points[after]
        return value * (to / value) ** ((share - start) / (end - start))

    @property
    def lowest(self) -> float:
        """The value of the densest step."""
        return min(value for _, value in self.points)

    @property
    def ends_dense(self) -> bool:
        """Whether the last steps are dense."""
        return self.points[-1][1] == 0

    @property
    def last_share(self) -> float:
        """The share of the run from which on nothing changes."""
        return self.points[-1][0]


@dataclass(frozen=True)
class Span:
    """The part of training that a schedule is over, in steps or in samples.

    Attributes:
        begin, end: what is done where it begins and where it ends.
    """

    begin: int
    end: int

    def share(self, done: int) -> float:
        """The share of it that is done, of 0 to 1."""
        return min(1.0, max(0.0, (done - self.begin) / (self.end - self.begin)))

    @classmethod
    def of_run(
        cls,
        done: int,
        end: int,
        saved: Span | None,
        extension: str | None,
        shown: str,
        counted: str | None = None,
    ) -> Span:
        """The span of a run to ``end`` of which ``done`` is done.

        Args:
            saved: that of the checkpoint that it goes on from; None if there is none, or it had no schedule.
            extension: one of :data:`EXTENSIONS`, or None.
            shown: how the run's length is given, for the error.
            counted: what the saved span counts, if it is something else.

        Raises:
            ConfigError: the length is another than it was, and no extension says what that means; or there is
                nothing left to train.
        """
        if saved is not None and saved.end == end and counted is None:
            return saved
        if saved is not None and extension is None:
            of_before = f"{saved.end}" if counted is None else f"{counted} {saved.end}"
            raise ConfigError(
                f"{shown}, but the schedule of the checkpoint is to {of_before}: give "
                f"{option('schedule_extension')} continue for one schedule over the whole new length, or "
                "restart for a schedule from here on"
            )
        begin = 0 if saved is None or counted is not None else saved.begin
        found = cls(done if extension == "restart" else begin, end)
        if found.end <= found.begin:
            raise ConfigError(f"{shown}, and {done} are done: there is nothing left for a schedule")
        return found


@lru_cache(maxsize=64)
def parse(name: str, text: str) -> Schedule:
    """The schedule of an option's value: a name of :data:`NAMED`, or points such as ``0:1.2,0.9:0.3,0.9:0``.

    Args:
        name: ``schedule``, whose values are prices, or ``target_schedule``, whose are recalls.

    Raises:
        ConfigError: it is neither, or points that cannot work.
    """
    shown, of_recall = f"{option(name)} is {text}", name == "target_schedule"
    what = "recall" if of_recall else "price"
    names = "".join(f"{each}, or " for each in NAMED[name])
    points: list[tuple[float, float]] = []
    for point in NAMED[name].get(text, text).split(","):
        start, _, number = point.partition(":")
        try:
            points.append((float(start), float(number)))
        except ValueError:
            raise ConfigError(
                f"{shown}, where {point!r} is not SHARE:{what.upper()}: give {names}points such as "
                + ("0:0.8,0.9:0.95,0.9:1" if of_recall else "0:1.2,0.9:0.3,0.9:0")
            ) from None
    for share, value in points:
        if not 0 <= share < 1:
            raise ConfigError(
                f"{shown}, with a point at {share:g}: use shares of the run from 0 to below 1"
            )
        if of_recall and not 0 < value <= 1:
            raise ConfigError(
                f"{shown}, with the recall {value:g}: use recalls above 0, or 1 for dense attention"
            )
        if not of_recall and not 0 <= value < math.inf:
            raise ConfigError(
                f"{shown}, with the price {value:g}: use prices above 0, or 0 for dense attention"
            )
    if points[0][0] != 0:
        raise ConfigError(
            f"{shown}, which begins at {points[0][0]:g}: give a point at 0, the start of the run"
        )
    for (before, _), (after, _) in zip(points, points[1:]):
        if after < before:
            raise ConfigError(
                f"{shown}, with {after:g} after {before:g}: give points in the order of their shares"
            )
    shares = [-1.0, 0.0, *(share for share, _ in points[1:])]
    for before, at, after in zip(shares, shares[1:], shares[2:]):
        if at == after and at in (before, 0):
            raise ConfigError(
                f"{shown}, with {'two points at 0' if not at else f'three points at {at:g}'}, of which one "
                "never holds: leave it out"
            )
    # From 1 - recall, small steps near 1 are as large as others.
    values = [round(1 - value, 12) if of_recall else value for _, value in points]
    if 0 in values[:-1]:
        raise ConfigError(
            f"{shown}, with dense steps before others: give dense attention (a {what} of {int(of_recall)}) "
            "as the last point alone"
        )
    if not values[0]:
        raise ConfigError(f"{shown}, which is dense from the start: use {option('price')} 0")
    return Schedule(tuple((share, value) for (share, _), value in zip(points, values)))
