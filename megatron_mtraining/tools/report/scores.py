# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures of benchmarks' scores and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .pictures import COLOURS, _save, pyplot, ticker


def score_by_task(path: Path, bars: Mapping[str, Mapping[str, dict]], title: str) -> Path:
    """A bar for each task and attention, with its interval.

    Args:
        bars: for each attention the score of each task: ``mean``, and ``low`` and ``high`` of its interval,
            None without one.
    """
    tasks = list(dict.fromkeys(task for of in bars.values() for task in of))
    figure, axes = pyplot.subplots(
        figsize=(max(6, 0.55 * len(tasks) * len(bars) + 2), 4.6), layout="constrained"
    )
    width = 0.8 / max(1, len(bars))
    for number, (attention, of) in enumerate(bars.items()):
        found = [of[task] for task in tasks]
        at = np.arange(len(tasks)) + (number - (len(bars) - 1) / 2) * width
        means = np.array([each["mean"] for each in found])
        ends = [
            [mean if each[end] is None else each[end] for each, mean in zip(found, means)]
            for end in ("low", "high")
        ]
        axes.bar(
            at, means, width, color=COLOURS[number], label=attention,
            yerr=np.maximum([means - ends[0], ends[1] - means], 0), capsize=2, error_kw={"linewidth": 0.8},
        )  # fmt: skip
    axes.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("score (95% interval)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3, axis="y")
    return _save(figure, path)


def length_by_depth(path: Path, grids: Mapping[str, dict], title: str) -> Path:
    """Scores of a needle in a haystack as heat maps, one for each attention.

    Args:
        grids: for each attention ``lengths``, ``depths`` and ``scores``, a row for each depth, 0 to 1.
    """
    first = next(iter(grids.values()))
    size = max(4.0, 0.8 * len(first["lengths"]) + 2), max(3.4, 0.4 * len(first["depths"]) + 1.6)
    figure, every = pyplot.subplots(
        1, len(grids), figsize=(size[0] * len(grids), size[1]), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    image = None
    for axes, (attention, grid) in zip(every[0], grids.items()):
        scores = np.asarray(grid["scores"])
        image = axes.imshow(scores, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for row, column in np.ndindex(scores.shape):
            axes.text(
                column, row, f"{scores[row, column]:.2g}", ha="center", va="center", fontsize=8
            )
        axes.set_xticks(range(len(grid["lengths"])), [str(each) for each in grid["lengths"]])
        axes.set_yticks(range(len(grid["depths"])), [f"{each:g}" for each in grid["depths"]])
        axes.set_xlabel("length (tokens)")
        axes.set_title(attention, fontsize=10)
    every[0][0].set_ylabel("depth of the needle (%)")
    figure.colorbar(image, ax=list(every[0]), label="score")
    figure.suptitle(f"{title}: needle in a haystack", fontsize=10)
    return _save(figure, path)


def loss_by_position(
    path: Path, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str
) -> Path:
    """Mean loss of tokens by their position.

    Args:
        curves: positions in tokens and losses in nats, by name.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (name, (positions, losses)) in enumerate(curves.items()):
        line, colour = "o-" if name.startswith("dense") else "s--", COLOURS[number % len(COLOURS)]
        axes.plot(positions, losses, line, color=colour, markersize=3.5, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    return _save(figure, path)
