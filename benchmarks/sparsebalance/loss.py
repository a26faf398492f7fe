# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""A real model trained on with tuning and without, on the same packed samples: is the loss the same?

One process, one GPU (or a CPU, to try it). Each step has ``--dp`` emulated data-parallel replicas with
``--microbatches`` micro-batches each, one sample a micro-batch, run one after the other; gradients are of the
mean loss of the step's tokens. Documents of a sample do not see each other. Runs:

- ``dense``: all pairs within documents, once (the first seed).
- ``off``: policy price at ``--price``, for each seed.
- ``both``: the same, where samples are placed by predicted cost, and the price of each micro-batch is
  multiplied as tuning says. Predictions are of Qwen2.5-3B's attention on the GPU of ``--profile``.

A seed is an order of the samples and where texts are cut. Each run's row in
``results/sparsebalance_loss.jsonl`` has the loss of every step, and of held-out samples before and after,
with the run's own attention at the untuned price and with dense attention. A run that has a row is left out.
``--jobs`` runs go on at the same time: a small model leaves most of a GPU idle.

    python -m benchmarks.sparsebalance.loss --model MODEL.gguf --text book=book.txt ... [--seeds N ...]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.balance.latency import LatencyModel
from megatron_mtraining.balance.plan import PlanSizes, plan_step
from megatron_mtraining.balance.tuning import TuningBounds
from megatron_mtraining.loss import linear_cross_entropy

from ..lib import record
from ..model import continuing
from . import sets, texts
from .balancer import samples_of
from .modes import QWEN, balance, predictor, tuned

OUTPUT = record.RESULTS / "sparsebalance_loss.jsonl"
RUNS = ("dense", "off", "both")
NO_LABEL = -100
ATTENTION = "mtraining_balance"
"""The name that the attention has in transformers. The package's own has one price for all micro-batches."""
SHAPE = ((1 / 512, 1 / 16, 0.5), (1 / 4, 1, 0.5))
"""Ranges of documents' lengths over that of a sample, with their shares of the tokens: the set bimodal."""


class Attention:
    """What all layers call in place of their attention, and what it has kept."""

    def __init__(self):
        self.config: MTrainingConfig | None = None
        self.documents = self.price = None
        self.density, self.recall = [], []

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **more):
        """``[1, h, s, d]`` in, ``[1, s, h, d]`` out."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast: RoPE leaves float32
        query, key, value = (t.permute(2, 0, 1, 3).contiguous() for t in (query, key, value))
        found = attend(
            query, key, value, config=self.config, softmax_scale=scaling, price=self.price,
            documents=self.documents,
        )  # fmt: skip
        density, recall = found.index.density(), found.index.recall
        self.density.append(density.mean())
        self.recall.append(torch.ones_like(density).mean() if recall is None else recall.mean())
        return found.out.transpose(0, 1), None

    def take(self) -> Tensor:
        """Density and recall since the last call, float32 ``[2]`` on the device."""
        found = torch.stack([torch.stack(each).mean() for each in (self.density, self.recall)])
        self.density, self.recall = [], []
        return found


class Run:
    """One run's model and what its attention is given.

    Args:
        dense: all pairs within documents.
    """

    def __init__(self, options, dense: bool):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.options, self.attention = options, Attention()
        self.model, self.yarn = continuing.load(options)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self.attention)
        self.model.set_attn_implementation(ATTENTION)
        self.priced = MTrainingConfig.from_options(price=options.price)
        self.dense = replace(self.priced, window=options.seq)
        self.config = self.dense if dense else self.priced

    def loss(self, tokens: Tensor, lengths: np.ndarray, config, multiplier: float) -> Tensor:
        """The sum of a sample's cross entropies; a document's last token has no label."""
        device, attention = self.options.device, self.attention
        attention.config, attention.price = config, None
        attention.documents = texts.documents_of(lengths, device)
        if config is self.priced:
            attention.price = torch.tensor(config.policy.price * multiplier, device=device)
        labels = tokens.roll(-1)
        labels[np.cumsum(lengths) - 1] = NO_LABEL
        tokens, labels = tokens.to(device), labels.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = self.model.base_model(
                input_ids=tokens[None], use_cache=False
            ).last_hidden_state[0]
        weight = self.model.lm_head.weight
        dtype = torch.bfloat16 if device == "cuda" else weight.dtype
        known = labels != NO_LABEL
        losses = linear_cross_entropy(
            hidden.to(dtype), weight.to(dtype), labels.where(known, 0), self.options.chunk
        )
        return losses.where(known, 0).sum()

    @torch.no_grad()
    def judged(self, held_out: list, config) -> float:
        """Mean loss of the held-out samples' tokens."""
        self.model.eval()
        total = sum(self.loss(*sample, config, 1.0) for sample in held_out)
        self.attention.take()
        self.model.train()
        return float(total) / sum(labels_of(lengths) for _, lengths in held_out)


