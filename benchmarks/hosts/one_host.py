# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Everything that is measured on one host of several GPUs, in calls of ten minutes: a list of commands.

    MEGATRON_LM_PATH=/path/to/Megatron-LM \
        python -m benchmarks.hosts.one_host --gpus 4 --minutes 9.5 --output-folder FOLDER [--stage NAME ...]
    ... --list          # what is done, what has failed and what is missing, with the commands
    ... --rehearse      # a short run of each stage on GPUs: at toy lengths, no measurements
    ... --device cpu --tiny     # the same over gloo, of toy models

Stages:

- ``layer``: one layer, search, forward and backward, at 128K, 256K and 512K tokens, on eight GPUs at 512K, 1M
  and 2M: fixed budgets, policy price at the frontier's density, with a pruned backward, all pairs, beside
  dense rings of others in the same run (``layer.rings``, ``rings.jsonl``); keys of all ranks at once, and
  inner rings of each size.
- ``balance``: kernel times by rank and round of a plain ring (``rounds_ms`` of its rows).
- ``slow``: a layer over two emulated hosts of half of the GPUs each, as one ring and as two inner rings.
- ``steps``: whole steps of Qwen2.5-3B's shape, 128K to 2M tokens, sparse and dense, and of Qwen2.5-7B's at
  256K (``model.pretrain``).
- ``transformers``: steps of Qwen3-8B's shape at 1M tokens (``model.sequences``, ``sequences.jsonl``).
- ``sparsebalance``: steps over data-parallel ranks on a mixed set, in each mode of the balancer
  (``sparsebalance.ranks``, ``sparsebalance.jsonl``).
- ``parity``: losses over layouts of ranks, and of repeated runs (``model.layouts``, ``layouts.jsonl``).

Each job is a run of one of these benchmarks (``host_jobs``), which appends its rows to their file in the
folder. ``hosts.jsonl`` says which jobs are done or have failed on a GPU and commit: those are not run again
(failed ones with ``--again``). Jobs of ``parity``, which have no times, run together. None is begun that
would not end in time, and one that does not end is stopped; the next call goes on. ``jobs.log`` has the end
of what each job printed. Append the rows of the folder to those of ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
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
from importlib.util import find_spec
from pathlib import Path

from ..lib import jobs, record
from .host_jobs import STAGES, Job, jobs_of

STATES, LOG = "hosts.jsonl", "jobs.log"
AT_ONCE = 8
"""Jobs without times that share the GPUs: they are small."""
GRACE = 45.0
"""Seconds in which a job that is stopped may end by itself: torchrun gives its ranks 30."""
ERROR = re.compile(r"\w*Error\b|\berror: |differ|are not those of|out of memory", re.IGNORECASE)
PROBE = """
import json, torch
from benchmarks.lib import record
print(json.dumps(dict(record.provenance(), count=torch.cuda.device_count())))
"""
"""In a process of its own, which gives its memory on the GPU back."""


# What has run.


class States:
    """What ``hosts.jsonl`` says of the jobs on this GPU and commit.

    Args:
        here: GPU, commit and versions, as rows have them.
    """

    def __init__(self, options, here: dict):
        self.options, self.here = options, here
        self.path = options.output_folder / STATES

    def of(self, job: Job) -> list[dict]:
        """What was recorded of a job, oldest first."""
        commits = (self.here["commit"], *self.options.commit)
        wanted = (job.stage, job.name, self.options.gpus, self.options.toy, self.here["gpu"])
        names = ("stage", "job", "gpus", "toy", "gpu")
        return [
            row for row in jobs.read(self.path)
            if tuple(row.get(name) for name in names) == wanted and row["commit"] in commits
        ]  # fmt: skip

    def status(self, job: Job) -> str:
        """``done``, ``failed``, or ``missing``, as a job is that was stopped."""
        last = self.of(job)[-1:]
        return last[0]["status"] if last and last[0]["status"] in ("done", "failed") else "missing"

    def seconds(self, job: Job) -> float:
        """What a job is expected to take: half as long again if it was stopped."""
        return max(
            [job.seconds, *(1.5 * r["seconds"] for r in self.of(job) if r["status"] == "stopped")]
        )

    def add(self, job: Job, status: str, seconds: float, why: str = "") -> None:
        row = dict(stage=job.stage, job=job.name, gpus=self.options.gpus, toy=self.options.toy)
        row |= dict(status=status, seconds=round(seconds, 1), why=why)
        record.copy(self.path, [row | self.here])

    def waits_for(self, job: Job, todo: list[Job]) -> str | None:
        """A job that must be done before and is not."""
        before = [each for each in todo if (each.stage, each.name) == (job.stage, job.needs)]
        return job.needs if before and self.status(before[0]) != "done" else None


