# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The page on a run: its table, and what it says above the charts."""

from __future__ import annotations

from html import escape

from ..report.page import Group, document
from ..report.themes import THEMES, svg
from . import charts
from .sources import Run, Series
from .timeline import Timeline

NUMBERS = (
    ("training loss", "loss", "{:.4f}"), ("density", "density", "{:.1%}"),
    ("recall", "recall", "{:.3f}"), ("price", "price", "{:.4g}"), ("seconds a step", "step_s", "{:.3f}"),
)  # fmt: skip
LAST = 20


def page(run: Run, title: str, timeline: Timeline | None = None) -> str:
    """The report of a run, with what a step of it did if there is a trace."""
    drawn = {theme: charts.drawn(run, theme, svg, timeline) for theme in THEMES}
    said = [*_not_finite(run), *run.warnings]
    group = Group(
        "", {name: {theme: of[name] for theme, of in drawn.items()} for name in drawn["light"]}
    )
    source = f"{run.source}; {_steps(run)}"
    if timeline is not None:
        source += f"; timeline: {timeline.source}"
    return document(title, source, said, _table(run), [group])


def _steps(run: Run) -> str:
    steps = sorted(
        {step for values in (*run.series.values(), *run.not_finite.values()) for step in values}
    )
    return f"steps {steps[0]} to {steps[-1]}"


def _not_finite(run: Run) -> list[str]:
    """Which values the charts and the table leave out."""
    names = {key: name for name, key, _ in NUMBERS}
    return [
        f"{names.get(key, key.replace('_', ' '))} is NaN or infinite in {_ranges(steps)}: left out below"
        for key, steps in run.not_finite.items()
    ]


def _ranges(steps: list[int]) -> str:
    """Steps in words: runs of consecutive steps by their ends, the first few of them."""
    ends: list[list[int]] = []
    for step in steps:
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    named = [str(first) if first == last else f"{first} to {last}" for first, last in ends[:LAST]]
    more = sum(last - first + 1 for first, last in ends[LAST:])
    return f"step{'s' * (len(steps) > 1)} {', '.join(named)}" + (
        f" and {more} more" if more else ""
    )


def _table(run: Run) -> str:
    """First and last values, and the mean of the last steps."""
    rows = []
    for name, key, form in NUMBERS:
        if values := run.series.get(key):
            rows.append(_row(name, values, form))
    head = f"<tr><th></th><th>first</th><th>last</th><th>mean of the last {LAST}</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>" if rows else ""


def _row(name: str, values: Series, form: str) -> str:
    found = [values[step] for step in sorted(values)]
    last = found[-LAST:]
    cells = (form.format(each) for each in (found[0], found[-1], sum(last) / len(last)))
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
