# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the pairs of each layer are worth in loss, prices by layer that follow from it, and runs with them.

    M="--model coder.gguf --cache tokens.npz --seq 32768 --price 0.31"
    python -m benchmarks.model.layer_prices measure $M
    python -m benchmarks.model.layer_prices train $M --lr 5e-6 --decay cosine --curve

At one price, the last pair that each layer selects holds the same attention mass, but a layer's mass may be
worth more or less. ``measure`` doubles the price of one layer at a time: the divergence of the predictions
from those of dense attention that this adds, over the share of pairs that it saves, is what these pairs are
worth. With prices in inverse proportion, the last pairs of all layers are worth the same; a common factor
then restores the density. ``train`` trains dense, at one price, and with these prices.

``--by all`` takes the loss in place of the divergence: of one layer it rises or falls by chance.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.transformers import NAME, configure, take_means

from ..lib import jobs, record
from . import continuing
from .frontier_settings import about
from .material import material

STEP = 2.0
"""Of one layer's price."""
BOUNDS = (0.25, 4.0)
"""Of a layer's price over the common one."""
BISECTIONS = 6
RUNS = ("dense", "same", "layers")


def config_of(prices: list[float], folder: str) -> MTrainingConfig:
    """Settings with a price for each layer, of a file in a folder that stays while they are used."""
    layers = {str(at): {"price": price} for at, price in enumerate(prices)}
    path = Path(tempfile.mkdtemp(dir=folder)) / "settings.json"
    path.write_text(json.dumps({"policy": "price", "price": prices[0], "layers": layers}))
    return MTrainingConfig.from_options(settings=str(path))


class Judge:
    """A model at prices by layer."""

    def __init__(self, options, folder: str):
        self.folder = folder
        self.given = material(options)
        self.model, _ = continuing.load(options)
        self.layers = self.model.config.num_hidden_layers
        self.dense: dict[str, torch.Tensor] = {}

    def _set(self, prices: list[float]) -> None:
        configure(self.model, config_of(prices, self.folder))
        continuing.attend_by(self.model, NAME)

    def __call__(self, prices: list[float]) -> tuple[dict[str, float], list[float]]:
        """Held-out losses by text, with the mean ``divergence`` from dense predictions; and each layer's
        density."""
        self._set(prices)
        losses = continuing.judged(self.model, self.given.held_out)
        losses["divergence"] = round(self._divergence(), 8)
        density = take_means(self.model, training=False).density
        return losses, density.double().mean(1).tolist()

    @torch.no_grad()
    def _divergence(self) -> float:
        """Of the first window of each kind of text, nats a token."""
        weight = self.model.get_output_embeddings().weight
        found = []
        for kind, windows in self.given.held_out.items():
            hidden = continuing.hidden_of(self.model, windows[0, :-1])
            if kind not in self.dense:
                continuing.attend_by(self.model, None)
                self.dense[kind] = continuing.hidden_of(self.model, windows[0, :-1])
                continuing.attend_by(self.model, NAME)
            for both in zip(
                hidden.split(continuing.CHUNK), self.dense[kind].split(continuing.CHUNK)
            ):
                own, dense = ((each.to(weight.dtype) @ weight.T).log_softmax(-1) for each in both)
                found.append((dense.exp() * (dense - own)).sum(-1))
        return torch.cat(found).double().mean().item()

    @torch.no_grad()
    def density(self, prices: list[float]) -> float:
        """The mean over layers, on one window of each kind of text."""
        self._set(prices)
        for windows in self.given.held_out.values():
            continuing.hidden_of(self.model, windows[0, :-1])
        return take_means(self.model, training=False).density.double().mean().item()


def measure(options) -> int:
    with tempfile.TemporaryDirectory() as folder:
        row = measured(Judge(options, folder), options)
    record.append(options.output, [row | about(options)])
    return 0


def measured(judge: Judge, options) -> dict:
    same = [options.price] * judge.layers
    losses, density = judge(same)
    worth = []
    for layer in range(judge.layers):
        doubled = [price * (STEP if at == layer else 1) for at, price in enumerate(same)]
        found, there = judge(doubled)
        saved = density[layer] - there[layer]
        worth.append((found[options.by] - losses[options.by]) / max(saved, 1e-6))
        print(f"layer {layer}: density {density[layer]:.4f}, worth {worth[-1]:.5f}", flush=True)
    prices = restored(judge, same, worth)
    own, own_density = judge(prices)
    return dict(
        stage="measure", by=options.by, price=options.price, density=[round(each, 5) for each in density],
        worth=[round(each, 6) for each in worth], prices=[round(each, 5) for each in prices],
        loss=losses, own_loss=own, own_density=[round(each, 5) for each in own_density],
    )  # fmt: skip


def restored(judge: Judge, same: list[float], worth: list[float]) -> list[float]:
    """Prices in inverse proportion to ``worth``, within :data:`BOUNDS`, with the density of ``same``."""
    middle = statistics.median(worth)
    if middle <= 0:
        raise ConfigError("most layers lose nothing at twice their price: give another --price")
    low, high = BOUNDS
    shares = [min(high, max(low, middle / max(each, middle / high))) for each in worth]
    wanted, below, above = judge.density(same), 0.25, 4.0
    for _ in range(BISECTIONS):
        factor = (below * above) ** 0.5
        dense = judge.density([a * b * factor for a, b in zip(same, shares)]) > wanted
        below, above = (factor, above) if dense else (below, factor)
    return [a * b * (below * above) ** 0.5 for a, b in zip(same, shares)]


def work(job) -> dict:
    name, seed, options, prices = job
    with tempfile.TemporaryDirectory() as folder:
        config = None if prices is None else config_of(prices, folder)
        run = continuing.Run(name, seed, options.steps, config)
        row, _ = continuing.train(run, material(options), options)
    return dict(stage="train", run=name, prices=prices, **row, **about(options))


def train(options) -> int:
    found = [row for row in jobs.read(options.output) if row["stage"] == "measure"]
    if not found:
        raise ConfigError(f"{options.output} has no row of measure: run that first")
    prices = found[-1]["prices"]
    by_run = dict(dense=None, same=[options.price] * len(prices), layers=prices)
    wanted = [(name, seed, options, by_run[name]) for seed in options.seeds for name in RUNS]
    deadline = jobs.Deadline(options.minutes, options.expect or 200.0)
    return jobs.run_jobs(wanted, work, options.output, options.jobs, deadline)


def main(words: list[str] | None = None) -> None:
    parser = record.parser(__doc__, "layer_prices.jsonl")
    parser.add_argument("stage", choices=("measure", "train"))
    continuing.add_options(parser)
    parser.add_argument("--price", type=float, default=0.31)
    parser.add_argument("--by", choices=("divergence", "all"), default="divergence",
                        help="what pairs are worth: all is the loss (%(default)s)")  # fmt: skip
    continuing.add_training_options(parser, seeds=[1])
    options = parser.parse_args(words)
    continuing.check_options(parser, options)
    jobs.run_stage("layer_prices.py", dict(measure=measure, train=train)[options.stage], options)


if __name__ == "__main__":
    main()
