# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a training step's time goes to, from a profiler's trace of it (``pretrain.py run --breakdown``).

Work of the GPU belongs to the part whose range (``instrument.py``) the CPU thread that launched it was in.
Names of kernels tell only communication: products of the loss and of layers are of the same kernels.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_mtraining.tools.run_report.timeline import (
    LAUNCHES,
    ON_GPU,
    SENDS,
    begun_in,
    ends,
    thread_of,
)

PREFIX = "mtraining: "
"""How the names of ranges begin."""
STEP = "step"
LAYERS, COMMUNICATION, WAITING = "layers", "communication", "waiting"
PARTS = ("attention", LAYERS, "loss", "optimizer", COMMUNICATION, WAITING)
"""Of a step's wall time, each instant belongs to one. ``layers`` is all work without a range: the rest of
the layers, embedding, gradients' sums; ``communication`` is what nothing is computed under; in ``waiting``
the GPU has nothing to do."""


class Work(NamedTuple):
    """What a GPU does from ``start`` to ``end``, in microseconds."""

    start: float
    end: float
    part: str


def read(path: Path) -> dict:
    """The parts of the steps in a trace file; see :func:`split`."""
    # Names of kernels may be any bytes.
    text = path.read_text(encoding="utf-8", errors="replace")
    return split(json.loads(text, strict=False)["traceEvents"])


def split(events: list[dict]) -> dict:
    """The parts of the steps among a trace's events, means over the steps.

    Returns:
        ``breakdown``: milliseconds by part, that sum to ``profiled_ms``, a step's wall time under the
        profiler; ``communication_hidden_ms``: communication while something is computed, which counts as
        that; ``unplaced_ms``: what of ``layers`` is there only because the trace lacks its launch, or the
        ranges of the thread that launched it; ``profiled_steps``.

    Raises:
        ValueError: no step is in it.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [ends(one) for one in whole if _is_range(one) and one["name"] == PREFIX + STEP]
    if not steps:
        raise ValueError(f"the trace has no range {PREFIX + STEP!r}: was it made with --breakdown?")
    work, unplaced = _work(whole)
    total, hidden, lost = Counter(), 0.0, 0.0
    for start, end in steps:
        parts, under = share(work, start, end)
        total.update(parts)
        hidden += under
        lost += sum(share(unplaced, start, end)[0][part] for part in PARTS if part != WAITING)

    def ms(microseconds):
        return round(microseconds / 1000 / len(steps), 3)

    return dict(
        breakdown={part: ms(total[part]) for part in PARTS},
        profiled_ms=ms(sum(end - start for start, end in steps)),
        communication_hidden_ms=ms(hidden),
        unplaced_ms=ms(lost),
        profiled_steps=len(steps),
    )


def share(work: Iterable[Work], start: float, end: float) -> tuple[Counter, float]:
    """The time from ``start`` to ``end`` by part, and how much of it communication was hidden.

    Where streams compute at once, they share the time evenly.
    """
    changes = defaultdict(Counter)
    for one in work:
        first, last = max(one.start, start), min(one.end, end)
        if first < last:
            changes[first][one.part] += 1
            changes[last][one.part] -= 1
    parts, hidden, running, before = Counter(), 0.0, Counter(), start
    for now in [*sorted(changes), end]:
        passed, before = now - before, now
        computing = {part: n for part, n in running.items() if n and part != COMMUNICATION}
        for part, n in computing.items():
            parts[part] += passed * n / sum(computing.values())
        if not computing:
            parts[COMMUNICATION if running[COMMUNICATION] else WAITING] += passed
        elif running[COMMUNICATION]:
            hidden += passed
        for part, change in changes.get(now, {}).items():
            running[part] += change
    return parts, hidden


def _is_range(event: dict) -> bool:
    # Ranges have shadows on the GPU's timeline, of another category.
    return event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)


def _work(events: list[dict]) -> tuple[list[Work], list[Work]]:
    """All work of the GPU, and that for which no launch is there."""
    ranges, launches = defaultdict(list), {}
    for event in events:
        if _is_range(event) and event["name"] != PREFIX + STEP:
            ranges[thread_of(event)].append((*ends(event), event["name"].removeprefix(PREFIX)))
    for of_thread in ranges.values():
        of_thread.sort()
    # Ranges and launches are recorded by different means: threads must have the same names in both.
    known = {
        thread_of(event) for event in events if event.get("cat") in ("cpu_op", "user_annotation")
    }
    for event in events:
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event
    found, unplaced = [], []
    for event in events:
        if event.get("cat") not in ON_GPU:
            continue
        launch = launches.get(event["args"].get("correlation"))
        if SENDS.search(event["name"]):
            part = COMMUNICATION
        elif launch is None or thread_of(launch) not in known:
            part = LAYERS
            unplaced.append(Work(*ends(event), part))
        else:
            part = begun_in(ranges, launch, LAYERS)
        found.append(Work(*ends(event), part))
    return found, unplaced
