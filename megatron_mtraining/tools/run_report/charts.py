# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The charts of a run, drawn by matplotlib for light and dark pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import matplotlib
import numpy as np
from matplotlib import pyplot, ticker
from matplotlib.figure import Figure

from ..report.themes import COLOURS, THEMES, style
from .sources import Run, Series
from .timeline import NAMES, Timeline

Picture = TypeVar("Picture")

KIND_COLOURS = {theme: (*COLOURS[theme], THEMES[theme]["lines"]) for theme in THEMES}
"""Of search, attention, loss, communication and other work."""
WIDTH = 5.6
"""Inches of a chart: on a phone, its text is as small as can be read."""
SMOOTHED = 20
"""A line of a mean over so many steps is drawn through values of more steps than twice that."""


class Chart(NamedTuple):
    """
    Attributes:
        lines: names of series, by their labels.
        is_share: shown in percent.
        smooth: whether a running mean is drawn.
        steady: twice the median at most is shown: the first step compiles.
    """

    title: str
    lines: dict[str, str]
    is_share: bool = False
    smooth: bool = False
    steady: bool = False


CHARTS = (
    Chart("Loss (nats a token)", {"training": "loss", "evaluation": "eval_loss"}, smooth=True),
    Chart("Seconds a step", {"": "step_s"}, steady=True),
    Chart("Tokens a second", {"": "tokens_per_s"}),
    Chart("TFLOP/s a GPU", {"": "tflops"}),
    Chart("Density (pairs that are computed)",
          {"mean": "density", "lowest head": "density_lowest", "highest head": "density_highest"}, True),
    Chart("Recall (attention mass that is kept)", {"mean": "recall", "lowest head": "recall_lowest"}, True),
    Chart("Pairs of the backward", {"": "backward_density"}, True),
    Chart("Price (median)", {"": "price"}),
    Chart("Milliseconds of a step",
          {"search": "search_ms", "attention": "attention_ms", "loss": "loss_ms",
           "exposed communication": "exposed_ms"}),
    Chart("Attention of the slowest rank over the mean", {"": "imbalance"}),
    Chart("Heads at a cap", {"": "capped"}, True),
    Chart("Idle time of ranks in attention", {"": "idle"}, True),
    Chart("Gradient norm", {"": "grad_norm"}),
    Chart("Learning rate", {"": "learning_rate"}),
)  # fmt: skip


def drawn(
    run: Run, theme: str, save: Callable[[Figure], Picture], timeline: Timeline | None = None
) -> dict[str, Picture]:
    """By title, what ``save`` makes of the chart of each thing that the run has logged, and of a step."""
    series, figures = run.series, {}
    with matplotlib.rc_context(style(theme)):
        for chart in CHARTS:
            lines = {label: series[name] for label, name in chart.lines.items() if name in series}
            if lines:
                figures[chart.title] = _lines(chart, lines, theme)
        for name, title in (("density", "Density by layer"), ("recall", "Recall by layer")):
            if run.layers.get(name):
                figures[title] = _by_layer(run.layers[name])
        if timeline is not None:
            figures["Timeline of a step"] = _timeline(timeline, theme)
        found = {title: save(figure) for title, figure in figures.items()}
    for figure in figures.values():
        pyplot.close(figure)
    return found


def _lines(chart: Chart, lines: dict[str, Series], theme: str) -> Figure:
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.1), layout="constrained")
    for label, values in lines.items():
        steps = np.array(sorted(values))
        heights = np.array([values[step] for step in steps])
        if chart.smooth and len(steps) > 2 * SMOOTHED:
            axes.plot(steps, heights, linewidth=0.8, alpha=0.35, color=COLOURS[theme][0])
            mean = np.convolve(heights, np.ones(SMOOTHED) / SMOOTHED, "valid")
            name = f"{label}, mean of {SMOOTHED} steps"
            axes.plot(steps[SMOOTHED - 1 :], mean, label=name, color=COLOURS[theme][0])
        else:
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, heights, marker=marker, label=label, linewidth=1.4)
    if not any(any(values.values()) for values in lines.values()):
        axes.set_ylim(0, 1)  # else zero would be in the middle
    if chart.is_share:
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_xlabel("step")
    if chart.steady:
        shown = np.array([height for values in lines.values() for height in values.values()])
        top = 2 * np.median(shown)
        if shown.max() > top:
            axes.set_ylim(0, top)
            axes.set_xlabel(f"step; the longest, {shown.max():.3g}, is beyond")
    axes.grid(alpha=0.5)
    if any(lines):
        axes.legend(fontsize=9)
    return figure


def _by_layer(layers: dict[int, Series]) -> Figure:
    steps = sorted({step for values in layers.values() for step in values})
    numbers = sorted(layers)
    shown = np.array([[layers[n].get(step, np.nan) for step in steps] for n in numbers])
    figure, axes = pyplot.subplots(
        figsize=(WIDTH, max(2.4, 0.16 * len(numbers) + 1.4)), layout="constrained"
    )
    image = axes.imshow(
        shown, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, len(numbers) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(numbers)), [str(n) for n in numbers], fontsize=7)
    axes.set_xlabel("step")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, format=ticker.PercentFormatter(1.0))
    return figure


def _timeline(timeline: Timeline, theme: str) -> Figure:
    colours = dict(zip(NAMES, KIND_COLOURS[theme]))
    figure, axes = pyplot.subplots(
        figsize=(WIDTH, 0.32 * len(timeline.rows) + 1.5), layout="constrained"
    )
    axes.imshow(
        np.ma.masked_less(timeline.cells, 0), aspect="auto", interpolation="nearest", vmin=0,
        vmax=len(NAMES) - 1, cmap=matplotlib.colors.ListedColormap(list(colours.values())),
        extent=(0, timeline.milliseconds, len(timeline.rows) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(timeline.rows)), timeline.rows, fontsize=8)
    axes.set_xlabel("milliseconds")
    for row in range(1, len(timeline.rows)):
        axes.axhline(row - 0.5, color=pyplot.rcParams["figure.facecolor"], linewidth=3)
    shown = [
        matplotlib.patches.Patch(color=colour, label=name)
        for number, (name, colour) in enumerate(colours.items())
        if (timeline.cells == number).any()
    ]
    figure.legend(handles=shown, loc="outside upper center", ncols=len(shown), fontsize=9)
    return figure
