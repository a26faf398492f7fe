# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The quickstart from start to end: text, training processes, table, pictures."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from .options import HEAD_DIM, Options, add_arguments, options_from

__all__ = ["add_arguments", "run"]  # what megatron_mtraining.tools.cli asks of a subcommand


def run(args) -> int:
    """The quickstart with parsed arguments; returns the exit status.

    Raises:
        ConfigError: an option's value cannot work.
    """
    options = options_from(args)
    missing = _missing()
    if missing:
        print(
            f"mtraining quickstart: {', '.join(missing)} not installed: "
            "pip install '.[quickstart]' in the checkout of megatron-mtraining",
            file=sys.stderr,
        )
        return 1
    from .text import TextError

    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="mtraining-quickstart-") as folder:
            prepare(options, Path(folder))
            train(options, Path(folder))
            report(options, Path(folder))
    except (TextError, TrainingError) as error:
        print(f"mtraining quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mtraining quickstart: interrupted", file=sys.stderr)
        return 130
    print(f"\nTook {time.perf_counter() - started:.0f} s. Pictures: {options.output.resolve()}")
    return 0


class TrainingError(RuntimeError):
    """A training process failed; the message says which and why."""


def prepare(options: Options, folder: Path) -> None:
    """Tokenise real text into ``train.npy`` and ``held_out.npy``, int32 ``[n, s + 1]``."""
    from . import text

    files, held_out = text.split(text.source_files())
    print(
        f"Text: {len(files) + len(held_out)} files of Python's standard library; training a "
        f"tokenizer of {options.vocab_size} pieces on them",
        flush=True,
    )
    tokenizer = text.train_tokenizer(files, options.vocab_size, folder / "tokenizer")
    count = options.steps * options.batch
    length = options.seq_length
    sequences = text.tokenize(files, tokenizer, count, length)
    # A long file is many sequences in a row: mixed, so that no stretch of steps is one file only.
    np.random.default_rng(0).shuffle(sequences)
    np.save(folder / "train.npy", sequences)
    np.save(folder / "held_out.npy", text.tokenize(held_out, tokenizer, options.held_out, length))


def train(options: Options, folder: Path) -> None:
    """Run the training processes; when one fails the others are stopped.

    Raises:
        TrainingError: with the traceback of the process that failed first.
    """
    import torch.multiprocessing as processes

    from .train import worker

    link = "GPUs, NCCL" if options.device == "cuda" else "CPU processes, gloo"
    print(
        f"Model: {options.layers} layers, hidden {options.hidden}, {options.heads}/"
        f"{options.kv_heads} heads of {HEAD_DIM}, {options.seq_length} tokens x "
        f"{options.batch}, context parallel {options.processes} ({link})",
        flush=True,
    )
    if options.device == "cpu":
        print(
            "No GPU is used: here the sparse run computes all pairs and masks, so it is not "
            "faster; the kernels that skip them need a GPU",
            flush=True,
        )
    try:
        processes.spawn(worker, args=(options, str(folder)), nprocs=options.processes, daemon=True)
    except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
        raise TrainingError(f"process {error.error_index} failed:\n{error}") from error


def report(options: Options, folder: Path) -> None:
    """Write the table and the pictures into ``options.output``, and print the table."""
    from ..report import pictures

    runs = json.loads((folder / "runs.json").read_text())
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    text = summary(options, runs)
    print(f"\n{text}", flush=True)
    (output / "table.txt").write_text(text + "\n", encoding="utf-8")
    (output / "runs.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")

    shape = f"{options.layers} layers, {options.seq_length} tokens, {options.processes} ranks"
    kept = f"{runs['sparse']['density'][-1]:.0%} of the pairs kept"
    losses = {name: run["losses"] for name, run in runs.items()}
    pictures.loss_curves(output / "loss.png", losses, f"{shape}; sparse: {kept}")

    patterns = dict(np.load(folder / "patterns.npz"))
    titled = {
        name.replace("_head", ", head ").replace("layer", "layer "): shares
        for name, shares in patterns.items()
    }
    last = list(titled)[-options.heads]  # the first head of the last layer
    pictures.pattern(
        output / "pattern.png",
        titled[last],
        options.seq_length,
        f"Query-key pairs that {last} keeps, chosen from held-out text (grey: the future)",
    )
    pictures.patterns(
        output / "patterns.png",
        titled,
        options.seq_length,
        "Query-key pairs that each head keeps, chosen from held-out text (grey: the future)",
    )
    pictures.work(
        output / "work.png",
        np.asarray(runs["sparse"]["work"]),
        np.sum(runs["dense"]["work"]),
        "Attention work of the sparse run's last step, all layers and heads",
    )


def summary(options: Options, runs: dict) -> str:
    """The table that compares the runs."""
    from ..report.table import table

    dense_pairs = np.sum(runs["dense"]["work"])
    last = max(1, options.steps // 10)
    header = ["", *runs]
    tokens = options.seq_length * options.batch

    def each(label, value):
        return [label, *(value(run) for run in runs.values())]

    rows = [
        each("loss, first step", lambda run: f"{run['losses'][0]:.3f}"),
        each(f"loss, mean of last {last}", lambda run: f"{np.mean(run['losses'][-last:]):.3f}"),
        each("loss, held-out text", lambda run: f"{run['held_out']:.3f}"),
        each("density (pairs kept)", lambda run: f"{np.mean(run['density']):.1%}"),
        # The first step allocates and, on GPUs, compiles.
        each("tokens/s", lambda run: f"{tokens / statistics.median(run['seconds'][1:]):,.0f}"),
    ]
    for rank in range(options.processes):
        rows.append(
            each(
                f"work of rank {rank}",
                lambda run, rank=rank: f"{np.sum(run['work'][rank]) / dense_pairs:.1%}",
            )
        )
    note = (
        f"{options.steps} steps of {tokens} tokens. Dense is the same backend with a slash budget "
        "of the whole sequence.\nWork: query-key pairs in the last step, as a share of all pairs "
        "of dense attention.\nOne seed and a short run: a small difference in loss, either way, says little."
    )
    return f"{table(header, rows)}\n{note}"


def _missing() -> list[str]:
    from importlib.util import find_spec

    names = ("megatron.core", "sentencepiece", "matplotlib", "tqdm")
    missing = []
    for name in names:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:  # the parent package
            found = None
        if found is None:
            missing.append(name)
    return missing
