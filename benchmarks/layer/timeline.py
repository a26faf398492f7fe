# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""When each rank of a ring computes and when it waits, step by step.

A :class:`Trace` is what a ring calls around the kernels of a step and around waits for transfers, if its
``trace`` is set. On a GPU it records events on the current stream, which cost a few microseconds each.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_mtraining.labels import WAIT

LEAD = 60_000_000
"""Cycles of a GPU's clock, about 30 ms: several times what launching a layer both ways takes."""


class Span(NamedTuple):
    """What a rank did from ``start`` to ``end``, in milliseconds since all ranks met."""

    phase: str
    name: str
    step: int  # in the order that the rank takes them in a phase; -1 for what belongs to none
    start: float
    end: float


def meet(group: dist.ProcessGroup, cycles: int) -> None:
    """The ranks' GPUs meet, behind a kernel that does nothing for so many cycles: what is launched meanwhile
    does not wait for the host, as in a model."""
    torch.cuda._sleep(cycles)
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


class Trace:
    """Records spans: ``with trace(name, step): ...``.

    Args:
        device: "cuda", whose current stream is watched, or "cpu".
        group: the ranks to compare.

    Attributes:
        phase: what the caller is doing; kept with each span. Steps are told apart within a phase.
    """

    def __init__(self, device: str, group: dist.ProcessGroup):
        self.phase = ""
        self._on_gpu, self._group = device == "cuda", group
        self._origin, self._marks, self._numbers = None, [], {}

    def begin(self) -> None:
        """Forget earlier spans; from here on time counts, on all ranks: they meet, GPUs by :func:`meet`."""
        self._marks, self._numbers = [], {}
        dist.barrier(group=self._group)
        if self._on_gpu:
            torch.cuda.synchronize()
            meet(self._group, LEAD)
        self._origin = self._now()

    @contextmanager
    def __call__(self, name: str, step=None):
        """``step`` is anything hashable that is the same for all spans of one step."""
        start = self._now()
        yield
        self._marks.append((self.phase, name, self._number(step), start, self._now()))

    def spans(self) -> list[Span]:
        """Everything since :meth:`begin`, in order; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [
            Span(phase, name, step, self._since_origin(start), self._since_origin(end))
            for phase, name, step, start, end in self._marks
        ]

    def gather(self) -> list[list[Span]]:
        """The spans of every rank, in rank order, on every rank."""
        found = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, self.spans(), group=self._group)
        return found

    def _number(self, step) -> int:
        if step is None:
            return -1
        numbers = self._numbers.setdefault(self.phase, {})
        return numbers.setdefault(step, len(numbers))

    def _now(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_origin(self, mark) -> float:
        if not self._on_gpu:
            return 1000 * (mark - self._origin)
        return self._origin.elapsed_time(mark)


def imbalance(ranks: list[list[Span]]) -> tuple[float, float] | tuple[None, None]:
    """How unevenly ranks computed, waits left out: the slowest rank's time over the mean, and
    the sum of every step's slowest rank over the same mean. None if nothing was traced."""
    by_step = [defaultdict(float) for _ in ranks]
    for found, spans in zip(by_step, ranks):
        for span in spans:
            if span.name != WAIT:
                found[span.phase, span.step] += span.end - span.start
    totals = [sum(found.values()) for found in by_step]
    mean = sum(totals) / len(totals)
    if not mean:
        return None, None
    steps = set().union(*by_step)
    slowest = sum(max(found[step] for found in by_step) for step in steps)
    return max(totals) / mean, slowest / mean


def by_round(ranks: list[list[Span]]) -> dict[str, list[list[float]]]:
    """Milliseconds of kernels by phase, rank and round, the rounds in the order that the rank takes them.
    Kernels that belong to no round are left out."""
    found: dict[str, list[dict[int, float]]] = {}
    for rank, spans in enumerate(ranks):
        for span in spans:
            if span.name != WAIT and span.step >= 0:
                of_rank = found.setdefault(span.phase, [{} for _ in ranks])[rank]
                of_rank[span.step] = of_rank.get(span.step, 0.0) + span.end - span.start
    return {
        phase: [[round(of_rank[step], 3) for step in sorted(of_rank)] for of_rank in all_ranks]
        for phase, all_ranks in found.items()
    }
