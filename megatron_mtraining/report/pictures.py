# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures as PNG files, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: there may be no display
from matplotlib import pyplot

COLOURS = ("#1f5fa8", "#e07b1a", "#3a8f4d", "#9a4fa3", "#b83a3a", "#6b6b6b", "#20a0a0", "#c2a000")


def loss_curves(path: Path, losses: Mapping[str, Sequence[float]], subtitle: str) -> Path:
    """Training loss against the step, a line a run, and below it how far each is from the first.

    Args:
        losses: nats per token at each step, of runs over the same data.
    """
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    names = list(losses)
    steps = np.arange(1, len(losses[names[0]]) + 1)
    for name, colour in zip(names, COLOURS, strict=False):
        dashed = "-" if name == names[0] else (0, (4, 1.5))
        above.plot(steps, losses[name], color=colour, linestyle=dashed, label=name)
        if name != names[0]:
            apart = np.subtract(losses[name], losses[names[0]])
            below.plot(steps, apart, color=colour, label=f"{name} − {names[0]}")
    above.set_ylabel("loss (nats per token)")
    above.set_title(f"Training loss from the same seed, on the same text\n{subtitle}", fontsize=11)
    above.legend()
    below.axhline(0, color="black", linewidth=0.8)
    limit = max(0.05, 1.1 * max(np.abs(line.get_ydata()).max() for line in below.lines))
    below.set_ylim(-limit, limit)
    below.set_ylabel("difference")
    below.set_xlabel("training step")
    below.legend(loc="upper left", fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    return _save(figure, path)


def pattern(path: Path, shares: np.ndarray, seq_length: int, title: str) -> Path:
    """One head's pattern as a heat map: queries down, keys to the right.

    Args:
        shares: ``[n, n]``, the share of the query-key pairs in each square that is kept, 0 to 1.
        seq_length: tokens along a side.
    """
    figure, axes = pyplot.subplots(figsize=(7.4, 6.4), layout="constrained")
    image = _heat_map(axes, shares, seq_length)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("key position (tokens)")
    axes.set_ylabel("query position (tokens)")
    figure.colorbar(image, ax=axes, shrink=0.85, label="share of the pairs that is kept")
    return _save(figure, path)


def patterns(path: Path, shares: Mapping[str, np.ndarray], seq_length: int, title: str) -> Path:
    """Several heads' patterns side by side, at most four in a row; keys are the titles."""
    columns = min(4, len(shares))
    rows = -(-len(shares) // columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(3.1 * columns + 1.2, 3.1 * rows + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[len(shares) :]:
        axes.set_visible(False)
    for axes, (name, share) in zip(grid.flat, shares.items(), strict=False):
        image = _heat_map(axes, share, seq_length)
        kept = share.sum() / (np.tri(len(share)).sum())
        axes.set_title(f"{name}: keeps {min(kept, 1):.0%}", fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("key position (tokens)", fontsize=10)
    figure.supylabel("query position (tokens)", fontsize=10)
    figure.colorbar(image, ax=grid, shrink=0.7, label="share of the pairs that is kept")
    return _save(figure, path)


def work(path: Path, pairs: np.ndarray, dense_pairs: float, title: str) -> Path:
    """Attention work of each rank in each round of the ring, as a share of what dense attention has.

    Args:
        pairs: ``[ranks, rounds]``, query-key pairs.
        dense_pairs: pairs of dense causal attention, over all ranks and rounds.
    """
    pairs = np.asarray(pairs, dtype=np.float64)
    ranks, steps = pairs.shape
    percent = 100 * pairs / dense_pairs
    figure, axes = pyplot.subplots(figsize=(max(5.5, 1.4 * ranks + 3), 4.6), layout="constrained")
    bottom = np.zeros(ranks)
    for step in range(steps):
        colour = COLOURS[step % len(COLOURS)]
        bars = axes.bar(
            np.arange(ranks),
            percent[:, step],
            bottom=bottom,
            color=colour,
            width=0.6,
            label=f"round {step}",
        )
        labels = [f"{value:.2f}%" for value in percent[:, step]]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
        bottom += percent[:, step]
    even = 100 / ranks
    axes.axhline(even, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"dense attention, shared evenly: {even:.1f}%",
        (ranks - 0.6, even),
        ha="right",
        va="bottom",
        fontsize=9,
    )
    axes.set_ylim(0, even * 1.12)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_xticks(np.arange(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel("context-parallel rank")
    axes.set_ylabel("query-key pairs\n(% of all pairs of dense causal attention)")
    busiest = pairs.sum(1).max() / pairs.sum(1).mean() - 1
    axes.set_title(f"{title}\nbusiest rank: {busiest:.1%} above the mean", fontsize=11)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return _save(figure, path)


def _heat_map(axes, shares: np.ndarray, seq_length: int):
    shares = np.asarray(shares)
    future = np.triu(np.ones(shares.shape, dtype=bool), 1)
    shown = np.ma.masked_where(future & (shares == 0), shares)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#e8e8e8")
    return axes.imshow(
        shown,
        cmap=colours,
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0, seq_length, seq_length, 0),
    )


def _save(figure, path: Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
