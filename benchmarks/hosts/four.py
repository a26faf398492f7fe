# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Everything that is measured on one host of four GPUs (or two), in several calls of ten minutes.

    MEGATRON_LM_PATH=/path/to/Megatron-LM \
        python -m benchmarks.hosts.four --minutes 9.5 --output-folder FOLDER [--stage NAME ...] [--gpus 4]
    ... --list          # what is done, what has failed and what is missing, with the commands
    ... --rehearse      # a short run of each stage on GPUs: at toy lengths, no measurements
    ... --device cpu --tiny     # the same over gloo, of toy models

Stages:

- ``layer``: one layer, search, forward and backward, at 128K, 256K and 512K tokens: fixed budgets, policy
  price at the frontier's density, with a pruned backward, all pairs, beside dense rings of others in the same
  run (``layer.rings``, ``rings.jsonl``).
- ``balance``: kernel times by rank and round of a plain ring, at 128K and 512K (``rounds_ms`` of its rows).
- ``steps``: whole steps of Qwen2.5-3B's shape, 128K to 1M tokens, sparse and dense (``model.pretrain``).
- ``sparsebalance``: steps over data-parallel ranks on a mixed set, in each mode of the balancer
  (``sparsebalance.ranks``, ``sparsebalance.jsonl``).
- ``parity``: losses over layouts of ranks, and of repeated runs (``model.layouts``, ``layouts.jsonl``).

Each job is a run of one of these benchmarks, which appends its rows to their file in the folder. A job that
has rows of this commit and GPU is not run again. Jobs of ``parity``, which have no times, run together. None
is begun that would not end in time, and one that does not end is stopped; the next call goes on. A job that
fails is recorded with its reason (``hosts.jsonl``) and not run again without ``--again``; ``jobs.log`` has
the end of what each job printed. At the end, or with ``--list``, it prints what is missing. Append the rows
of the folder to those of ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..lib import jobs, record
from .host import FULL, NEED_MEGATRON, REHEARSAL, STAGES, TINY, Host, Job
from .host_jobs import jobs_of, left_out
from .host_runs import STATES, States, command, reason, run_all, waits_for

PROBE = """
import json, torch
from benchmarks.lib import record
print(json.dumps(dict(record.provenance(), gpus=torch.cuda.device_count())))
"""
"""In a process of its own, which gives its memory on the GPU back."""


def show(todo: list[Job], states: States, commands: bool, minutes: float | None) -> int:
    """Print what is missing, or with ``commands`` the state of each job; returns how many are missing."""
    left, seconds = 0, 0.0
    for job in todo:
        missing, failure = states.missing(job), states.failure(job)
        took = states.seconds(job)
        if failure:
            print(f"failed   {job.stage}: {job.name}: {failure}")
        elif missing:
            left, seconds = left + 1, seconds + took
            before = waits_for(job, todo, states)
            said = f", after {before}" if before else ""
            if any(other.name == before and states.failure(other) for other in todo):
                said += ", which has failed"
            if minutes is not None and took * jobs.MARGIN > 60 * minutes:
                said += f", does not fit a call of {minutes:g} minutes"
            print(f"missing  {job.stage}: {job.name} (about {took:.0f} s{said})")
        elif commands:
            print(f"done     {job.stage}: {job.name}")
        if commands and (failure or missing):
            print(f"         {command(job, states.host)}")
    print(f"{left} of {len(todo)} jobs are missing, about {seconds / 60:.0f} minutes")
    return left


# Options.


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options that fit each other; else ends with what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output-folder", type=Path, required=True, help="where rows go, and are looked for")
    add("--minutes", type=float, help="of this call (default: no end)")
    add("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    add(
        "--job",
        nargs="+",
        metavar="TEXT",
        help="only jobs with one of these in their names, and those that they need",
    )
    add("--gpus", type=int, choices=(2, 4), default=4)
    add("--list", action="store_true", help="print the state of each job and its command, and stop")
    add("--commit", nargs="+", default=[], metavar="COMMIT",
        help="rows of these commits count, too: what is measured has not changed since")  # fmt: skip
    add("--again", action="store_true", help="run failed jobs, too")
    add("--rehearse", action="store_true", help="a short run of each stage; no measurements")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="toy models, on CPUs; no measurements")
    add("--megatron", type=Path, default=os.environ.get("MEGATRON_LM_PATH") or None,
        help="a Megatron-LM checkout (default: MEGATRON_LM_PATH)")  # fmt: skip
    add("--weights", type=Path, metavar="FOLDER",
        help="a converted checkpoint of Qwen2.5-3B's shape, for steps (default: random)")  # fmt: skip
    add("--balance-weights", type=Path, metavar="FOLDER",
        help="a converted checkpoint for sparsebalance (default: random weights)")  # fmt: skip
    add("--balance-cache", type=Path, metavar="FILE",
        help="tokens of texts for it (benchmarks.model.texts)")  # fmt: skip
    add("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "mtraining-hosts",
        help="datasets and checkpoints that jobs share (%(default)s)")  # fmt: skip
    options = parser.parse_args(words)
    options.refuse = parser.error
    if (options.device == "cpu") != options.tiny:
        parser.error("--device cpu goes with --tiny: times of CPUs are no measurements")
    if options.tiny and options.rehearse:
        parser.error("--rehearse is for GPUs, --tiny for CPUs: give one")
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: use more than 0")
    toy = options.tiny or options.rehearse
    if toy and options.output_folder.resolve() == record.RESULTS:
        parser.error("toy rows are no measurements: give another --output-folder than the results'")
    if toy and (options.weights or options.balance_weights):
        parser.error("--weights and --balance-weights are for measurements")
    if (options.balance_weights is None) != (options.balance_cache is None):
        parser.error(
            "--balance-weights and --balance-cache belong together: trained weights, real texts"
        )
    for name in ("weights", "balance_weights"):
        folder = getattr(options, name)
        if folder and not (folder / "megatron_args.sh").is_file():
            parser.error(
                f"--{name.replace('_', '-')} {folder} has no megatron_args.sh: it is no folder that "
                "mtraining convert hf-to-megatron wrote"
            )
    if options.balance_cache and not options.balance_cache.is_file():
        parser.error(f"there is no --balance-cache {options.balance_cache}")
    return options


