# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""A trained model trained on at length by Megatron-LM, dense and sparse, and judged by transformers.

The model is converted (``mtraining convert``) with YaRN for the length, trained by a recipe of ``examples/``
with ``pretrain_gpt.py`` on real text, converted back and judged on text that was held out. FOLDER has all
that is between, and a row of each run and judgement; each command leaves out what is there:

    L="--folder FOLDER --seq 131072 --cache tokens.npz"
    python -m benchmarks.model.long prepare $L --model MODEL.gguf --steps 200
    python -m benchmarks.model.long train $L --megatron MEGATRON_LM --gpus 4 --steps 200 --setting dense
    python -m benchmarks.model.long judge $L --megatron MEGATRON_LM --setting dense --ruler ruler.npz
    python -m benchmarks.model.long table $L --name NAME

Settings: ``start`` (only judged), ``dense``, ``target@RECALL``, ``schedule@POINTS[/THRESHOLD]``. Dense runs
keep their attention's output, as sparse ones do, and have this package's loss. ``table`` needs ``dense``,
judged, and appends a row of each setting to ``--output``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config.schedule import parse as parse_schedule
from megatron_mtraining.models.hugging_face import unpacked
from megatron_mtraining.transformers import NAME, configure, take_means

from ..lib import jobs, record
from . import continuing, material, pretrain, ruler_samples, texts

RECIPE = record.ROOT / "examples" / "qwen2.5-0.5b-128k" / "run.sh"
BINS = 8
"""Parts of a sequence whose losses a row has."""
STEPS_TRACED = 2
SEED = 1


def mtraining(*words) -> None:
    """Run the package's command; its error ends this."""
    # Elsewhere than in a checkout of ours, whose kernels/ would be taken for a package.
    command = [sys.executable, "-m", "megatron_mtraining", *map(str, words)]
    if code := subprocess.run(command, cwd=tempfile.gettempdir()).returncode:
        sys.exit(f"{' '.join(command)}: exit status {code}")


def slug(setting: str) -> str:
    """The setting as a file's name."""
    return setting.replace("@", "-").replace("/", "-")


# Stages.


def prepare(options) -> None:
    """``hf`` (if ``--model`` is a GGUF file, its weights in bf16), ``model`` (Megatron's) and ``text``."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, model = options.folder, options.folder / "hf"
    if not model.exists():
        if options.model.is_file():
            how = dict(gguf_file=options.model.name, local_files_only=True)
            made = AutoModelForCausalLM.from_pretrained(
                options.model.parent, dtype=torch.bfloat16, **how, **unpacked()
            )
            if hasattr(made.config, "quantization_config"):
                del made.config.quantization_config
            made.save_pretrained(model)
            AutoTokenizer.from_pretrained(options.model.parent, **how).save_pretrained(model)
        else:
            model.symlink_to(options.model)
    if not (folder / "model").exists():
        config = AutoConfig.from_pretrained(model)
        factor = -(-options.seq // config.max_position_embeddings)
        more = ["--yarn", factor] if factor > 1 else []
        mtraining("convert", "hf-to-megatron", model, folder / "model", *more)
    if not (folder / "text.idx").exists():
        write_text(options, folder / "text")


def write_text(options, prefix: Path) -> None:
    """The windows that a run is trained on as Megatron's indexed dataset; the last label of each is the first
    token of another."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokens = {kind: each for kind, each in texts.read(options).items() if kind in options.kinds}
    # n sequences make n - 1 samples.
    windows = material.training(tokens, options.steps + 1, SEED, options)[:, :-1].int()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    for window in windows:
        builder.add_document(window, [len(window)])
    builder.finalize(f"{prefix}.idx")


def train(options) -> None:
    """A run of the recipe; its row in ``pretrain-SETTING.jsonl``."""
    folder, name = options.folder, slug(options.setting)
    row = folder / f"pretrain-{name}.jsonl"
    if row.exists():
        return
    policy, _, at = options.setting.partition("@")
    points, _, threshold = at.partition("/")
    words = ["run", options.megatron, "--script", options.script, "--weights", folder / "model"]
    words += ["--data", folder / "text", "--seq-length", options.seq, "--gpus", options.gpus]
    words += ["--iterations", options.steps, "--memory-interval", "--log", folder / f"{name}.log"]
    words += ["--save", folder / name, "--no-save-optim", "--output", row]
    words += ["--model", options.name] if options.name else []
    if options.gpus_are_there:
        words += ["--breakdown", STEPS_TRACED]
    if policy == "dense":
        words += ["--attention", "fused", "--loss-chunk", pretrain.DEFAULT_CHUNK]
        words += ["--dense-recompute", "kept" if options.gpus_are_there else "twice"]
    else:
        words += ["--attention", "mtraining"]
        words += ["--target-recall", at] if policy == "target" else ["--schedule", points]
        words += ["--mtraining-backward-threshold", threshold] if threshold else []
    with mock.patch.dict(os.environ, CP=str(options.gpus), BATCH="1"):
        pretrain.main([str(word) for word in words + options.more])


