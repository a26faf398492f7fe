# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How ``four.py`` runs jobs, and what it knows of those that have run."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..lib import jobs, record
from .host import AT_ONCE, Host, Job

STATES, LOG = "hosts.jsonl", "jobs.log"
KEPT = 150
"""Lines of what a job printed that the log keeps."""
REASON = re.compile(r"\w*Error\b|\berror: |differ|are not those of|out of memory", re.IGNORECASE)
GRACE = 45.0
"""Seconds in which a job that is stopped may end by itself: torchrun gives its ranks 30."""
MORE = 1.5
"""A job that was stopped is expected to take this many times as long."""


class States:
    """Which jobs are done, and which have failed.

    Args:
        here: what rows say of this GPU and commit.
        gpu: whether the GPU counts; not if there is none and only a list is wanted.
        commits: whose rows count, beside this commit's.
    """

    def __init__(
        self, host: Host, here: dict[str, Any], gpu: bool = True, commits: Sequence[str] = ()
    ):
        self.host, self.here = host, here
        self._gpu = {"gpu": here["gpu"]} if gpu else {}
        self._commits = {here["commit"], *commits}

    def rows(self, file: str) -> list[dict]:
        """Rows of this GPU and of the commits that count."""
        found = jobs.read(self.host.folder / file)
        return [row for row in found if _has(row, self._gpu) and row["commit"] in self._commits]

    def missing(self, job: Job) -> list[dict]:
        """The rows that a job should have and has not."""
        if job.made is not None:
            return [] if job.made.is_file() else [dict(file=str(job.made))]
        found = self.rows(job.file)
        return [wanted for wanted in job.rows if not any(_has(row, wanted) for row in found)]

    def recorded(self, job: Job) -> list[dict]:
        """What earlier calls say of a job that did not end well."""
        wanted = dict(stage=job.stage, job=job.name, gpus=self.host.gpus)
        return [row for row in self.rows(STATES) if _has(row, wanted)]

    def failure(self, job: Job) -> str | None:
        """Why a job has failed; None if it has not."""
        failed = [row["why"] for row in self.recorded(job) if row["status"] == "failed"]
        return failed[-1] if failed else None

    def seconds(self, job: Job) -> float:
        """What a job is expected to take: more if it was stopped."""
        stopped = [row["seconds"] for row in self.recorded(job) if row["status"] == "stopped"]
        return max([job.seconds, *(MORE * seconds for seconds in stopped)])

    def add(self, job: Job, status: str, seconds: float, why: str) -> None:
        row = dict(
            stage=job.stage, job=job.name, gpus=self.host.gpus, status=status,
            seconds=round(seconds, 1), why=why, **self.here,
        )  # fmt: skip
        with open(self.host.folder / STATES, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _has(row: dict, wanted: dict) -> bool:
    return all(row.get(name) == value for name, value in wanted.items())


# Jobs that run.


def command(job: Job, host: Host) -> str:
    """A job's command, for a shell."""
    return shlex.join(["python", *job.words])


def environment(host: Host) -> dict[str, str]:
    """What jobs find: this Python's programs first, this package, and Megatron."""
    found = dict(os.environ)
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
    paths = [str(record.ROOT), *([str(host.megatron)] if host.megatron else [])]
    paths += [found["PYTHONPATH"]] if found.get("PYTHONPATH") else []
    found["PYTHONPATH"] = os.pathsep.join(paths)
    if host.device == "cpu":
        found.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    else:
        found.setdefault("NCCL_NVLS_ENABLE", "0")
    return found


class Run:
    """A job that runs. Its output goes to a file, which is read when it has ended."""

    def __init__(self, job: Job, states: States):
        self.job, self.states, self.began = job, states, time.monotonic()
        self.output = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, *job.words], cwd=record.ROOT, env=environment(states.host),
            stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def settle(self, stopped: float | None = None) -> None:
        """Log what it printed, and print and record how it ended.

        Args:
            stopped: the seconds after which it was stopped; None if it has ended by itself.
        """
        job, states, seconds = self.job, self.states, time.monotonic() - self.began
        self.output.seek(0)
        lines = self.output.read().splitlines()
        self.output.close()
        with open(states.host.folder / LOG, "a", encoding="utf-8") as file:
            file.write(f"=== {job.stage}: {job.name}\n$ {command(job, states.host)}\n")
            file.write("\n".join(lines[-KEPT:]) + "\n")
        why, code = None, self.process.returncode
        if stopped is not None:
            why = f"stopped after {stopped:.0f} s: time was short"
            print(f"  {job.name} was {why}", flush=True)
        elif code:
            why = reason(lines) or f"exit status {code}"
        elif missing := states.missing(job):
            why = f"it ended without {len(missing)} of its rows, such as {missing[0]}"
        if why is None:
            print(f"  {job.name} took {seconds:.0f} s", flush=True)
            return
        if stopped is None:
            print(f"  {job.name} has failed: {why}", flush=True)
        states.add(job, "failed" if stopped is None else "stopped", seconds, why)


def run(group: list[Job], states: States, until: float) -> None:
    """Run jobs at the same time, until a time of the monotonic clock at the latest."""
    began = time.monotonic()
    runs: list[Run] = []
    try:
        for job in group:
            runs.append(Run(job, states))
        left = list(runs)
        while left and time.monotonic() < until:
            time.sleep(0.1)
            for one in [one for one in left if one.process.poll() is not None]:
                left.remove(one)
                end(one.process)
                one.settle()
        for one in left:
            end(one.process)
            one.settle(stopped=until - began)
    finally:  # also when this process is interrupted: ranks of a job must not stay behind
        for one in runs:
            end(one.process)


def end(process: subprocess.Popen) -> None:
    """End what is left of a job. Ranks are in sessions of their own, which torchrun ends when it is told to
    end itself, so it is waited for also where it is not the job's first process."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE
        while _signal(process, kind):
            kind = 0  # from now on, whether any is left
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        else:
            return


def _signal(process: subprocess.Popen, kind: int) -> bool:
    """Send a signal to a job's process group. Returns whether there is one."""
    process.poll()  # a process that has ended is in its group until it is waited for
    try:
        os.killpg(process.pid, kind)
    except ProcessLookupError:
        return False
    return True


def reason(lines: list[str]) -> str:
    """The line of a failed job's output that says most: the last that names an error of its own."""
    shown = [line.strip() for line in lines if line.strip()]
    said = [
        line
        for line in shown
        if REASON.search(line) and not re.search(r"ChildFailedError|error_file", line)
    ]
    return (said or shown or [""])[-1][:300]


# All jobs.


def run_all(todo: list[Job], states: States, deadline: jobs.Deadline) -> None:
    """Run what is missing, fits in the time and has what it needs, in order; jobs without times together."""
    tried: list[Job] = []

    def is_ready(job: Job) -> bool:
        done = job in tried or not states.missing(job) or states.failure(job)
        return not done and not waits_for(job, todo, states) and deadline.fits(states.seconds(job))

    while ready := [job for job in todo if is_ready(job)]:
        group = ready[:1]
        if not group[0].timed and states.host.device != "cpu":
            group = [job for job in ready if not job.timed][:AT_ONCE]
        for job in group:
            print(f"{job.stage}: {job.name}", flush=True)
        tried += group
        run(group, states, math.inf if deadline.end is None else deadline.end)


def waits_for(job: Job, todo: list[Job], states: States) -> str | None:
    """A job of the same stage that must be done before; None if all are."""
    for other in todo:
        if other.stage == job.stage and other.name in job.needs and states.missing(other):
            return other.name
    return None
