# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A model of transformers, judged and trained on with dense attention or this package's, on real text.

One process, one GPU or the CPU. Weights are float32, under bf16 autocast on a GPU. Nothing waits for the GPU
within a step: losses stay on it.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.loss import linear_cross_entropy
from megatron_mtraining.models.hugging_face import unpacked
from megatron_mtraining.transformers import NAME, advance, configure, state_of, take_means

from ..lib import record
from . import material, ruler_samples
from .layer_times import Shape
from .material import Material, training
from .ruler_samples import Sample

CHUNK = 4096
"""Tokens whose logits are held at once."""
DENSE_TAIL = 64
"""Last tokens of a prompt that attend to all keys, with the answer's, in answers with a dense tail."""
KEPT_TOKENS = 16384
"""Of longer sequences activations of the MLPs are recomputed, so that a 0.5B model trains in 80 GB."""
CURVE = (50, 100, 200, 300, 600, 1000, 1500, 2000, 3000)
"""Steps after which a run is judged, beside its last, if ``--curve`` does not say otherwise."""

LAST_RATE = 0.1
"""The learning rate at the end of a decay, as a part of its peak."""

_loaded: dict = {}


def load(options):
    """The model as it was before anything was trained, with PyTorch's attention, on the device; YaRN with the
    factor that ``options.seq`` needs. Read once in a process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    key = options.model, options.seq, options.device
    if key not in _loaded:
        folder, how, weights = options.model, {"local_files_only": True}, {}
        if options.model.is_file():
            folder, how["gguf_file"] = options.model.parent, options.model.name
            weights = unpacked()
        config = AutoConfig.from_pretrained(folder, **how)
        factor = stretch(config, options.seq)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="sdpa", **how, **weights
        )
        model.to(options.device)
        if options.seq > KEPT_TOKENS:
            recompute_mlps(model)
        _loaded.clear()
        _loaded[key] = model, {n: t.clone() for n, t in model.state_dict().items()}, factor
    model, weights, factor = _loaded[key]
    model.load_state_dict(weights)
    model.set_attn_implementation("sdpa")
    model.eval()
    return model, factor


def stretch(config, length: int) -> float:
    """Give a configuration the positions of a length by YaRN (arXiv 2309.00071), and return the factor; 1 if
    it has them."""
    positions = config.max_position_embeddings
    factor = max(1.0, length / positions)
    if factor > 1:
        config.rope_parameters = {
            **config.rope_parameters, "rope_type": "yarn", "factor": factor,
            "original_max_position_embeddings": positions,
        }  # fmt: skip
        config.max_position_embeddings = int(positions * factor)
    return factor


def recompute_mlps(model) -> None:
    """Recompute each layer's MLP in the backward instead of keeping its activations."""
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def attend_by(model, name: str | None) -> None:
    """Have a configured model attend by the attention of this name, or, for None, to all."""
    model.set_attn_implementation(name or "sdpa")


# Judging.


def hidden_of(model, tokens: Tensor) -> Tensor:
    """``[s, h]``, of tokens ``[s]``."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        return model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]


def token_losses(model, tokens: Tensor) -> Tensor:
    """Cross entropy of each token but the first of one sequence ``[s + 1]``: float32 ``[s]``."""
    hidden, weight = hidden_of(model, tokens[:-1]), model.get_output_embeddings().weight
    dtype = torch.bfloat16 if tokens.is_cuda else weight.dtype
    return linear_cross_entropy(hidden.to(dtype), weight.to(dtype), tokens[1:], CHUNK)


def loss_of(model, tokens: Tensor) -> Tensor:
    """Mean cross entropy of one sequence ``[s + 1]``."""
    return token_losses(model, tokens).mean()


@torch.no_grad()
def window_losses(model, held_out: dict[str, Tensor]) -> dict[str, Tensor]:
    """By kind of text, the loss of each token of the held-out windows, with the model's attention as it is
    set: float64 ``[n, s]``."""
    was_training = model.training
    model.eval()
    losses = {
        kind: torch.stack([token_losses(model, each) for each in some]).double()
        for kind, some in held_out.items()
    }
    model.train(was_training)
    return losses


def means_of(losses: dict[str, Tensor]) -> dict[str, float]:
    """The mean of each kind of text; and ``all``: of all windows."""
    found = {kind: round(each.mean().item(), 6) for kind, each in losses.items()}
    return {"all": round(torch.cat(list(losses.values())).mean().item(), 6), **found}


def judged(model, held_out: dict[str, Tensor]) -> dict[str, float]:
    """Mean loss of the held-out windows, with the model's attention as it is set; see :func:`means_of`."""
    return means_of(window_losses(model, held_out))


