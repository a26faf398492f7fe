# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the Megatron tests: the plug-in registered, groups without processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_mtraining.megatron import register

# The tests' own process has the plug-in; that it changes nothing else is tested too.
register()


@pytest.fixture
def cpu_device(monkeypatch):
    """megatron-core moves rotary tables to the current CUDA device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


class Group:
    """As much of a process group as layout code asks for."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture
def group():
    return Group


def checkout_paths() -> list[Path]:
    """The Megatron-LM checkouts to test with: MEGATRON_LM_PATH, one or several."""
    given = os.environ.get("MEGATRON_LM_PATH", "")
    return [Path(part).resolve() for part in given.split(os.pathsep) if part]


def pytest_generate_tests(metafunc):
    """Tests that take ``checkout`` run once for each, or are skipped, saying what is missing."""
    if "checkout" in metafunc.fixturenames:
        paths = checkout_paths()
        missing = pytest.mark.skip(reason="MEGATRON_LM_PATH names no Megatron-LM checkout")
        values = paths or [pytest.param(None, marks=missing)]
        names = [path.name for path in paths] or ["no-checkout"]
        metafunc.parametrize("checkout", values, ids=names, scope="session")
