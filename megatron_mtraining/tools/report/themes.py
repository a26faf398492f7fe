# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How figures look on light and dark pages."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display
from matplotlib.figure import Figure

THEMES = {
    "light": dict(text="#222222", page="#ffffff", lines="#cccccc"),
    "dark": dict(text="#dddddd", page="#16181c", lines="#44484f"),
}
COLOURS = {
    "light": ("#1f5fa8", "#c2620c", "#2f7d42", "#8a4f9e"),
    "dark": ("#6fa8f0", "#f0a050", "#70c088", "#c79be0"),
}


def style(theme: str) -> dict:
    """Settings of matplotlib."""
    of = THEMES[theme]
    text = {f"{name}.color": of["text"] for name in ("text", "xtick", "ytick")}
    return {
        **text, "axes.labelcolor": of["text"], "axes.edgecolor": of["lines"], "grid.color": of["lines"],
        "figure.facecolor": of["page"], "axes.facecolor": of["page"], "savefig.facecolor": of["page"],
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS[theme]), "svg.fonttype": "none",
        "svg.hashsalt": "report", "font.size": 10, "legend.framealpha": 0.0,
    }  # fmt: skip


def svg(figure: Figure) -> str:
    """The figure as an element of a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def svg_by_theme(draw: Callable[[Path], object]) -> dict[str, str]:
    """A picture as an element of a page for each theme.

    Args:
        draw: writes the picture to a file, of the kind that the end of its name says.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        for theme in THEMES:
            with matplotlib.rc_context(style(theme)):
                draw(path)
            text = path.read_text(encoding="utf-8")
            found[theme] = text[text.index("<svg") :]
    return found


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=150)
    return content.getvalue()