def judge(options) -> None:
    """A row in ``judged.jsonl`` of each attention: dense, and the pattern that the run ended with."""
    folder, name = options.folder, slug(options.setting)
    rows = folder / f"judged-{name}.jsonl"
    if rows.exists():
        return
    trained, checkpoint = folder / f"{name}-hf", folder / name
    if options.setting == "start":
        trained = folder / "hf"
    elif not trained.exists():
        mtraining("convert", "megatron-to-hf", checkpoint, trained, "--like", folder / "hf")
    options.model = trained  # for its tokenizer, too
    given = material.material(options)
    samples = ruler_samples.read(options.ruler, options.device) if options.ruler else {}
    model, _ = continuing.load(options)
    own = pattern_of(options.setting, checkpoint)
    found = [dict(attention="dense", **judged(model, given, samples))]
    if own is not None:
        configure(model, own)
        continuing.attend_by(model, NAME)
        found.append(dict(attention="own", **judged(model, given, samples)))
    record.append(rows, [dict(setting=options.setting, **row) for row in found])


def pattern_of(setting: str, checkpoint: Path) -> MTrainingConfig | None:
    """What a run attended with at its end; None for dense attention."""
    policy, _, at = setting.partition("@")
    if policy == "target":  # at the prices that its heads have reached
        settings = checkpoint.with_name(f"{checkpoint.name}.json")
        if not settings.exists():
            mtraining("convert", "prices", checkpoint, settings)
        return MTrainingConfig.from_options(settings=str(settings))
    if policy == "schedule":
        price = parse_schedule("schedule", at.partition("/")[0]).at(1.0)
        return MTrainingConfig.from_options(price=price) if price else None
    return None


def judged(model, given: material.Material, samples) -> dict:
    """Losses of the held-out windows, of the needles' answers and of RULER's, as attention is set now."""
    losses = continuing.window_losses(model, given.held_out)
    row: dict = dict(
        loss=continuing.means_of(losses),
        windows={kind: len(each) for kind, each in losses.items()},
        by_position=[
            round(torch.stack([each.mean() for each in parts]).mean().item(), 6)
            for parts in zip(*(each.chunk(BINS, dim=1) for each in losses.values()))
        ],
    )
    if model.config._attn_implementation == NAME:
        means = take_means(model, training=False)
        density, recall = (each.nanmean().item() for each in (means.density, means.recall))
        row |= dict(density=round(density, 5), recall=round(recall, 5))
    row |= dict(continuing.answered(model, given), needles=len(given.answers))
    row["ruler"] = {
        task: {
            "samples": len(samples[task]),
            **{name: round(sum(each) / len(each), 4) for name, each in answers.items()},
        }
        for task, answers in continuing.answered_ruler(model, samples).items()
    }
    return row


