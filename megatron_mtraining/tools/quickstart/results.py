# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the two runs show: a table and pictures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np

from ..report import pictures
from ..report.table import table
from . import trained_heads
from .options import Options

FILES = (
    "table.txt",
    "runs.json",
    "loss.png",
    "pattern.png",
    "patterns.png",
    "trained.png",
    "work.png",
)
"""What is written."""
ON_GPUS = "What a density costs on GPUs: docs/performance.md (time), docs/settings.md (loss)."


def write_results(options: Options, folder: Path, output: Path) -> str:
    """Write the table of the runs in ``folder``, and all pictures, into ``output``; returns the table."""
    runs = json.loads((folder / "runs.json").read_text())
    text = summary(options, runs)
    (output / "table.txt").write_text(text + "\n", encoding="utf-8")
    (output / "runs.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")

    losses = {name: run["losses"] for name, run in runs.items()}
    about = (
        f"{options.layers} layers, {options.seq_length} tokens, {options.processes} ranks; "
        f"sparse: density {runs['sparse']['density'][-1]:.0%}"
    )
    pictures.loss_curves(output / "loss.png", losses, about)
    patterns = np.load(folder / "patterns.npy")
    named = {
        f"layer {layer}, head {head}": patterns[layer, head]
        for layer, head in np.ndindex(patterns.shape[:2])
    }
    last = f"layer {options.layers - 1}, head 0"
    title = "Query-key pairs selected by {}, on held-out text (grey: the future)"
    length = options.seq_length
    pictures.pattern(output / "pattern.png", named[last], length, title.format(last))
    pictures.patterns(output / "patterns.png", named, length, title.format("each head"))
    trained = trained_heads.read()
    pictures.patterns(
        output / "trained.png",
        trained_heads.pictures(trained),
        trained["tokens"],
        f"Recorded: 8 of {trained['heads_in_all']} heads of a trained model ({trained['model']}, "
        f"{trained['tokens']} tokens, policy price)\nall heads: density {trained['density']:.0%}, recall "
        f"{trained['recall']:.0%}",
    )
    pictures.work(
        output / "work.png",
        np.asarray(runs["sparse"]["work"]),
        np.sum(runs["dense"]["work"]),
        "Attention work in the last step of the sparse run, all layers and heads",
    )
    return text


def summary(options: Options, runs: dict) -> str:
    """The table that compares the runs."""
    dense_pairs = np.sum(runs["dense"]["work"])
    last = max(1, options.steps // 10)
    lines = {
        "loss, first step": lambda run: f"{run['losses'][0]:.3f}",
        f"loss, mean of last {last}": lambda run: f"{np.mean(run['losses'][-last:]):.3f}",
        "loss, held-out text": lambda run: f"{run['held_out']:.3f}",
        "density": lambda run: f"{np.mean(run['density']):.1%}",
        "recall, last step": lambda run: f"{run['recall'][-1]:.1%}",
        # Without the first step, which allocates and, on GPUs, compiles.
        "tokens/s": lambda run: (
            f"{options.seq_length / statistics.median(run['seconds'][1:]):,.0f}"
        ),
    }
    for rank in range(options.processes):
        lines[f"work of rank {rank}"] = lambda run, rank=rank: (
            f"{np.sum(run['work'][rank]) / dense_pairs:.1%}"
        )
    rows = [[label, *map(value, runs.values())] for label, value in lines.items()]
    note = (
        f"{options.steps} steps of {options.seq_length} tokens. Dense is the same backend with all slashes "
        "selected.\nDensity: selected fraction of the causal query-key pairs. Recall: attention mass of "
        "the selected pairs.\nWork of a rank: pairs in the last step, as a fraction of all causal pairs.\n"
        "This model is small and trained for a minute: its heads look alike (patterns.png). trained.png "
        "has heads of a trained model, which differ.\n"
        "One seed and a short run: small differences in loss mean little."
    )
    if options.device == "cpu":
        note += f"\n{ON_GPUS}"
    return f"{table(['', *runs], rows)}\n{note}"
