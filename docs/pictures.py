# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pictures of docs/performance.md and docs/balance.md, from the rows of ``benchmarks/results/*.jsonl``.

``docs/generate.py`` draws them. Each file carries a hash of the figures that it shows, by which a stale one
is found: pixels differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import tables
from tables import kernel_tables, pattern_tables, ring_tables, sparsebalance_tables, step_tables
from tables.common import tokens

from benchmarks.model import frontier_tables

IMAGES = Path(__file__).parent / "images"
KEY = "Rows"
"""Name of the PNG text that has the hash."""
BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999",
)  # fmt: skip
"""Okabe and Ito's colours."""
PART_COLOURS = dict(zip(step_tables.PARTS, (BLUE, GREEN, ORANGE, PINK, RED, GREY)))


# What each picture shows, as plain lists and dicts; is_stale() compares their hash


def step_data() -> list[dict]:
    """Bars of Qwen2.5-3B: seconds of each part; ``None`` for a step that was not profiled."""
    bars = []
    profiled = {
        (row["seq"], row["attention"]): row for row in step_tables.profiled() if row["world"] == 4
    }
    for seq in (131072, 524288):
        sparse, dense = profiled[seq, "mtraining"], profiled.get((seq, "fused"))
        for row in (dense or step_tables.dense_of(tables.step(seq)), sparse):
            kind = (
                "dense"
                if row["attention"] == "fused"
                else f"sparse, {tables.percent(row['density'])}"
            )
            whole = row["iter_ms"] / 1000
            parts = row.get("breakdown")
            parts = parts and {name: parts[name] / 1000 for name in step_tables.PARTS}
            bars.append(
                dict(seq=tokens(seq), kind=kind, seconds=whole, parts=parts, commit=row["commit"])
            )
    return bars


def kernel_data() -> list[dict]:
    """A point for each case and direction: density, and rate over cuDNN's dense rate."""
    points = []
    for case in kernel_tables.kernel_rows():
        for op in ("forward", "backward"):
            row, flex = case[f"{op} mtraining"], case.get(f"{op} flex")
            point = {
                name: row[name] for name in ("op", "seq", "dim", "density", "vertical", "documents")
            }
            point |= dict(share=row["share_of_cudnn"], flex=flex and flex["share_of_cudnn"])
            points.append(point | dict(commit=row["commit"], gpu=row["gpu"]))
    return [point for point in points if not point["documents"]]


def layer_data() -> list[dict]:
    """Forward, and forward and backward, of one layer, by ranks: the newest row of each number of ranks."""
    found = []
    cases = ("512K 1000 columns, 100 diagonals", "512K 3500 columns, 30 diagonals")
    for case in cases:
        for world in (2, 4):
            rows = [
                row for row in tables.rows("rings")
                if row["case"] == case and row["world"] == world and row["inner"] == world
                and row["hosts"] == 1 and row.get("ranks_per_gpu", 1) == 1
            ]  # fmt: skip
            row = rows[-1]
            figures = {
                name: row[name] for name in ("fwd_ms", "fwdbwd_ms", "density", "commit", "gpu")
            }
            found.append(dict(case=case, world=world, **figures))
    return found


def balance_data() -> list[dict]:
    """Max / mean over ranks of all rounds' pairs, by layout and ranks, for a real layer's pattern."""
    found = []
    for layout in ("striped", "zigzag", "contiguous"):
        for world in (4, *ring_tables.WORLDS):
            row = ring_tables.balance_row("real layer08, stretched", world, layout)
            found.append(
                dict(layout=layout, world=world, ratio=row["exposed"], commit=row["commit"])
            )
    return found


def recall_data() -> list[dict]:
    """Density and recall of each setting at 32K tokens of code and of prose."""
    return [
        dict(text=pattern_tables.TEXTS[text], policy=name, points=points)
        for text in ("code", "moby.txt")
        for (policy, estimator), name in pattern_tables.POLICIES.items()
        if (points := pattern_tables.curve("qwen.gguf", text, 32768, policy, estimator))
    ]


def sparsebalance_data() -> list[dict]:
    """Attention of the slowest rank and of the mean one on 64 GPUs, and max/mean by GPUs, of each mode."""
    found = []
    for (name, gpus, waits, mode), row in sparsebalance_tables.found("simulated").items():
        if name == "bimodal" and waits == "step":
            figures = ("attention_ms", "mean_attention_ms", "max_over_mean", "recall", "commit")
            found.append(dict(mode=mode, gpus=gpus, **{figure: row[figure] for figure in figures}))
    return found


def frontier_data() -> list[dict]:
    """The joined rows, of which the places are."""
    names = {
        name
        for panels in frontier_tables.PANELS.values()
        for up, right, _ in panels
        for name in (up, right)
    }
    times = [
        f"{kind}_ms_{label}"
        for kind in ("layer", "search", "dense")
        for label in frontier_tables.TIMED
    ]
    names = [
        *sorted(names - set(frontier_tables.TIMED)),
        *times,
        "model",
        "policy",
        "steps",
        "commit",
    ]
    return [{name: row[name] for name in names} for row in tables.rows("frontier")]


