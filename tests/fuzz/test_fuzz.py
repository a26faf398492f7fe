# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Changed and random input of every kind is read, or refused in one line: no traceback, hang or leftover."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("yaml")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")
pytest.importorskip("pyarrow")

from hypothesis import HealthCheck, given, note, settings

from . import inputs
from .targets import TARGETS
from .worker import Worker

EXAMPLES = 25
"""Of each target in the short run."""
COMMON = dict(
    deadline=None,  # the worker has one
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    report_multiple_bugs=False,
)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TARGETS)
def test_read_or_refused(name, minutes):
    worker = Worker(name)
    short = minutes is None
    how = (
        settings(**COMMON, max_examples=EXAMPLES, derandomize=True, database=None)
        if short
        # A failing input is kept in .hypothesis, and tried first by the next run.
        else settings(**COMMON, max_examples=500)
    )

    @how
    @given(inputs.of(name, worker.target, worker.seeds))
    def check(case):
        if time.monotonic() > end:
            return
        try:
            worker.check(case)
        except AssertionError:
            note(f"of {name}")
            raise

    try:
        # As they are, seeds are read: else the others are refused for nothing.
        for seed in worker.seeds:
            assert worker.run(seed) == ("read", "")
        end = time.monotonic() + (1e9 if short else 60 * minutes / len(TARGETS))
        check()
        while not short and time.monotonic() < end:
            check()
    finally:
        worker.close()
        print(f"FUZZ {name}: {worker.tried} inputs, {worker.read} of them were read")
