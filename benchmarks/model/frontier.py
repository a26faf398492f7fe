# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""The frontier: density, recall, loss and time of each policy, beside dense attention.

One command a stage, one GPU (or a CPU, to try it). Each appends rows to ``--output`` as they come and leaves
out what has a row there, so a stage goes on where it was stopped; ``--minutes`` is how long it may take: no
job is begun that is not expected to end in time. Stages:

- ``zero``: the model untrained. For each policy the setting that has a wanted density (found on one held-out
  window of each kind of text), then loss over dense, density and recall on all held-out windows, loss of the
  answers of samples with a needle, and how many are right.
- ``time``: one layer of Qwen2.5-3B's shape at 32K, 128K and 512K tokens: search, forward and backward at the
  setting that has the density on operands that look like a usual head's, beside cuDNN in the same process.
- ``train``: training from the same weights on the same data, 300 steps of one sequence, for each seed: loss
  with the run's own attention and with dense attention, during training and after. ``target`` moves the
  prices to a recall, ``schedule`` over the run. Settings are those of ``zero``; without its row they are
  found again.
- ``table``: joins rows to ``frontier.jsonl`` (a row a policy, density and length of training, with the mean
  cost of its attention: ``mean_cost``).

The order is by what a row says. zero and time: densities 15, 8, 4, 30, 2%, at each price, window, fixed,
coverage from the last rows, xattention, moba, coverage. train: the main runs with the first seed, dense,
price at 15% and at 8% with the other seeds, the other runs, the other main runs with the other seeds.
``--run price@0.15 dense target@0.95 schedule@anneal/3`` says which instead.

Recall is measured on held-out query rows, but for policies from the last rows (``_last``), which have none:
theirs is that of the rows that select, and too high. A step's density moves as the model is trained: rows of
training have their own. A time is of the GPU, launched ahead (``benchmarks/lib/clock.py``).

On a GPU machine, with a model and a file of tokens (``benchmarks.model.corpus``; rows of training have its
fingerprint as ``data``, and are compared with the dense runs on it), where OUT is a folder that is kept
(brought from another machine, with the rows in it, stages go on):

    M="--model smol.gguf --cache tokens.npz --output $OUT/frontier_runs.jsonl"
    python -m benchmarks.model.frontier zero $M --minutes 5             # 37 rows, 6 s each
    python -m benchmarks.model.frontier time $M --minutes 4             # 105 rows, 1 to 8 s each
    python -m benchmarks.model.frontier train $M --minutes 9 --jobs 4   # 30 runs, 40 s each
    python -m benchmarks.model.frontier table $M                        # no GPU

Times are estimates for an H200 from other runs of this model; rows say what they took (``seconds``).
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from megatron_mtraining import ConfigError, MTrainingConfig

from ..lib import jobs, record
from ..lib.policies_at_density import AS_PUBLISHED, FAMILIES, config_of
from . import continuing, texts
from .frontier_rows import joined
from .frontier_settings import Judge, about, rows_like, setting_of, split
from .layer_times import Layers
from .material import material

STAGES = ("zero", "time", "train", "table")
DENSITIES = (0.15, 0.08, 0.04, 0.3, 0.02)
POLICIES = ("price", "window", "fixed", "coverage_last", "xattention", "moba", "coverage")
LENGTHS = (131072, 524288, 32768)
RUN_SECONDS = 150.0
"""Of 300 steps, a few runs at once, until one has ended."""
KEY = ("dense", "price@0.15", "price@0.08")
MAIN = (*KEY, "window@0.15", "fixed@0.15", "coverage_last@0.15", "xattention@0.15")
OTHERS = (
    "moba@0.15", "target@0.95", "price@0.04", "price@0.3", "window@0.08", "fixed@0.08", "target@0.9",
    "coverage_last@0.08", "coverage@0.15",
)  # fmt: skip
MOVING = ("target", "schedule")
"""Runs whose prices move: they have no setting at a density."""


# The model as it is.


def zero(options) -> int:
    """Rows of the model as it is."""
    wanted = [("dense", None), ("published", None)]
    wanted += [(policy, density) for density in options.densities for policy in options.policies]
    if options.run:
        wanted = [each for each in map(split, options.run) if each[0] not in MOVING]
    there = {(row["policy"], row["wanted"]) for row in rows_like(options, "zero")}
    wanted = [each for each in wanted if each not in there]
    print(f"zero: {len(wanted)} rows are to be made", flush=True)
    judge = Judge(options, material(options)) if wanted else None

    def work(case) -> dict:
        (policy, density), began = case, time.perf_counter()
        found, setting = None, AS_PUBLISHED if policy == "published" else None
        if policy == "published":
            setting = dict(
                setting, **{n: min(setting[n], options.seq - 1) for n in ("vertical", "slash")}
            )
        if density is not None:
            found = judge.find(policy, density)
            setting = found.setting
        row = dict(stage="zero", policy=policy, wanted=density, **judge.row(setting))
        row |= dict(
            reached=found is None or found.is_near(density),
            seconds=round(time.perf_counter() - began, 1), **about(options),
        )  # fmt: skip
        print(
            f"  {policy} at {density}: density {row['density']:.4f}, recall {row['recall']:.4f}, "
            f"{row['zero_over_dense']:+.2%}, {row['seconds']} s",
            flush=True,
        )
        return row

    return jobs.run_jobs(wanted, work, options.output, 1, jobs.Deadline(options.minutes, 20.0))


