# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""The pruned backward: how far its gradient is, what it costs in loss, and its time.

One command a stage, one GPU (or a CPU, to try it). Each appends rows to ``--output`` as they come, leaves out
what has a row there, and begins no job that is not expected to end within ``--minutes``. Stages:

- ``gradient``: the gradient of all parameters on one window of each kind of text, against the backward of the
  same forward without pruning: cosine and relative error, of the projections of queries, keys and values and
  of all other parameters, and the ratio of norms. Beside them two yardsticks: the error that the forward's
  pattern makes against the dense gradient (``what`` is ``forward``), and the difference from the gradient of
  another window of the same text (``another window``).
- ``train``: training from the same weights on the same data, for each seed: the loss judged with dense
  attention and with the run's own. Rows of dense training are the frontier's (``--frontier``), where it has
  them.
- ``time``: forward and backward of one layer of Qwen2.5-3B's shape, on operands that look like a usual
  head's, beside the same without pruning and beside cuDNN.

``--forward`` has the forward's patterns: ``dense``, or ``POLICY@DENSITY`` as in ``frontier.py``; of a density
the setting is found once. A threshold of 0 is the backward without pruning.

    M="--model smol.gguf --cache tokens.npz --output $OUT/backward.jsonl"
    python -m benchmarks.model.backward gradient $M --minutes 4
    python -m benchmarks.model.backward time $M --minutes 4
    python -m benchmarks.model.backward train $M --minutes 9 --jobs 3
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.transformers import configure, take_backward_means, take_means

from ..lib import jobs, record
from ..lib.policies_at_density import config_of
from . import continuing
from .frontier import RUN_SECONDS
from .frontier_settings import about, dense_run, rows_like, setting_of, split
from .layer_times import Layers
from .material import Material, material

