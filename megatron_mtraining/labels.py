# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Names of what runs, in the timelines of profilers, and the times of what has them."""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch.autograd.profiler import record_function

P, R = ParamSpec("P"), TypeVar("R")
PREFIX = "mtraining/"
SEARCH, FORWARD, BACKWARD = "pattern search", "attention forward", "attention backward"
LOSS_FORWARD, LOSS_BACKWARD = "loss forward", "loss backward"
WAIT = "wait"
"""Of a ring (``Ring.span``): the stream that computes waits for keys, values or their gradients."""
IN_NSYS = "NSYS_PROFILING_SESSION_ID" in os.environ
"""Whether Nsight Systems has started this process: it knows NVTX ranges alone."""
MOST = 100_000
"""Calls of a step at most."""


class Times:
    """Times of the labelled calls of this process, forward and backward, while ``on``: by CUDA events where
    CUDA is in use, else by a clock. Nothing waits for the device until :meth:`take`."""

    def __init__(self):
        self.on = False
        self._calls: list[tuple[str, object, object]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times what runs within, on the current stream."""
        start = _now()
        yield
        self._calls.append((name, start, _now()))
        self.on = self.on and len(self._calls) < MOST  # the step has not ended: an error has

    def of_ring(self, name: str, number: int | None = None) -> AbstractContextManager:
        """What a ring without a ``trace`` has: its waits are timed."""
        return self.span(name) if self.on and name == WAIT else nullcontext()

    def take(self) -> dict[str, float]:
        """Milliseconds by label since the last call; ``on`` ends. Waits for the device if there were any."""
        self.on = False
        calls, self._calls = self._calls, []
        found: dict[str, float] = defaultdict(float)
        if calls and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for name, start, end in calls:
            if isinstance(start, float) and isinstance(end, float):
                found[name] += 1000 * (end - start)
            elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                found[name] += start.elapsed_time(end)
        return dict(found)


TIMES = Times()
"""Of this process. The log's side turns it on for steps that are logged, and takes them."""


def _now() -> float | torch.cuda.Event | None:
    """None while a CUDA graph is captured: its events have no time."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def labelled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have calls of a function show as ``mtraining/NAME`` under PyTorch's profiler and in Nsight Systems, and
    count in :data:`TIMES`. Without these, a call costs about 0.4 microseconds more."""
    shown = PREFIX + name

    def label(function: Callable[P, R]) -> Callable[P, R]:
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.autograd._profiler_enabled():
                with record_function(shown):
                    return function(*args, **kwargs)
            if IN_NSYS:
                with torch.cuda.nvtx.range(shown):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not TIMES.on:
                return named(*args, **kwargs)
            with TIMES.span(name):
                return named(*args, **kwargs)

        return call

    return label
