# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables and pictures of the frontier, from joined rows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from megatron_mtraining.config.schedule import NAMED, parse

from ..lib.policies_at_density import AS_PUBLISHED_BY_BLOCK
from .frontier_rows import CONSTANT, SELECTING, Row, joined

MODELS = {"smol.gguf": "SmolLM2-135M-Instruct", "qwen.gguf": "Qwen2.5-Coder-0.5B-Instruct"}
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
    "xattention": "xattention, as published",
    "moba": "moba, as published",
    "window": "sliding window",
    "xattention_previous": "xattention",
    "moba_previous": "moba",
    "schedule": "price",
}
MARK = " †"
"""Of own-attention losses of policies that look ahead."""
TEXTS = ("code", "book", "speech")

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
    if row["policy"] == "target":
        label = f"{label} {row['wanted']:g}"
    if row["policy"] == "schedule":
        label = f"{label} {prices_of(row)}"
    return f"{label}, {decay_name(row)}" if row.get("decay") not in (None, CONSTANT) else label


def prices_of(row: Row) -> str:
    """The prices of a run with a schedule: its name or its points, or the one price."""
    text = row["setting"]["schedule"]
    schedule = parse("schedule", text)
    if len(schedule.points) == 1:
        return f"{schedule.lowest:g}"
    named = (
        name for name, other in NAMED["schedule"].items() if parse("schedule", other) == schedule
    )
    return f"`{next(named, text)}`"


def decay_name(row: Row) -> str:
    """How the learning rate decays."""
    return f"linear over {row['decay']}" if "-" in row["decay"] else row["decay"]


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


def times_of(row: Row) -> str:
    """Of a layer over dense: at 128K tokens, then at 512K."""
    found = [times(row, label) for label in ("128k", "512k")]
    return ", ".join(each or "–" for each in found) if any(found) else ""


def by_text(row: Row, name: str) -> str:
    """A loss over dense by text."""
    found = row[f"{name}_by_text"]
    return ", ".join(percent(found.get(kind), 2, True) or "–" for kind in TEXTS) if found else ""


def untrained_table(rows: list[Row]) -> str:
    """Markdown of joined rows: the model as it is."""
    header = [
        "model, tokens", "policy", "density", "recall", "loss over dense", "needle; with a dense tail",
        "answer loss", "layer 128K, 512K / cuDNN",
    ]  # fmt: skip
    rows = [row for row in rows if row["zero_over_dense"] is not None]
    rows = list(
        {(row["model"], row["seq"], row["policy"], row["wanted"]): row for row in rows}.values()
    )
    body = [
        [
            f"{model_of(row)}, {row['seq'] // 1024}K", name_of({**row, "decay": None}),
            percent(row["density"]), recall_of(row),
            percent(row["zero_over_dense"], 2, True),
            "; ".join(filter(None, (number(row["zero_needle"]), number(row["zero_needle_tail"])))),
            number(row["zero_answer_loss"]), times_of(row),
        ]
        for row in sorted(rows, key=lambda row: (*order(row)[:2], *order(row)[3:]))
    ]  # fmt: skip
    return markdown(header, body)


def trained(rows: list[Row]) -> list[Row]:
    """Rows of training in their order, at the last learning rate of each model, which is constant; dense
    runs and schedules left out."""
    rows = [row for row in rows if row["steps"] and not is_scheduled(row)]
    rates = {row["model"]: row["lr"] for row in rows}
    rows = [row for row in rows if row["policy"] != "dense" and row["lr"] == rates[row["model"]]]
    return sorted(rows, key=lambda row: (row["model"], row["seq"], row["steps"], *order(row)[3:]))


def is_scheduled(row: Row) -> bool:
    """Whether prices or learning rates of a run have a schedule."""
    return row["policy"] == "schedule" or row["decay"] not in (None, CONSTANT)


def scheduled(rows: list[Row]) -> list[Row]:
    """Rows of training with a schedule in their order; dense runs left out."""
    rows = [row for row in rows if is_scheduled(row) and row["policy"] != "dense"]
    names = ("model", "seq", "steps", "decay")
    return sorted(rows, key=lambda row: (*map(row.get, names), -row["density_trained"]))


def run_of(row: Row) -> str:
    """Model, length and steps."""
    return f"{model_of(row)}, {row['seq'] // 1024}K, {row['steps']}"


def trained_table(rows: list[Row]) -> str:
    """Markdown of joined rows: losses after training."""
    header = [
        "model, tokens, steps", "policy", "seeds", "density, recall", "dense-attention loss over dense",
        "code, book, speeches", "own-attention loss; code, book, speeches", "layer 128K, 512K / cuDNN",
    ]  # fmt: skip
    body = []
    for row in trained(rows):
        own = losses(row, "trained_own") + (MARK if row["policy"] in AS_PUBLISHED_BY_BLOCK else "")
        body.append(
            [
                run_of(row), name_of(row), row["seeds"],
                f"{percent(row['density_trained'])}, {number(row['recall_trained'], 3)}",
                losses(row, "trained_dense"), by_text(row, "trained_dense"),
                "; ".join(filter(None, (own, by_text(row, "trained_own")))), times_of(row),
            ]
        )  # fmt: skip
    return markdown(header, body)


