# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels that are compiled before anything is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_mtraining.balance import AttentionShape
from megatron_mtraining.tools.profile import compiling
from megatron_mtraining.tools.profile.cases import Case, cases, tiny
from megatron_mtraining.tools.profile.compiling import compile_ahead, compile_cases, groups

SHAPE = AttentionShape(2, 1, 64)
CPU = torch.device("cpu")


def test_each_set_of_kernels_is_run_at_two_lengths():
    planned = cases([AttentionShape(16, 2, 128)])
    found = groups(planned)
    names = [{(c.kind, c.shape, c.documents > 1) for c in own} for own in found]
    assert all(len(own) == 1 for own in names)
    assert set().union(*names) == {(c.kind, c.shape, c.documents > 1) for c in planned}
    for own in found:
        assert 1 <= len(own) <= 2 and len({case.tokens for case in own}) == len(own)


class Started(list):
    """In place of ``subprocess.Popen``: what would be started."""

    def __call__(self, words, **_):
        self.append(words)
        return self

    def wait(self):
        """Each has ended."""

    def poll(self):
        return 0


@pytest.mark.parametrize("cores, processes", [(3, 3), (64, 6), (1, 1)])
def test_the_sets_are_shared_by_processes(monkeypatch, cores, processes):
    planned = [
        Case(kind, SHAPE, 256, 1.0, documents=count)
        for count in (1, 2)
        for kind in ("dense", "block_lists", "vertical_slash")
    ]
    started, told, ran = Started(), [], []
    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(compiling.subprocess, "Popen", started)
    monkeypatch.setattr(compiling, "measure", lambda case, *_: ran.append(case))
    compile_ahead(planned, CPU, lambda *numbers: told.append(numbers))
    assert told == [(6, processes)] and len(started) == processes
    for interpreter, flag, module, device, text in started:
        assert (interpreter, flag, module) == (sys.executable, "-m", compiling.__name__)
        compile_cases(torch.device(device), text)
    assert {*ran} == {*planned} and len(ran) == len(planned)


def test_processes_end_with_this_one(monkeypatch):
    """Ctrl-C while they compile."""
    ended = []

    class Interrupted:
        def __init__(self, *_, **__):
            self.running = True

        def wait(self):
            if self.running:
                raise KeyboardInterrupt

        def poll(self):
            return None if self.running else 0

        def kill(self):
            self.running = False
            ended.append(self)

    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(compiling.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_ahead(tiny([SHAPE]), CPU, lambda *_: None)
    assert len(ended) == 2


@pytest.mark.slow
def test_a_process_runs_its_cases(monkeypatch):
    running, popen = [], subprocess.Popen

    def start(words, **given):
        running.append(popen(words, **given))
        return running[-1]

    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(compiling.subprocess, "Popen", start)
    compile_ahead(tiny([SHAPE])[:2], CPU, lambda *_: None)
    assert [process.returncode for process in running] == [0]
    # One that fails is no error.
    compile_ahead([Case("dense", AttentionShape(3, 2, 64), 256, 1.0)], CPU, lambda *_: None)
    assert running[-1].returncode != 0
