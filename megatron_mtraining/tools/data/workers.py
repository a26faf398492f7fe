# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Worker processes that tokenize parts, and whose end is noticed whenever it comes.

Not ``concurrent.futures.ProcessPoolExecutor``: a worker that ends while it starts the others makes it
raise what it does not document, or (Python 3.10 and 3.11) wait for ever. Here each worker has a pipe of its
own, which ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

from ...errors import ConfigError
from ..common.signals import interrupts_ignored


class WorkerEnded(Exception):
    """A worker process has ended, or could not be started; the message says which."""


def unordered(
    open_work: Callable[[], Callable[[int], object]], numbers: list[int], workers: int
) -> Iterator[tuple[int, object]]:
    """Run ``work(number)`` for all numbers in worker processes; yields number and result, as they are done.

    Args:
        open_work: is called once in each worker and returns ``work``. It has to be picklable, as have the
            results of ``work`` and its exceptions.
        workers: processes, at most one for each number.

    Raises:
        WorkerEnded: see there.
        Exception: the first that ``open_work`` or ``work`` raised.
    """
    context = multiprocessing.get_context("spawn")  # not fork: this process has threads
    waiting = iter(numbers)
    processes = []
    busy: list[Connection] = []
    try:
        with interrupts_ignored():  # in the workers: this process ends them
            for _, number in zip(range(workers), waiting):  # not the other way: it would lose one
                here, there = context.Pipe()
                busy.append(here)
                with there, _ended("could not be started: {}"):
                    process = context.Process(target=_serve, args=(there, open_work), daemon=True)
                    process.start()
                processes.append(process)
                with _ended():
                    here.send(number)
        while busy:
            for connection in wait(busy):
                with _ended():
                    number, result = connection.recv()
                if isinstance(result, Exception):
                    raise result
                yield number, result
                following = next(waiting, None)
                if following is None:
                    busy.remove(connection)
                    connection.close()
                else:
                    with _ended():
                        connection.send(following)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        for connection in busy:
            connection.close()


@contextmanager
def _ended(what: str = "ended"):
    """Errors of a process or its pipe."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise WorkerEnded(what.format(getattr(error, "strerror", None) or error)) from None


def _serve(connection: Connection, open_work) -> None:
    """A worker process."""
    # A parent that is killed tells nobody.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work = None
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        try:
            work = work or open_work()
            result = work(number)
        except Exception as error:
            result = error
            if not isinstance(error, (ConfigError, OSError)):
                traceback.print_exc()  # of a fault in the code, the lines: they do not travel
        connection.send((number, result))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
