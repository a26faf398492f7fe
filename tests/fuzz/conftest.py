# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How long fuzzing takes: a moment in ``make test``, MTRAINING_FUZZ_MINUTES in ``make fuzz``."""

from __future__ import annotations

import os

import pytest

MINUTES = "MTRAINING_FUZZ_MINUTES"


def pytest_report_header(config):
    minutes = os.environ.get(MINUTES)
    return (
        f"fuzzing: {minutes} minutes, random"
        if minutes
        else "fuzzing: short, the same inputs in each run"
    )


@pytest.fixture(scope="session")
def minutes() -> float | None:
    """Of the whole run; None for the short one."""
    text = os.environ.get(MINUTES)
    return float(text) if text else None
