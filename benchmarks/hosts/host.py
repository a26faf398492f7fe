# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ``four.py`` runs on, how large, and what a job is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..layer.ring_cases import LENGTHS
from ..sparsebalance.ranks import MODES

STAGES = ("layer", "balance", "steps", "sparsebalance", "parity")
NEED_MEGATRON = ("steps", "sparsebalance", "parity")
START = 45
"""Seconds until a run of Megatron trains, about."""
AT_ONCE = 8
"""Jobs without times that share four GPUs: they are small."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        lengths: by the lengths of the full table, the tokens that are run in their place.
        shape: heads, KV heads and head dimension of a layer.
        budget: seconds a case of the layer table.
        steps: lengths of whole steps.
        modes: of the balancer.
        layouts: of parity; None for all that the ranks can have.
    """

    name: str
    lengths: dict[int, int]
    steps: dict[int, int]
    modes: tuple[str, ...]
    layouts: tuple[str, ...] | None = None
    shape: tuple[int, int, int] = (16, 2, 128)
    budget: float = 6.0


K = 1024
FULL = Sizes(
    "full", {seq: seq for seq in LENGTHS},
    {seq: seq for seq in (128 * K, 512 * K, 256 * K, 1024 * K)}, tuple(MODES),
)  # fmt: skip
REHEARSAL = Sizes(
    "rehearsal", {128 * K: 16 * K}, {128 * K: 16 * K}, ("both",), ("CP 1", "CP 2"), budget=0.5
)
TINY = Sizes(
    "tiny", {128 * K: K}, {128 * K: K}, ("off", "both"),
    ("CP 1", "CP 1, again", "CP 2", "CP 4, hierarchical 2 x 2", "TP 2 x CP 2"), (2, 1, 64), 0.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Host:
    """What jobs run on, and with."""

    gpus: int
    device: str
    sizes: Sizes
    folder: Path
    scratch: Path
    megatron: Path | None
    has_te: bool
    weights: Path | None = None
    balance_weights: Path | None = None
    balance_cache: Path | None = None

    def seconds(self, on_four: float, start: float = START) -> float:
        """What a job takes here that takes so many seconds on four GPUs after its start."""
        return start + on_four * 4 / self.gpus if self.sizes is FULL else start


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of one benchmark.

    Attributes:
        seconds: that it takes, about.
        words: after ``python``.
        file: that its rows go to, in the folder.
        rows: fields of the rows that say that it is done.
        made: a file that says so in place of rows.
        needs: names of jobs of its stage that must be done before.
        timed: whether it measures times, and must have the GPUs for itself.
    """

    stage: str
    name: str
    seconds: float
    words: tuple[str, ...]
    file: str = ""
    rows: tuple[dict[str, Any], ...] = ()
    made: Path | None = None
    needs: tuple[str, ...] = ()
    timed: bool = True
