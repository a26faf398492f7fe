# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Steps of 4 to 1024 GPUs by event simulation, from measured layers and recorded patterns.

Plans, estimates and tuning are the package's own code. What is simulated is the rest:

- samples: a mixed set (:mod:`.sets`), whose true density and recall at each price are drawn from recorded
  windows of a real model (:mod:`.windows`); the balancer does not know them.
- attention of a micro-batch: the latency profile at its true density, in Qwen2.5-3B's shape, times a random
  factor with the profile's own error on shapes that were not fitted.
- all else: the time a token takes in layers and loss, and a step in communication and optimizer, of the last
  profiled step of Qwen2.5-3B in ``results/pretrain.jsonl``. All samples have equally many tokens.

After ``--learn`` steps, in which estimates begin from their prior, ``--steps`` count. Rows of
``results/sparsebalance.jsonl`` with ``source`` simulated: ``max_over_mean`` and ``idle_share`` are of
attention over the ranks that wait, ``step_max_over_mean`` and ``step_idle_share`` of the whole step.

    python -m benchmarks.sparsebalance.simulate [--set NAME ...] [--gpus N ...] [--waits KIND ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_mtraining import ConfigError
from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.balance.latency import LatencyModel
from megatron_mtraining.balance.plan import PlanSizes, Samples
from megatron_mtraining.balance.planner import Planner, lag_of
from megatron_mtraining.balance.tuning import Groups, TuningBounds

from ..lib import record
from . import schedule, sets
from .modes import MODES, QWEN, predictor, tuned
from .windows import PATTERNS, Windows, sample_curves

OUTPUT = record.RESULTS / "sparsebalance.jsonl"
CP = {"bimodal": 2, "8K-72K": 2, "long-tailed": 4, "to 256K": 8}
"""Context-parallel ranks: a GPU has 32K to 36K tokens. Fewer where there would be under 4 replicas."""
FORWARD = 1 / 3
"""Of the time outside of attention."""
NORMAL = 0.6745
"""Half of the errors of a normal distribution are within so many standard deviations."""
FIELDS = ("set", "gpus", "cp", "pp", "microbatches", "waits", "mode", "price", "max_mass", "seed")


class Rest(NamedTuple):
    """What a step has beside attention, in ms."""

    token: float
    """Of each token of a GPU."""
    step: float
    row: dict

    @classmethod
    def measured(cls, path: Path = record.RESULTS / "pretrain.jsonl") -> Rest:
        """Of the last profiled sparse step of Qwen2.5-3B on 4 GPUs with context parallelism."""
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        row = [
            row
            for row in rows
            if row["model"] == QWEN.name
            and row["attention"] == "mtraining"
            and row["world"] == 4
            and row.get("breakdown")
        ][-1]
        parts = row["breakdown"]
        tokens = row["seq"] * row["batch"] / row["world"]
        once = parts["communication"] + parts["optimizer"]
        return cls((parts["layers"] + parts["loss"]) / tokens, once, row)


class Case(NamedTuple):
    """One setting of a simulated run."""

    set: str
    gpus: int
    waits: str
    mode: str
    price: float
    seed: int
    stages: int
    microbatches: int

    @property
    def cp(self) -> int:
        return min(CP[self.set], max(1, self.gpus // self.pp // 4))

    @property
    def pp(self) -> int:
        return self.stages if self.waits == "pipeline" else 1

    @property
    def dp(self) -> int:
        return self.gpus // self.cp // self.pp


class World:
    """What is true of a set's samples, and what the balancer is told."""

    def __init__(self, name: str, windows: Windows, count: int, seed: int):
        kinds = tuple(kind for kind in sets.KINDS if kind in windows.kinds)
        self.packed = sets.build(name, count, seed, kinds)
        self.samples = self.packed.samples()
        self.windows = windows
        self.density, self.recall = sample_curves(windows, self.packed, seed)

    def look_up(self, numbers: np.ndarray) -> Samples:
        """Of numbers that go on beyond the last sample: epochs, each in an order of its own."""
        count = len(self.packed.documents)
        epochs, places = np.divmod(numbers, count)
        found = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            order = np.random.default_rng([7, int(epoch)]).permutation(count)
            found[epochs == epoch] = order[places[epochs == epoch]]
        return Samples(found, *(each[found] for each in self.samples[1:]))

    def at(self, numbers: np.ndarray, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """True density and recall of samples at prices, in the shape of ``numbers``."""
        flat, at = numbers.ravel(), prices.ravel()
        density = self.windows.at_price(self.density[flat], at, left=False)
        recall = self.windows.at_price(self.recall[flat], at, left=True)
        return density.reshape(numbers.shape), recall.reshape(numbers.shape)


def simulate(case: Case, world: World, profile: LatencyModel, rest: Rest, options) -> dict:
    """A run in one setting: its row."""
    mode, seq = MODES[case.mode], world.packed.seq_length
    sizes = PlanSizes(case.dp, case.microbatches, 1, case.waits != "step")
    predict = predictor(profile, QWEN, seq, case.cp)
    error = profile.errors.get("vertical_slash")
    sigma = error.median / NORMAL if error else 0.03
    rng = np.random.default_rng([11, case.seed])
    steps = options.learn + options.steps
    planner = Planner(
        0, 0, (steps + 64) * sizes.samples, sizes, mode.batching, world.look_up, predict,
        DensityEstimates(), lag_of(2, 2, case.microbatches),
    )  # fmt: skip
    bounds = TuningBounds(max_mass=options.mass)
    groups = Groups(
        (case.microbatches, case.dp), case.waits == "microbatch", case.waits == "pipeline"
    )
    elsewhere = rest.token * seq / case.cp
    found, plans_ms = [], []
    for step in range(steps):
        plan = planner.plan_of(step)
        started = time.perf_counter()
        multipliers, mass = np.ones(plan.density.shape), np.zeros(plan.density.shape)
        expected = plan.predicted_ms
        if mode.tuning and planner.knows(step):
            change = tuned(plan, planner.elasticity, bounds, case.price, predict, case.waits)
            multipliers = change.multipliers.astype(np.float64)
            mass, expected = change.mass, change.predicted_ms
        plans_ms.append(1000 * (time.perf_counter() - started))
        order, pairs = plan.order[..., 0], plan.pairs[..., 0]
        density, recall = world.at(order, case.price * multipliers)
        latency = profile.predict(seq, pairs, density, QWEN.shape, cp_size=case.cp)
        noise = np.exp(rng.normal(0, sigma, order.shape))
        forward = QWEN.layers * noise * (latency.search_ms + latency.forward_ms)
        backward = QWEN.layers * noise * latency.backward_ms
        planner.observe(step, density, np.clip(recall + mass, 0, 1), multipliers)
        if step < options.learn:
            continue
        attention = forward + backward
        done = schedule.ends(
            forward + FORWARD * elsewhere, backward + (1 - FORWARD) * elsewhere, case.waits, case.pp
        )
        # A rank's own work, whoever waits: all of its stages are busy for that long in turn.
        busy = (attention + elsewhere).sum(0) / case.pp
        over = groups.max_over_mean(attention)
        step_ms = done.max() + rest.step
        weights = pairs / pairs.sum()
        found.append(
            dict(
                max_over_mean=over, idle_share=1 - 1 / over, step_ms=step_ms,
                attention_ms=groups.split(attention).sum(-1).max(-1).sum() / case.pp,
                mean_attention_ms=attention.sum(0).mean() / case.pp,
                step_max_over_mean=done.max() / busy.mean(),
                step_idle_share=1 - (busy.mean() + rest.step) / step_ms,
                recall=recall.mean(), density=(density * weights).sum(),
                mass_moved=np.abs(mass).mean(),
                error=np.median(np.abs(expected / attention - 1)),
            )
        )  # fmt: skip
    mean = {name: round(float(np.mean([each[name] for each in found])), 5) for name in found[0]}
    return dict(
        source="simulated", set=case.set, gpus=case.gpus, dp=case.dp, cp=case.cp, pp=case.pp,
        microbatches=case.microbatches, waits=case.waits, mode=case.mode, price=case.price,
        max_mass=options.mass, seed=case.seed, seq=seq, **mean, steps=options.steps,
        learn=options.learn, elasticity=round(planner.elasticity, 4), noise=round(sigma, 4),
        rest_us_per_token=round(1000 * rest.token, 3), rest_ms_per_step=round(rest.step, 1),
        rest_commit=rest.row["commit"], profile=profile.gpu, profile_commit=profile.commit,
        patterns_model=world.windows.about["model"], patterns_commit=world.windows.about["commit"],
        tune_ms=round(float(np.median(plans_ms)), 2),
    )  # fmt: skip


def cases_of(options) -> list[Case]:
    """All settings; those that wait otherwise at one number of GPUs alone."""
    found = []
    for name in options.set:
        for price in options.price:
            for waits in options.waits:
                gpus = options.gpus if waits == "step" else [options.others_gpus]
                for count in gpus:
                    for mode in options.mode:
                        found.append(
                            Case(
                                name, count, waits, mode, price, options.seed, options.stages,
                                options.microbatches if waits == "step" else options.others_microbatches,
                            )
                        )  # fmt: skip
    return found


def done(path: Path, source: str = "simulated") -> set[tuple]:
    """Settings that have rows."""
    if not path.exists():
        return set()
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {tuple(row[name] for name in FIELDS) for row in rows if row["source"] == source}


def run_all(options) -> None:
    """Every setting that has no row yet."""
    profile = LatencyModel.for_gpu(options.gpu, options.profile)
    if profile.warning:
        raise ConfigError(profile.warning)
    windows, rest = Windows(options.patterns), Rest.measured()
    there = done(options.output)
    worlds: dict[str, World] = {}
    for case in cases_of(options):
        row = dict(case._asdict(), cp=case.cp, pp=case.pp, max_mass=options.mass)
        if tuple(row[name] for name in FIELDS) in there:
            continue
        if case.set not in worlds:
            worlds = {case.set: World(case.set, windows, options.samples, options.seed)}
        started = time.perf_counter()
        row = simulate(case, worlds[case.set], profile, rest, options)
        record.append(options.output, [row])
        print(
            f"{case.set}, {case.gpus} GPUs, dp {case.dp} cp {case.cp} pp {case.pp}, {case.waits}, "
            f"{case.mode}: max/mean {row['max_over_mean']:.3f}, attention {row['attention_ms']:.0f} ms, "
            f"step {row['step_ms']:.0f} ms, idle {row['step_idle_share']:.3f}, recall {row['recall']:.4f}, "
            f"density {row['density']:.4f}; {time.perf_counter() - started:.1f} s",
            flush=True,
        )


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--set", nargs="+", choices=list(sets.SETS), default=list(sets.SETS))
    add("--gpus", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    add("--mode", nargs="+", choices=list(MODES), default=list(MODES))
    add("--waits", nargs="+", choices=schedule.WAITS, default=list(schedule.WAITS))
    add(
        "--others-gpus",
        type=int,
        default=64,
        help="where ranks wait in micro-batches or a pipeline",
    )
    add("--stages", type=int, default=4, help="of a pipeline")
    add("--microbatches", type=int, default=4, help="of a step")
    add(
        "--others-microbatches", type=int, default=8, help="where ranks wait in each, or a pipeline"
    )
    add("--price", type=float, nargs="+", default=[0.25])
    add("--mass", type=float, default=0.01, help="as --mtraining-tuning-mass")
    add("--steps", type=int, default=50)
    add("--learn", type=int, default=20)
    add("--samples", type=int, default=4096, help="of a set; a longer run repeats them")
    add("--seed", type=int, default=1)
    add("--gpu", default="NVIDIA H200", help="whose latency profile")
    add("--profile", type=Path)
    add("--patterns", type=Path, default=PATTERNS)
    add("--output", type=Path, default=OUTPUT)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    try:
        run_all(options_from(words))
    except ConfigError as error:
        sys.exit(f"simulate.py: {error}")


if __name__ == "__main__":
    main()
