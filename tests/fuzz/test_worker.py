# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The fuzzing itself: what a target must not do is seen."""

from __future__ import annotations

import os
import time

import pytest

from megatron_mtraining import ConfigError

from .targets import Target
from .worker import Worker


def raises(case, place):
    raise {"config": ConfigError, "key": KeyError}[case]("a\nb")


FAULTS = {
    "traceback": (lambda case, place: {}[case], "KeyError"),
    "hang": (lambda case, place: time.sleep(60), "it hangs"),
    "busy": (lambda case, place: sum(iter(int, 1)), "it ended the process|it hangs"),
    "crash": (lambda case, place: os.abort(), "it ended the process"),
    "memory": (lambda case, place: bytearray(1 << 40), "MemoryError"),
    "code": (lambda case, place: os.system("true"), "it runs code"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    run, said = FAULTS[name]
    worker = Worker(name, seconds=3, target=Target(run))
    try:
        kind, message = worker.run("case")
        assert kind == "fault" and any(each in message for each in said.split("|")), message
        assert worker.run("case")[0] == "fault", "the next one runs in a new process"
    finally:
        worker.close()


def test_refusals_are_none():
    worker = Worker("refusals", target=Target(raises))
    try:
        assert worker.run("config") == ("refused", "a b")
        assert worker.run("key")[0] == "fault"
        assert worker.run("config") == ("refused", "a b")
    finally:
        worker.close()