STAGES = ("gradient", "train", "time")
FORWARDS = ("dense", "price@0.1")
THRESHOLDS = (1.0, 3.0, 10.0)
LENGTHS = (131072, 524288)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def split_forward(name: str) -> tuple[str, float | None]:
    """The forward's policy and density.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    policy, density = split(name)
    if policy == "target":
        raise argparse.ArgumentTypeError(f"{name!r} has no density: use dense or POLICY@DENSITY")
    return policy, density


def pruned(setting: dict | None, threshold: float) -> dict:
    """A setting with a pruned backward; a dense forward for None."""
    setting = dict(policy="price", price=0.0) if setting is None else setting
    return dict(setting, backward_threshold=threshold)


# Gradients.


def gradients_of(model, tokens: Tensor, config: MTrainingConfig) -> tuple[dict[str, Tensor], dict]:
    """The gradient of a model's loss on a window, by groups of parameters; and what a row says of it."""
    configure(model, config)
    model.train()  # a search for the setting of a density evaluates the same model
    model.zero_grad(set_to_none=True)
    loss = continuing.loss_of(model, tokens)
    loss.backward()
    parts: dict[str, list[Tensor]] = {"qkv": [], "rest": []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            part = "qkv" if any(each in name for each in PROJECTIONS) else "rest"
            parts[part].append(parameter.grad.detach().flatten().clone())
    density = take_means(model).density.nanmean().item()
    said = dict(loss=round(loss.item(), 6), forward_density=round(density, 5))
    kept = kept_of(model) if config.backward_threshold else None
    said |= kept or dict(backward_density=round(density, 5), dropped_mass=0.0)
    return {name: torch.cat(some) for name, some in parts.items()}, said


def kept_of(model) -> dict:
    """What a pruned backward has kept since the last call, in a row."""
    means = take_backward_means(model)
    return dict(
        backward_density=round(means.density.nanmean().item(), 5),
        dropped_mass=round(means.dropped.nanmean().item(), 6),
    )


def compared(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Cosine, relative error and ratio of norms of each group of parameters, and of all (``grad``)."""
    both = {name: (found[name], exact[name]) for name in exact}
    both["grad"] = torch.cat([*found.values()]), torch.cat([*exact.values()])
    row = {}
    for name, (ours, true) in both.items():
        ours, true = ours.double(), true.double()
        cosine = torch.nn.functional.cosine_similarity(ours, true, 0)
        row |= {
            f"cos_{name}": round(cosine.item(), 6),
            f"err_{name}": round(((ours - true).norm() / true.norm()).item(), 6),
            f"norm_{name}": round((ours.norm() / true.norm()).item(), 6),
        }
    return row


def gradient(options) -> int:
    """Rows of gradients: a job is a forward and a kind of text."""
    given = material(options)
    kinds = [kind for kind, windows in given.held_out.items() if len(windows) > 1]
    if not kinds:
        raise ConfigError("no text has two held-out windows: give more text, or a shorter --seq")
    there = {
        (row["forward"], row["text"], row["what"], row["threshold"])
        for row in rows_like(options, "gradient")
    }
    cases = [
        (name, kind)
        for name in options.forward
        for kind in kinds
        if not all((name, kind, "pruned", each) in there for each in options.thresholds)
    ]
    print(f"gradient: {len(cases)} sets of rows are to be made", flush=True)
    model, yarn = continuing.load(options) if cases else (None, 1.0)

    def work(case) -> None:
        (name, kind), began = case, time.perf_counter()
        windows = given.held_out[kind]
        setting = setting_of(*split_forward(name), options, given)

        def config(threshold=0.0, setting=setting):
            return config_of(pruned(setting, threshold), options.block_size)

        exact, said = gradients_of(model, windows[0], config())
        rows = []

        def add(what: str, threshold: float, found, said: dict) -> None:
            rows.append(
                dict(
                    stage="gradient",
                    forward=name,
                    setting=setting,
                    text=kind,
                    what=what,
                    threshold=threshold,
                    **said,
                    **compared(found, exact),
                    yarn=yarn,
                    **about(options),
                )
            )

        for each in options.thresholds:
            add("pruned", each, *gradients_of(model, windows[0], config(each)))
        add("another window", 0.0, *gradients_of(model, windows[1], config()))
        if setting is not None:
            pattern, exact = exact, gradients_of(model, windows[0], config(setting=None))[0]
            add("forward", 0.0, pattern, said)
        for row in rows:
            row["seconds"] = round(time.perf_counter() - began, 1)
            print(
                f"  {name}, {kind}, {row['what']}, threshold {row['threshold']:g}: density "
                f"{row['backward_density']:.4f}, error {row['err_grad']:.4f}, cosine {row['cos_grad']:.4f}",
                flush=True,
            )
        record.append(options.output, rows)

    return jobs.run_jobs(cases, work, options.output, 1, jobs.Deadline(options.minutes, 30.0))


# Training.


def work(job: tuple[str, float, int, argparse.Namespace]) -> dict:
    """A run of training; in a process of its own."""
    name, threshold, seed, options = job
    given: Material = material(options)
    setting = setting_of(*split_forward(name), options, given)
    config = config_of(pruned(setting, threshold), options.block_size)
    if name == "dense" and not threshold:
        config = None  # PyTorch's own attention: what all runs are compared with
    run = continuing.Run(f"{name} threshold {threshold:g}", seed, options.steps, config)
    row, model = continuing.train(run, given, options)
    kept = dict(backward_density=row["density"], dropped_mass=0.0)
    if config is not None and threshold:
        kept = kept_of(model)
    return dict(
        stage="train", forward=name, threshold=threshold, setting=setting, **kept, **row, **about(options)
    )  # fmt: skip


def unpruned_dense(found: dict) -> dict:
    """The frontier's row of dense training as a row of this script."""
    row = {name: value for name, value in found.items() if name not in ("policy", "wanted")}
    pruning = dict(threshold=0.0, backward_density=1.0, dropped_mass=0.0)
    return dict(stage="train", forward="dense") | pruning | row


def train(options) -> int:
    """Rows of training, those without pruning first; of dense training, the frontier's if it has them."""
    there = {
        (row["forward"], row["threshold"], row["seed"])
        for row in rows_like(options, "train", steps=options.steps, lr=options.lr)
    }
    for seed in options.seeds if "dense" in options.forward else ():
        run = ("dense", 0.0, seed)
        if run not in there and (found := dense_run(options, seed)):
            record.copy(options.output, [unpruned_dense(found)])
            there.add(run)
    runs = [
        (name, each, seed)
        for seed in options.seeds
        for each in [0.0, *options.thresholds]
        for name in options.forward
        if (name, each, seed) not in there
    ]
    print(f"train: {len(runs)} runs of {options.steps} steps are to be made", flush=True)
    if runs:
        material(options)  # makes the file of tokens, once
    expected = options.expect or RUN_SECONDS * options.steps / 300
    return jobs.run_jobs(
        [(*each, options) for each in runs], work, options.output, options.jobs,
        jobs.Deadline(options.minutes, expected),
    )  # fmt: skip


# One layer's time.


def time_layers(options) -> int:
    """Rows of one layer's time."""
    layers = Layers(options)
    there = {
        (row["forward"], row["threshold"], row["seq"])
        for row in jobs.read(options.output)
        if row["stage"] == "time"
        and (row["gpu"], row["shape"], row["block_size"])
        == (layers.gpu, list(options.shape), options.block_size)
    }
    cases = [
        (name, each, seq)
        for seq in options.lengths
        for name in options.forward
        for each in [0.0, *options.thresholds]
        if (name, each, seq) not in there
    ]
    print(f"time: {len(cases)} rows are to be made", flush=True)

    def work(case) -> dict:
        (name, threshold, seq), began = case, time.perf_counter()
        layer, dense = layers.at(seq), layers.dense(seq)
        policy, wanted = split_forward(name)
        setting = dict(policy="price", price=0.0)
        if wanted is not None:
            at = layers.found(policy, wanted, seq)
            if not at.is_near(wanted):
                raise ConfigError(f"{policy} cannot have density {wanted} at {seq} tokens")
            setting = at.setting
        times = layer.times(pruned(setting, threshold))
        row = dict(
            stage="time", forward=name, setting=setting, threshold=threshold, seq=seq,
            shape=list(options.shape), block_size=options.block_size, forward_density=times.pop("density"),
            **times, layer_ms=round(times["forward_ms"] + times["backward_ms"], 5), **dense,
            seconds=round(time.perf_counter() - began, 1), versions=about(options)["versions"],
        )  # fmt: skip
        print(
            f"  {name}, threshold {threshold:g}, {seq // 1024}K: backward density "
            f"{row['backward_density']}, forward {row['forward_ms']:.2f} ms, backward "
            f"{row['backward_ms']:.2f} ms (cuDNN dense {row['dense_backward_ms']:.2f} ms)",
            flush=True,
        )
        return row

    return jobs.run_jobs(cases, work, options.output, 1, jobs.Deadline(options.minutes, 25.0))


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    """The run that arguments ask for."""
    parser = record.parser(__doc__, "backward.jsonl")
    add = parser.add_argument
    add("stage", choices=STAGES)
    continuing.add_options(parser)
    add(
        "--forward", nargs="+", default=list(FORWARDS), metavar="NAME", help="dense, POLICY@DENSITY"
    )
    add("--thresholds", type=float, nargs="+", default=list(THRESHOLDS))
    continuing.add_layer_options(parser, LENGTHS, seeds=[1, 2, 3])
    options = parser.parse_args(words)
    for name in options.forward:
        try:
            split_forward(name)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    for threshold in options.thresholds:
        if not threshold > 0:
            parser.error(f"--thresholds {threshold}: use numbers above 0")
    continuing.check_options(parser, options)
    return options


def main(words: list[str] | None = None) -> None:
    options = options_from(words)
    stages = dict(gradient=gradient, train=train, time=time_layers)
    jobs.run_stage("backward.py", stages[options.stage], options)


if __name__ == "__main__":
    main()
