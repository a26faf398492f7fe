# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Losses of one model over layouts of ranks: tensor, pipeline, context and expert parallelism.

    python -m benchmarks.model.layouts MEGATRON_LM --layout "CP 4" --folder FOLDER
    python -m benchmarks.model.layouts MEGATRON_LM --list

Trains a small model with ``pretrain_gpt.py`` for a few steps, from the same weights in every layout: a run
of one process saves them in the folder once. Appends a row to ``results/layouts.jsonl`` with the losses, and
with how far they are from those of the layout of one process (``worst``, a share of the loss). Losses of bf16
runs count as equal up to a rounding of bf16, 2^-8. The layouts named "again" repeat a run, and compare with
it digit by digit (``equal``). Layouts of dense attention, Transformer Engine's, show how much the sums of the
model's other parts differ. Attention is sparse in all others, with the same budgets.

The layout of one process comes first: the others read its row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from ..lib import jobs, record
from .pretrain import follow, megatron_version, read_log

BF16 = 2.0**-8
"""A rounding of bf16: losses that differ by no more are equal."""
FLOAT32 = 1e-4
"""The same for runs on CPUs, which are in float32."""


class Layout(NamedTuple):
    """How the ranks of a run are laid out.

    Attributes:
        words: Megatron's options.
        like: the layout whose losses it should have; None for the first.
        kind: of model: ``plain``, or with ``experts``.
        dense: dense attention, Transformer Engine's.
        again: it is a repetition, and every digit should be the same.
    """

    ranks: int
    words: str = ""
    like: str | None = None
    kind: str = "plain"
    dense: bool = False
    again: bool = False


def _cp(size: int) -> str:
    return f"--context-parallel-size {size}"


ONE, EXPERTS, DENSE = "CP 1", "experts, CP 1", "dense, CP 1"
# The vocabulary is padded to a multiple of this times the tensor-parallel ranks: to the same in all.
TP = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
PP = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    ONE: Layout(1),
    "CP 1, again": Layout(1, like=ONE, again=True),
    "CP 2": Layout(2, _cp(2), ONE),
    "CP 2, again": Layout(2, _cp(2), "CP 2", again=True),
    "CP 4": Layout(4, _cp(4), ONE),
    "CP 4, again": Layout(4, _cp(4), "CP 4", again=True),
    "CP 4, hierarchical 2 x 2": Layout(
        4, f"{_cp(4)} --hierarchical-context-parallel-sizes 2 2", ONE
    ),
    "TP 2": Layout(2, TP, ONE),
    "TP 2 x CP 2": Layout(4, f"{TP} {_cp(2)}", ONE),
    "PP 2": Layout(2, PP, ONE),
    "PP 2 x CP 2": Layout(4, f"{PP} {_cp(2)}", ONE),
    EXPERTS: Layout(1, kind="experts"),
    "experts, EP 2 x CP 2": Layout(
        2, f"{_cp(2)} --expert-model-parallel-size 2", EXPERTS, kind="experts"
    ),
    DENSE: Layout(1, dense=True),
    "dense, CP 2": Layout(2, _cp(2), DENSE, dense=True),
    "dense, CP 4": Layout(4, _cp(4), DENSE, dense=True),
}

MODEL = """
    --use-mcore-models --group-query-attention --num-query-groups 2 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --lr-decay-style constant --seed 11 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader
    --ckpt-format torch_dist
"""
"""Of a small model and its training, on any data."""
COMMON = f"""{MODEL}
    --global-batch-size 2 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer
    --make-vocab-size-divisible-by 128
"""
ON_GPU = """
    --num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --kv-channels 128
    --vocab-size 32000 --bf16
"""
ON_CPU = """
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 64
    --vocab-size 500
"""
# Without a loss for balance, which is a mean over a rank's own tokens.
MOE = """
    --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
    --moe-token-dispatcher-type {dispatcher} --moe-ffn-hidden-size {size}
"""


def model_words(options, kind: str) -> list[str]:
    """Megatron's options of the model and its training, but for attention and layout."""
    gpu = options.device == "cuda"
    words = COMMON + (ON_GPU if gpu else ON_CPU)
    words += f" --seq-length {options.seq} --max-position-embeddings {options.seq}"
    if kind == "experts":
        dispatcher, size = ("alltoall", 1024) if gpu else ("allgather", 64)
        words += MOE.format(dispatcher=dispatcher, size=size)
    if gpu and options.transformer_impl == "local":
        words += " --no-rope-fusion --no-persist-layer-norm"
    if gpu:
        words += f" --transformer-impl {options.transformer_impl}"
    return words.split()


def attention_words(options) -> list[str]:
    """The options of sparse attention."""
    if options.device == "cuda":
        budgets = "--mtraining-vertical 500 --mtraining-slash 50"
    else:
        budgets = "--mtraining-vertical 16 --mtraining-slash 0 --mtraining-window 0 --mtraining-block-size 64"
    return ["--attention-backend", "mtraining", *budgets.split()]


