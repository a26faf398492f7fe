# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pictures of README.md and of pages of docs/, from the rows of ``benchmarks/results/*.jsonl``.

``docs/generate.py`` draws them. Each file carries a hash of the figures that it shows, by which a stale one
is found: pixels differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import overview
import tables
from colours import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY
from tables import (
    kernel_tables,
    pattern_tables,
    peer_tables,
    ring_tables,
    step_tables,
)
from tables.common import cell, rows

IMAGES = Path(__file__).parent / "images"
KEY = "Rows"
"""Name of the PNG text that has the hash."""
PART_COLOURS = {
    "attention": BLUE, "layers": GREEN, "loss": ORANGE, "communication, optimizer, waiting": RED,
}  # fmt: skip
OTHERS = ("communication", "optimizer", "waiting")
"""Parts that are too small to be seen by themselves."""


# What each picture shows, as plain lists and dicts; is_stale() compares their hash


def step_data() -> list[dict]:
    """Bars of Qwen2.5-3B: seconds of each part; ``None`` for a step that was not profiled."""
    bars = []
    profiled = {
        (row["seq"], row["attention"], step_tables.recompute_of(row)): row
        for row in step_tables.breakdown.shown() if row["world"] == 4
    }  # fmt: skip
    for seq in (131072, 524288):
        sparse = tables.step(seq)
        shown = [
            step_tables.dense_of(sparse, each) for each in (step_tables.TWICE, step_tables.KEPT)
        ]
        for row in filter(None, (*shown, sparse, step_tables.step_at_price(seq))):
            recompute = step_tables.recompute_of(row)
            kind = cell("sparse,\n{density:share}", row)
            if row["attention"] == "fused":
                kind = "dense,\n" + ("run twice" if recompute == step_tables.TWICE else recompute)
            same = profiled.get((seq, row["attention"], recompute), row)
            parts = (
                same.get("breakdown") if same["density"] == row["density"] else row.get("breakdown")
            )
            if parts:
                small = sum(parts[name] for name in OTHERS)
                parts = {name: parts.get(name, small) / 1000 for name in PART_COLOURS}
            bars.append(
                dict(
                    seq=cell("{seq:K}", row), kind=kind, seconds=row["iter_ms"] / 1000, parts=parts,
                    commit=row["commit"], gpu=cell("{world} {gpu:gpu}", row),
                )
            )  # fmt: skip
        if step_tables.dense_of(sparse, step_tables.KEPT) is None:
            seconds, _ = step_tables.kept_seconds(sparse)
            more = dict(
                bars[-1], kind="dense,\noutput kept,\nestimated", seconds=seconds, parts=None
            )
            bars.insert(-2, more)
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
    return [point for point in points if not point["documents"]] + peer_data()


def peer_data() -> list[dict]:
    """Block-sparse kernels of other packages at 128K tokens, of the runs with all of them."""
    names = ("cudnn_blocks", "cudnn_flex", "fa4_blocks")
    return [
        dict(peer=peer_tables.NAMES[peer], op=op, density=row["density"], share=row["share_of_cudnn"],
             commit=row["commit"])
        for case in peer_tables.peer_rows().values()
        for (peer, op), row in case.items()
        if peer in names and row["share_of_cudnn"] and (row["seq"], row["heads"]) == (131072, 16)
    ]  # fmt: skip


def balance_data() -> list[dict]:
    """Max / mean over ranks of all rounds' pairs, by layout and ranks, for a real layer's pattern."""
    found = []
    for layout in ("striped", "zigzag", "contiguous"):
        for world in (4, *ring_tables.WORLDS):
            [row] = ring_tables.balance_rows(524288, layout, world, ring_tables.REAL)
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


# How they are drawn


