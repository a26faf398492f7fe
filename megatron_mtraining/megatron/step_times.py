# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How long pattern search, attention and loss take in the steps that are logged, over all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import labels
from ..cp_group import RankGroup
from ..labels import TIMES
from .backend import is_active, training_arguments
from .run_state import RUN

PARTS = {
    "search": (labels.SEARCH,),
    "attention": (labels.FORWARD, labels.BACKWARD),
    "loss": (labels.LOSS_FORWARD, labels.LOSS_BACKWARD),
    "exposed-communication": (labels.WAIT,),
}
"""Labels of what is summed, by name."""


class StepTimes(NamedTuple):
    """Milliseconds of a step on the slowest rank of each part; 0 of what was not timed, such as Megatron's
    own loss.

    Attributes:
        search, attention, loss: of all layers and microbatches; attention forward and backward.
        exposed: in which attention waits for keys, values or their gradients; part of ``attention``.
        imbalance: attention without these waits, of the slowest rank over the mean of the ranks that have
            some: in ``attention`` itself, ranks of a ring that wait for each other are alike.
    """

    search: float
    attention: float
    loss: float
    exposed: float
    imbalance: float

    def __str__(self) -> str:
        attention = f"attention {self.attention:.4g} ms (max/mean {self.imbalance:.3f}"
        attention += f", exposed communication {self.exposed:.4g} ms)" if self.exposed else ")"
        parts = [f"search {self.search:.4g} ms"] * bool(self.search) + [attention]
        return ", ".join(parts + [f"loss {self.loss:.4g} ms"] * bool(self.loss))

    def figures(self) -> dict[str, float]:
        """What TensorBoard and W&B get, by name."""
        named = {f"{name}-ms": value for name, value in zip(PARTS, self) if value}
        named["attention-max-over-mean"] = self.imbalance
        return {f"mtraining-time/{name}": value for name, value in named.items()}


def time_step() -> None:
    """Called before attention in training: times the step if it will be logged. Not the first of a process,
    which compiles; nor other training loops, which have no log."""
    if not TIMES.on:
        TIMES.on = is_active(training_arguments()) and RUN.logged and RUN.step_is_logged()


def take_times() -> StepTimes | None:
    """The times of the step that has ended; a collective where there are several ranks. None if it was not
    timed."""
    found, ranks = TIMES.take(), RankGroup.everyone()
    own = [sum(found.get(label, 0.0) for label in named) for named in PARTS.values()]
    own.append(max(own[1] - own[3], 0.0))
    slowest = torch.tensor(own, device=ranks.device)
    total = torch.stack((slowest[-1], (slowest[-1] > 0).float()))
    search, attention, loss, exposed, alone = ranks.all_reduce(slowest, "max").tolist()
    summed, count = ranks.all_reduce(total).tolist()
    if not count:
        return None
    return StepTimes(search, attention, loss, exposed, alone * count / summed)
