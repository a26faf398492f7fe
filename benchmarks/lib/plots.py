# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures of benchmark rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_mtraining.tools.report.pictures import COLOURS, pyplot

# What a colour stands for, by (implementation, whether the pattern has columns).
SERIES = {
    ("mtraining", False): ("mtraining, slashes", COLOURS[0]),
    ("mtraining", True): ("mtraining, slashes and so many columns", COLOURS[1]),
    ("flex", False): ("FlexAttention, the same blocks", COLOURS[2]),
    ("cudnn", False): ("cuDNN, dense", COLOURS[4]),
    ("flash", False): ("flash, dense", COLOURS[5]),
}
MARKERS = {65536: "o", 131072: "s", 262144: "^", 524288: "D"}


def newest(rows: list[dict]) -> list[dict]:
    """The attention rows of the commit, and its GPU, that has the most kinds of them, the last of each kind;
    of commits with equally many, the last: a run of a few cases is no picture. Without packed documents."""
    runs = {}
    for row in rows:
        if row["op"] in ("forward", "backward") and not row.get("documents"):
            names = ("op", "impl", "seq", "heads", "dim", "density", "vertical")
            kinds = runs.setdefault((row["commit"], row["gpu"]), {})
            kinds[tuple(row[name] for name in names)] = row
    return list(max(reversed(runs.values()), key=len, default={}).values())


def kernels(path: Path, rows: list[dict]) -> Path:
    """Rates of the attention kernels against density, forward and backward side by side.

    Lines join what differs in density alone; hollow markers are head dim 64.
    """
    rows = newest(rows)
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5.6), sharey=True)
    for axes, op in zip(panels, ("forward", "backward")):
        _panel(axes, [row for row in rows if row["op"] == op])
        axes.set_title(op)
        axes.set_xlabel("share of the causal pairs that is kept")
    panels[0].set_ylabel("TFLOP/s of what is kept")
    panels[0].set_ylim(bottom=0)
    figure.suptitle(f"Attention kernels, bf16, {rows[0]['gpu']}, commit {rows[0]['commit']}")
    figure.legend(handles=_legend(rows), loc="lower center", ncols=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _panel(axes, rows: list[dict]) -> None:
    lines = {}
    for row in rows:
        lines.setdefault((row["impl"], row["dim"], row["seq"], row["vertical"]), []).append(row)
    for (name, dim, seq, columns), found in lines.items():
        colour = SERIES[name, columns > 0][1]
        found.sort(key=lambda row: row["density"])
        rates = [row["tflops"] for row in found]
        axes.plot(
            [row["density"] for row in found],
            rates,
            color=colour,
            marker=MARKERS.get(seq, "v"),
            markerfacecolor="white" if dim == 64 else colour,
            linewidth=1.2,
        )
        if columns:
            far = (found[-1]["density"], rates[-1])
            axes.annotate(f" {columns}", far, fontsize=7, va="bottom", color=colour)
        if name == "cudnn":  # the rate to reach at any density
            axes.axhline(rates[-1], color=colour, linestyle=":", linewidth=0.8, alpha=0.6)
    axes.set_xscale("log")
    ticks = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.009, 1.2)
    axes.grid(alpha=0.3)


def _legend(rows: list[dict]) -> list:
    """A handle for each colour and each marker that the rows have."""
    drawn = {(row["impl"], row["vertical"] > 0) for row in rows}
    handles = [
        pyplot.Line2D([], [], color=colour, label=label)
        for key, (label, colour) in SERIES.items()
        if key in drawn
    ]
    grey = dict(color="#444444", linestyle="none")
    for seq in sorted({row["seq"] for row in rows}):
        label = f"{seq // 1024}K tokens"
        handles.append(pyplot.Line2D([], [], marker=MARKERS.get(seq, "v"), label=label, **grey))
    if any(row["dim"] == 64 for row in rows):
        hollow = dict(marker="o", markerfacecolor="white", label="hollow: head dim 64")
        handles.append(pyplot.Line2D([], [], **hollow, **grey))
    return handles


# Colours of what a rank does, by the names that a ring's trace gives.
SPANS = {
    "attend": COLOURS[0],
    "query": COLOURS[2],
    "key": COLOURS[6],
    "columns": COLOURS[1],
    "wait": COLOURS[4],
    "transfer": "#444444",
}
# Where a rank's row has them, and how high: beside its kernels there is what moves meanwhile.
LANES = {"wait": (0, 0.4), "transfer": (0.45, 0.1)}


def timeline(path: Path, layers: Mapping[str, Sequence[Sequence]], title: str) -> Path:
    """What each rank does during a layer's forward and backward, a panel a ring, on one scale of time.

    Args:
        layers: by the ring's name, for each rank its spans (:class:`timeline.Span`); waits for transfers are
            drawn half as high, and transfers as lines below.
    """
    ranks = max(len(layer) for layer in layers.values())
    figure, panels = pyplot.subplots(
        len(layers), 1, figsize=(12, 1.2 + len(layers) * (0.9 + 0.32 * ranks)), sharex=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    drawn = {}
    for axes, (name, layer) in zip(panels[:, 0], layers.items()):
        for rank, spans in enumerate(layer):
            for kind in dict.fromkeys(span.name for span in spans):
                bars = [(s.start, s.end - s.start) for s in spans if s.name == kind]
                middle, height = LANES.get(kind, (0, 0.8))
                colour = SPANS.get(kind, COLOURS[5])
                drawn[kind] = axes.broken_barh(
                    bars,
                    (rank + middle - height / 2, height),
                    color=colour,
                    edgecolor="white",
                    linewidth=0.4 if kind != "transfer" else 0,
                )
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel("rank")
        axes.set_yticks(range(len(layer)))
        axes.set_ylim(len(layer) - 0.4, -0.6)
        axes.grid(axis="x", alpha=0.3)
    panels[-1, 0].set_xlabel("milliseconds since all ranks began")
    figure.suptitle(title, fontsize=11)
    names = sorted(drawn, key=[*SPANS, *drawn].index)
    figure.legend(
        [drawn[name] for name in names], names, loc="outside lower center", ncols=6, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