def labels_of(lengths: np.ndarray) -> int:
    """Tokens that have a label."""
    return int(lengths.sum()) - len(lengths)


def samples_for(tokens: dict, seed: int, options) -> tuple[sets.PackedSet, list, list]:
    """The packed set, its samples' tokens, and the held-out samples: tokens and lengths of documents."""
    need = options.steps * options.dp * options.microbatches
    kinds = tuple(kind for kind in sets.KINDS if kind in tokens)
    ranges = tuple(
        sets.Range(max(16, round(options.seq * low)), round(options.seq * high), share)
        for low, high, share in SHAPE
    )
    packed = sets.pack(ranges, options.seq, need + 2 * len(kinds), seed, kinds)
    source = texts.Texts(tokens, seed=seed)
    content = [source.sample(*each) for each in zip(packed.datasets, packed.documents)]
    # The same for all seeds.
    judges = sets.pack(ranges, options.seq, options.held_out, 0, kinds)
    source = texts.Texts(tokens, held_out=True)
    held_out = [
        (source.sample(dataset, lengths), lengths)
        for dataset, lengths in zip(judges.datasets, judges.documents)
    ]
    return packed, content, held_out


def train(name: str, seed: int, tokens: dict, options) -> dict:
    """One run."""
    torch.manual_seed(seed)
    packed, content, held_out = samples_for(tokens, seed, options)
    samples = packed.samples()
    run = Run(options, dense=name == "dense")
    before = run.judged(held_out, run.config)
    sizes = PlanSizes(options.dp, options.microbatches, 1)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    profile = LatencyModel.for_gpu(gpu, options.profile)
    predict = predictor(profile, QWEN, options.seq)
    estimates, bounds = DensityEstimates(), TuningBounds(max_mass=options.mass)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=options.lr, weight_decay=0.0)
    losses, kept, moved, over, started = [], [], [], [], time.time()
    run.model.train()
    for step in range(options.steps):
        numbers = np.arange(step * sizes.samples, (step + 1) * sizes.samples)
        given = samples_of(samples, numbers)
        batching = "cost" if name == "both" else "off"
        plan = plan_step(step, given, sizes, batching, estimates, predict)
        multipliers, mass = np.ones(plan.density.shape), np.zeros(plan.density.shape)
        if name == "both" and step:  # nothing is known before the first
            found = tuned(plan, estimates.elasticity, bounds, options.price, predict)
            multipliers, mass = found.multipliers, found.mass
        order = plan.order[..., 0]
        count = sum(labels_of(packed.documents[number]) for number in order.ravel())
        total, cells = torch.zeros((), device=options.device), []
        for place, number in np.ndenumerate(order):
            loss = run.loss(
                content[number], packed.documents[number], run.config, float(multipliers[place])
            )
            (loss / count).backward()
            total += loss.detach() / count
            cells.append(run.attention.take())
        rate = options.lr * min(1.0, (step + 1) / options.warm_up)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        density, recall = torch.stack(cells).double().T.reshape(2, *order.shape).cpu().numpy()
        if name != "dense":
            untuned = np.clip(recall + mass, 0, 1)
            estimates.observe(plan.kinds, density, untuned, multipliers, plan.pairs)
        # The wait that is predicted, at the densities that were found.
        over.append(balance(predict(plan.pairs.sum(-1), density).sum(0))[0])
        losses.append(total.item())
        kept.append((density.mean(), recall.mean()))
        moved.append((np.abs(mass).mean(), multipliers.min(), multipliers.max()))
        if (step + 1) % 50 == 0 or step + 1 == options.steps:
            print(
                f"  {name}, seed {seed}, {step + 1:4d}: loss {losses[-1]:.4f}, density {density.mean():.4f}, "
                f"recall {recall.mean():.4f}, {time.time() - started:.0f} s",
                flush=True,
            )
    density, recall = np.mean(kept, 0)
    return dict(
        run=name, seed=seed, model=options.model.name, seq=options.seq, yarn=run.yarn, dp=options.dp,
        microbatches=options.microbatches, steps=options.steps, lr=options.lr,
        price=options.price, max_mass=options.mass, held_out=len(held_out),
        held_out_before=round(before, 5),
        held_out_after=round(run.judged(held_out, run.config), 5),
        held_out_after_dense=round(run.judged(held_out, run.dense), 5),
        loss_last_50=round(float(np.mean(losses[-50:])), 5),
        density=round(float(density), 5), recall=round(float(recall), 5),
        max_over_mean=round(float(np.mean(over)), 5),
        mass_moved=round(float(np.mean([each[0] for each in moved])), 6),
        multipliers=[
            round(float(min(each[1] for each in moved)), 4),
            round(float(max(each[2] for each in moved)), 4),
        ],
        elasticity=round(estimates.elasticity, 4), profile=profile.gpu,
        seconds=round(time.time() - started, 1), losses=[round(loss, 5) for loss in losses],
    )  # fmt: skip


