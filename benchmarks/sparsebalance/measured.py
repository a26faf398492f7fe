# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""The attention of whole steps measured on one GPU, one micro-batch after the other, beside its prediction.

A real model runs over packed samples of a mixed set, cut from real texts. In every ``--every``-th layer the
attention (search, forward, backward with a random gradient) is timed by CUDA events, behind a delay in which
the host launches it; the sum, times that number, is a micro-batch's attention time. The ranks and
micro-batches of a step are those that the plan gives; what each mode's ranks would have waited follows from
the measured times. Price multipliers of tuning are measured as they are: such micro-batches run again.

A row of ``results/sparsebalance.jsonl`` for each set and mode, with ``source`` measured; ``step_ms`` is the
attention of the slowest rank. Steps before ``--learn`` teach the estimates and do not count.

    python -m benchmarks.sparsebalance.measured --model MODEL.gguf --text book=book.txt ... \
        [--set NAME ...] [--dp N] [--microbatches N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.balance.latency import LatencyModel
from megatron_mtraining.balance.plan import PlanSizes
from megatron_mtraining.balance.terms import AttentionShape
from megatron_mtraining.models.environment import default_dtype
from megatron_mtraining.models.open import open_model
from megatron_mtraining.models.types import LayerInput, ModelOptions

from ..lib import record
from . import sets, texts
from .balancer import Balancer, samples_of
from .modes import MODES, Model, predictor

OUTPUT = record.RESULTS / "sparsebalance.jsonl"
DELAY = 8_000_000
"""Clock cycles, 4 ms, that the GPU waits before a timed part: longer than the host takes to launch it."""


class Timed:
    """A visitor of a model's layers that attends by a pattern, and times some of them.

    Args:
        config: the settings.
        multiplier: of the price.
        documents: lengths of the sample's documents.
        every: which layers are timed: each n-th.
    """

    def __init__(self, config: MTrainingConfig, multiplier: float, documents, every: int, device):
        self.config, self.every = config, every
        self.documents = texts.documents_of(documents, device)
        price = config.policy.price * multiplier
        self.price = torch.tensor(price, dtype=torch.float32, device=device)
        self.density, self.recall, self.spans = [], [], []

    def __call__(self, given: LayerInput) -> Tensor:
        query, key, value = (t.detach().contiguous() for t in (*given[1:3], given.value))
        is_timed = given.layer % self.every == 0
        with torch.enable_grad():
            if is_timed:
                for each in (query, key, value):
                    each.requires_grad_()
                gradient = torch.randn_like(query)
            begin = self._mark(is_timed)
            found = attend(
                query, key, value, config=self.config, softmax_scale=given.softmax_scale,
                price=self.price, documents=self.documents,
            )  # fmt: skip
            if is_timed:
                self.spans.append((begin, self._mark()))
                begin = self._mark(True)
                torch.autograd.grad(found.out, (query, key, value), gradient)
                self.spans.append((begin, self._mark()))
        density = found.index.density()
        recall = found.index.recall
        self.density.append(density.mean())
        self.recall.append(torch.ones_like(density).mean() if recall is None else recall.mean())
        return found.out.detach()

    def _mark(self, delayed: bool = False):
        """A point in time of the GPU's, or of the host's where there is none."""
        if not self.price.is_cuda:
            return time.perf_counter()
        if delayed:
            torch.cuda._sleep(DELAY)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def result(self) -> tuple[float, float, float]:
        """Milliseconds of attention in all layers, density and recall."""
        if self.price.is_cuda:
            torch.cuda.synchronize()
            times = [begin.elapsed_time(end) for begin, end in self.spans]
        else:
            times = [1000 * (end - begin) for begin, end in self.spans]
        share = len(self.spans) / 2 / len(self.density)
        density, recall = (
            torch.stack(each).double().mean().item() for each in (self.density, self.recall)
        )
        return sum(times) / share, density, recall


class Measurer:
    """Runs a model over the samples of a set."""

    def __init__(self, run, packed: sets.PackedSet, tokens: dict[str, np.ndarray], options):
        self.run, self.packed, self.options = run, packed, options
        source = texts.Texts(tokens, seed=options.seed)
        self.tokens = [
            source.sample(dataset, documents)
            for dataset, documents in zip(packed.datasets, packed.documents)
        ]
        self.config = MTrainingConfig.from_options(price=options.price)
        self.count = 0

    def __call__(self, number: int, multiplier: float) -> tuple[float, float, float]:
        """Milliseconds, density and recall of a sample's attention."""
        self.count += 1
        documents = self.packed.documents[number]
        visitor = Timed(self.config, multiplier, documents, self.options.every, self.options.device)
        self.run(self.tokens[number], visitor)
        return visitor.result()

    def step(self, order: np.ndarray, multipliers: np.ndarray, known: dict) -> np.ndarray:
        """Of the micro-batches ``[M, dp]``: milliseconds, density, recall, ``[3, M, dp]``.

        Args:
            order: samples ``[M, dp]``.
            known: what samples gave at a multiplier of 1; added to.
        """
        found = np.empty((3, *order.shape))
        for place, number in np.ndenumerate(order):
            multiplier = float(multipliers[place])
            if abs(multiplier - 1) > 1e-3:
                found[(slice(None), *place)] = self(number, multiplier)
                continue
            if number not in known:
                known[number] = self(number, 1.0)
            found[(slice(None), *place)] = known[number]
        return found


def run_set(chosen: str, source, run, tokens, profile: LatencyModel, options) -> None:
    """All modes over the steps of a set; appends its rows."""
    seq = options.seq or sets.SETS[chosen].seq_length
    ranges = sets.ranges_at(chosen, seq)
    sizes = PlanSizes(options.dp, options.microbatches, 1)
    need = options.steps * sizes.samples
    kinds = tuple(kind for kind in sets.KINDS if kind in tokens)
    packed = sets.pack(ranges, seq, need + len(kinds), options.seed, kinds)
    samples = packed.samples()
    shape = source.shape
    model = Model(
        options.model.name,
        shape.layers,
        AttentionShape(shape.heads, shape.kv_heads, shape.head_dim),
    )
    predict = predictor(profile, model, seq)
    measure = Measurer(run, packed, tokens, options)
    balancers = [Balancer(name, sizes, predict, options) for name in MODES]
    measure(0, 1.0)  # compiles
    measure(1, 2.0)
    started = time.perf_counter()
    for step in range(options.steps):
        numbers = np.arange(step * sizes.samples, (step + 1) * sizes.samples)
        known: dict = {}
        for balancer in balancers:
            plan, multipliers, predicted = balancer.plan(step, samples_of(samples, numbers))
            found = measure.step(plan.order[..., 0], multipliers, known)
            balancer.take(plan, multipliers, predicted, found)
        shown = ", ".join(f"{each.name} {each.steps[-1]['over']:.3f}" for each in balancers)
        took = time.perf_counter() - started
        print(f"{chosen}, step {step + 1}: max/mean {shown}; {took:.0f} s", flush=True)
    about = dict(
        model=options.model.name, seq=seq, yarn=source.options.yarn_factor, profile=profile.gpu,
        profile_commit=profile.commit,
    )  # fmt: skip
    record.append(options.output, [{**each.row(chosen), **about} for each in balancers])


def done(path: Path, options) -> set[str]:
    """The sets that have rows of this model and length."""
    if not path.exists():
        return set()
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        row["set"]
        for row in rows
        if row["source"] == "measured" and row["model"] == options.model.name
    }


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    texts.add_options(parser)
    add("--set", nargs="+", choices=list(sets.SETS), default=["bimodal", "8K-72K"])
    add("--seq", type=int, help="tokens of a sample, and all lengths in proportion")
    add("--dp", type=int, default=4)
    add("--microbatches", type=int, default=4)
    add("--steps", type=int, default=5)
    add("--learn", type=int, default=1, help="first steps that do not count")
    add("--every", type=int, default=3, help="time each so many-th layer")
    add("--price", type=float, default=0.25)
    add("--mass", type=float, default=0.01, help="as --mtraining-tuning-mass")
    add("--profile", type=Path, help="a latency profile; default: the GPU's own")
    add("--seed", type=int, default=1)
    add("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(words)
    if options.learn >= options.steps:
        parser.error("--learn leaves no step that counts: give more --steps")
    return options


def main(words: list[str] | None = None) -> None:
    options = options_from(words)
    options.device = torch.device(options.device)
    try:
        left = [name for name in options.set if name not in done(options.output, options)]
        cuda = options.device.type == "cuda"
        gpu = torch.cuda.get_device_name(options.device) if cuda else "none"
        profile = LatencyModel.for_gpu(gpu, options.profile)
        if profile.warning:
            print(profile.warning, flush=True)
        tokens = texts.read(options)
        dtype = default_dtype(options.device) if cuda else torch.float32
        positions = open_model(ModelOptions(options.model, options.device, dtype)).shape.positions
        for name in left:
            seq = options.seq or sets.SETS[name].seq_length
            yarn = None if seq <= positions else seq / positions
            source = open_model(
                ModelOptions(options.model, options.device, dtype, yarn_factor=yarn)
            )
            with source.loaded() as run:
                run_set(name, source, run, tokens, profile, options)
    except ConfigError as error:
        sys.exit(f"measured.py: {error}")


if __name__ == "__main__":
    main()
