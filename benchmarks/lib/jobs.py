# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Run jobs within a time limit, several at once; each job writes a row when it ends."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from megatron_mtraining import ConfigError

from . import record

STARTED = time.monotonic()
"""When this process began, about: the time that a run may take counts from then."""
MARGIN = 1.2
"""A job is begun if this many times the median of those so far still fits."""


def read(path: Path) -> list[dict]:
    """The rows of a file; none if it is not there. A last line that was cut off is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            print(f"{path.name} has a line that is cut off: it is left out", flush=True)
    return found


def run_stage(script: str, stage: Callable[[Any], int], options: Any) -> None:
    """Run a stage of a script. A stage returns how many rows are left for another call. If it is refused, the
    process ends with one line."""
    try:
        left = stage(options)
    except ConfigError as error:
        sys.exit(f"{script}: {error}")
    if left:
        print(f"{left} rows are left for another call: time is short", flush=True)


class Deadline:
    """What is left of ``minutes``.

    Args:
        minutes: from the start of the process; None for no end.
        expected: seconds that a job takes, until one has ended.
    """

    def __init__(self, minutes: float | None, expected: float):
        self.end = None if minutes is None else STARTED + 60 * minutes
        self.expected, self._took = expected, []

    def took(self, seconds: float) -> None:
        """A job has taken so long."""
        self._took.append(seconds)

    def fits(self, size: float = 1.0) -> bool:
        """Whether a job that is begun now is expected to end in time.

        Args:
            size: times of a usual job that it takes.
        """
        # Not the longest: the first run of each process compiles, and of one that is dense takes longer.
        usual = (statistics.median(self._took) if self._took else self.expected) * size
        return self.end is None or time.monotonic() + MARGIN * usual <= self.end


def run_jobs(
    jobs: Sequence[Any],
    work: Callable[[Any], dict | None],
    output: Path,
    count: int,
    deadline: Deadline,
) -> int:
    """Do jobs in their order, ``count`` at once, and append each one's row when it ends.

    Args:
        work: does a job: gives its row, or None if it has none. A function of a module, as other processes
            call it; with ``count`` 1 this process does. A job that fails is printed, and the others go on.

    Returns:
        How many jobs were not begun because time is short.
    """
    left = list(jobs)

    def ended(job, get: Callable[[], dict | None], began: float) -> None:
        try:
            row = get()
        except (RuntimeError, ValueError, OSError, ConfigError) as error:
            print(f"job {job} has failed: {error}", flush=True)
            return
        deadline.took(time.monotonic() - began)
        if row is not None:
            record.append(output, [row])

    if count == 1:
        while left and deadline.fits():
            job, began = left.pop(0), time.monotonic()
            ended(job, lambda: work(job), began)
        return len(left)
    under_way: dict = {}
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        while left or under_way:
            while left and len(under_way) < count and deadline.fits():
                job = left.pop(0)
                under_way[pool.submit(work, job)] = job, time.monotonic()
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                job, began = under_way.pop(future)
                ended(job, future.result, began)
    return len(left)
