# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The commands of ``four.py``, with how long they take."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..layer.ring_cases import LENGTHS, PRICED, host_cases
from ..lib.workloads import BLOCK
from ..model.layouts import LAYOUTS, ONE
from ..sparsebalance.ranks import MODES

K = 1024
EXAMPLES = Path(__file__).parents[2] / "examples"
TINY_RECIPE = Path(__file__).with_name("tiny.sh")
START = 45
"""Seconds until a run of Megatron trains, about."""
COMPILES = 80
"""Seconds that the first two sparse steps take more than later ones."""
LOCAL = "--transformer-impl local --no-rope-fusion --no-persist-layer-norm"
"""Megatron's options without Transformer Engine."""


class Job(NamedTuple):
    """A run of one benchmark.

    Attributes:
        seconds: that it takes, about.
        words: after ``python``.
        file: that its rows go to, in the folder.
        needs: a job of its stage that must be done before.
        timed: whether it measures times, and must have the GPUs for itself.
    """

    stage: str
    name: str
    seconds: float
    words: list[str]
    file: str
    needs: str | None = None
    timed: bool = True


# What is measured.

LAYER_SECONDS = {128 * K: (270, 110, 220), 256 * K: (300, 130, None), 512 * K: (340, 200, 260)}
"""On four GPUs: of what is compared with dense rings, of the pruned backward of all pairs, of a plain ring. A
run of all settings would not end in a call: the kernels of each are compiled first."""
DENSE, KEPT = "dense", "output kept"
SPARSE, PRICE = "1000 columns, 100 diagonals", f"price at {PRICED:.1%}"
SETTINGS = {
    DENSE: "--attention fused",
    # Recomputation does not run attention's forward again, as it does not with the plug-in.
    KEPT: "--attention fused --dense-recompute kept --loss-chunk 4096",
    "all pairs": "--attention mtraining --price 0",
    SPARSE: "--attention mtraining --vertical {columns} --slash {diagonals}",
    # Random weights attend evenly: the price keeps all that the caps let it keep.
    PRICE: "--attention mtraining --price 0.25 --mtraining-slash-cap {cap} "
    "--mtraining-vertical-cap {columns}",
}
"""Of whole steps."""
STEPS = {
    128 * K: {DENSE: (6.7, 11, 3, 2), KEPT: (5.7, 7, 3, 0), "all pairs": (5.7, 7, 3, 0),
              SPARSE: (1.9, 13, 4, 2), PRICE: (2.2, 13, 4, 2)},
    512 * K: {SPARSE: (7.5, 8, 2, 2), PRICE: (15.4, 7, 2, 2), DENSE: (94, 3, 1, 0), KEPT: (75, 3, 1, 0),
              "all pairs": (70, 3, 1, 0)},
    256 * K: {DENSE: (25, 6, 2, 0), SPARSE: (3.7, 10, 3, 0), PRICE: (6, 9, 3, 0)},
    1024 * K: {SPARSE: (19, 5, 2, 0), PRICE: (50, 4, 2, 0)},
}  # fmt: skip
"""By tokens and setting: seconds of a step on four GPUs, steps, steps of warm-up, and profiled ones."""
FEW_LAYOUTS = {
    1024: ("CP 1", "CP 1, again", "CP 2", "CP 4, hierarchical 2 x 2", "TP 2 x CP 2"),
    16384: ("CP 1", "CP 2"),
}
"""Of toy runs, by their length."""


def slash_cap(seq: int) -> int:
    """Block distances, those next to the diagonal, that hold :data:`~.ring_cases.PRICED` of the pairs."""
    return max(2, round((1 - math.sqrt(1 - PRICED)) * seq / BLOCK))


def seconds_of(options, on_four: float, start: float = START) -> float:
    """What a job takes here that takes so many seconds on four GPUs after its start."""
    return start if options.toy else start + on_four * 4 / options.gpus


def _job(
    options, stage: str, name: str, seconds: float, run: str, words: list, file: str, **more
) -> Job:
    output = ["--output", options.output_folder / file]
    return Job(
        stage, name, seconds, list(map(str, (*shlex.split(run), *words, *output))), file, **more
    )


def layer_jobs(options) -> Iterator[Job]:
    """Jobs of ``layer`` and ``balance``: a length and a group of settings each, others' dense rings in the
    same run as ours of all pairs. Over a plain ring, rounds are single ranks' keys."""
    run = f"-m torch.distributed.run --standalone --nproc-per-node {options.gpus} -m benchmarks.layer.rings "
    run += f"--shape {'2 1 64' if options.tiny else '16 2 128'} --device {options.device}"
    levels = "--inner 0 2" if options.gpus >= 4 else "--inner 0"
    for seq in LENGTHS[:1] if options.toy else LENGTHS:
        cases = host_cases(seq)
        dense = [case for case in cases if case.slash == seq]
        pruned = [case for case in dense if case.threshold]
        compared = (
            f"{levels} --dense-once --budget {0.5 if options.rehearse else 6 * (not options.tiny)}"
        )
        groups = [
            ("layer", "side by side", compared, [case for case in cases if case not in pruned]),
            ("layer", "all pairs pruned", compared, pruned),
            ("balance", "a ring of single ranks", "--inner 1 --impl mtraining --budget 0",
             [case for case in cases if case not in dense]),
        ]  # fmt: skip
        for (stage, name, how, some), seconds in zip(groups, LAYER_SECONDS[seq]):
            if seconds is not None:
                words = ["--case", *(case.name for case in some)]
                words += ["--seq", options.toy] if options.toy else []
                yield _job(
                    options, stage, f"{(options.toy or seq) // K}K, {name}",
                    seconds_of(options, seconds, 40), f"{run} {how}", words, "rings.jsonl",
                )  # fmt: skip


