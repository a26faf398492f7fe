# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Worker processes of ``mtraining data prepare``: what they do, and that no end of one is missed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace

import psutil
import pytest

from megatron_mtraining.errors import ConfigError
from megatron_mtraining.tools.data.workers import tokenize

start = SpawnProcess.start


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("not to be pickled")


@dataclass(frozen=True)
class Job:
    """In place of the tool's: squares, and at one number another thing happens."""

    options: SimpleNamespace
    at: int = -1
    what: object = None

    def run(self, encoder, number: int) -> tuple[int, int]:
        if number == self.at and self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.at:
            raise self.what
        return number**2, os.getpid()


def run(sentencepiece_model, numbers: int, processes: int, *what):
    options = SimpleNamespace(workers=processes, tokenizer=sentencepiece_model, eod=None)
    return tokenize(Job(options, *what), None, list(range(numbers)))


@pytest.fixture(autouse=True)
def none_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    # Python's own, which keeps track of shared memory, stays.
    assert not [one for one in left if "resource_tracker" not in " ".join(one.cmdline())]


@pytest.mark.parametrize("processes, numbers, most", [(3, 2, 2), (2, 40, 2), (2, 1, 1), (2, 0, 0)])
def test_each_number_once(processes, numbers, most, sentencepiece_model):
    done = dict(run(sentencepiece_model, numbers, processes))
    assert {number: value for number, (value, _) in done.items()} == {
        number: number**2 for number in range(numbers)
    }
    where = {process for _, process in done.values()}
    assert len(where) <= most and (os.getpid() in where) == (numbers == 1)


@pytest.mark.parametrize(
    "what, error, message",
    [
        (ConfigError("broken"), ConfigError, "broken"),
        (OSError(28, "No space"), OSError, "No space"),
        (ZeroDivisionError("fault"), ZeroDivisionError, "fault"),
        (Unpicklable(), TypeError, "not to be pickled"),
        ("killed", ConfigError, "one of 2 worker processes ended"),
    ],
)
@pytest.mark.parametrize("at", [0, 7])
def test_first_error_is_raised(at, what, error, message, sentencepiece_model):
    with pytest.raises(error, match=message) as raised:
        list(run(sentencepiece_model, 8, 2, at, what))
    if error is ZeroDivisionError:  # of a fault in the code, the lines are shown
        assert "in run\n" in str(raised.value.__cause__)


def test_a_tokenizer_that_a_worker_cannot_open(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer is"):
        list(run(tmp_path / "none", 8, 2))


def test_a_worker_that_ends_before_the_next_starts(sentencepiece_model, monkeypatch):
    def start_and_kill(process):
        start(process)
        process.kill()
        process.join()

    monkeypatch.setattr(SpawnProcess, "start", start_and_kill)
    with pytest.raises(ConfigError, match="ended"):
        list(run(sentencepiece_model, 8, 3))


def test_a_process_that_cannot_be_started(sentencepiece_model, monkeypatch):
    started = []

    def only_one(process):
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(process)
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", only_one)
    with pytest.raises(ConfigError, match="could not be started: Resource temporarily"):
        list(run(sentencepiece_model, 8, 2))
    assert len(started) == 1
