# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How ``rings.py`` takes times, memory and the bandwidth of a hop: all ranks together, calls in a row.

A time is a call's, in milliseconds. *In turns*, runs take turns, and each begins with an idle GPU: where
launching a call takes the host longer than the GPU takes to run it, it is the host's time that shows.
*Queued*, calls are launched while the GPU is busy with something else, and it has them all at hand when it
gets to them: as in a model, whose other work gives the host a lead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from . import timeline
from .ring_runs import Setting

ROUNDS = (3, 15)  # at least, at most
TURN, MOST_CALLS = 100.0, 20
"""A turn is as many calls in a row as take about so many milliseconds, up to so many."""
QUEUED = 8
"""Calls in a row that are queued, at most: their launches must fit a queue of CUDA's, about 1000."""
SHORT = 50.0
"""Calls of more milliseconds are not queued: launching takes a tenth of that."""
CYCLES = 2e6
"""Of a GPU's clock in a millisecond, about: an H200 has up to 1.98e6."""


def milliseconds(run: Callable, setting: Setting, calls: int = 1) -> float:
    """What one of several calls in a row takes on this rank; all ranks begin together.

    In a row, as in a model: the host prepares a layer's kernels while those before still run.
    """
    setting.synchronize()
    dist.barrier(group=setting.group)
    if setting.device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return 1000 * (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return _gpu_milliseconds(run, calls)


def _gpu_milliseconds(run: Callable, calls: int) -> float:
    """A call's, of several in a row, from where the GPU's work has come to so far."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def take_turns(runs: dict, setting: Setting, budget: float) -> dict:
    """Milliseconds of each run: medians over rounds in which each has a turn, the longest of the ranks."""
    for run in runs.values():
        run()  # compiles, makes communicators
    once = {name: setting.slowest(milliseconds(run, setting)) for name, run in runs.items()}
    calls = {name: max(1, min(MOST_CALLS, int(TURN / ms))) for name, ms in once.items()}
    a_round = sum(once[name] * calls[name] for name in runs) / 1000
    least, most = ROUNDS
    rounds = min(most, max(least, int(budget / a_round)))
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run, setting, calls[name]))
    return {name: setting.slowest(statistics.median(found)) for name, found in times.items()}


def queued_milliseconds(run: Callable, setting: Setting, calls: int) -> float:
    """What one of several calls takes on this rank if its GPU never waits for the host: they are launched
    behind a kernel that does nothing for twice as long as launching takes. All ranks' GPUs begin together."""
    setting.synchronize()
    dist.barrier(group=setting.group)
    setting.synchronize()
    launched = time.perf_counter()
    run()
    launched = setting.slowest(1000 * (time.perf_counter() - launched))
    timeline.meet(setting.group, int(2 * CYCLES * launched * (calls + 1)))
    return _gpu_milliseconds(run, calls)


def queued(runs: dict, once: dict, setting: Setting) -> dict | None:
    """Milliseconds of each run, its launches queued: medians of three, the longest of the ranks.

    Args:
        once: about what a call of each takes. Long ones are left out.

    None on a CPU, which has no queue, and where all are left out.
    """
    if setting.device != "cuda":
        return None
    times = {}
    for name, run in runs.items():
        if once[name] <= SHORT:
            calls = max(1, min(QUEUED, int(TURN / once[name])))
            found = [queued_milliseconds(run, setting, calls) for _ in range(ROUNDS[0])]
            times[name] = setting.slowest(statistics.median(found))
    return times or None


def peak_gib(run: Callable, setting: Setting) -> float | None:
    """The most memory allocated during a run, over what was before."""
    if setting.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return setting.slowest((torch.cuda.max_memory_allocated() - before) / 2**30)


def hop_gb_s(setting: Setting, nbytes: int) -> float:
    """Bandwidth of a hop when all ranks send so much to the next one at once."""
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=setting.device)
    received = torch.empty_like(sent)
    following, previous = (
        dist.get_global_rank(setting.group, (setting.rank + by) % setting.world) for by in (1, -1)
    )

    def hop():
        operations = [
            dist.P2POp(dist.isend, sent, following, setting.group),
            dist.P2POp(dist.irecv, received, previous, setting.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return nbytes / take_turns({"hop": hop}, setting, 1.0)["hop"] / 1e6