# Jobs that run.


def environment(options) -> dict[str, str]:
    """What jobs find: this Python's programs first, this package, and Megatron."""
    found = dict(os.environ)
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
    paths = (record.ROOT, options.megatron, found.get("PYTHONPATH"))
    found["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    if options.device == "cpu":
        found.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    else:
        found.setdefault("NCCL_NVLS_ENABLE", "0")
    return found


def run(group: list[Job], states: States, until: float) -> None:
    """Run jobs at the same time, until a time of the monotonic clock at the latest, and record how they
    ended."""
    began, runs = time.monotonic(), []
    try:
        for job in group:
            output = tempfile.TemporaryFile("w+", errors="replace")
            count = len(jobs.read(states.options.output_folder / job.file)) if job.file else 0
            runs.append((job, output, count, subprocess.Popen(
                [sys.executable, *job.words], cwd=record.ROOT, env=environment(states.options),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )))  # fmt: skip
        left = list(runs)
        while left and time.monotonic() < until:
            time.sleep(0.1)
            for one in [one for one in left if one[3].poll() is not None]:
                left.remove(one)
                end(one[3])
                settle(*one, states, time.monotonic() - began)
        for one in left:
            end(one[3])
            settle(*one, states, time.monotonic() - began, is_stopped=True)
    finally:  # also when this process is interrupted: ranks of a job must not stay behind
        for one in runs:
            end(one[3])


def settle(job, output, count, process, states, seconds, is_stopped=False) -> None:
    """Log what a job printed, and print and record how it ended."""
    folder = states.options.output_folder
    with output:
        output.seek(0)
        lines = output.read().splitlines()
    with open(folder / LOG, "a", encoding="utf-8") as file:
        said = "\n".join(lines[-150:])
        file.write(f"=== {job.stage}: {job.name}\n$ {shlex.join(['python', *job.words])}\n{said}\n")
    status, why = "done", ""
    if is_stopped:
        status, why = "stopped", "time was short"
    elif process.returncode:
        status, why = "failed", reason(lines) or f"exit status {process.returncode}"
    elif job.file and len(jobs.read(folder / job.file)) == count:
        status, why = "failed", "it ended without a row"
    print(f"  {job.name} is {status} after {seconds:.0f} s{why and ': '}{why}", flush=True)
    states.add(job, status, seconds, why)


def reason(lines: list[str]) -> str:
    """The line of a failed job's output that says most: the last that names an error of its own."""
    shown = [line.strip() for line in lines if line.strip()]
    errors = [line for line in shown if ERROR.search(line) and "ChildFailedError" not in line]
    return ([line for line in errors if "error_file" not in line] or shown or [""])[-1][:300]


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


def run_all(todo: list[Job], states: States, deadline: jobs.Deadline) -> None:
    """Run what is missing, fits in the time and has what it needs, in order; jobs without times together."""
    tried: list[Job] = []

    def is_ready(job: Job) -> bool:
        if job in tried or states.status(job) == "done" or states.waits_for(job, todo):
            return False
        again = states.options.again or states.status(job) != "failed"
        return again and deadline.fits(states.seconds(job))

    while ready := [job for job in todo if is_ready(job)]:
        group = ready[:1]
        if not group[0].timed and states.options.device != "cpu":
            group = [job for job in ready if not job.timed][:AT_ONCE]
        for job in group:
            print(f"{job.stage}: {job.name}", flush=True)
        tried += group
        run(group, states, math.inf if deadline.end is None else deadline.end)


def show(todo: list[Job], states: States, commands: bool) -> int:
    """Print what is missing, or with ``commands`` the state of each job; returns how many are missing."""
    left = [job for job in todo if states.status(job) == "missing"]
    for job in todo:
        status, why = states.status(job), ""
        if status == "failed":
            why = f": {states.of(job)[-1]['why']}"
        elif status == "missing":
            before = states.waits_for(job, todo)
            why = (
                f" (about {states.seconds(job):.0f} s{', after ' if before else ''}{before or ''})"
            )
        if commands or status != "done":
            print(f"{status:8} {job.stage}: {job.name}{why}")
        if commands and status != "done":
            print(f"         {shlex.join(['python', *job.words])}")
    minutes = sum(map(states.seconds, left)) / 60
    print(f"{len(left)} of {len(todo)} jobs are missing, about {minutes:.0f} minutes")
    return len(left)


# Options.


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options that fit each other; else ends with what is wrong."""
    parser = record.parser(__doc__)
    add = parser.add_argument
    add("--output-folder", type=Path, required=True, help="where rows go, and are looked for")
    add("--minutes", type=float, help="of this call (default: no end)")
    add("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    add("--job", nargs="+", metavar="TEXT",
        help="only jobs with one of these in their names, and those that they need")  # fmt: skip
    add("--gpus", type=int, default=4, metavar="N", help="an even number (%(default)s)")
    add("--list", action="store_true", help="print the state of each job and its command, and stop")
    add("--commit", nargs="+", default=[], metavar="COMMIT",
        help="rows of these commits count, too: what is measured has not changed since")  # fmt: skip
    add("--again", action="store_true", help="run failed jobs, too")
    add("--rehearse", action="store_true", help="a short run of each stage; no measurements")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="toy models, on CPUs; no measurements")
    add("--megatron", type=Path, default=os.environ.get("MEGATRON_LM_PATH") or None,
        help="a Megatron-LM checkout (default: MEGATRON_LM_PATH)")  # fmt: skip
    add("--balance-weights", type=Path, metavar="FOLDER",
        help="a converted checkpoint for sparsebalance (default: random weights)")  # fmt: skip
    add("--balance-cache", type=Path, metavar="FILE",
        help="tokens of texts for it (benchmarks.model.texts)")  # fmt: skip
    add("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "mtraining-hosts",
        help="datasets and checkpoints that jobs share (%(default)s)")  # fmt: skip
    options = parser.parse_args(words)
    options.refuse = parser.error
    if options.gpus < 2 or options.gpus % 2:
        parser.error(f"--gpus {options.gpus}: use 2 or another even number")
    options.toy = 1024 if options.tiny else 16384 if options.rehearse else 0
    for name in ("output_folder", "scratch", "megatron", "balance_weights", "balance_cache"):
        if getattr(options, name):
            setattr(options, name, getattr(options, name).resolve())
    if (options.device == "cpu") != options.tiny or (options.tiny and options.rehearse):
        parser.error(
            "--device cpu goes with --tiny, for times of CPUs are no measurements; --rehearse is for GPUs"
        )
    if options.toy and (options.output_folder == record.RESULTS or options.balance_weights):
        parser.error(
            "toy rows are no measurements: give another --output-folder, and no --balance-weights"
        )
    if (options.balance_weights is None) != (options.balance_cache is None):
        parser.error(
            "--balance-weights and --balance-cache belong together: trained weights, real texts"
        )
    if options.megatron is None and set(options.stage) & {"steps", "sparsebalance", "parity"}:
        parser.error(
            "steps, sparsebalance and parity need a Megatron-LM checkout: set MEGATRON_LM_PATH, or give "
            "--megatron, or leave them out: --stage layer balance slow transformers"
        )
    needed = [options.megatron and options.megatron / "pretrain_gpt.py", options.balance_cache,
              options.balance_weights and options.balance_weights / "megatron_args.sh"]  # fmt: skip
    for path in needed:
        if path and not path.is_file():
            parser.error(f"there is no {path}")
    if "parity" in options.stage and not options.list and find_spec("psutil") is None:
        parser.error("parity saves a checkpoint, and without psutil Megatron waits for ever as it does: pip "
                     "install psutil, or leave it out with --stage")  # fmt: skip
    return options


def probe(options) -> dict:
    """GPU, versions and commit, as rows have them, and ``count``, how many GPUs there are."""
    settings = environment(options)
    found = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=record.ROOT, env=settings, capture_output=True, text=True
    )
    if found.returncode:
        sys.exit(
            f"one_host.py: torch cannot be asked for GPUs: {reason(found.stderr.splitlines())}"
        )
    return dict(json.loads(found.stdout.splitlines()[-1]), command=record.command())


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    # As an interrupt from the keyboard: the job that runs is stopped first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = probe(options)
    count, on_gpu = here.pop("count"), options.device == "cuda"
    if on_gpu and count < options.gpus and not options.list:
        options.refuse(
            f"--gpus {options.gpus}, but there are {count}: give fewer, or --device cpu --tiny"
        )
    options.has_te = on_gpu and record.installed("transformer-engine") != "none"
    options.local = on_gpu and not options.has_te
    if not options.has_te:
        print("without Transformer Engine: no rows of its ring, no dense steps and layouts")
    if options.toy:
        print(f"a trial: its rows are no measurements; they go to {options.output_folder} alone")
    options.output_folder.mkdir(parents=True, exist_ok=True)
    options.scratch.mkdir(parents=True, exist_ok=True)
    todo, states = jobs_of(options), States(options, here)
    if not options.list:
        try:
            run_all(todo, states, jobs.Deadline(options.minutes, 1.0))
        except KeyboardInterrupt:
            print("interrupted: the job that ran is stopped, and the next call goes on", flush=True)
    show(todo, states, options.list)


if __name__ == "__main__":
    main()