def retrieval_table(rows: list[Row]) -> str:
    """Markdown of joined rows: needle and RULER after training, of the rows that were judged by RULER."""
    header = [
        "model, tokens, steps", "policy", "density",
        "needle: own attention, with a dense tail, dense attention, dense run",
        "RULER's answers, likewise", "loss of the answers, likewise", "dense attention − dense run, 95%",
    ]  # fmt: skip
    body = []
    for row in [*trained(rows), *scheduled(rows)]:
        if row["ruler"] is None:
            continue
        three = [
            ", ".join(
                number(row[f"{name}{kind}"]) or "–" for kind in ("", "_tail", "_dense", "_of_dense")
            )
            for name in ("needle", "ruler", "ruler_loss")
        ]
        body.append(
            [
                run_of(row), name_of(row), percent(row["density_trained"]), *three,
                interval(row["ruler_loss_more"]),
            ]
        )  # fmt: skip
    return markdown(header, body)


def frontier_table(rows: list[Row]) -> str:
    """All tables."""
    return "\n\n".join((untrained_table(rows), trained_table(rows), retrieval_table(rows)))


def needle_noise(share: float, samples: int) -> float:
    """The standard deviation of a share over samples drawn again from the same ones (bootstrap), which for
    right and wrong answers is the binomial one."""
    return math.sqrt(share * (1 - share) / samples)


# Files.


def write(rows: list[Row], path: Path, measured: Iterable[Row] = ()) -> list[Row]:
    """Write joined rows to a file; returns them.

    Args:
        measured: rows of real operands, for mean costs.
    """
    found = joined(rows, measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return found


SIZE = (8.5, 7.6)
ACROSS = {
    "density": "density (share of causal pairs, logarithmic)",
    "128k": "layer, 128K tokens / cuDNN dense (random operands, log)",
}
"""What is to the right, from the upper line of panels on."""
TICKS = {"density": (0.04, 0.08, 0.15, 0.3), "128k": (0.05, 0.1, 0.2, 0.4)}
LOSS_TICKS = (0, 0.1, 0.25, 0.5, 1, 2, 4)
COLOURS = (
    "#0072b2", "#56b4e9", "#1b3b6f", "#d55e00", "#a0522d", "#009e73", "#66c2a5", "#cc79a7", "#e69f00",
    "#7b5ea7", "#b8860b", "#7f7f7f", "#e41a1c", "#4daf4a",
)  # fmt: skip
MARKERS = "osD^v<>pX*Ph"


def shown(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows to plot, by model: trained for the steps and at the length of most of its rows."""
    found = {}
    for model in sorted({row["model"] for row in trained(rows)}, reverse=True):
        own = [row for row in trained(rows) if row["model"] == model]
        usual = statistics.mode((row["seq"], row["steps"]) for row in own)
        found[model] = [row for row in own if (row["seq"], row["steps"]) == usual]
    return found


Place = tuple[float, float, float]
"""Right, upward in percent, and half of the range over seeds (0 of one)."""


def points(rows: list[Row], right: str) -> dict[str, list[Place]]:
    """By policy: places, in order. Upward is the dense-attention loss."""
    found: dict[str, list[Place]] = {}
    for row in rows:
        word = "" if right == "density" else times(row, right)
        place = row["density_trained"] if right == "density" else float(word) if word else None
        loss = row["trained_dense_over_dense"]
        if place is not None and loss is not None:
            spread = row["trained_dense_spread"] or 0.0
            found.setdefault(row["policy"], []).append((place, 100 * loss, 100 * spread))
    return {policy: sorted(places) for policy, places in found.items()}


def draw_panels(figure, rows: list[Row]) -> None:
    """Loss over dense against density and against time: a column a model, a line a policy."""
    models = shown(rows)
    panels = figure.subplots(len(ACROSS), len(models), sharey=True, squeeze=False)
    policies = [name for name in LABELS if name != "dense"]
    for line, right in zip(panels, ACROSS):
        line[0].set_ylabel("dense-attention loss over dense\n(linear to 0.5%, then logarithmic)")
        for axes, own in zip(line, models.values()):
            for policy, places in points(own, right).items():
                at = policies.index(policy)
                x, y, error = zip(*places)
                axes.errorbar(
                    x, y, error, marker=MARKERS[at % len(MARKERS)], color=COLOURS[at % len(COLOURS)],
                    linewidth=2.2 if policy == "price" else 1.0, capsize=3, label=LABELS[policy],
                )  # fmt: skip
            axes.axhline(0, color="black", linewidth=0.8)
            axes.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
            ticks = TICKS[right]
            axes.set(xlabel=ACROSS[right], xscale="log", xlim=(0.75 * ticks[0], 1.3 * ticks[-1]))
            axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            if right == next(iter(ACROSS)):
                axes.set_title(title_of(own), fontsize=9)
    first = panels[0, 0]
    first.set_yscale("symlog", linthresh=0.5)
    first.set_ylim(-0.1, 6)
    first.set_yticks(LOSS_TICKS, [f"{tick:g}%" for tick in LOSS_TICKS])
    first.text(
        0.02, 0, "dense training: 0", transform=first.get_yaxis_transform(), va="bottom", fontsize=7
    )
    named = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels())
    }
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )  # fmt: skip


def title_of(own: list[Row]) -> str:
    """Model, tokens, steps and seeds."""
    row, seeds = own[0], sorted({row["seeds"] for row in own})
    said = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seeds"
    first = f"{model_of(row)}, {row['seq'] // 1024}K tokens, {row['steps']} steps"
    return f"{first}\n{said}; bars: range over seeds"