# One layer's time.


def time_layers(options) -> int:
    """Rows of one layer's time."""
    layers, shape = Layers(options), list(options.shape)
    cases = [
        (policy, density, seq)
        for density in options.densities
        for seq in options.lengths
        for policy in options.policies
    ]
    if options.run:
        named = [each for each in map(split, options.run) if each[1] and each[0] not in MOVING]
        cases = [(*each, seq) for each in named for seq in options.lengths]
    there = {
        (row["policy"], row["wanted"], row["seq"])
        for row in jobs.read(options.output)
        if row["stage"] == "time" and (row["gpu"], row["shape"]) == (layers.gpu, shape)
    }
    cases = [case for case in cases if case not in there]
    print(f"time: {len(cases)} rows are to be made", flush=True)

    def work(case) -> dict:
        (policy, wanted, seq), began, why = case, time.perf_counter(), None
        layer, dense = layers.at(seq), layers.dense(seq)
        row = dict(stage="time", policy=policy, wanted=wanted, seq=seq, shape=shape)
        row |= dict(block_size=options.block_size)
        try:
            found = layers.found(*case)
            row |= dict(setting=found.setting, density=found.density, reached=found.is_near(wanted))
            if row["reached"]:
                row |= layer.times(found.setting)
        except (RuntimeError, ValueError, ConfigError) as error:
            why = str(error).splitlines()[0][:200]
            if layers.device.type == "cuda":
                torch.cuda.synchronize()  # an error of the GPU's ends all that follows
                torch.cuda.empty_cache()
        row |= dict(
            **dense, why=why, seconds=round(time.perf_counter() - began, 1),
            versions=about(options)["versions"],
        )  # fmt: skip
        shown = {
            name: row.get(name)
            for name in ("density", "search_ms", "forward_ms", "backward_ms", "why")
        }
        print(f"  {policy} at {wanted}, {seq // 1024}K: {shown}, {row['seconds']} s", flush=True)
        return row

    return jobs.run_jobs(cases, work, options.output, 1, jobs.Deadline(options.minutes, 25.0))


# Training.


def wanted_runs(options) -> list[tuple[str, int]]:
    """Names and seeds of the runs of a stage, most informative first."""
    seeds, first = options.seeds, options.seeds[:1]
    if options.run:
        return [(name, seed) for seed in seeds for name in options.run]
    found = [(name, seed) for seed in first for name in MAIN]
    found += [(name, seed) for seed in seeds[1:] for name in KEY]
    found += [(name, seed) for seed in first for name in OTHERS]
    return found + [(name, seed) for seed in seeds[1:] for name in MAIN if name not in KEY]


def work(job: tuple[str, int, argparse.Namespace]) -> dict:
    """A run of training; in a process of its own."""
    name, seed, options = job
    policy, wanted = split(name)
    given = material(options)
    setting = setting_of(policy, wanted, options, given)
    config: MTrainingConfig | None = (
        None if setting is None else config_of(setting, options.block_size)
    )
    run = continuing.Run(name.replace("/", "_"), seed, options.steps, config)
    row, _ = continuing.train(run, given, options)
    return dict(
        zip(("policy", "wanted"), split(name)),
        stage="train",
        setting=setting,
        **row,
        **about(options),
    )


def train(options) -> int:
    """Rows of training."""
    there = {
        (row["policy"], row["wanted"], row["seed"])
        for row in rows_like(options, "train", steps=options.steps, lr=options.lr)
    }
    runs = [each for each in wanted_runs(options) if (*split(each[0]), each[1]) not in there]
    print(f"{options.stage}: {len(runs)} runs of {options.steps} steps are to be made", flush=True)
    if runs:
        texts.read(options)  # makes the file of tokens, once
    expected = RUN_SECONDS * options.steps / 300
    return jobs.run_jobs(
        [(*each, options) for each in runs], work, options.output, options.jobs,
        jobs.Deadline(options.minutes, options.expect or expected),
    )  # fmt: skip


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    """The run that arguments ask for."""
    parser = record.parser(__doc__, "frontier_runs.jsonl")
    add = parser.add_argument
    add("stage", choices=STAGES)
    continuing.add_options(parser)
    add("--densities", type=float, nargs="+", default=list(DENSITIES))
    add("--policies", nargs="+", choices=list(FAMILIES), default=list(POLICIES))
    add(
        "--run",
        nargs="+",
        metavar="NAME",
        help="dense, target@RECALL, schedule@POINTS[/THRESHOLD], POLICY@DENSITY",
    )
    continuing.add_layer_options(parser, LENGTHS, seeds=[1, 2, 3])
    options = parser.parse_args(words)
    for name in options.run or ():
        try:
            split(name)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    for density in options.densities:
        if not 0 < density < 1:
            parser.error(f"--densities {density}: use shares between 0 and 1")
    continuing.check_options(parser, options)
    return options


def join(options) -> int:
    """Write the joined rows."""
    rows, path = jobs.read(options.output), options.output.with_name("frontier.jsonl")
    found = joined(rows, jobs.read(record.RESULTS / "real_operands.jsonl"))
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    print(f"{len(found)} rows are in {path}")
    return 0


def main(words: list[str] | None = None) -> None:
    options = options_from(words)
    stages = dict(zero=zero, time=time_layers, train=train, table=join)
    jobs.run_stage("frontier.py", stages[options.stage], options)


if __name__ == "__main__":
    main()
