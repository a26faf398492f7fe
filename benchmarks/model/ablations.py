# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Ablations: what each part of the method costs in loss or in time, one row each.

Rows go to ``results/ablations.jsonl``; what has a row is left out, and ``--minutes`` is how long a stage may
take, as in ``frontier.py``, whose rows (``--frontier``) hold the base run and the dense run of each seed that
losses are compared with. Stages:

- ``train``: the base run, policy price at a density (``--base price@0.15``), with one thing changed: dense
  attention in the last 10, 5, 2% of the steps, in the first 10%, in each 10th or 4th; the pattern of each
  layer selected once, on one held-out window, and kept; rows that estimate the pattern: the last 64; dense
  attention in the first, the last or both 2 layers.
- ``time``: a layer of Qwen2.5-3B's shape under recomputation of activations, with the first pass's attention
  kept, its pattern kept, and nothing kept.

``loss_over_dense`` is the dense-attention loss of the trained model, ``own_over_dense`` its own-attention
loss, both as a ratio less 1 to the dense run with the same seed. ``step_ms`` of train is of whole steps on
the host's clock with ``jobs`` runs at once, so it is for comparison within one call; of time it is a layer's
forward and backward.

    python -m benchmarks.model.ablations train --model smol.gguf --cache tokens.npz \
        --frontier frontier_runs.jsonl --output ablations.jsonl --minutes 9.5
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.transformers.interface import mask
from megatron_mtraining.transformers.state import ATTRIBUTE

from ..lib import jobs, policies_at_density, record
from . import continuing, texts
from .frontier import RUN_SECONDS
from .frontier_rows import decay_of
from .frontier_settings import about as about_model
from .frontier_settings import dense_run, on_frontier, setting_of, split
from .layer_times import Layers
from .material import material

STAGES = ("train", "time")
LENGTHS = (131072, 524288)
FROZEN = "mtraining_frozen"
LAYERS = 30
"""Of SmolLM2-135M, for rows that do not say it."""


class Variant(NamedTuple):
    """The base run with one thing changed.

    Attributes:
        dense_steps: ``first`` or ``last`` with a share of the steps, or ``every`` with a number.
        dense_layers: how many of the first and of the last layers are dense.
        policy: in place of the base's, at the same density.
        is_frozen: whether the pattern is selected once.
    """

    what: str
    setting: str
    dense_steps: tuple[str, float] | None = None
    dense_layers: tuple[int, int] = (0, 0)
    policy: str = ""
    is_frozen: bool = False


VARIANTS = {
    "cool-10": Variant("dense steps", "last 10%", ("last", 0.1)),
    "cool-5": Variant("dense steps", "last 5%", ("last", 0.05)),
    "once": Variant("pattern", "selected once, on one window", is_frozen=True),
    "every-10": Variant("dense steps", "each 10th", ("every", 10)),
    "warm-10": Variant("dense steps", "first 10%", ("first", 0.1)),
    "last-rows": Variant("estimator", "last 64 rows", policy="price_last"),
    "first-layers": Variant("dense layers", "first 2", dense_layers=(2, 0)),
    "cool-2": Variant("dense steps", "last 2%", ("last", 0.02)),
    "last-layers": Variant("dense layers", "last 2", dense_layers=(0, 2)),
    "every-4": Variant("dense steps", "each 4th", ("every", 4)),
    "end-layers": Variant("dense layers", "first 2 and last 2", dense_layers=(2, 2)),
}
"""By name, most informative first."""


def is_dense(where: str, value: float, step: int, steps: int) -> bool:
    """Whether a step of so many is dense; see ``dense_steps`` of :class:`Variant`."""
    if where == "every":
        return step % round(value) == round(value) - 1
    count = max(1, round(value * steps))
    return step < count if where == "first" else step >= steps - count


class Frozen:
    """Attention by the pattern that each layer has selected first, under a name of its own."""

    def __init__(self):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(FROZEN, self)
        ALL_MASK_ATTENTION_FUNCTIONS.register(FROZEN, mask)
        self.patterns: dict = {}

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **more):
        """``[1, h, s, d]`` in, ``[1, s, h, d]`` out."""
        state, layer = getattr(module, ATTRIBUTE), module.layer_idx
        operands = (t.to(value.dtype).permute(2, 0, 1, 3) for t in (query, key, value))
        found = attend(
            *operands, config=state.config, softmax_scale=scaling, head_policies=state.policies(layer),
            pattern=self.patterns.get(layer),
        )  # fmt: skip
        self.patterns.setdefault(layer, found.index)
        state.observe(layer, found.index, module.training)
        return found.out.transpose(0, 1), None


@functools.cache
def _kept() -> tempfile.TemporaryDirectory:
    """A folder of settings files, until this process ends."""
    return tempfile.TemporaryDirectory(prefix="ablations-")


