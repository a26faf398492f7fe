# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Times of a GPU, without the host's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ROUND = 0.012
"""Seconds of GPU work that are launched at once, at least."""
WANTED = 0.06
"""Seconds of GPU work that a figure is the median over, if three runs take no longer."""
FIRST, MOST = 0.005, 0.1
"""Seconds that the GPU sleeps while the first run is launched, and the most that it does."""
LONG = 0.3
"""Of a run that takes more seconds, one more is enough."""


class Clock:
    """Measures runs on one device.

    A GPU first sleeps while the host launches: so no kernel waits for the host, and the time between two
    events is the GPU's. What waits for the GPU itself, as the search of xattention does, cannot be launched
    ahead; its waiting is in its time. What else the host does only adds to that, so each run is timed by
    itself and the shortest time is taken.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._cycles = self._cycles_a_second() if device.type == "cuda" else 0.0

    def __call__(self, run: Callable[[], object], waits: bool = False) -> float:
        """Milliseconds of ``run``, which has been run before, from its first kernel's start to the last one's
        end: the median over a few rounds.

        Args:
            waits: whether it waits for the device.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        first, host = self._round(run, 1, None if waits else FIRST)
        if waits:
            count, rounds = 1, max(3, min(15, round(2 * WANTED / max(first, 1e-6))))
        else:
            count = max(1, min(16, round(ROUND / max(first, 1e-6))))
            rounds = max(3, min(7, round(WANTED / (count * first))))
        if first > LONG:
            rounds = 1
        found = [first] if first > LONG else []
        sleep = None if waits else min(MOST, 1.5 * count * host)
        for _ in range(rounds):
            found.append(self._round(run, count, sleep)[0])
        seconds = min(found) if waits else statistics.median(found)
        # Of nothing at all an event shows 0, which no error is relative to.
        return max(1e-4, 1e3 * seconds)

    def _round(self, run, count: int, sleep: float | None) -> tuple[float, float]:
        """Seconds of the GPU and of the host for one of ``count`` runs, launched while the GPU sleeps for at
        least so many seconds; for None it does not."""
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            if sleep is not None:
                torch.cuda._sleep(int(sleep * self._cycles))
            start.record()
            began = time.perf_counter()
            for _ in range(count):
                run()
            host = (time.perf_counter() - began) / count
            behind = start.query()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3 / count
            # It is enough that the GPU was busy all the time, which it is if its work takes longer.
            if sleep is None or not behind or host < 0.5 * seconds or sleep >= MOST:
                break
            sleep = min(MOST, 2 * max(sleep, host * count))
        return seconds, host

    @staticmethod
    def _cycles_a_second() -> float:
        cycles = 20_000_000
        for _ in range(2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        return cycles / (start.elapsed_time(end) / 1e3)