def check(options, here: dict[str, Any]) -> None:
    """Refuse what would fail late.

    Args:
        here: what the probe has found.
    """
    if not options.list and options.device == "cuda" and here["gpus"] < options.gpus:
        options.refuse(
            f"--gpus {options.gpus}, but there are {here['gpus']}: give --gpus 2 with two, or "
            "--device cpu --tiny for a trial"
        )
    stages = [stage for stage in options.stage if stage in NEED_MEGATRON]
    if stages:
        if options.megatron is None:
            options.refuse(
                f"stages {', '.join(stages)} need a Megatron-LM checkout: set MEGATRON_LM_PATH, or give "
                f"--megatron; or leave them out: --stage {' '.join(_rest(options, stages))}"
            )
        if not (options.megatron / "pretrain_gpt.py").is_file():
            options.refuse(f"there is no pretrain_gpt.py in {options.megatron}")
    if "parity" in stages and not options.list and find_spec("psutil") is None:
        options.refuse(
            "stage parity saves a checkpoint, and without psutil Megatron waits for ever as it does: pip "
            f"install psutil, or --stage {' '.join(_rest(options, ['parity']))}"
        )
    for folder in (options.output_folder, options.scratch):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            options.refuse(f"nothing can be written to {folder}: {error.strerror or error}")


def _rest(options, stages: list[str]) -> list[str]:
    """The stages that are left without some, or all others if none is."""
    left = [stage for stage in options.stage if stage not in stages]
    return left or [stage for stage in STAGES if stage not in stages]


def probe(device: str) -> dict[str, Any]:
    """GPU, versions and commit, as rows have them, and ``gpus``, how many there are."""
    settings = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    found = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=record.ROOT, env=settings, capture_output=True, text=True
    )
    if found.returncode:
        sys.exit(f"four.py: torch cannot be asked for GPUs: {reason(found.stderr.splitlines())}")
    return dict(json.loads(found.stdout.splitlines()[-1]), command=record.command())


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    # As an interrupt from the keyboard: the job that runs is stopped first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = probe(options.device)
    check(options, here)
    on_gpu = options.device == "cuda"
    sizes = TINY if options.tiny else REHEARSAL if options.rehearse else FULL
    paths = ("megatron", "weights", "balance_weights", "balance_cache")
    host = Host(
        options.gpus, options.device, sizes, options.output_folder.resolve(),
        options.scratch.resolve(),
        has_te=on_gpu and (options.list or record.installed("transformer-engine") != "none"),
        **{name: path and path.resolve() for name in paths for path in [getattr(options, name)]},
    )  # fmt: skip
    if sizes is not FULL:
        print(f"{sizes.name}: its rows are no measurements; they go to {host.folder} alone")
    for line in left_out(options.stage, host):
        print(line)
    todo = jobs_of(options.stage, host)
    if options.job:
        for text in options.job:
            if not any(text in job.name for job in todo):
                options.refuse(f"no job of {', '.join(options.stage)} has {text!r} in its name")
        todo = chosen(todo, options.job)
    states = States(host, {name: each for name, each in here.items() if name != "gpus"},
                    not (options.list and on_gpu and not here["gpus"]), options.commit)  # fmt: skip
    if options.again:
        forget(states, todo)
    if not options.list:
        try:
            run_all(todo, states, jobs.Deadline(options.minutes, 1.0))
        except KeyboardInterrupt:
            print("interrupted: the job that ran is stopped, and the next call goes on", flush=True)
    show(todo, states, options.list, options.minutes)


def chosen(todo: list[Job], texts: list[str]) -> list[Job]:
    """The jobs with one of the texts in their names, and those that they need."""
    found: list[Job] = []
    for job in reversed(todo):  # a job comes after those that it needs
        needed = any(other.stage == job.stage and job.name in other.needs for other in found)
        if needed or any(text in job.name for text in texts):
            found.insert(0, job)
    return found


def forget(states: States, todo: list[Job]) -> None:
    """Take the records of failed jobs out of the file, so that they run again."""
    path = states.host.folder / STATES
    rows = jobs.read(path)
    names = {(job.stage, job.name) for job in todo}
    kept = [row for row in rows if (row["stage"], row["job"]) not in names]
    if len(kept) < len(rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


if __name__ == "__main__":
    main()
