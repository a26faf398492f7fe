# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The jobs of ``four.py`` that train: whole steps, data-parallel ranks, layouts of ranks."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..layer.ring_cases import PRICED, THRESHOLD
from ..lib.workloads import BLOCK
from ..model.layouts import LAYOUTS, ONE
from .host import FULL, START, TINY, Host, Job, K

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY_RECIPE = Path(__file__).with_name("tiny.sh")
FRONTIER_PRICE = 0.2925
"""The price of the frontier's setting on a trained model (frontier.jsonl, price at 15%)."""
EVEN_PRICE = 0.25
"""A price for random weights: they attend evenly, it keeps all that a cap lets it keep."""
COMPILES = 80
"""Seconds that the first two sparse steps take more than later ones."""
LOCAL = ("--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm")
"""Megatron's options without Transformer Engine."""

# Whole steps.


@dataclasses.dataclass(frozen=True)
class Step:
    """A setting of whole steps at a length, and how long a step takes on four GPUs, about."""

    seq: int
    setting: str
    seconds: float
    iterations: int
    warm_up: int
    breakdown: int = 0


PRICE = f"price at {PRICED:.1%}"
PRUNED = f"{PRICE}, backward threshold {THRESHOLD:g}"
FIXED, DENSE = "1000 columns, 100 diagonals", "dense"
KEPT = "output kept"
"""Dense, and recomputation does not run attention's forward again, as it does not with the plug-in."""
OWN = "all pairs"
"""Dense attention through the plug-in."""
STEPS = (
    Step(128 * K, DENSE, 6.7, 11, 3, 2),
    Step(128 * K, KEPT, 5.7, 7, 3),
    Step(128 * K, OWN, 5.7, 7, 3),
    Step(128 * K, FIXED, 1.9, 13, 4, 2),
    Step(128 * K, PRICE, 2.2, 13, 4, 2),
    Step(128 * K, PRUNED, 2.2, 13, 4),
    Step(512 * K, FIXED, 7.5, 8, 2, 2),
    Step(512 * K, PRICE, 15.4, 7, 2, 2),
    Step(512 * K, PRUNED, 15.4, 6, 2),
    Step(512 * K, DENSE, 94, 3, 1),
    Step(512 * K, KEPT, 75, 3, 1),
    Step(512 * K, OWN, 70, 3, 1),
    Step(256 * K, DENSE, 25, 6, 2),
    Step(256 * K, FIXED, 3.7, 10, 3),
    Step(256 * K, PRICE, 6, 9, 3),
    Step(1024 * K, FIXED, 19, 5, 2),
    Step(1024 * K, PRICE, 50, 4, 2),
)
"""Seconds of steps at the price are predicted (docs/frontier.md), but for 512K tokens."""


def slash_cap(seq: int) -> int:
    """Block distances, those next to the diagonal, that hold :data:`~.ring_cases.PRICED` of the pairs."""
    return max(2, round((1 - math.sqrt(1 - PRICED)) * seq / BLOCK))


def step_jobs(host: Host) -> Iterator[Job]:
    """A setting and length each, with a row of ``pretrain.jsonl``."""
    text = host.scratch / "data" / "text"
    if host.sizes is FULL:  # toy runs have mock data
        words = ("-m", "benchmarks.model.pretrain", "data", str(text.parent))
        yield Job("steps", "data", 60, words, made=text.with_suffix(".idx"))
    wanted = STEPS
    if host.sizes is not FULL:
        wanted = [step for step in STEPS if step.seq in host.sizes.steps]
        short = {DENSE: 3, PRUNED: 4} | ({FIXED: 4} if host.sizes is TINY else {})
        wanted = [
            dataclasses.replace(step, iterations=short[step.setting], warm_up=1, breakdown=0)
            for step in wanted
            if step.setting in short
        ]
    if host.sizes is FULL and not host.weights:  # they attend evenly: nothing is pruned
        wanted = [step for step in wanted if not step.setting.startswith(PRUNED)]
    for step in wanted:
        each, most = step.seq // host.gpus, 128 * K
        dense = step.setting in (DENSE, KEPT)
        if (dense and (not host.has_te or each > most)) or each > 2 * most:
            continue
        yield _step_job(host, step, text)