def table(options) -> None:
    """Rows of the settings that were trained and judged, over the dense run; GPU, versions, commit and
    command are the training's."""
    folder = options.folder
    runs = {path.stem[9:]: jobs.read(path)[-1] for path in folder.glob("pretrain-*.jsonl")}
    verdicts: dict[str, dict[str, dict]] = {}
    for path in folder.glob("judged-*.jsonl"):
        verdicts[path.stem[7:]] = {row["attention"]: row for row in jobs.read(path)}
    if "dense" not in runs or "dense" not in verdicts:
        raise ConfigError(f"{folder} has no dense run that was judged: train and judge it first")
    dense, to = runs["dense"], verdicts["dense"]["dense"]
    made = []
    for name in sorted(runs.keys() & verdicts.keys()):
        run, found = runs[name], verdicts[name]
        own = found.get("own", found["dense"])
        row = dict(
            model=run["model"], tokens=run["seq"], steps=run["iterations"], gpus=run["world"],
            policy=found["dense"]["setting"], density=run["density"], recall=run["recall"],
            own_loss_over_dense=over(own, to)["all"], own_over_dense_by_text=over(own, to),
            dense_loss_over_dense=over(found["dense"], to)["all"],
            dense_over_dense_by_text=over(found["dense"], to),
            dense_over_dense_by_position=[
                round(a / b - 1, 6) for a, b in zip(found["dense"]["by_position"], to["by_position"])
            ],
            loss=found["dense"]["loss"], windows=to["windows"], own_density=own.get("density"),
            needles=to["needles"], needle=[found["dense"]["needle"], own["needle"]],
            ruler_samples=sum(each["samples"] for each in to["ruler"].values()),
            ruler=[score(found["dense"]), score(own)],
            before={
                key: verdicts["start"]["dense"][key] for key in ("loss", "needle", "ruler")
            } if "start" in verdicts else None,
            step_ms=round(step_ms(run), 1), step_over_dense=round(step_ms(run) / step_ms(dense), 4),
            layer_over_dense=attention_over(run, dense),
            tokens_per_s_gpu=round(1000 * run["seq"] * run["batch"] / step_ms(run) / run["world"]),
            max_alloc_gb=run["max_alloc_gb"], losses=run["losses"], versions=run["versions"],
            judged=found["dense"]["command"],
            **{key: run[key] for key in ("gpu", "torch", "triton", "commit", "command")},
        )  # fmt: skip
        made.append(row)
        print(record.line(row, "policy", "density", "own_loss_over_dense", "dense_loss_over_dense",
                          "needle", "ruler", "step_over_dense", "layer_over_dense"))  # fmt: skip
    record.copy(options.output, made)


def over(found: dict, dense: dict) -> dict[str, float]:
    """Loss over that of the dense run with dense attention, less 1, by text."""
    return {kind: round(loss / dense["loss"][kind] - 1, 6) for kind, loss in found["loss"].items()}


def score(found: dict) -> float | None:
    """The mean over RULER's tasks of the answers that are right."""
    right = [each["right"] for each in found["ruler"].values()]
    return round(sum(right) / len(right), 4) if right else None


def step_ms(run: dict) -> float:
    """The mean step of a run, without those that compile or are traced: prices move over a run, and a median
    would leave out its ends."""
    last = -(run["profiled_steps"] + 1) if "breakdown" in run else None
    return statistics.mean(run["step_ms"][run["warm_up"] : last] or run["step_ms"])


def attention_over(run: dict, dense: dict) -> float | None:
    """Time of attention over that of the dense run: of mean steps, less what the traced steps spent on all
    else; None if none was traced."""
    if "breakdown" not in run or "breakdown" not in dense:
        return None

    def attention(each: dict) -> float:
        parts = each["breakdown"]
        return step_ms(each) - sum(parts.values()) + parts["attention"]

    return round(attention(run) / attention(dense), 4)


STAGES = dict(prepare=prepare, train=train, judge=judge, table=table)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = record.parser(__doc__, "long.jsonl")
    parser.add_argument("stage", choices=STAGES)
    material.add_options(parser, needs_model=False)  # only the first stage reads it
    add = parser.add_argument
    add("--folder", type=Path, required=True)
    add("--megatron", type=Path, metavar="MEGATRON_LM", help="train, judge: a checkout")
    add("--script", type=Path, default=RECIPE, help="train: a recipe (%(default)s)")
    add("--setting", help="train, judge: see above")
    add("--steps", type=int, default=200)
    add("--gpus", type=int, default=4, help="train: context-parallel ranks (%(default)s)")
    add("--name", help="what rows call the model (default: the recipe's)")
    parser.set_defaults(held_out_share=0.25)
    # What this does not know goes to Megatron.
    options, options.more = parser.parse_known_args(words)
    needed = dict(
        prepare=("model", "cache"), train=("megatron", "setting"), judge=("setting", "cache")
    )
    for name in needed.get(options.stage, ()):
        if getattr(options, name) is None:
            parser.error(f"{options.stage} needs --{name}")
    if options.more and options.stage != "train":
        parser.error(f"unknown to {options.stage}: {' '.join(options.more)}")
    if options.megatron is not None:
        options.megatron = options.megatron.resolve()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.gpus_are_there = torch.cuda.is_available()
    return options


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    jobs.run_stage("long.py", STAGES[options.stage], options)


if __name__ == "__main__":
    main()
