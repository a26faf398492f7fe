# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures as PNG files, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: there may be no display
from matplotlib import pyplot, ticker

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


def recall_density(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]],
    target: float,
    title: str,
) -> Path:
    """Recall against density, a line a policy: solid the mean, dotted the worst tenth of the heads.

    Args:
        curves: density, mean recall and recall of the worst tenth, all as shares, at each setting.
        target: recall that is marked.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5.6), layout="constrained")
    for number, (name, (density, mean, worst)) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        percent = 100 * np.asarray(density)
        axes.plot(percent, 100 * np.asarray(mean), "o-", color=colour, markersize=4, label=name)
        axes.plot(percent, 100 * np.asarray(worst), ":", color=colour, linewidth=1.2)
    axes.axhline(100 * target, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"target {target:.0%}", (0.01, 100 * target), xycoords=("axes fraction", "data"),
        va="bottom", fontsize=9,
    )  # fmt: skip
    axes.set_xscale("log")
    # Powers of ten alone would be one label, or none.
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("density (% of all causal pairs that is kept)")
    axes.set_ylabel("recall (% of the true attention that is kept)")
    axes.set_title(f"{title}; dotted: nine in ten heads are above", fontsize=10)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3, which="both")
    return _save(figure, path)


def layers_by_heads(path: Path, values: np.ndarray, title: str, label: str) -> Path:
    """A share of each head as a heat map: layers down, heads to the right; crosses where not finite.

    Args:
        values: ``[layers, heads]``, 0 to 1.
    """
    values = np.asarray(values, dtype=np.float64)
    layers, heads = values.shape
    figure, axes = pyplot.subplots(
        figsize=(max(5.5, 0.3 * heads + 2.5), max(3.5, 0.22 * layers + 1.5)), layout="constrained"
    )
    shown = np.ma.masked_invalid(values)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#e8e8e8")
    image = axes.imshow(shown, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    rows, columns = np.nonzero(~np.isfinite(values))
    axes.plot(columns, rows, "x", color="#b83a3a", markersize=6)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=20))
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, label=label)
    return _save(figure, path)


def attention_and_pattern(
    path: Path, mass: np.ndarray, shares: np.ndarray, seq_length: int, title: str
) -> Path:
    """One head's true attention, and beside it the pairs that its pattern keeps.

    Args:
        mass: ``[n, n]``, the share of an average query's attention that each cell of keys has.
        shares: ``[n, n]``, the share of the pairs in each cell that is kept. NaN rows are left out.
        seq_length: tokens along a side.
    """
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12.4, 6), sharex=True, sharey=True, layout="constrained"
    )
    mass = np.asarray(mass, dtype=np.float64)
    seen = np.ma.masked_where(~(mass > 0), mass)
    colours = matplotlib.colormaps["magma"].with_extremes(bad="#e8e8e8")
    image = left.imshow(
        seen,
        cmap=colours,
        norm=matplotlib.colors.LogNorm(vmin=1e-5, vmax=1, clip=True),
        interpolation="nearest",
        extent=(0, seq_length, seq_length, 0),
    )
    left.set_title("true attention", fontsize=10)
    figure.colorbar(image, ax=left, shrink=0.8, label="share of a query's attention in the cell")
    # By the square root: a single column in a cell of many keys would not show.
    norm = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=1)
    image = _heat_map(right, shares, seq_length, norm)
    right.set_title("pattern", fontsize=10)
    figure.colorbar(image, ax=right, shrink=0.8, label="share of the pairs that is kept")
    for axes in (left, right):
        axes.set_xlabel("key position (tokens)")
    left.set_ylabel("query position (tokens)")
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def _heat_map(axes, shares: np.ndarray, seq_length: int, norm=None):
    shares = np.asarray(shares)
    future = np.triu(np.ones(shares.shape, dtype=bool), 1)
    shown = np.ma.masked_where(future & (shares == 0) | np.isnan(shares), shares)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#e8e8e8")
    return axes.imshow(
        shown,
        cmap=colours,
        norm=norm or matplotlib.colors.Normalize(0, 1),
        interpolation="nearest",
        extent=(0, seq_length, seq_length, 0),
    )


def _save(figure, path: Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