def _step_job(host: Host, step: Step, text: Path) -> Job:
    tokens, dense = host.sizes.steps[step.seq], step.setting in (DENSE, KEPT)
    row: dict[str, Any] = dict(
        seq=tokens, world=host.gpus, vertical=None, slash=None, slash_cap=None,
        backward_threshold=None, attention="fused" if dense else "mtraining",
        weights=host.weights.name if host.weights else "random",
        model="tiny" if host.sizes is TINY else "qwen2.5-3b",
        dense_recompute={DENSE: "twice", KEPT: "output kept"}.get(step.setting),
    )  # fmt: skip
    words = ["-m", "benchmarks.model.pretrain", "run", host.megatron, "--model", row["model"]]
    words += ["--gpus", host.gpus, "--seq-length", tokens, "--attention", row["attention"]]
    words += ["--iterations", step.iterations, "--warm-up", step.warm_up, "--memory-interval"]
    words += ["--breakdown", step.breakdown] if step.breakdown else []
    words += ["--output", host.folder / "pretrain.jsonl"]
    if host.sizes is FULL:
        words += ["--data", text]
    elif host.sizes is TINY:
        words += ["--script", TINY_RECIPE]
    if host.weights:
        words += ["--script", EXAMPLES / "run.sh", "--weights", host.weights]
    words += ["--dense-recompute", "kept"] if step.setting == KEPT else []
    if step.setting == OWN:
        row |= dict(price=0.0)
        words += ["--price", 0]
    if dense and (step.seq > 128 * K or step.setting == KEPT):
        words += ["--loss-chunk", 4096]
    elif step.setting == FIXED:
        row |= dict(vertical=min(1000, tokens // 16), slash=min(100, tokens // 16))
        words += ["--vertical", row["vertical"], "--slash", row["slash"]]
    # What pretrain does not know goes to Megatron.
    words += ["--lr", "1e-4"]
    if not dense and step.seq // host.gpus > 128 * K:
        words += ["--mtraining-recompute-attention"]
    if not dense and not host.has_te and host.device == "cuda":
        words += LOCAL
    if step.setting.startswith(PRICE):
        row |= dict(price=FRONTIER_PRICE if host.weights else EVEN_PRICE)
        words += ["--price", row["price"]]
        if not host.weights:
            row["slash_cap"] = slash_cap(tokens)
            words += ["--mtraining-slash-cap", row["slash_cap"]]
            words += ["--mtraining-vertical-cap", min(1000, tokens // 16)]
    if step.setting == PRUNED:
        words += ["--mtraining-backward-threshold", f"{THRESHOLD:g}"]
        row |= dict(backward_threshold=THRESHOLD)
    return Job(
        "steps", f"{tokens // K}K, {step.setting}",
        host.seconds(step.seconds * step.iterations + COMPILES * (not dense)),
        tuple(map(str, words)), "pretrain.jsonl", (row,),
        needs=("data",) if host.sizes is FULL else (),
    )  # fmt: skip


# Data-parallel ranks.


def balancer_jobs(host: Host) -> Iterator[Job]:
    """A mode and layout each, with a row of ``sparsebalance.jsonl``."""
    full, tiny = host.sizes is FULL, host.sizes is TINY
    seq, batch = (K if tiny else 64 * K), (16 if full else 4)
    for cp in (1, 2) if host.gpus == 4 else (1,):
        for mode in host.sizes.modes:
            words = ["-m", "benchmarks.sparsebalance.ranks", host.megatron, "--mode", mode]
            words += ["--gpus", host.gpus, "--cp", cp, "--set", "bimodal", "--seq", seq]
            words += ["--folder", host.scratch / "sets", "--output"]
            words += [host.folder / "sparsebalance.jsonl"]
            words += ["--batch", batch]
            words += [] if full else ["--iterations", 5, "--learn", 2]
            words += (
                ["--script", TINY_RECIPE, "--name", "tiny", "--vocabulary", 500] if tiny else []
            )
            cap = None
            if host.balance_weights:
                words += ["--weights", host.balance_weights, "--name", host.balance_weights.name]
                words += ["--script", EXAMPLES / "run.sh", "--cache", host.balance_cache]
            else:
                cap = slash_cap(seq)
                words += ["--slash-cap", cap]
            if not host.has_te and host.device == "cuda":
                words += LOCAL
            row = dict(
                source="ranks", mode=mode, gpus=host.gpus, cp=cp, seq=seq, slash_cap=cap,
                weights=host.balance_weights.name if host.balance_weights else "random",
                microbatches=batch // (host.gpus // cp),
            )  # fmt: skip
            yield Job(
                "sparsebalance", f"DP {host.gpus // cp} x CP {cp}, {mode}", host.seconds(75),
                tuple(map(str, words)), "sparsebalance.jsonl", (row,),
            )  # fmt: skip


# Layouts.


def parity_jobs(host: Host) -> Iterator[Job]:
    """A layout each, with a row of ``layouts.jsonl``."""
    chosen = host.sizes.layouts
    for name, layout in LAYOUTS.items():
        is_half = host.gpus == 4 and re.fullmatch("[TP]P 2", name)  # in "TP 2 x CP 2" as well
        if layout.ranks > host.gpus or (layout.dense and not host.has_te) or is_half:
            continue
        if chosen is not None and name not in chosen:
            continue
        steps = 10 if host.sizes is FULL else 3
        words = ["-m", "benchmarks.model.layouts", host.megatron, "--layout", name]
        words += ["--folder", host.scratch / "layouts", "--steps", steps, "--device", host.device]
        words += ["--output", host.folder / "layouts.jsonl"]
        row = dict(layout=name, steps=steps, device=host.device)
        row |= dict(within=True) if layout.like else {}
        row |= dict(equal=True) if layout.again else {}
        saves = START if layout.like is None and not layout.dense else 0
        yield Job(
            "parity", name, START + saves + 20, tuple(map(str, words)), "layouts.jsonl",
            (row,),
            # The layout of one process saves the weights for dense ones, too.
            needs=(layout.like,) if layout.like else (ONE,) if layout.dense else (), timed=False,
        )  # fmt: skip