def config_of(variant: Variant, setting: dict, layers: int, options) -> MTrainingConfig:
    """The settings of a variant, for a model with a given number of layers."""
    first, last = variant.dense_layers
    if not first and not last:
        return policies_at_density.config_of(setting, options.block_size)
    if first + last > layers:
        raise ConfigError(f"the model has {layers} layers, fewer than {variant.setting}")
    dense = [*range(first), *range(layers - last, layers)]
    file = Path(_kept().name, f"{first}_{last}.json")
    file.write_text(json.dumps({"layers": {str(layer): {"dense": True} for layer in dense}}))
    return policies_at_density.config_of({**setting, "settings": str(file)}, options.block_size)


def compared(row: dict, dense: dict) -> dict:
    """Losses relative to a dense run."""
    return dict(
        loss_over_dense=round(row["dense"] / dense["dense"] - 1, 6),
        own_over_dense=round(row["own"] / dense["dense"] - 1, 6),
    )


def work(job: tuple[str, int, argparse.Namespace]) -> dict:
    """A run of training; in a process of its own."""
    name, seed, options = job
    variant = VARIANTS[name]
    policy, wanted = split(options.base)
    given = material(options)
    setting = setting_of(variant.policy or policy, wanted, on_frontier(options), given)
    model = continuing.load(options)[0]
    config = config_of(variant, setting, model.config.num_hidden_layers, options)
    dense_steps = functools.partial(is_dense, *variant.dense_steps) if variant.dense_steps else None
    if variant.is_frozen:
        Frozen()
    attention = FROZEN if variant.is_frozen else continuing.NAME
    run = continuing.Run(name, seed, options.steps, config, dense_steps, attention)
    row, _ = continuing.train(run, given, options)
    if variant.is_frozen:
        row["recall"] = None  # measured on the window that selected the pattern
    dense = dense_run(options, seed)
    assert dense is not None  # train() has looked
    return dict(
        what=variant.what, setting=variant.setting, variant=name, base=options.base, options=setting,
        layers=model.config.num_hidden_layers,
        **compared(row, dense), **row, **about_model(options),
    )  # fmt: skip


def train(options) -> int:
    """Rows of training."""
    policy, wanted = split(options.base)
    seeds = [seed for seed in options.seeds if dense_run(options, seed)]
    if missing := [seed for seed in options.seeds if seed not in seeds]:
        raise ConfigError(
            f"{options.frontier.name} has no dense run of {options.steps} steps with seeds {missing}: run "
            f"frontier.py train --run dense {options.base} --seeds {' '.join(map(str, missing))} first"
        )
    names = ("variant", "seed", "steps", "base", "model", "seq", "data")
    there = {(*map(row.get, names), decay_of(row)) for row in jobs.read(options.output)}
    about = (
        options.steps, options.base, options.model.name, options.seq, texts.fingerprint(options),
        options.decay,
    )  # fmt: skip
    wanted_runs = [
        (name, seed)
        for seed in seeds
        for name in options.variants
        if (name, seed, *about) not in there
    ]
    print(f"train: {len(wanted_runs)} runs are to be made", flush=True)
    if wanted_runs:
        texts.read(options)
    expected = options.expect or RUN_SECONDS * options.steps / 300
    deadline = jobs.Deadline(options.minutes, expected)
    todo = [(*each, options) for each in wanted_runs]
    return jobs.run_jobs(todo, work, options.output, options.jobs, deadline)


def time_layers(options) -> int:
    """Rows of a layer under recomputation."""
    layers = Layers(options)
    there = {row.get("seq") for row in jobs.read(options.output) if row["what"] == "recomputation"}
    for seq in options.lengths:
        if seq in there:
            continue
        found = layers.found(*split(options.base), seq)
        times = layers.at(seq).replay_times(found.setting)
        rows = [
            dict(
                what="recomputation", setting=f"{kept} kept", options=found.setting, seq=seq,
                density=found.density, loss_over_dense=None, step_ms=each, shape=list(options.shape),
                over_base=round(each / times["result"], 4),
            )
            for kept, each in times.items()
        ]  # fmt: skip
        record.append(options.output, rows)
        print(f"  recomputation at {seq}: {times}", flush=True)
    return 0


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    """The run that arguments ask for."""
    parser = record.parser(__doc__, "ablations.jsonl")
    add = parser.add_argument
    add("stage", choices=STAGES)
    continuing.add_options(parser)
    add("--base", default="price@0.15", help="policy and density of the base run (%(default)s)")
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    continuing.add_layer_options(parser, LENGTHS, seeds=[1])
    options = parser.parse_args(words)
    try:
        policy, _ = split(options.base)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if policy in ("dense", "target"):
        parser.error(f"--base {options.base}: use POLICY@DENSITY, such as price@0.15")
    continuing.check_options(parser, options)
    return options


def main(words: list[str] | None = None) -> None:
    options = options_from(words)
    stages = dict(train=train, time=time_layers)
    jobs.run_stage("ablations.py", stages[options.stage], options)


if __name__ == "__main__":
    main()