def launch(options, ranks: int, words: list[str]) -> str:
    """Megatron's log of a run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "megatron_mtraining.launch"]
    command += ["--cpu"] if options.device == "cpu" else []
    environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")
    if options.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    script = str(options.megatron / "pretrain_gpt.py")
    return follow([*command, script, *words], environment, options.log)


def weights(options, kind: str) -> Path:
    """The folder with a kind's weights, which a run of one process saves after its first step."""
    folder = options.folder / f"weights-{kind}-{options.device}"
    if not (folder / "latest_checkpointed_iteration.txt").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was stopped has left
        print(f"weights of the model, {kind}", flush=True)
        words = [*model_words(options, kind), *attention_words(options), "--train-iters", "1"]
        words += ["--save", str(folder), "--save-interval", "1", "--no-save-optim", "--no-save-rng"]
        launch(options, 1, words)
    return folder


def losses_of(options, layout: Layout) -> list[float]:
    """The losses of the steps in a layout."""
    words = [*model_words(options, layout.kind), *layout.words.split()]
    if options.device == "cuda" and options.transformer_impl != "local" and TP in layout.words:
        words.append("--sequence-parallel")
    words += ["--attention-backend", "fused"] if layout.dense else attention_words(options)
    words += ["--train-iters", str(options.steps), "--load", str(weights(options, layout.kind))]
    words += ["--finetune", "--no-load-optim", "--no-load-rng"]
    found = read_log(launch(options, layout.ranks, words))["loss"]
    return [found[step] for step in sorted(found)]


def row_of(options, name: str, losses: list[float], before: list[dict]) -> dict:
    """A layout's row.

    Args:
        before: earlier rows of the same commit and GPU, with the layout that it is compared with.
    """
    layout = LAYOUTS[name]
    like = [row["losses"] for row in before if row["layout"] == layout.like]
    worst = equal = None
    if layout.like:
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, like[-1], strict=True))
        equal = losses == like[-1]
    within = None if worst is None else worst <= bound(options)
    return dict(
        layout=name, world=layout.ranks, kind=layout.kind, like=layout.like,
        attention="fused" if layout.dense else "mtraining", words=layout.words, seq=options.seq,
        steps=options.steps, losses=losses, worst=worst, bound=bound(options), within=within,
        equal=equal, again=layout.again, device=options.device,
        versions={
            "megatron": megatron_version(options.megatron),
            "transformer_engine": record.installed("transformer-engine"),
        },
    )  # fmt: skip


def bound(options) -> float:
    """The share of the loss that losses may differ by, and be equal."""
    return BF16 if options.device == "cuda" else FLOAT32


def earlier(options) -> list[dict]:
    """Rows of the output of this commit, GPU, length and number of steps."""
    here = record.provenance()
    own = {"seq": options.seq, "steps": options.steps} | {k: here[k] for k in ("gpu", "commit")}
    return [
        row
        for row in jobs.read(options.output)
        if all(row.get(name) == value for name, value in own.items())
    ]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options that can work; else ends with what is wrong."""
    parser = record.parser(__doc__, "layouts.jsonl")
    add = parser.add_argument
    add("megatron", type=Path, nargs="?", help="a Megatron-LM checkout")
    add("--layout", choices=LAYOUTS, help="the layout to run")
    add("--list", action="store_true", help="print the layouts and stop")
    add("--folder", type=Path, help="for the weights, which layouts share")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--seq", type=int, help="tokens (16384; 512 on CPUs)")
    add("--steps", type=int, default=10)
    add("--transformer-impl", choices=("transformer_engine", "local"),
        help="on GPUs (default: transformer_engine where it is installed)")  # fmt: skip
    add("--log", type=Path, help="keep Megatron's log here")
    options = parser.parse_args(words)
    if options.list:
        print("\n".join(f"{name} ({layout.ranks} ranks)" for name, layout in LAYOUTS.items()))
        parser.exit()
    for name in ("megatron", "layout", "folder"):
        if getattr(options, name) is None:
            parser.error(f"give {'MEGATRON_LM' if name == 'megatron' else '--' + name}")
    # Paths, as in the rows of runs that start elsewhere.
    options.megatron, options.folder = options.megatron.resolve(), options.folder.resolve()
    if not (options.megatron / "pretrain_gpt.py").is_file():
        parser.error(f"there is no pretrain_gpt.py in {options.megatron}")
    options.seq = options.seq or (16384 if options.device == "cuda" else 512)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: use 1 or more")
    has_te = record.installed("transformer-engine") != "none"
    options.transformer_impl = options.transformer_impl or (
        "transformer_engine" if has_te and options.device == "cuda" else "local"
    )
    layout = LAYOUTS[options.layout]
    if layout.dense and options.transformer_impl == "local":
        parser.error(f"--layout {options.layout!r} needs Transformer Engine and a GPU")
    if layout.like and layout.like not in {row["layout"] for row in earlier(options)}:
        parser.error(
            f"--layout {options.layout!r} is compared with {layout.like!r}, which has no row of this commit "
            f"and GPU in {options.output}: run that layout first"
        )
    return options


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    losses = losses_of(options, LAYOUTS[options.layout])
    row = row_of(options, options.layout, losses, earlier(options))
    record.append(options.output, [row])
    print(json.dumps(row))
    if row["within"] is False:
        sys.exit(
            f"losses of {options.layout!r} differ by {row['worst']:.2%} from {row['like']!r}, more than "
            f"{row['bound']:.2%}"
        )
    if row["again"] and not row["equal"]:
        sys.exit(f"losses of {options.layout!r} are not those of {row['like']!r}, digit by digit")


if __name__ == "__main__":
    main()
