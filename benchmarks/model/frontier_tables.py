# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables and pictures of the frontier, from joined rows."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from .frontier_rows import SELECTING, TIMED, Row, joined

MODELS = {"smol.gguf": "SmolLM2-135M", "qwen.gguf": "Qwen2.5-Coder-0.5B"}
"""By file name, as rows have it."""
LABELS = {
    "dense": "dense",
    "published": "fixed: 1000 columns, 100 diagonals, last 64 rows",
    "price": "price",
    "target": "price, target recall",
    "settings": "settings of layers and heads",
    "fixed": "fixed",
    "fixed_last": "fixed, last 64 rows",
    "coverage": "coverage",
    "coverage_last": "coverage, last 64 rows",
    "price_last": "price, last 64 rows",
    "xattention": "xattention",
    "moba": "moba",
    "window": "sliding window",
}
EARLIER = "earlier"
"""Texts of rows that have no fingerprint of theirs."""

# Tables.


def percent(value: float | None, digits: int = 1, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:{'+' if sign else ''}.{digits}f}%".replace("-", "−")


def losses(row: Row, name: str) -> str:
    """A loss over dense with its spread over seeds."""
    return with_spread(row[f"{name}_over_dense"], row[f"{name}_spread"])


def with_spread(value: float | None, spread: float | None) -> str:
    """A ratio less 1 in percent, with half of its range; None of one."""
    return percent(value, 2, True) + ("" if spread is None else f" ± {100 * spread:.2f}")


def times(row: Row, label: str) -> str:
    """Search, forward and backward over dense."""
    if row[f"layer_ms_{label}"] is None:
        return ""
    return (
        f"{(row[f'layer_ms_{label}'] + row[f'search_ms_{label}']) / row[f'dense_ms_{label}']:.3f}"
    )


def name_of(row: Row) -> str:
    label = LABELS.get(row["policy"], row["policy"])
    return f"{label} {row['wanted']:g}" if row["policy"] == "target" else label


def order(row: Row) -> tuple:
    return (
        row["model"],
        row["seq"],
        row["steps"] or 0,
        list(LABELS).index(row["policy"]),
        -row["density"],
    )


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def interval(value: list[float] | None) -> str:
    """A mean with its 95% interval, as ``mtraining eval`` has it."""
    if not value:
        return ""
    text = f"{value[0]:+.2f}" + (f" [{value[1]:.2f}, {value[2]:.2f}]" if len(value) == 3 else "")
    return text.replace("-", "−")


def model_of(row: Row) -> str:
    return MODELS.get(row["model"], row["model"])


def recall_of(row: Row) -> str:
    return number(row["recall"], 3) + ("*" if row["recall_by"] == SELECTING else "")


