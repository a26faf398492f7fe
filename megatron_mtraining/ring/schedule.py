# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The order of a ring's steps, as data: a pure function that needs no process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RingStep:
    """What one rank computes in one step.

    Attributes:
        distance: t, how many ranks the keys have come: ``(rank - source) % world``.
        source: the rank whose keys are at hand.
        wrap: 1 if ``source > rank``, which moves the block distances on by one stripe, else 0.
        first, last: whether this is the rank's first step (nothing to carry in), or its last.
    """

    distance: int
    source: int
    wrap: int
    first: bool
    last: bool


def flat_ring(rank: int, world: int) -> list[RingStep]:
    """The steps of one rank in a ring over all ``world`` ranks: its own keys first, then those of the
    rank before, and so on. Keys always move to the next higher rank."""
    return [
        RingStep(
            distance=t,
            source=(rank - t) % world,
            wrap=int((rank - t) % world > rank),
            first=t == 0,
            last=t == world - 1,
        )
        for t in range(world)
    ]
