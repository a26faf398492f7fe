# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Steps over packed conversations (``--sft``), short and long, sparse beside dense.

    python -m benchmarks.model.conversations FOLDER
    python -m benchmarks.model.sft MEGATRON_LM --folder FOLDER --label start --attention fused --save
    python -m benchmarks.model.sft MEGATRON_LM --folder FOLDER --label dense --attention fused
    python -m benchmarks.model.sft MEGATRON_LM --folder FOLDER --label kept --price 0 --like dense

Trains a small model with ``pretrain_gpt.py`` and appends a row to ``results/sft.jsonl``: times and losses of
its steps, and the loss of each document of the first one. ``--save`` trains random weights and keeps them in
the folder: later runs begin with them, over the same packs. Beside an earlier row (``--like``) there are the
shares of the loss that steps and documents differ by: ``worst`` of all steps, ``worst_first`` of the first,
whose weights are the same, and ``worst_document``. What this does not know goes to Megatron.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

from ..lib import jobs, record
from . import instrument
from .conversations import ABOUT
from .layouts import MODEL, launch
from .pretrain import megatron_version, read_log

COMMON = f"""{MODEL}
    --global-batch-size 1 --calculate-per-token-loss
    --sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format default --split 100,0,0
"""
# 16 heads of 128 over a hidden size of 1024: attention has most of a long step.
ON_GPU = """
    --num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --kv-channels 128 --bf16
    --num-workers 6
"""
ON_CPU = "--num-layers 2 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 64"


def command(options) -> list[str]:
    """Megatron's options of a run."""
    gpu, folder, seq = options.device == "cuda", options.folder, options.about["seq"]
    words = COMMON.split() + (ON_GPU if gpu else ON_CPU).split()
    words += ["--seq-length", seq, "--max-position-embeddings", seq, "--train-iters", options.steps]
    words += ["--tokenizer-model", folder / "tokenizer", "--data-path", folder / "chat.jsonl"]
    words += ["--lr", options.lr]
    if gpu:
        te = record.installed("transformer-engine") != "none"
        words += ["--transformer-impl", "transformer_engine" if te else "local"]
        words += [] if te else ["--no-rope-fusion", "--no-persist-layer-norm"]
    words += ["--attention-backend", options.attention]
    if options.attention == "mtraining":
        words += [] if options.price is None else ["--mtraining-price", options.price]
        words += [] if gpu else ["--mtraining-block-size", 64]
    for name, size in (("context", options.cp), ("tensor-model", options.tp)):
        words += [f"--{name}-parallel-size", size]
    words += ["--sequence-parallel"] if gpu and options.tp > 1 else []
    weights = folder / "weights"
    if options.save:
        words += ["--save", weights, "--save-interval", options.steps]
        words += ["--no-save-optim", "--no-save-rng"]
    elif not options.random:
        words += ["--load", weights, "--finetune", "--no-load-optim", "--no-load-rng"]
    return [*map(str, words), *options.more]


def run(options) -> dict:
    """The row of a run."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "documents.json"
        checkout = instrument.stand_in(
            options.megatron, Path(folder) / "Megatron-LM", documents=str(found)
        )
        plain = argparse.Namespace(**{**vars(options), "megatron": checkout})
        log = read_log(launch(plain, options.cp * options.tp, command(options)))
        lengths, documents = json.loads(found.read_text())
    steady = [ms for step, ms in log["ms"].items() if step > options.warm_up]
    ours = options.attention == "mtraining"
    return dict(
        label=options.label, attention=options.attention, price=options.price if ours else None,
        cp=options.cp, tp=options.tp, more=" ".join(options.more), device=options.device,
        alone=not options.shared, **options.about,
        weights="random" if options.save or options.random else "trained",
        iter_ms=round(statistics.median(steady or log["ms"].values()), 1),
        step_ms=list(log["ms"].values()), losses=step_losses(list(log["loss"].values())),
        density=round(statistics.mean(log["density"]), 4) if log["density"] else 1.0,
        recall=round(statistics.mean(log["recall"]), 4) if log["recall"] else None,
        max_alloc_gb=round(max(log["memory"], default=math.nan) / 1024, 2) if log["memory"] else None,
        document_lengths=lengths, document_losses=[round(loss, 6) for loss in documents],
        versions={
            "megatron": megatron_version(options.megatron),
            "transformer_engine": record.installed("transformer-engine"),
        },
    )  # fmt: skip


def step_losses(printed: list[float]) -> list[float]:
    """The loss of each step: the second line that Megatron logs has the mean of the first two."""
    first, *others = printed
    return [first, *(round(2 * each - first, 7) for each in others[:1]), *others[1:]]


def beside(row: dict, other: dict) -> dict:
    """How far a row's losses are from another's, as shares of these."""
    if row["document_lengths"] != other["document_lengths"]:
        raise ValueError(f"the documents of {other['label']!r} are others")
    shares = [abs(a - b) / b for a, b in zip(row["losses"], other["losses"])]
    pairs = zip(row["document_losses"], other["document_losses"], strict=True)
    return dict(
        like=other["label"], worst=max(shares), worst_first=shares[0],
        worst_document=max(abs(a - b) / b for a, b in pairs),
    )  # fmt: skip


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options that can work; else ends with what is wrong."""
    parser = record.parser(__doc__, "sft.jsonl")
    add = parser.add_argument
    add("megatron", type=Path, help="a Megatron-LM checkout")
    add("--folder", type=Path, required=True, help="conversations, and weights")
    add("--label", required=True, help="the row's name")
    add("--like", help="the row that losses are compared with")
    add("--attention", choices=("mtraining", "fused"), default="mtraining")
    add("--price", type=float, help="0 keeps everything (default: Megatron's options say)")
    add("--cp", type=int, default=2)
    add("--tp", type=int, default=1)
    add("--steps", type=int, default=12)
    add("--warm-up", type=int, default=4, help="steps whose time does not count")
    add("--lr", type=float, default=3e-4)
    add("--save", action="store_true", help="train random weights, and keep them")
    add("--random", action="store_true", help="begin with random weights")
    add("--shared", action="store_true", help="other runs share the GPUs: times do not count")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--log", type=Path, help="keep Megatron's log here")
    options, options.more = parser.parse_known_args(words)
    options.folder = options.folder.resolve()
    options.megatron = options.megatron.resolve()
    needed = [options.megatron / "pretrain_gpt.py", options.folder / ABOUT]
    needed += [] if options.save or options.random else [options.folder / "weights"]
    for path in needed:
        if not path.exists():
            parser.error(f"there is no {path}")
    options.about = json.loads((options.folder / ABOUT).read_text())
    return options


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    row, here = run(options), record.provenance()
    own = dict(label=options.like, seq=row["seq"], gpu=here["gpu"], commit=here["commit"])
    before = [r for r in jobs.read(options.output) if own.items() <= r.items()]
    row |= beside(row, before[-1]) if before else {}
    record.append(options.output, [row])
    print(record.line({"like": None, "worst": None, "worst_document": None} | row, "label", "iter_ms",
                      "density", "like", "worst", "worst_document"))  # fmt: skip
    if options.like and not before:
        sys.exit(f"{options.output} has no row {options.like!r} of this commit, GPU and length")


if __name__ == "__main__":
    main()
