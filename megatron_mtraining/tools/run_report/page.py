# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The page: one HTML file that loads nothing."""

from __future__ import annotations

from html import escape

from . import charts
from .sources import Run, Series

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 84rem; padding: 1rem;
  background: #ffffff; color: #222222; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1rem; margin: 0 0 .25rem; }
p.source { margin: 0 0 1rem; overflow-wrap: anywhere; opacity: .75; }
table { border-collapse: collapse; margin: 0 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem 1rem .15rem 0; border-bottom: 1px solid #8884; }
div.charts { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
svg { width: 100%; height: auto; } .dark { display: none; }
ul.warnings { border-left: 4px solid #c2620c; padding: .5rem 1rem .5rem 2rem; margin: 0 0 1.5rem; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #dddddd; } .dark { display: block; } .light { display: none; }
}
"""
NUMBERS = (
    ("training loss", "loss", "{:.4f}"), ("density", "density", "{:.1%}"),
    ("recall", "recall", "{:.3f}"), ("price", "price", "{:.4g}"), ("seconds a step", "step_s", "{:.3f}"),
)  # fmt: skip
LAST = 20


def page(run: Run, title: str) -> str:
    """The report of a run."""
    parts = []
    light, dark = (charts.drawn(run, theme, charts.svg) for theme in charts.THEMES)
    for name in light:
        pictures = "".join(
            f'<div class="{theme}" role="img" aria-label="{escape(name)}">{of[name]}</div>'
            for theme, of in zip(charts.THEMES, (light, dark))
        )
        parts.append(f"<section><h2>{escape(name)}</h2>{pictures}</section>")
    said = [*_not_finite(run), *run.warnings]
    warnings = "".join(f"<li>{escape(each)}</li>" for each in said)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="source">{escape(run.source)}; {_steps(run)}</p>',
            f'<ul class="warnings">{warnings}</ul>' if warnings else "",
            _table(run),
            f'<div class="charts">{"".join(parts)}</div>',
            "</body></html>",
        ]
    )


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