def wanted(options) -> list[tuple[str, int]]:
    """Runs and seeds that have no row yet."""
    runs = [("dense", options.seeds[0])] if "dense" in options.run else []
    runs += [(name, seed) for seed in options.seeds for name in options.run if name != "dense"]
    if options.output.exists():
        lines = options.output.read_text(encoding="utf-8").splitlines()
        same = ("model", "seq", "steps", "dp", "microbatches")
        values = (options.model.name, *(getattr(options, name) for name in same[1:]))
        rows = [row for row in map(json.loads, lines) if tuple(row[n] for n in same) == values]
        there = {(row["run"], row["seed"]) for row in rows}
        runs = [each for each in runs if each not in there]
    return runs


def work(job: tuple[str, int, argparse.Namespace]) -> dict | None:
    """A run; None if its loss was no number."""
    name, seed, options = job
    row = train(name, seed, texts.read(options), options)
    if not all(map(math.isfinite, row["losses"])):
        print(f"a loss of run {name}, seed {seed} is not finite: its row is not kept", flush=True)
        return None
    print({key: value for key, value in row.items() if key != "losses"}, flush=True)
    return row


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    texts.add_options(parser)
    add("--run", nargs="+", choices=RUNS, default=list(RUNS))
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--seq", type=int, default=8192)
    add("--dp", type=int, default=4)
    add("--microbatches", type=int, default=1)
    add("--steps", type=int, default=300)
    add("--held-out", type=int, default=24, help="held-out samples")
    add("--price", type=float, default=0.25)
    add("--mass", type=float, default=0.01, help="as --mtraining-tuning-mass")
    add("--lr", type=float, default=3e-5)
    add("--warm-up", type=int, default=20)
    add("--chunk", type=int, default=4096, help="tokens whose logits are held at once")
    add("--profile", type=Path, help="a latency profile; default: the GPU's own")
    add("--jobs", type=int, default=1, help="runs at the same time")
    add("--output", type=Path, default=OUTPUT)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    options = options_from(words)
    jobs = [(name, seed, options) for name, seed in wanted(options)]
    print(f"{len(jobs)} runs are to be made", flush=True)
    try:
        texts.read(options)  # makes the file of tokens, once
        with ExitStack() as stack:
            found = map(work, jobs)
            if options.jobs > 1:
                pool = multiprocessing.get_context("spawn").Pool(options.jobs)
                found = stack.enter_context(pool).imap_unordered(work, jobs)
            for row in found:
                if row is not None:
                    record.append(options.output, [row])
    except ConfigError as error:
        sys.exit(f"loss.py: {error}")


if __name__ == "__main__":
    main()