def step_jobs(options) -> Iterator[Job]:
    """A setting and length each; dense steps of more than 128K tokens a GPU, and others of more than 256K, do
    not fit."""
    text = options.scratch / "data" / "text"
    if not options.toy:  # toy runs have mock data
        words = ["-m", "benchmarks.model.pretrain", "data", str(text.parent)]
        yield Job("steps", "data", 60, words, "")
    for full, settings in STEPS.items():
        seq, each = options.toy or full, full // options.gpus
        for setting, (seconds, steps, warm_up, profiled) in settings.items():
            dense = setting in (DENSE, KEPT)
            if (dense and not options.has_te) or each > (128 if dense else 256) * K:
                continue
            if options.toy and (full != 128 * K or setting not in (DENSE, SPARSE, PRICE)):
                continue
            if options.toy:
                steps, warm_up, profiled = 3 + (not dense), 1, 0
            numbers = dict(
                columns=min(1000, seq // 16), diagonals=min(100, seq // 16), cap=slash_cap(seq)
            )
            run = f"-m benchmarks.model.pretrain run {shlex.quote(str(options.megatron))} "
            run += f"--gpus {options.gpus} --model {'tiny' if options.tiny else 'qwen2.5-3b'} "
            run += f"--seq-length {seq} "
            run += f"--iterations {steps} --warm-up {warm_up} --memory-interval "
            run += f"--breakdown {profiled} " * bool(profiled)
            run += SETTINGS[setting].format(**numbers)
            run += " --loss-chunk 4096" * (setting == DENSE and full > 128 * K)
            # What pretrain does not know goes to Megatron.
            run += " --lr 1e-4"
            run += " --mtraining-recompute-attention" * (not dense and each > 128 * K)
            words = [] if options.toy else ["--data", text]
            words += ["--script", TINY_RECIPE] if options.tiny else []
            words += shlex.split(LOCAL) if options.local and not dense else []
            yield _job(
                options, "steps", f"{seq // K}K, {setting}",
                seconds_of(options, seconds * steps + COMPILES * (not dense)), run, words,
                "pretrain.jsonl", needs=None if options.toy else "data",
            )  # fmt: skip


def balancer_jobs(options) -> Iterator[Job]:
    """A mode of the balancer and a layout each."""
    modes = ("off", "both") if options.tiny else ("both",) if options.rehearse else MODES
    seq = K if options.tiny else 64 * K
    for cp in (1, 2) if options.gpus >= 4 else (1,):
        for mode in modes:
            run = f"-m benchmarks.sparsebalance.ranks {shlex.quote(str(options.megatron))} --mode {mode} "
            run += f"--gpus {options.gpus} --cp {cp} --seq {seq} "
            run += "--batch 4 --iterations 5 --learn 2 " if options.toy else "--batch 16 "
            words = ["--folder", options.scratch / "sets"]
            if options.tiny:
                words += ["--script", TINY_RECIPE, "--name", "tiny", "--vocabulary", 500]
            if weights := options.balance_weights:
                words += [
                    "--weights",
                    weights,
                    "--name",
                    weights.name,
                    "--script",
                    EXAMPLES / "run.sh",
                ]
                words += ["--cache", options.balance_cache]
            else:
                words += ["--slash-cap", slash_cap(seq)]
            words += shlex.split(LOCAL) if options.local else []
            yield _job(options, "sparsebalance", f"DP {options.gpus // cp} x CP {cp}, {mode}",
                       seconds_of(options, 75), run, words, "sparsebalance.jsonl")  # fmt: skip


def parity_jobs(options) -> Iterator[Job]:
    """A layout each."""
    for name, layout in LAYOUTS.items():
        is_half = options.gpus >= 4 and re.fullmatch("[TP]P 2", name)  # in "TP 2 x CP 2" as well
        if layout.ranks > options.gpus or (layout.dense and not options.has_te) or is_half:
            continue
        if options.toy and name not in FEW_LAYOUTS[options.toy]:
            continue
        run = f"-m benchmarks.model.layouts {shlex.quote(str(options.megatron))} --layout '{name}' "
        run += f"--steps {3 if options.toy else 10} --device {options.device}"
        saves = START if layout.like is None and not layout.dense else 0
        # The layout of one process saves the weights for dense ones, too.
        yield _job(
            options, "parity", name, START + saves + 20, run, ["--folder", options.scratch / "layouts"],
            "layouts.jsonl", needs=layout.like or (ONE if layout.dense else None), timed=False,
        )  # fmt: skip


STAGES = ("layer", "balance", "steps", "sparsebalance", "parity")
MAKERS = (layer_jobs, step_jobs, balancer_jobs, parity_jobs)


def jobs_of(options) -> list[Job]:
    """The jobs of the stages that are asked for, in their order."""
    found = [job for make in MAKERS for job in make(options) if job.stage in options.stage]
    found.sort(key=lambda job: STAGES.index(job.stage))
    for text in options.job or ():
        if not any(text in job.name for job in found):
            options.refuse(f"no job of {', '.join(options.stage)} has {text!r} in its name")
    needed = {job.needs for job in found if any(text in job.name for text in options.job or ())}
    return [
        job for job in found
        if not options.job or job.name in needed or any(text in job.name for text in options.job)
    ]  # fmt: skip