def teacher_forced(model, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The loss of the last ``count`` tokens, an answer, and whether each is the likeliest (1 or 0)."""
    hidden = hidden_of(model, tokens[:-1])[-count:].float()
    logits, answer = hidden @ model.get_output_embeddings().weight.float().T, tokens[-count:]
    loss = torch.nn.functional.cross_entropy(logits, answer)
    return loss, (logits.argmax(-1) == answer).all().float()


@torch.no_grad()
def answered(model, given: Material) -> dict[str, float | None]:
    """Teacher-forced loss of the needles' answers, and the share of them that are right in every token."""
    was_training = model.training
    model.eval()
    found = [teacher_forced(model, *each) for each in zip(given.needles, given.answers)]
    model.train(was_training)
    if not found:
        return dict(answer_loss=None, needle=None)
    losses, right = zip(*found)
    loss, share = torch.stack(losses).mean().item(), torch.stack(right).mean().item()
    return dict(answer_loss=round(loss, 5), needle=round(share, 4))


def longest_answer(given: Material) -> int:
    """Tokens of it: in a forward of prompt and answer they come after the prompt's last ones."""
    return max(given.answers, default=1)


@torch.no_grad()
def answered_ruler(
    model, samples: dict[str, list[Sample]], tail: bool = False
) -> dict[str, dict[str, list[float]]]:
    """Of each task of RULER: the loss of each sample's right answer (teacher-forced), and whether every token
    of it is the likeliest one (1 or 0)."""
    was_training = model.training
    model.eval()
    found = {}
    for task, some in samples.items():
        if tail:
            state_of(model).dense_tail = DENSE_TAIL + max(each.answer for each in some)
        losses, right = zip(*[teacher_forced(model, *each) for each in some])
        loss, share = torch.stack(losses).tolist(), torch.stack(right).tolist()
        found[task] = dict(loss=[round(each, 4) for each in loss], right=share)
    model.train(was_training)
    return found


# Training.


class Run(NamedTuple):
    """A run of training.

    Attributes:
        name: of its policy and what else it differs in.
        config: what it attends with; None for all.
        is_dense: whether a step is dense, from its number and the number of all steps; None for none.
        attention: the name that its attention has in transformers.
    """

    name: str
    seed: int
    steps: int
    config: MTrainingConfig | None
    is_dense: Callable[[int, int], bool] | None = None
    attention: str = NAME


def train(run: Run, given: Material, options) -> tuple[dict, object]:
    """What a run's row says of losses, density and time; and the trained model.

    Raises:
        ConfigError: a loss is not a finite number.
    """
    torch.manual_seed(run.seed)
    model, _ = load(options)
    if run.config is not None:
        configure(model, run.config, num_steps=run.steps)
    tokens = training(given.tokens, run.steps, run.seed, options).to(options.device)
    rates = [
        options.lr
        * min(1.0, (step + 1) / options.warm_up)
        * decayed(options.decay, step / run.steps)
        for step in range(run.steps)
    ]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, weight_decay=0.0, fused=options.device == "cuda"
    )
    curve, losses, means, spent = [], [], Means(), 0.0
    before, started = judge(model, run, given), time.perf_counter()
    take(model, run)
    model.train()
    for step in range(run.steps):
        dense = run.config is None or (run.is_dense is not None and run.is_dense(step, run.steps))
        if run.config is not None:
            attend_by(model, None if dense else run.attention)
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        loss = loss_of(model, tokens[step])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if run.config is not None and not dense:
            advance(model)
        means.add(dense)
        losses.append(loss.detach())
        done = step + 1
        if done in options.curve or done == run.steps:
            shown = losses[-1].item()  # waits
            spent += time.perf_counter() - started
            means.take(take(model, run))
            now = judge(model, run, given)
            curve.append([done, *now])
            print(
                f"  {run.name}, seed {run.seed}, {done:4d}: loss {shown:.4f}, {spent:.0f} s",
                flush=True,
            )
            started = time.perf_counter()
    losses = torch.stack(losses).tolist()
    if not all(map(np.isfinite, losses)):
        raise ConfigError(f"a loss of run {run.name}, seed {run.seed} is not finite")
    row = dict(
        seed=run.seed, steps=run.steps, lr=options.lr, decay=options.decay, **means.row(),
        before_own=before[0]["all"], before_dense=before[1]["all"], before_dense_by_text=before[1],
        own=curve[-1][1]["all"], dense=curve[-1][2]["all"],
        own_by_text=curve[-1][1], dense_by_text=curve[-1][2],
        curve=[[step, own["all"], dense["all"]] for step, own, dense in curve],
        dense_curve_by_text=[[step, dense] for step, _, dense in curve],
        loss_last_50=round(float(np.mean(losses[-50:])), 5),
        seconds=round(spent, 1), step_ms=round(1e3 * spent / run.steps, 2), jobs=options.jobs,
        losses=[round(loss, 4) for loss in losses],
    )  # fmt: skip
    samples = options.ruler and ruler_samples.read(options.ruler, options.device)
    dense = run.config is None or ends_dense(model, run)
    found: dict = {}
    for kind in ("own", "dense") if run.config is None else ("own", "tail", "dense"):
        if not found or not dense:  # else the same again
            if run.config is not None:
                attend_by(model, None if dense or kind == "dense" else run.attention)
                state_of(model).dense_tail = (
                    0 if kind != "tail" else DENSE_TAIL + longest_answer(given)
                )
            found = answered(model, given)
            if samples is not None:
                found["ruler"] = answered_ruler(model, samples, kind == "tail")
        row |= {f"{name}_{kind}": value for name, value in found.items()}
    return row, model


