# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Worker processes of ``mtraining data prepare``: what they do, and that no end of one is missed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from multiprocessing.context import SpawnProcess

import psutil
import pytest

from megatron_mtraining.errors import ConfigError
from megatron_mtraining.tools.data.workers import WorkerEnded, unordered

start = SpawnProcess.start


def open_square():
    return square


def square(number: int) -> tuple[int, int]:
    return number**2, os.getpid()


def open_failing(error):
    return partial(fail, error)


def fail(error, number: int):
    raise error


def open_dying(at: int):
    return partial(die, at)


def die(at: int, number: int) -> int:
    if number == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refuse_to_open():
    raise ConfigError("no tokenizer")


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("not to be pickled")


@pytest.fixture(autouse=True)
def none_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    # Python's own, which keeps track of shared memory, stays.
    assert not [one for one in left if "resource_tracker" not in " ".join(one.cmdline())]


@pytest.mark.parametrize("count, numbers, processes", [(1, 3, 1), (3, 2, 2), (2, 40, 2), (2, 0, 0)])
def test_each_number_once(count, numbers, processes):
    done = dict(unordered(open_square, list(range(numbers)), count))
    assert {number: value for number, (value, _) in done.items()} == {
        number: number**2 for number in range(numbers)
    }
    assert os.getpid() not in {where for _, where in done.values()}
    assert len({where for _, where in done.values()}) <= processes


@pytest.mark.parametrize(
    "open_work, error, message",
    [
        (refuse_to_open, ConfigError, "no tokenizer"),
        (partial(open_failing, ConfigError("broken")), ConfigError, "broken"),
        (partial(open_failing, OSError(28, "No space")), OSError, "No space"),
        (partial(open_failing, ZeroDivisionError("fault")), ZeroDivisionError, "fault"),
        (partial(open_failing, Unpicklable), WorkerEnded, "ended"),
        *((partial(open_dying, at), WorkerEnded, "ended") for at in (0, 3, 7)),
    ],
)
def test_first_error_is_raised(open_work, error, message, capfd):
    with pytest.raises(error, match=message):
        list(unordered(open_work, list(range(8)), 2))
    if error is ZeroDivisionError:  # of a fault in the code, the lines are shown
        assert "in fail\n" in capfd.readouterr().err


def test_a_worker_that_ends_before_the_next_starts(monkeypatch):
    def start_and_kill(process):
        start(process)
        process.kill()
        process.join()

    monkeypatch.setattr(SpawnProcess, "start", start_and_kill)
    with pytest.raises(WorkerEnded, match="ended"):
        list(unordered(open_square, list(range(8)), 3))


def test_a_worker_that_ends_between_two_parts():
    # Not a process of an earlier test: a Manager's lives as long as something refers to it.
    before = multiprocessing.active_children()
    done = unordered(open_square, list(range(8)), 1)
    next(done)
    (worker,) = (one for one in multiprocessing.active_children() if one not in before)
    worker.kill()
    with pytest.raises(WorkerEnded, match="ended"):
        list(done)


def test_a_process_that_cannot_be_started(monkeypatch):
    started = []

    def only_one(process):
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(process)
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", only_one)
    with pytest.raises(WorkerEnded, match="could not be started: Resource temporarily"):
        list(unordered(open_square, list(range(8)), 2))
    assert len(started) == 1


def test_closed_before_the_end():
    done = unordered(open_square, list(range(100)), 2)
    next(done)
    done.close()