def markdown(header: list[str], body: list[list]) -> str:
    """Without columns that have nothing in any row."""
    used = [at for at in range(len(header)) if not body or any(line[at] != "" for line in body)]
    lines = [header, ["---"] * len(header), *body]
    lines = [[line[at] for at in used] for line in lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def untrained_table(rows: list[Row]) -> str:
    """Markdown of joined rows: the model as it is."""
    header = [
        "model", "tokens", "policy", "density", "recall", "loss over dense", "needle", "with a dense tail",
        "answer loss", "layer 128K / dense", "512K / dense", "search 128K, ms",
    ]  # fmt: skip
    rows = [row for row in rows if row["zero_over_dense"] is not None]
    rows = list(
        {(row["model"], row["seq"], row["policy"], row["wanted"]): row for row in rows}.values()
    )
    body = [
        [
            model_of(row), f"{row['seq'] // 1024}K", name_of(row), percent(row["density"]), recall_of(row),
            percent(row["zero_over_dense"], 2, True), number(row["zero_needle"]),
            number(row["zero_needle_tail"]),
            number(row["zero_answer_loss"]), times(row, "128k"), times(row, "512k"),
            number(row["search_ms_128k"]),
        ]
        for row in sorted(rows, key=lambda row: (*order(row)[:2], *order(row)[3:]))
    ]  # fmt: skip
    return markdown(header, body)


def trained_table(rows: list[Row]) -> str:
    """Markdown of joined rows: after training."""
    header = [
        "model", "tokens", "steps", "learning rate", "policy", "texts", "runs", "density", "recall",
        "own-attention loss over dense", "dense-attention loss over dense",
        "needle: own attention, with a dense tail, dense attention, dense run",
        "RULER's answers, likewise", "loss of the answers, likewise", "dense attention − dense run, 95%",
        "layer 128K / dense", "512K / dense",
    ]  # fmt: skip
    rows = [row for row in rows if row["steps"]]
    body = []
    for row in sorted(
        rows,
        key=lambda row: (row["model"], row["seq"], row["steps"], row["lr"], *order(row)[3:]),
    ):
        three = [
            ", ".join(
                number(row[f"{name}{kind}"]) or "–" for kind in ("", "_tail", "_dense", "_of_dense")
            )
            if row[name] is not None
            else ""
            for name in ("needle", "ruler", "ruler_loss")
        ]
        body.append(
            [
                model_of(row), f"{row['seq'] // 1024}K", row["steps"], f"{row['lr']:.0e}", name_of(row),
                row["data"] or EARLIER, row["seeds"],
                percent(row["density_trained"]), number(row["recall_trained"], 3),
                losses(row, "trained_own"), losses(row, "trained_dense"), *three,
                interval(row["ruler_loss_more"]), times(row, "128k"), times(row, "512k"),
            ]
        )  # fmt: skip
    return markdown(header, body)


def frontier_table(rows: list[Row]) -> str:
    """Both tables."""
    return f"{untrained_table(rows)}\n\n{trained_table(rows)}"


def needle_noise(share: float, samples: int) -> float:
    """The standard deviation of a share over samples drawn again from the same ones (bootstrap), which for
    right and wrong answers is the binomial one."""
    return math.sqrt(share * (1 - share) / samples)


# Files.


def write(rows: list[Row], path: Path) -> list[Row]:
    """Write joined rows to a file, and the pictures beside it; returns them."""
    found = joined(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    for kind in ("density", "time"):
        draw(path.with_name(f"frontier_{kind}.png"), found, kind)
    return found


PANELS = {
    "density": (
        ("zero_over_dense", "density", "density\nuntrained"),
        ("trained_own_over_dense", "density_trained", "density\ntrained, own-attention loss"),
        ("trained_dense_over_dense", "density_trained", "density\ntrained, dense-attention loss"),
    ),
    "time": (
        ("zero_over_dense", "512k", "layer's time over cuDNN, 512K\nuntrained"),
        (
            "trained_dense_over_dense",
            "128k",
            "layer's time over cuDNN, 128K\ntrained, dense-attention loss",
        ),
        (
            "trained_dense_over_dense",
            "512k",
            "layer's time over cuDNN, 512K\ntrained, dense-attention loss",
        ),
    ),
}
"""By picture: what is upward, what is to the right, and the name of the latter."""


def points(rows: list[Row], upward: str, right: str) -> dict[str, list[tuple[float, float]]]:
    """By policy: places, in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["policy"] == "dense" or row[upward] is None:
            continue
        place = row.get(right)
        if right in TIMED:
            word = times(row, right)
            place = float(word) if word else None
        if place is not None:
            found.setdefault(row["policy"], []).append((place, 100 * row[upward]))
    return {policy: sorted(set(places)) for policy, places in found.items()}


def shown(rows: list[Row]) -> list[Row]:
    """The rows to plot: of the model with the most rows, untrained or trained for the most common number of
    steps."""
    model = statistics.mode(row["model"] for row in rows) if rows else None
    rows = [row for row in rows if row["model"] == model]
    steps = [row["steps"] for row in rows if row["steps"]]
    usual = statistics.mode(steps) if steps else None
    return [row for row in rows if row["steps"] in (None, usual)]


COLOURS = dict(zip(LABELS, (
    "black", "#555555", "#0072b2", "#56b4e9", "#1b3b6f", "#d55e00", "#a0522d", "#009e73", "#66c2a5",
    "#377eb8", "#cc79a7", "#e69f00", "#999999",
)))  # fmt: skip
"""By policy; what is from the last rows is lighter."""
TICKS = {"density": (0.02, 0.04, 0.08, 0.15, 0.3, 0.5), "time": (0.03, 0.06, 0.1, 0.2, 0.4)}
LOSS_TICKS = (0, 0.1, 0.25, 0.5, 1, 2, 5, 10)


def draw_panels(figure, rows: list[Row], kind: str) -> None:
    """Loss over dense against density, or against time; a line a policy."""
    panels = figure.subplots(1, 3, sharey=True)
    markers = "os^DdvH<>pX*hP"
    for axes, (upward, right, label) in zip(panels, PANELS[kind]):
        for policy, places in points(shown(rows), upward, right).items():
            axes.plot(
                *zip(*places), marker=markers[list(LABELS).index(policy)], color=COLOURS[policy],
                linewidth=2.2 if policy == "price" else 1.0, label=LABELS[policy],
            )  # fmt: skip
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel=label, xscale="log", xlim=(0.8 * TICKS[kind][0], 1.3 * TICKS[kind][-1]))
        axes.set_xticks(TICKS[kind], [f"{tick:.0%}" for tick in TICKS[kind]])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_yscale("symlog", linthresh=0.5)
    panels[0].set_ylim(-0.1, 14)
    panels[0].set_yticks(LOSS_TICKS, [f"{tick:g}%" for tick in LOSS_TICKS])
    panels[0].set_ylabel("loss over dense (dotted: 0.5%)")
    named = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())
    }
    if named:
        figure.legend(
            named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
        )  # fmt: skip


def draw(path: Path, rows: list[Row], kind: str) -> Path:
    """Draw a picture to a file."""
    from megatron_mtraining.tools.report.pictures import pyplot

    figure = pyplot.figure(figsize=(15, 4.8), layout="constrained")
    draw_panels(figure, rows, kind)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
