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
- ``recorded``: rows from measurements that are there: other policies at the base's density (``--frontier``),
  contiguous and zigzag layout (``balance.jsonl``: busiest rank over the mean), rings: all gathered, plain
  and 2 x 2 (``rings.jsonl``).
- ``table``: prints all.

``loss_over_dense`` is the dense-attention loss of the trained model, ``own_over_dense`` its own-attention
loss, both as a ratio less 1 to the dense run with the same seed. ``step_ms`` of train is of whole steps on
the host's clock with ``jobs`` runs at once, so it is for comparison within one call; of time and recorded it
is a layer's forward and backward.

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

import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.transformers.interface import mask
from megatron_mtraining.transformers.state import ATTRIBUTE

from ..lib import jobs, policies_at_density, record
from . import continuing, frontier_rows, frontier_tables, texts
from .frontier import RUN_SECONDS
from .frontier_settings import about as about_model
from .frontier_settings import on_frontier, run_of_frontier, setting_of, split
from .layer_times import Layer, Shape
from .material import material

STAGES = ("train", "time", "recorded", "table")
LENGTHS = (131072, 524288)
FROZEN = "mtraining_frozen"
RINGS = ("mtraining_flat", "mtraining_hier")
LAYOUTS = ("striped", "zigzag", "contiguous")
PATTERN = "real layer08, stretched"
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


class IsDense:
    """Whether a step is dense, from its number and the number of all steps."""

    def __init__(self, where: str, value: float):
        self.where, self.value = where, value

    def __call__(self, step: int, steps: int) -> bool:
        if self.where == "every":
            return step % round(self.value) == round(self.value) - 1
        count = max(1, round(self.value * steps))
        return step < count if self.where == "first" else step >= steps - count


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
    return tempfile.TemporaryDirectory(prefix="ablations-")


def _folder() -> Path:
    """Of settings files, until this process ends."""
    return Path(_kept().name)


def config_of(variant: Variant, setting: dict, layers: int, options) -> MTrainingConfig:
    """The settings of a variant, for a model with a given number of layers."""
    first, last = variant.dense_layers
    if not first and not last:
        return policies_at_density.config_of(setting, options.block_size)
    if first + last > layers:
        raise ConfigError(f"the model has {layers} layers, fewer than {variant.setting}")
    dense = [*range(first), *range(layers - last, layers)]
    file = _folder() / f"{first}_{last}.json"
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
    is_dense = IsDense(*variant.dense_steps) if variant.dense_steps else None
    if variant.is_frozen:
        Frozen()
    attention = FROZEN if variant.is_frozen else continuing.NAME
    run = continuing.Run(name, seed, options.steps, config, is_dense, attention)
    row, _ = continuing.train(run, given, options)
    if variant.is_frozen:
        row["recall"] = None  # measured on the window that selected the pattern
    dense = run_of_frontier(options, "dense", None, seed)
    assert dense is not None  # train() has looked
    return dict(
        what=variant.what, setting=variant.setting, variant=name, base=options.base, options=setting,
        layers=model.config.num_hidden_layers,
        **compared(row, dense), **row, **about_model(options),
    )  # fmt: skip


def train(options) -> int:
    """Rows of training."""
    policy, wanted = split(options.base)
    seeds = [seed for seed in options.seeds if run_of_frontier(options, "dense", None, seed)]
    if missing := [seed for seed in options.seeds if seed not in seeds]:
        raise ConfigError(
            f"{options.frontier.name} has no dense run of {options.steps} steps with seeds {missing}: run "
            f"frontier.py train --run dense {options.base} --seeds {' '.join(map(str, missing))} first"
        )
    names = ("variant", "seed", "steps", "base", "model", "seq", "data")
    there = {
        (*map(row.get, names), frontier_rows.decay_of(row)) for row in jobs.read(options.output)
    }
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
    device = torch.device(options.device)
    policy, wanted = split(options.base)
    there = {row.get("seq") for row in jobs.read(options.output) if row["what"] == "recomputation"}
    for seq in options.lengths:
        if seq in there:
            continue
        layer = Layer(seq, options.shape, device, options.block_size)
        found = policies_at_density.at_density(
            policy, wanted, seq, options.block_size, layer.density
        )
        times = layer.replay_times(found.setting)
        rows = [
            dict(
                what="recomputation", setting=f"{kept} kept", options=found.setting, seq=seq,
                density=found.density, loss_over_dense=None, step_ms=each["ms"], shape=list(options.shape),
                over_base=round(each["ms"] / times["result"]["ms"], 4),
            )
            for kept, each in times.items()
        ]  # fmt: skip
        record.append(options.output, rows)
        print(f"  recomputation at {seq}: {times}", flush=True)
    return 0