# How they are drawn


def draw_steps(figure, bars: list[dict]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    for axes, seq in zip((left, right), dict.fromkeys(bar["seq"] for bar in bars)):
        own = [bar for bar in bars if bar["seq"] == seq]
        for at, bar in enumerate(own):
            bottom = 0.0
            if bar["parts"] is None:
                axes.bar(at, bar["seconds"], 0.6, color="white", edgecolor=GREY, hatch="//")
                axes.text(
                    at, bar["seconds"] / 2, "not\nprofiled", ha="center", va="center", fontsize=8
                )
            for part, seconds in (bar["parts"] or {}).items():
                axes.bar(at, seconds, 0.6, bottom, color=PART_COLOURS[part])
                bottom += seconds
            axes.text(
                at, max(bottom, bar["seconds"]), f"{bar['seconds']:.3g} s", ha="center", va="bottom"
            )
        axes.set_xticks(range(len(own)), [bar["kind"] for bar in own])
        axes.set_xlim(-0.6, len(own) - 0.4)
        axes.set_title(f"{seq} tokens")
        axes.set_ylabel("seconds per step")
        axes.margins(y=0.1)
    handles = [right.bar(0, 0, color=colour, label=part) for part, colour in PART_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle("Qwen2.5-3B's shape, 4 H200, random weights: one training step")


def draw_kernels(figure, points: list[dict]) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    kinds = {
        "slashes, dim 128": (BLUE, "o", lambda p: p["dim"] == 128 and not p["vertical"]),
        "slashes and 1000 columns": (ORANGE, "s", lambda p: p["vertical"] == 1000),
        "slashes and 3500 columns": (GREEN, "^", lambda p: p["vertical"] == 3500),
        "slashes, dim 64": (PINK, "D", lambda p: p["dim"] == 64),
    }
    for axes, op in zip(panels, ("forward", "backward")):
        own = [point for point in points if point["op"] == op]
        for label, (colour, marker, fits) in kinds.items():
            xy = [(p["density"], p["share"]) for p in own if fits(p)]
            axes.plot(*zip(*xy), marker, color=colour, label=label)
        xy = [(p["density"], p["flex"]) for p in own if p["flex"]]
        axes.plot(*zip(*xy), "x", color=GREY, label="FlexAttention, the same blocks")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        ticks = (0.01, 0.03, 0.1, 0.3, 1)
        axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 1.2)
        axes.set_xlabel("density")
        axes.set_title(op)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("TFLOP/s of selected pairs,\nover cuDNN dense")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle("Attention kernels, 64K to 512K tokens, bf16, one H200")


def draw_layers(figure, found: list[dict]) -> None:
    panels = figure.subplots(1, 2)
    for axes, case in zip(panels, dict.fromkeys(row["case"] for row in found)):
        own = [row for row in found if row["case"] == case]
        for name, colour, label in (
            ("fwdbwd_ms", ORANGE, "forward and backward"),
            ("fwd_ms", BLUE, "forward"),
        ):
            worlds, values = [row["world"] for row in own], [row[name] for row in own]
            axes.plot(worlds, values, "o-", color=colour, label=label)
            half = [values[0] * worlds[0] / world for world in worlds]
            axes.plot(worlds, half, ":", color=colour, linewidth=1)
            for x, y in zip(worlds, values):
                axes.annotate(
                    f"{y:.3g}", (x, y), textcoords="offset points", xytext=(0, 6), ha="center"
                )
        axes.set_xticks([2, 4])
        axes.set_xlim(1.5, 4.5)
        axes.set_ylim(0, 1.15 * max(row["fwdbwd_ms"] for row in own))
        axes.set_xlabel("GPUs")
        axes.set_title(f"{case}\ndensity {tables.percent(own[-1]['density'], 2)}", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ms per layer, with host time")
    handles, labels = panels[0].get_legend_handles_labels()
    labels.append("half the time on twice the GPUs")
    handles.append(panels[0].plot([], [], ":", color="black")[0])
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle("One layer over H200s of one host, 16/2 heads, dim 128")


def draw_balance(figure, found: list[dict]) -> None:
    axes = figure.subplots()
    names = {
        "striped": ("block-striped", BLUE),
        "zigzag": ("zigzag", ORANGE),
        "contiguous": ("contiguous", GREEN),
    }
    for layout, (label, colour) in names.items():
        own = [row for row in found if row["layout"] == layout]
        axes.plot(
            [r["world"] for r in own], [r["ratio"] for r in own], "o-", color=colour, label=label
        )
    axes.set_xscale("log", base=2)
    worlds = [row["world"] for row in found if row["layout"] == "striped"]
    axes.set_xticks(worlds, worlds)
    axes.set_ylim(0.95, None)
    axes.set_xlabel("context-parallel ranks (inner groups of up to 8)")
    axes.set_ylabel("critical path / mean work of a rank")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title("Imbalance of one real layer's pattern, stretched to 512K tokens (counted)")


def draw_recall(figure, found: list[dict]) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    colours = (BLUE, "black", ORANGE, PINK, GREEN, SKY)
    for axes, text in zip(panels, dict.fromkeys(line["text"] for line in found)):
        for line, colour in zip([line for line in found if line["text"] == text], colours):
            label = line["policy"].replace("*", "")
            style = "--" if "oracle" in label else "-"
            axes.plot(*zip(*line["points"]), style, marker=".", color=colour, label=label)
        axes.axhline(0.95, color=GREY, linewidth=0.8)
        axes.set_xlim(0, 0.5)
        axes.set_ylim(0.75, 1)
        axes.set_xlabel("density")
        axes.set_title(f"{text}, 32K tokens")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("recall (attention mass held)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle("What patterns hold: Qwen2.5-Coder-0.5B, mean over 24 layers x 14 heads")


def draw_sparsebalance(figure, found: list[dict]) -> None:
    left, right = figure.subplots(1, 2)
    modes = dict(zip(sparsebalance_tables.MODES, (GREY, ORANGE, BLUE, PINK, GREEN)))
    own = {row["mode"]: row for row in found if row["gpus"] == sparsebalance_tables.GPUS}
    for at, (mode, colour) in enumerate(modes.items()):
        row = own[mode]
        busy, slowest = row["mean_attention_ms"], row["attention_ms"]
        left.bar(at, busy, 0.6, color=colour)
        left.bar(at, slowest - busy, 0.6, busy, color="white", edgecolor=colour, hatch="//")
        left.text(at, slowest, f"recall {row['recall']:.3f}", ha="center", va="bottom", fontsize=7)
    left.set_xticks(range(len(modes)), modes)
    left.set_ylabel("ms of attention in a step\n(hatched: the mean rank waits)")
    left.set_title(f"{sparsebalance_tables.GPUS} GPUs")
    left.margins(y=0.1)
    for mode, colour in modes.items():
        line = sorted((row["gpus"], row["max_over_mean"]) for row in found if row["mode"] == mode)
        right.plot(*zip(*line), "o-", color=colour, label=mode)
    right.set_xscale("log", base=2)
    gpus = sorted({row["gpus"] for row in found})
    right.set_xticks(gpus, gpus)
    right.set_ylim(0.95, None)
    right.set_xlabel("GPUs")
    right.set_ylabel("attention of the slowest rank / mean")
    right.grid(alpha=0.3)
    right.legend(frameon=False)
    figure.suptitle("Set bimodal, samples of 64K tokens, Qwen2.5-3B's shape (simulated)")


def draw_frontier_density(figure, found: list[dict]) -> None:
    frontier_tables.draw_panels(figure, found, "density")


def draw_frontier_time(figure, found: list[dict]) -> None:
    frontier_tables.draw_panels(figure, found, "time")


PICTURES: dict[str, tuple[Callable, Callable]] = {
    "steps.png": (step_data, draw_steps),
    "kernels.png": (kernel_data, draw_kernels),
    "layers.png": (layer_data, draw_layers),
    "balance.png": (balance_data, draw_balance),
    "recall.png": (recall_data, draw_recall),
    "sparsebalance.png": (sparsebalance_data, draw_sparsebalance),
    "frontier_density.png": (frontier_data, draw_frontier_density),
    "frontier_time.png": (frontier_data, draw_frontier_time),
}
"""By file name: what is shown, and how it is drawn."""
NAMES = {
    f"frontier_{kind}.png": [frontier_tables.PANELS[kind], frontier_tables.LABELS]
    for kind in ("density", "time")
}
"""What axes and lines are called, where that is not from the rows."""


def digest(name: str) -> str:
    """The hash of what a picture shows."""
    shown = PICTURES[name][0]()
    if name in NAMES:
        shown = [shown, NAMES[name]]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def is_stale(name: str) -> bool:
    """Whether a picture is missing, or shows other figures than the rows have now."""
    from PIL import Image

    path = IMAGES / name
    if not path.is_file():
        return True
    with Image.open(path) as image:
        return image.text.get(KEY) != digest(name)


def draw(name: str, folder: Path = IMAGES) -> Path:
    """Draw a picture."""
    import matplotlib

    matplotlib.use("Agg")  # before pyplot: there may be no display
    from matplotlib import pyplot

    data, make = PICTURES[name]
    with pyplot.rc_context({"font.size": 9}):
        figure = pyplot.figure(figsize=(8, 4.2), layout="constrained")
        make(figure, data())
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, dpi=150, metadata={KEY: digest(name)})
        pyplot.close(figure)
    return folder / name
