# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What each stream of a GPU, or each thread, does in a step, from a trace of PyTorch's profiler."""

from __future__ import annotations

import bisect
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ...config import ConfigError

KINDS = {
    "search": ("pattern search",),
    "attention": ("attention forward", "attention backward"),
    "loss": ("loss forward", "loss backward"),
    "communication": (),
    "other": (),
}
"""What a row may show, with the labels of :mod:`megatron_mtraining.labels` that mean it."""
NAMES = list(KINDS)
OTHER, COMMUNICATION = NAMES.index("other"), NAMES.index("communication")
PREFIX = "mtraining/"
OF_LABEL = {
    PREFIX + label: number for number, labels in enumerate(KINDS.values()) for label in labels
}
STEP = "ProfilerStep#"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
SENDS = re.compile("nccl|nvshmem|Memcpy PtoP", re.IGNORECASE)
BINS = 1200
"""Parts of a step along the time axis: the kind with most time in each is shown."""
MOST_ROWS = 8
PLACES = ("*.pt.trace.json*", "torch_profile/rank-*.json*")
"""Where traces are: of TensorBoard's handler, and of Megatron, which puts them beside --tensorboard-dir."""

T = TypeVar("T")
Event = dict
Interval = tuple[float, float, int]


class Timeline(NamedTuple):
    """
    Attributes:
        source: the trace's file.
        rows: names of streams or threads, the busiest ones, in the order of their numbers.
        cells: the number of the kind in :data:`NAMES` of each row and part of the step, int ``[rows, BINS]``;
            -1 where nothing runs.
        milliseconds: of the step.
    """

    source: str
    rows: list[str]
    cells: np.ndarray
    milliseconds: float


def find(run: Path) -> Path | None:
    """A trace in the folder of a run: the first by name, such as rank 0's."""
    if not run.is_dir():
        return None
    found = (file for place in PLACES for file in sorted(run.glob(place)))
    return next(found, None) or next(iter(sorted(run.rglob(PLACES[0]))), None)


def read(path: Path) -> Timeline:
    """The last step that a trace has; all of it if it has no ``ProfilerStep``.

    Raises:
        ConfigError: the file is no trace, or nothing runs in it.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        # Names of kernels may be any bytes.
        found = json.loads(content.decode("utf-8", errors="replace"), strict=False)
        events = [event for event in found["traceEvents"] if event.get("ph") == "X"]
        rows = _of_step(events)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be read: {error.strerror or error}") from None
    except (
        ArithmeticError, AttributeError, EOFError, KeyError, RecursionError, TypeError, ValueError,
        zlib.error,
    ):  # fmt: skip
        raise ConfigError(
            f"--trace {path} is no whole trace of PyTorch's profiler: give what export_chrome_trace writes"
        ) from None
    if not rows:
        raise ConfigError(f"--trace {path} has no kernel and no operator of a step")
    start = min(interval[0] for row in rows.values() for interval in row)
    end = max(interval[1] for row in rows.values() for interval in row)
    busiest = sorted(rows, key=lambda name: -sum(end - start for start, end, _ in rows[name]))
    names = sorted(busiest[:MOST_ROWS])
    edges = np.linspace(start, end, BINS + 1)
    cells = np.stack([_cells(rows[name], edges) for name in names])
    return Timeline(
        str(path), [f"{kind} {number}" for kind, number in names], cells, (end - start) / 1e3
    )


def _of_step(events: list[Event]) -> dict[tuple[str, int], list[Interval]]:
    """Begin, end and kind of what runs in the last step, by row: streams of the GPU, else threads."""
    steps = [event for event in events if str(event.get("name")).startswith(STEP)]
    steps = [ends(event) for event in steps if event.get("cat") == "user_annotation"]
    first, last = max(steps, default=(-np.inf, np.inf))
    ranges: dict[tuple, list[Interval]] = defaultdict(list)
    streams: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    threads: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    launches: dict[int, Event] = {}
    for event in events:
        kind = OF_LABEL.get(str(event.get("name")))
        if event.get("cat") == "user_annotation" and kind is not None:
            ranges[thread_of(event)].append((*ends(event), kind))
            if first <= event["ts"] <= last:  # with the host's time between operators
                threads["thread", int(event["tid"])].append((*ends(event), kind))
        elif event.get("cat") in LAUNCHES:
            launches[event.get("args", {}).get("correlation")] = event
    for of_thread in ranges.values():
        of_thread.sort()
    for event in events:
        if event.get("cat") in ON_GPU:
            args = event.get("args", {})
            launch = launches.get(args.get("correlation"), event)
            if first <= launch["ts"] <= last:
                kind = (
                    COMMUNICATION
                    if SENDS.search(event["name"])
                    else begun_in(ranges, launch, OTHER)
                )
                streams["stream", int(args.get("stream", 0))].append((*ends(event), kind))
        elif event.get("cat") == "cpu_op" and first <= event["ts"] <= last:
            threads["thread", int(event["tid"])].append(
                (*ends(event), begun_in(ranges, event, OTHER))
            )
    return streams or threads


def ends(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def thread_of(event: Event) -> tuple:
    return event.get("pid"), event.get("tid")


def begun_in(ranges: Mapping[tuple, list[tuple]], event: Event, otherwise: T) -> T:
    """What the range has that an event begins in, on its own thread.

    Args:
        ranges: begin, end and what they have, ascending, by thread (:func:`thread_of`); none in another.
        otherwise: what an event in none of them has.
    """
    of_thread = ranges.get(thread_of(event), [])
    at = bisect.bisect_right(of_thread, (event["ts"], np.inf)) - 1
    return of_thread[at][2] if at >= 0 and event["ts"] <= of_thread[at][1] else otherwise


def _cells(row: list[Interval], edges: np.ndarray) -> np.ndarray:
    """The kind with most time between each two edges, ``[BINS]``; -1 where nothing runs."""
    time = np.zeros((len(NAMES), BINS))
    for kind in range(len(NAMES)):
        bounds, reached = [edges[0]], edges[0]
        for start, end, own in sorted(row):
            if own == kind and end > reached:  # operators of a thread are within others
                bounds += [max(start, reached), end]
                reached = end
        busy = np.concatenate([[0.0], np.diff(bounds) * (np.arange(len(bounds) - 1) % 2)]).cumsum()
        time[kind] = np.diff(np.interp(edges, bounds, busy))
    time[OTHER] *= 1 - 1e-6  # an operator around labelled ones has as much time as these
    return np.where(time.max(0) > 0, time.argmax(0), -1)
