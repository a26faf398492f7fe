# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A page of charts: one HTML file that loads nothing, for light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import NamedTuple

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 84rem; padding: 1rem;
  background: #ffffff; color: #222222; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 1.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
p.source { margin: 0 0 1rem; opacity: .75; }
table { border-collapse: collapse; margin: 0 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem 1rem .15rem 0; border-bottom: 1px solid #8884; }
div.charts { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
svg { width: 100%; height: auto; } .dark { display: none; }
pre { overflow-x: auto; font-size: .8rem; }
ul.warnings { border-left: 4px solid #c2620c; padding: .5rem 1rem .5rem 2rem; margin: 0 0 1.5rem; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #dddddd; } .dark { display: block; } .light { display: none; }
}
"""


class Group(NamedTuple):
    """Charts under a heading.

    Attributes:
        heading: none if it is empty.
        charts: an SVG element for each theme, by its title.
    """

    heading: str
    charts: Mapping[str, Mapping[str, str]]


def document(
    title: str, source: str, warnings: Iterable[str], table: str, groups: Iterable[Group]
) -> str:
    """The page.

    Args:
        source: where its numbers come from.
        table: HTML; all else is text.
    """
    said = "".join(f"<li>{escape(each)}</li>" for each in warnings)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="source">{escape(source)}</p>',
            f'<ul class="warnings">{said}</ul>' if said else "",
            table,
            *map(_group, groups),
            "</body></html>",
        ]
    )


def text_block(text: str) -> str:
    """HTML of text in columns, such as a printed table."""
    return f"<pre>{escape(text)}</pre>"


def _group(group: Group) -> str:
    parts = []
    for name, by_theme in group.charts.items():
        pictures = "".join(
            f'<div class="{theme}" role="img" aria-label="{escape(name)}">{picture}</div>'
            for theme, picture in by_theme.items()
        )
        parts.append(f"<section><h3>{escape(name)}</h3>{pictures}</section>")
    heading = f"<h2>{escape(group.heading)}</h2>" if group.heading else ""
    return f'{heading}<div class="charts">{"".join(parts)}</div>'