def recorded(options) -> int:
    """Rows from measurements in other files; rows that were written before are left out."""
    rows = [*layouts(record.RESULTS), *rings(record.RESULTS), *policies(options)]
    names = ("what", "setting", "seq", "source", "source_commit")
    there = {tuple(row.get(name) for name in names) for row in jobs.read(options.output)}
    record.append(
        options.output, [row for row in rows if tuple(row[name] for name in names) not in there]
    )
    return 0


def _source(row: dict, file: str) -> dict:
    return dict(source=file, source_gpu=row["gpu"], source_commit=row["commit"])


def layouts(results: Path) -> list[dict]:
    """The busiest rank over the mean, of a real layer's pattern stretched to 512K, by layout and ranks."""
    newest = {}
    for row in jobs.read(results / "balance.jsonl"):
        if (row["pattern"], row["inner"]) == (PATTERN, 0) and row["layout"] in LAYOUTS:
            newest[row["layout"], row["world"], row["seq"]] = row
    return [
        dict(
            what="layout", setting=f"{layout}, {world} ranks", seq=seq, loss_over_dense=None, step_ms=None,
            max_over_mean=row["exposed"],
            over_base=round(row["exposed"] / newest["striped", world, seq]["exposed"], 4),
            **_source(row, "balance.jsonl"),
        )
        for (layout, world, seq), row in newest.items()
        if ("striped", world, seq) in newest
    ]  # fmt: skip


def rings(results: Path) -> list[dict]:
    """Forward and backward of a layer over several ranks, in one group and in 2 x 2, of the same commit.

    The base is all gathered on one host, and a plain ring on two, whose group would span them.
    """
    newest: dict = {}
    for row in jobs.read(results / "rings.jsonl"):
        # A plain ring within one host is measured for its balance alone.
        if row["impl"] in RINGS and (row["inner"] != 1 or row.get("hosts", 1) > 1):
            hosts = row.get("hosts", 1)
            place = row["case"], row["world"], hosts, row["commit"], row["gpu"]
            newest.setdefault(place, {})[row["impl"]] = row
    found = []
    for (case, world, hosts, _, _), pair in newest.items():
        if len(pair) < 2:
            continue
        base = pair["mtraining_flat"]
        gpus = world // base.get("ranks_per_gpu", 1)
        where = f"{world} ranks on {gpus} GPUs" + (f", {hosts} hosts emulated" if hosts > 1 else "")
        for row in (base, pair["mtraining_hier"]):
            inner = row["inner"]
            keys = {1: "plain ring", world: "all gathered"}.get(
                inner, f"{inner} x {world // inner}"
            )
            found.append(
                dict(
                    what="ring", setting=f"{keys}: {case}, {where}", seq=row["seq"], loss_over_dense=None,
                    step_ms=row["fwdbwd_ms"],
                    over_base=round(row["fwdbwd_ms"] / base["fwdbwd_ms"], 4),
                    **_source(row, "rings.jsonl"),
                )
            )  # fmt: skip
    return found


def policies(options) -> list[dict]:
    """Other policies at the base's density, trained as it was."""
    _, wanted = split(options.base)
    found = []
    for row in frontier_rows.joined(jobs.read(options.frontier)):
        is_base = row["wanted"] == wanted and row["decay"] == frontier_rows.CONSTANT
        if not is_base or row["policy"] == "target" or not row["seeds"]:
            continue
        found.append(
            dict(
                what="policy", setting=f"{row['policy']}, {row['steps']} steps", seq=row["seq"],
                model=row["model"], density=row["density_trained"], seeds=row["seeds"], step_ms=None,
                loss_over_dense=row["trained_dense_over_dense"],
                own_over_dense=row["trained_own_over_dense"], **_source(row, options.frontier.name),
            )
        )  # fmt: skip
    return found


