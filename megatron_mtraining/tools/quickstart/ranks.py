# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The training processes: started together, watched, and ended together."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from multiprocessing import connection
from pathlib import Path

from ...requirements import first_line
from ..common.signals import interrupts_ignored
from .options import Options

GRACE = 5.0
"""Seconds in which the others find that a process has failed, and fail themselves."""
TIMED_OUT = re.compile(r"tim(ed|e)[ -]?out", re.IGNORECASE)


class RankFailed(RuntimeError):
    """A training process has failed, or did not answer.

    Attributes:
        details: its traceback, or nothing.
    """

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


def run_ranks(options: Options, folder: Path) -> None:
    """Train in ``options.processes`` processes on the text in ``folder``; returns when all have ended.

    Raises:
        RankFailed: one has failed; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, options, str(folder)), daemon=True)
        for rank in range(options.processes)
    ]
    try:
        with interrupts_ignored():  # in them: this process ends them
            for rank in ranks:
                rank.start()
        _wait(ranks, options, folder)
    finally:
        started = [rank for rank in ranks if rank.pid is not None]
        for rank in started:
            rank.kill()  # SIGTERM does not end one that is stopped
        for rank in started:
            rank.join()


def _rank(rank: int, options: Options, folder: str) -> None:
    """In a training process: train, and leave what has failed in a file."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        from tqdm import tqdm

        from .train import worker

        # Its own is shared among processes, and Python complains at the end of one that was not given back.
        tqdm.set_lock(threading.RLock())
        worker(rank, options, folder)
    except Exception as error:
        whole = "".join(traceback.format_exception(error))
        partial = Path(folder, f"error{rank}.partial")
        partial.write_text(f"{first_line(error)}\n{whole}", encoding="utf-8", errors="replace")
        partial.rename(_error_file(folder, rank))
        sys.stdout.flush()
        os._exit(1)  # not by way of a process group that waits for the others


def _end_with_parent() -> None:
    """A parent that is killed tells nobody."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _named(ranks: list, numbers: list[int]) -> str:
    return ", ".join(f"{number} (PID {ranks[number].pid})" for number in numbers)


def _error_file(folder: Path | str, rank: int) -> Path:
    return Path(folder, f"error{rank}")


def _wait(ranks: list, options: Options, folder: Path) -> None:
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in connection.wait(list(running)):
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                _settle(running)
                raise _what_failed(ranks, options, folder)


def _settle(running: dict) -> None:
    """Wait until the others have failed as well, or do not."""
    end = time.monotonic() + GRACE
    while running and (left := end - time.monotonic()) > 0:
        for sentinel in connection.wait(list(running), left):
            running.pop(sentinel).join()


def _what_failed(ranks: list, options: Options, folder: Path) -> RankFailed:
    """The first failure; or, if it is that a process has waited for too long, which others are late."""
    files = {number: _error_file(folder, number) for number in range(len(ranks))}
    failed = sorted(
        (file.stat().st_mtime_ns, number) for number, file in files.items() if file.exists()
    )
    late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
    if not failed:
        number, status = next(
            (number, rank.exitcode) for number, rank in enumerate(ranks) if rank.exitcode
        )
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return RankFailed(f"process {number} failed: it {how} (out of memory?)")
    number = failed[0][1]
    error, _, details = files[number].read_text(encoding="utf-8").partition("\n")
    if late and TIMED_OUT.search(error):
        return RankFailed(
            f"--timeout is {options.timeout} s, and process {_named(ranks, late)} did not answer process "
            f"{number} within it: it is stopped, hangs, or needs more time; look at it, or raise --timeout"
        )
    return RankFailed(f"process {number} failed: {error}", details)
