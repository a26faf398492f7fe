# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The commands of ``one_host.py``, with how long they take."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..layer.ring_cases import CASES, LENGTHS, PRICED, host_cases
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

LAYER_SECONDS = {
    128 * K: (270, 110, 220), 256 * K: (300, 130, None), 512 * K: (340, 200, 260),
    1024 * K: (600, None, 400), 2048 * K: (900, None, None),
}  # fmt: skip
"""On four GPUs: of what is compared with dense rings (at 2M tokens without them), of the pruned backward of
all pairs, of a plain ring. A run of all settings would not end in a call: the kernels of each are compiled
first."""
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
    1024 * K: {SPARSE: (19, 5, 2, 0), PRICE: (50, 4, 2, 0), KEPT: (300, 2, 1, 0)},
    2048 * K: {SPARSE: (50, 5, 2, 0), PRICE: (200, 3, 2, 0)},
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


def _torchrun(options) -> str:
    return f"-m torch.distributed.run --standalone --nproc-per-node {options.gpus} -m"


def _inner_rings(gpus: int) -> list[int]:
    """Sizes of inner rings between single ranks and all of them."""
    return [size for size in range(2, gpus) if gpus % size == 0]


def layer_jobs(options) -> Iterator[Job]:
    """Jobs of ``layer``, ``balance`` and ``slow``: a length and a group of settings each, others' dense rings
    in the same run as ours of all pairs. Over a plain ring, rounds are single ranks' keys."""
    run = f"{_torchrun(options)} benchmarks.layer.rings "
    run += f"--shape {'2 1 64' if options.tiny else '16 2 128'} --device {options.device}"
    levels = " ".join(map(str, ("--inner 0", *_inner_rings(options.gpus))))
    shortest, longest = (64, 256) if options.gpus > 4 else (0, 512 / options.gpus)  # of a GPU, in K
    lengths = [seq for seq in LENGTHS if shortest <= seq / K / options.gpus <= longest]

    def job(stage: str, seq: int, name: str, how: str, cases: list[str], seconds: float) -> Job:
        words = ["--case", *cases, *(["--seq", options.toy] if options.toy else [])]
        return _job(
            options, stage, f"{(options.toy or seq) // K}K, {name}", seconds_of(options, seconds, 40),
            f"{run} {how}", words, "rings.jsonl",
        )  # fmt: skip

    for seq in lengths[:1] if options.toy else lengths:
        cases = host_cases(seq)
        dense = [case for case in cases if case.slash == seq]
        pruned = [case for case in dense if case.threshold]
        whole = [case for case in cases if case not in (dense if seq > 1024 * K else pruned)]
        compared = (
            f"{levels} --dense-once --budget {0.5 if options.rehearse else 6 * (not options.tiny)}"
        )
        groups = [
            ("layer", "side by side", compared, whole),
            ("layer", "all pairs pruned", compared, pruned),
            ("balance", "a ring of single ranks", "--inner 1 --impl mtraining --budget 0",
             [case for case in cases if case not in dense]),
        ]  # fmt: skip
        for (stage, name, how, some), seconds in zip(groups, LAYER_SECONDS[seq]):
            if seconds is not None:
                yield job(stage, seq, name, how, [case.name for case in some], seconds)
    half = options.gpus // 2
    if half > 1 and options.device == "cuda":
        slow = [case.name for case in CASES if case.slow_link and case.seq == 512 * K]
        slow += [case.name for case in host_cases(512 * K) if case.price and not case.threshold]
        yield job(
            "slow", 512 * K, f"two hosts of {half}", f"--inner 1 {half} --impl mtraining "
            f"--emulate-hosts {half} --budget {0.5 if options.rehearse else 6}", slow, 300,
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
        if each < 32 * K and not options.toy:  # too short for so many GPUs
            continue
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


def larger_jobs(options) -> Iterator[Job]:
    """On eight GPUs or more: Qwen2.5-7B's shape at 256K tokens by its recipe, and Qwen3-8B's at 1M in
    transformers, whose dense steps would not end in a call: those are of two layers."""
    if options.toy or options.gpus < 8:
        return
    run = f"-m benchmarks.model.pretrain run {shlex.quote(str(options.megatron))} --gpus {options.gpus} "
    run += f"--script {EXAMPLES / 'qwen2.5-7b-256k' / 'run.sh'} --memory-interval --global-batch-size 1 "
    for setting, (seconds, steps, warm_up) in {
        SPARSE: (5, 10, 3),
        PRICE: (8, 9, 3),
        KEPT: (25, 6, 2),
    }.items():
        numbers = dict(columns=1000, diagonals=100, cap=slash_cap(256 * K))
        words = shlex.split(SETTINGS[setting].format(**numbers))
        words += ["--iterations", steps, "--warm-up", warm_up]
        words += ["--data", options.scratch / "data" / "text"]
        if setting != KEPT or options.has_te:
            yield _job(
                options, "steps", f"7B, 256K, {setting}", seconds_of(options, 2 * seconds * steps + COMPILES),
                run, words, "pretrain.jsonl", needs="data",
            )  # fmt: skip
    run = (
        f"{_torchrun(options)} benchmarks.model.sequences --shape qwen3-8b --lengths 1M --steps 3 "
    )
    for name, words in {
        "8B, 1M, 1000 columns, 600 diagonals": "--settings vertical=1000,slash=600",
        "8B, 1M, two layers, dense and sparse": "--layers 2 --settings dense vertical=1000,slash=600",
    }.items():
        yield _job(options, "transformers", name, seconds_of(options, 700), run + words, [],
                   "sequences.jsonl")  # fmt: skip


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


STAGES = ("layer", "balance", "slow", "steps", "transformers", "sparsebalance", "parity")
MAKERS = (layer_jobs, step_jobs, larger_jobs, balancer_jobs, parity_jobs)


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