# The table.


def times_of_steps(row: dict, joined_rows: list[dict]) -> dict[str, float]:
    """By length, the attention time of all steps over the attention time of dense steps: from the
    base's layer times and the share of dense steps or layers."""
    variant = VARIANTS.get(row.get("variant", ""), Variant("", ""))
    share = row["dense_share"] + sum(variant.dense_layers) / row.get("layers", LAYERS)
    found = {}
    for each in joined_rows:
        if (each["policy"], each["wanted"], each["model"]) != (
            *split(row["base"]),
            row["model"],
        ):
            continue
        for label in ("128k", "512k"):
            if word := frontier_tables.times(each, label):
                found[label] = round(share + (1 - share) * float(word), 4)
    return found


def _setting(row: dict) -> str:
    """As a table has it: with the length where rows differ in it alone."""
    length = f", {row['seq'] // 1024}K" if row["what"] == "recomputation" else ""
    return row["setting"] + length


def _model(row: dict) -> str:
    """The name and the length of a model that was trained."""
    trained = row.get("model") is not None
    return f"{frontier_tables.model_of(row)}, {row['seq'] // 1024}K" if trained else ""


def ablation_table(rows: list[dict], joined_rows: list[dict]) -> str:
    """Markdown of rows; rows of several seeds become their mean."""
    header = [
        "model, tokens",
        "what",
        "runs",
        "density",
        "dense-attention loss over dense",
        "own-attention loss over dense",
    ]
    header += ["ms", "over base", "attention 128K / dense", "512K / dense"]
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        names = ("what", "setting", "seq", "base", "model", "steps")
        groups.setdefault((*map(row.get, names), frontier_rows.decay_of(row)), []).append(row)
    body = []
    for some in groups.values():
        if some[0].get("seed") is not None:
            some = frontier_rows.newest(some, "seed")
        else:
            some = some[-1:]
        means = {
            name: frontier_rows.mean(row.get(name) for row in some)
            for name in (
                "density",
                "loss_over_dense",
                "own_over_dense",
                "step_ms",
                "over_base",
                "seeds",
            )
        }
        one = some[-1]
        # With several runs at once a step's time compares within a call alone.
        means["ms"] = None if one.get("jobs") else means["step_ms"]
        times = times_of_steps(one, joined_rows) if one.get("base") else {}
        seeds = int(means["seeds"] or len(some)) if means["loss_over_dense"] is not None else ""
        percent = frontier_tables.percent
        body.append(
            [
                _model(one), f"{one['what']}: {_setting(one)}", seeds, percent(means["density"]),
                percent(means["loss_over_dense"], 2, True), percent(means["own_over_dense"], 2, True),
                *("" if means[n] is None else f"{means[n]:.2f}" for n in ("ms", "over_base")),
                *(f"{times[label]:.3f}" if label in times else "" for label in ("128k", "512k")),
            ]
        )  # fmt: skip
    return frontier_tables.markdown(header, body)


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    """The run that arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", choices=STAGES)
    continuing.add_options(parser)
    add("--base", default="price@0.15", help="policy and density of the base run (%(default)s)")
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add("--seeds", type=int, nargs="+", default=[1])
    add("--steps", type=int, default=300)
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="time: tokens")
    add("--shape", type=int, nargs=3, default=list(Shape()), metavar=("HEADS", "KV_HEADS", "DIM"))
    add("--frontier", type=Path, default=record.RESULTS / "frontier_runs.jsonl")
    add("--output", type=Path, default=record.RESULTS / "ablations.jsonl")
    options = parser.parse_args(words)
    options.shape = Shape(*options.shape)
    try:
        policy, _ = split(options.base)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if policy in ("dense", "target"):
        parser.error(f"--base {options.base}: use POLICY@DENSITY, such as price@0.15")
    continuing.check_options(parser, options)
    return options


def show_table(options) -> int:
    found = frontier_rows.joined(jobs.read(options.frontier))
    print(ablation_table(jobs.read(options.output), found))
    return 0


def main(words: list[str] | None = None) -> None:
    options = options_from(words)
    stages = dict(train=train, time=time_layers, recorded=recorded, table=show_table)
    jobs.run_stage("ablations.py", stages[options.stage], options)


if __name__ == "__main__":
    main()
