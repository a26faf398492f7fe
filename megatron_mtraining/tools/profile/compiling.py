# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Compiles the kernels of all cases before they are measured, in several processes.

Triton keeps compiled kernels on disk, and the process that measures finds them there. Each process runs the
shortest cases of what it is given. One that fails is no error: what is missing is compiled when it is
measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from ...balance import AttentionShape
from .cases import Case
from .measure import measure
from .timing import Time

MOST_PROCESSES = 16
MEMORY = 2 << 30
"""Bytes of the GPU that a process may take: what CUDA needs, and short sequences."""
EACH = 2
"""Lengths that are run of each set of kernels: they may differ in what a kernel is compiled for."""


def groups(cases: Sequence[Case]) -> list[list[Case]]:
    """The shortest cases of each set that shares its kernels: a kind, heads, and documents or none."""
    found: dict[tuple, dict[int, Case]] = {}
    for case in sorted(cases, key=lambda case: case.tokens):
        own = found.setdefault((case.kind, case.shape, case.documents > 1), {})
        own.setdefault(case.tokens, case)
    return [list(own.values())[:EACH] for own in found.values()]


def num_processes(wanted: int, device: torch.device) -> int:
    """Processes for so many sets of kernels: no more than there are cores and memory for."""
    most = min(wanted, MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info(device)[0] // MEMORY)
    return max(1, most)


def compile_ahead(
    cases: Sequence[Case], device: torch.device, tell: Callable[[int, int], None]
) -> None:
    """Compile what the cases need; see the module's text.

    Args:
        tell: called once, with the number of sets of kernels and of processes.
    """
    sets = groups(cases)
    count = num_processes(len(sets), device)
    tell(len(sets), count)
    shares: list[list[Case]] = [[] for _ in range(count)]
    for own in sorted(sets, key=_weight, reverse=True):
        min(shares, key=_weight).extend(own)
    running = []
    try:
        for words in shares:
            running.append(
                subprocess.Popen(  # noqa: S603 - this Python, this module
                    [sys.executable, "-m", __name__, str(device), json.dumps(words, default=vars)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        for process in running:
            process.wait()
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def _weight(cases: Sequence[Case]) -> float:
    """How long it takes to compile the kernels of these sets, relative to others: about twice as long for
    patterns that have a search and columns, and for twice the head dimension."""
    sets = {(case.kind, case.shape, case.documents > 1) for case in cases}
    return sum((1 + (kind == "vertical_slash")) * shape.head_dim for kind, shape, _ in sets)


def compile_cases(device: torch.device, text: str) -> None:
    """Run cases once, of :func:`compile_ahead`; the first error ends it."""
    for values in json.loads(text):
        case = Case(**{**values, "shape": AttentionShape(*values["shape"])})
        measure(case, device, _no_clock, {})


def _no_clock(run: Callable[[], object]) -> Time:
    """In place of :class:`.timing.Clock`. What is measured has run once before."""
    return Time(0.0, 0.0)


if __name__ == "__main__":
    compile_cases(torch.device(sys.argv[1]), sys.argv[2])
