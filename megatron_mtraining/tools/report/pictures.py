# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures as files, drawn without a display: PNG, or what the end of the name says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: there may be no display
from matplotlib import pyplot, ticker

COLOURS = ("#1f5fa8", "#e07b1a", "#3a8f4d", "#9a4fa3", "#b83a3a", "#6b6b6b", "#20a0a0", "#c2a000")


def loss_curves(path: Path, losses: Mapping[str, Sequence[float]], subtitle: str) -> Path:
    """Training loss of each run by step, and below it the difference from the first run.

    Args:
        losses: nats per token at each step, for each run's name; all over the same data.
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


def pattern(path: Path, density: np.ndarray, seq_length: int, title: str) -> Path:
    """One head's pattern as a heat map with a query per row and a key per column.

    Args:
        density: ``[n, n]``, the fraction of the query-key pairs in each cell that is selected.
        seq_length: tokens along a side.
    """
    figure, axes = pyplot.subplots(figsize=(7.4, 6.4), layout="constrained")
    image = _heat_map(axes, density, seq_length)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("key position (tokens)")
    axes.set_ylabel("query position (tokens)")
    figure.colorbar(image, ax=axes, shrink=0.85, label="density (fraction of pairs selected)")
    return _save(figure, path)


def patterns(path: Path, heads: Mapping[str, np.ndarray], seq_length: int, title: str) -> Path:
    """Several heads' patterns as in :func:`pattern` side by side, at most four in a row, by their titles."""
    columns = min(4, len(heads))
    rows = -(-len(heads) // columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(3.1 * columns + 1.2, 3.1 * rows + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[len(heads) :]:
        axes.set_visible(False)
    for axes, (name, density) in zip(grid.flat, heads.items(), strict=False):
        image = _heat_map(axes, density, seq_length)
        mean = density.sum() / np.tri(len(density)).sum()
        axes.set_title(f"{name}: density {min(mean, 1):.0%}", fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("key position (tokens)", fontsize=10)
    figure.supylabel("query position (tokens)", fontsize=10)
    figure.colorbar(image, ax=grid, shrink=0.7, label="density (fraction of pairs selected)")
    return _save(figure, path)


def work(path: Path, pairs: np.ndarray, dense_pairs: float, title: str) -> Path:
    """Attention work of each rank in each round of the ring, as a fraction of dense attention's.

    Args:
        pairs: ``[ranks, rounds]``, query-key pairs.
        dense_pairs: pairs of dense causal attention, over all ranks and rounds.
    """
    pairs = np.asarray(pairs, dtype=np.float64)
    ranks, rounds = pairs.shape
    percent = 100 * pairs / dense_pairs
    figure, axes = pyplot.subplots(figsize=(max(5.5, 1.4 * ranks + 3), 4.6), layout="constrained")
    bottom = np.zeros(ranks)
    for number in range(rounds):
        colour = COLOURS[number % len(COLOURS)]
        bars = axes.bar(
            np.arange(ranks),
            percent[:, number],
            bottom=bottom,
            color=colour,
            width=0.6,
            label=f"round {number}",
        )
        labels = [f"{value:.2f}%" for value in percent[:, number]]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
        bottom += percent[:, number]
    even = 100 / ranks
    axes.axhline(even, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"dense attention, evenly distributed: {even:.1f}%",
        (ranks - 0.6, even),
        ha="right",
        va="bottom",
        fontsize=9,
    )
    axes.set_ylim(0, even * 1.12)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_xticks(np.arange(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel("context-parallel rank")
    axes.set_ylabel("query-key pairs\n(% of all causal pairs)")
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
    """Recall by density, two lines for each policy: solid for the mean, dotted for a low percentile.

    Args:
        curves: density, mean recall and the 10th percentile of recall, all as fractions, for each setting.
        target: the recall to mark.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5.6), layout="constrained")
    # Those of a dark page are its own.
    colours = COLOURS if _is_light() else pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
    for number, (name, (density, mean, decile)) in enumerate(curves.items()):
        colour = colours[number % len(colours)]
        percent = 100 * np.asarray(density)
        axes.plot(percent, 100 * np.asarray(mean), "o-", color=colour, markersize=4, label=name)
        axes.plot(percent, 100 * np.asarray(decile), ":", color=colour, linewidth=1.2)
    axes.axhline(100 * target, color=pyplot.rcParams["text.color"], linestyle="--", linewidth=1)
    axes.annotate(
        f"target {target:.0%}", (0.01, 100 * target), xycoords=("axes fraction", "data"),
        va="bottom", fontsize=9,
    )  # fmt: skip
    axes.set_xscale("log")
    # Powers of ten alone would be one label, or none.
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("density (% of causal query-key pairs kept)")
    axes.set_ylabel("recall (% of attention mass kept)")
    axes.set_title(f"{title}; dotted: 10th percentile of heads", fontsize=10)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3, which="both")
    return _save(figure, path)


def layers_by_heads(
    path: Path, values: np.ndarray, title: str, label: str, layers: Sequence[int] | None = None
) -> Path:
    """A value of each head as a heat map with a layer per row; crosses where it is not finite.

    Args:
        values: ``[layers, heads]``, 0 to 1.
        layers: the number of each layer; None for 0, 1, ...
    """
    values = np.asarray(values, dtype=np.float64)
    height, heads = values.shape
    figure, axes = pyplot.subplots(
        figsize=(max(5.5, 0.3 * heads + 2.5), max(3.5, 0.22 * height + 1.5)), layout="constrained"
    )
    shown = np.ma.masked_invalid(values)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=_nothing())
    image = axes.imshow(shown, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    rows, columns = np.nonzero(~np.isfinite(values))
    axes.plot(columns, rows, "x", color="#b83a3a", markersize=6)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=20))
    if layers is not None and list(layers) != list(range(height)):
        axes.set_yticks(range(height), [str(layer) for layer in layers])
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, label=label)
    return _save(figure, path)


def attention_and_pattern(
    path: Path,
    mass: np.ndarray,
    density: np.ndarray,
    seq_length: int,
    title: str,
    parts: Sequence[str] = ("dense attention", "pattern"),
) -> Path:
    """One head's dense attention, and beside it the pairs that its pattern selects.

    Args:
        mass: ``[n, n]``, the attention mass of each cell, averaged over its queries.
        density: ``[n, n]``, the fraction of the pairs in each cell that is selected. NaN rows are left out.
        seq_length: tokens along a side.
        parts: which of the two to draw.
    """
    figure, grid = pyplot.subplots(
        1, len(parts), figsize=(6.2 * len(parts), 6 if title else 4.9), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for part, axes in zip(parts, grid[0]):
        if part == "pattern":
            # With a linear scale a single column in a cell of many keys would not show.
            norm = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=1)
            image = _heat_map(axes, density, seq_length, norm)
            label = "density (fraction of pairs selected)"
        else:
            image = _mass_map(axes, mass, seq_length)
            label = "mean attention mass of a query in the cell"
        figure.colorbar(image, ax=axes, shrink=0.8, label=label)
        if len(parts) > 1:
            axes.set_title(part, fontsize=10)
        axes.set_xlabel("key position (tokens)")
    grid[0][0].set_ylabel("query position (tokens)")
    if title:
        figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def _mass_map(axes, mass: np.ndarray, seq_length: int):
    mass = np.asarray(mass, dtype=np.float64)
    return axes.imshow(
        np.ma.masked_where(~(mass > 0), mass),
        cmap=matplotlib.colormaps["magma"].with_extremes(bad=_nothing()),
        norm=matplotlib.colors.LogNorm(vmin=1e-5, vmax=1, clip=True),
        interpolation="nearest",
        extent=(0, seq_length, seq_length, 0),
    )


def _nothing() -> str:
    """The colour of cells without a value, near the page's."""
    return "#e8e8e8" if _is_light() else "#2a2d33"


def _is_light() -> bool:
    return matplotlib.colors.to_rgb(pyplot.rcParams["figure.facecolor"])[0] > 0.5


def _heat_map(axes, density: np.ndarray, seq_length: int, norm=None):
    density = np.asarray(density)
    future = np.triu(np.ones(density.shape, dtype=bool), 1)
    shown = np.ma.masked_where(future & (density == 0) | np.isnan(density), density)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=_nothing())
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