def draw_steps(figure, bars: list[dict]) -> None:
    panels = figure.subplots(1, 2)
    for axes, seq in zip(panels, dict.fromkeys(bar["seq"] for bar in bars)):
        own = [bar for bar in bars if bar["seq"] == seq]
        for at, bar in enumerate(own):
            bottom = 0.0
            if bar["parts"] is None:
                axes.bar(at, bar["seconds"], 0.6, color="white", edgecolor="black", hatch="//")
            for part, seconds in (bar["parts"] or {}).items():
                axes.bar(at, seconds, 0.6, bottom, color=PART_COLOURS[part])
                bottom += seconds
            axes.text(
                at,
                max(bottom, bar["seconds"]),
                tables.seconds_of(bar["seconds"]),
                ha="center",
                va="bottom",
            )
        axes.set_xticks(range(len(own)), [bar["kind"] for bar in own], fontsize=7.5)
        axes.set_xlim(-0.6, len(own) - 0.4)
        axes.set_title(f"{seq} tokens, {own[0]['gpu']} (own scale)", fontsize=9)
        axes.set_ylabel("seconds per step")
        axes.margins(y=0.1)
    right = panels[-1]
    handles = [right.bar(0, 0, color=colour, label=part) for part, colour in PART_COLOURS.items()]
    handles.append(
        right.bar(0, 0, color="white", edgecolor="black", hatch="//", label="not profiled")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(
        "One training step of Qwen2.5-3B's shape, random weights, Megatron-LM with Transformer Engine"
    )


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
            xy = [(p["density"], p["share"]) for p in own if "peer" not in p and fits(p)]
            axes.plot(*zip(*xy), marker, color=colour, label=f"this package, {label}")
        for dim, marker in ((128, "x"), (64, "+")):
            xy = [(p["density"], p["flex"]) for p in own if p.get("flex") and p["dim"] == dim]
            axes.plot(*zip(*xy), marker, color="black", label=f"FlexAttention, slashes, dim {dim}")
        for peer, colour, marker in zip(
            sorted({p["peer"] for p in points if "peer" in p}), (SKY, RED, GREY), "v<>"
        ):
            xy = [(p["density"], p["share"]) for p in own if p.get("peer") == peer]
            axes.plot(*zip(*sorted(xy)), marker + ":", color=colour, label=f"{peer}, slashes, 128K")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        ticks = (0.01, 0.03, 0.1, 0.3, 1)
        axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 1.3)
        axes.set_xlabel("density (logarithmic)")
        axes.set_title(op)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("TFLOP/s of selected pairs\nover cuDNN dense (line at 1)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle("Attention kernels, 64K to 512K tokens, bf16, one H200")


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
    figure.suptitle(
        "What patterns hold: Qwen2.5-Coder-0.5B-Instruct, mean over 24 layers x 14 heads, untrained"
    )


PICTURES: dict[str, tuple[Callable, Callable]] = {
    "overview.png": (overview.overview_data, overview.draw_overview),
    "steps.png": (step_data, draw_steps),
    "kernels.png": (kernel_data, draw_kernels),
    "balance.png": (balance_data, draw_balance),
    "recall.png": (recall_data, draw_recall),
    "frontier.png": (overview.frontier_data, overview.draw_panels),
    "schedules.png": (
        lambda: overview.places(rows("frontier")),
        overview.draw_schedules,
    ),
}
"""By file name: what is shown, and how it is drawn."""
NAMES = {"frontier.png": [overview.ACROSS, overview.LABELS, overview.MODELS]}
"""What axes and lines are called, where that is not from the rows."""


def digest(name: str) -> str:
    """The hash of what a picture shows."""
    shown = PICTURES[name][0]()
    if name in NAMES:
        shown = [shown, NAMES[name]]
    # Sums differ in their last digits: Python 3.12 and later add floats more exactly.
    rounded = json.loads(json.dumps(shown), parse_float=lambda digits: f"{float(digits):.9g}")
    return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()


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
        size = overview.SIZE if name == "frontier.png" else (8.5, 4.4)
        figure = pyplot.figure(figsize=size, layout="constrained")
        make(figure, data())
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / name, dpi=150, metadata={KEY: digest(name)})
        pyplot.close(figure)
    return folder / name