def decayed(decay: str, share: float) -> float:
    """The learning rate as a part of its peak, when this share of the steps is done: ``constant``; ``cosine``
    over the whole run; ``BEGIN-END``, linear between these shares. Decays end at :data:`LAST_RATE`.

    Raises:
        ValueError: it is none of these.
    """
    if decay == "constant":
        return 1.0
    if decay == "cosine":
        return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2
    begin, end = map(float, decay.split("-"))
    if not 0 <= begin < end <= 1:
        raise ValueError(f"{begin} and {end} are no shares of a run in order")
    return 1 - (1 - LAST_RATE) * min(1.0, max(0.0, (share - begin) / (end - begin)))


def ends_dense(model, run: Run) -> bool:
    """Whether a schedule has made the model's own attention dense by now."""
    return run.config is not None and state_of(model).steering.is_dense


def judge(model, run: Run, given: Material) -> tuple[dict[str, float], dict[str, float]]:
    """Held-out losses with the run's own attention, and with dense attention."""
    found: list[dict[str, float]] = []
    names = [None] if ends_dense(model, run) else [run.attention, None]
    for name in names:
        if run.config is not None:
            attend_by(model, name)
        if run.config is not None or not found:
            found.append(judged(model, given.held_out))
    if run.config is not None:
        take_means(model, training=False)
    return found[0], found[-1]


def take(model, run: Run) -> tuple[float, float]:
    """Density and recall of training since the last call; NaN where nothing has attended by a pattern."""
    if run.config is None:
        return 1.0, 1.0
    found = take_means(model)
    return found.density.nanmean().item(), found.recall.nanmean().item()


class Means:
    """Density and recall over the steps with a pattern."""

    def __init__(self):
        self.found, self.sparse, self.dense, self._now = [], 0, 0, 0

    def add(self, dense: bool) -> None:
        """Count a step."""
        self.dense += dense
        self.sparse += not dense
        self._now += not dense

    def take(self, found: tuple[float, float]) -> None:
        """What the steps since the last call had."""
        if self._now:
            self.found.append((self._now, *found))
        self._now = 0

    def row(self) -> dict:
        """``density`` and ``recall`` of the steps with a pattern, and the share of the dense ones."""
        share = self.dense / max(1, self.dense + self.sparse)
        if not self.found:
            return dict(density=1.0, recall=1.0, dense_share=share)
        counts, *values = map(np.array, zip(*self.found))
        density, recall = (round(float((each * counts).sum() / counts.sum()), 5) for each in values)
        return dict(density=density, recall=recall, dense_share=round(share, 4))


# Options and jobs.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of all scripts that train or judge a model so."""
    add = parser.add_argument
    material.add_options(parser)
    add("--block-size", type=int, default=128)
    add("--lr", type=float, default=3e-5)
    add("--warm-up", type=int, default=20)
    add("--decay", default="constant", metavar="HOW",
        help="of the learning rate: constant, cosine, or linear between two shares of the steps, such as "
        "0.9-1 (%(default)s)")  # fmt: skip
    add("--curve", type=int, nargs="*", default=list(CURVE), metavar="STEP",
        help="steps after which a run is judged, beside its last; none: less time (%(default)s)")  # fmt: skip
    add("--jobs", type=int, default=3, help="runs of training at the same time (%(default)s)")
    add("--minutes", type=float, help="that the stage may take, from its start (no end)")
    add("--expect", type=float, metavar="SECONDS", help="that a run takes, until one has ended")


def add_training_options(parser: argparse.ArgumentParser, seeds: list[int]) -> None:
    """Options of runs of training, which are compared with those of the frontier."""
    add = parser.add_argument
    add("--steps", type=int, default=300, help="of training (%(default)s)")
    add("--seeds", type=int, nargs="+", default=seeds)
    add("--frontier", type=Path, default=record.RESULTS / "frontier_runs.jsonl",
        help="rows of benchmarks.model.frontier: settings, and dense runs (%(default)s)")  # fmt: skip


def add_layer_options(
    parser: argparse.ArgumentParser, lengths: tuple[int, ...], seeds: list[int]
) -> None:
    """Those, and options of the stage that times a layer."""
    add_training_options(parser, seeds)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=list(lengths), help="time: tokens")
    add("--shape", type=int, nargs=3, default=list(Shape()), metavar=("HEADS", "KV_HEADS", "DIM"),
        help="time: of the layer (%(default)s)")  # fmt: skip


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End in an error of the parser if a count is not 1 or more; ``options.steps`` is the script's own."""
    if hasattr(options, "shape"):
        options.shape = Shape(*options.shape)
    if options.ruler is not None and not options.ruler.is_file():
        parser.error(f"--ruler {options.ruler} is no file")
    try:
        decayed(options.decay, 0.5)
    except ValueError:
        parser.error(f"--decay {options.decay}: use constant, cosine, or two shares such as 0.9-1")
    for name in ("seq", "steps", "held_out", "jobs", "warm_up"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: use 1 or more")
