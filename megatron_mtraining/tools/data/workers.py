# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Processes that tokenize parts, and whose end is noticed whenever it comes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing.connection import Connection

from ...errors import ConfigError
from ..common.signals import interrupts_ignored
from .tokenization import Encoder, Job, open_encoder


def tokenize(job: Job, encoder: Encoder, numbers: list[int]) -> Iterator[tuple[int, dict]]:
    """Tokenize parts, in any order; yields number and counts of each as it is done.

    Raises:
        ConfigError: see :meth:`~megatron_mtraining.tools.data.tokenization.Job.run`; or a worker process
            ended.
    """
    workers = min(job.options.workers, len(numbers))
    if workers <= 1:
        for number in numbers:
            yield number, job.run(encoder, number)
        return
    try:
        yield from _unordered(job, numbers, workers)
    except BrokenProcessPool:
        raise _ended(workers, "ended") from None


def _unordered(job: Job, numbers: list[int], workers: int) -> Iterator[tuple[int, dict]]:
    context = multiprocessing.get_context("spawn")  # not fork: this process has threads
    theirs, ours = context.Pipe(duplex=False)
    waiting = iter(numbers)
    pools: list[ProcessPoolExecutor] = []
    busy: dict[Future, tuple[ProcessPoolExecutor, int]] = {}
    try:
        with interrupts_ignored():  # in the workers: this process ends them
            for _, number in zip(range(workers), waiting):  # not the other way: it would lose one
                # Of one process each: a pool of several may wait for ever if one of them ends while it
                # starts the others.
                pools.append(ProcessPoolExecutor(1, context, _begin, (theirs, job)))
                try:
                    busy[pools[-1].submit(_run, number)] = pools[-1], number
                except OSError as error:
                    why = f"could not be started: {error.strerror or error}"
                    raise _ended(workers, why) from None
        while busy:
            for done in wait(busy, return_when=FIRST_COMPLETED).done:
                pool, number = busy.pop(done)
                yield number, done.result()
                if (following := next(waiting, None)) is not None:
                    busy[pool.submit(_run, following)] = pool, following
    finally:
        ours.close()
        theirs.close()
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _ended(workers: int, how: str) -> ConfigError:
    return ConfigError(
        f"one of {workers} worker processes {how} (out of memory?): run the same command again to go on "
        "with what is left, with fewer --workers if it was memory"
    )


def _begin(parent: Connection, job: Job) -> None:
    """In a worker process, before its first part."""
    global _job
    _job = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """End this process when the other end of its pipe is closed: by the parent, or as that is killed."""
    parent.poll(None)
    os.kill(os.getpid(), signal.SIGKILL)


def _run(number: int) -> dict:
    return _job.run(_encoder(), number)


@cache
def _encoder() -> Encoder:
    return open_encoder(_job.options.tokenizer, _job.options.eod)
