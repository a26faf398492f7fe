# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows of the frontier joined: a row for each policy, density and length of training; tables, pictures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

Row = dict
KEY = ("model", "seq", "policy", "wanted")
LABELS = {
    "dense": "dense",
    "published": "published: 1000 columns, 100 diagonals, last 64 rows",
    "price": "price",
    "target": "price, target recall",
    "fixed": "fixed",
    "fixed_last": "fixed, last 64 rows",
    "coverage": "coverage",
    "coverage_last": "coverage, last 64 rows",
    "price_last": "price, last 64 rows",
    "xattention": "xattention",
    "moba": "moba",
    "window": "sliding window",
}
TIMED = {"128k": 131072, "512k": 524288, "32k": 32768}
LAST = "_last"
SELECTING = "the rows that select"


def mean(values: Iterable[float | None]) -> float | None:
    """Of the numbers that are there."""
    found = [value for value in values if value is not None]
    return round(statistics.mean(found), 6) if found else None


def spread(values: Iterable[float]) -> float | None:
    """Half of the distance between the lowest and the highest; None of one."""
    found = list(values)
    return round((max(found) - min(found)) / 2, 6) if len(found) > 1 else None


def newest(rows: Iterable[Row], *names: str) -> list[Row]:
    """The last row of each kind."""
    return list({json.dumps([row.get(name) for name in names]): row for row in rows}.values())


def joined(rows: list[Row]) -> list[Row]:
    """A row for each model, length, policy, wanted density and number of training steps (None: none).

    Losses are ratios to dense attention's, less 1: of training, of the dense run with the same seed, steps
    and learning rate; means over seeds, with half of their range (``_spread``).
    """
    judged = newest((row for row in rows if row["stage"] == "zero"), *KEY)
    trained = newest((row for row in rows if row["stage"] == "train"), *KEY, "seed", "steps", "lr")
    timed = newest((row for row in rows if row["stage"] == "time"), "policy", "wanted", "seq")
    dense = {_of_run(row): row for row in trained if row["policy"] == "dense"}
    keys = {tuple(row[name] for name in KEY): None for row in judged + trained}
    found = []
    for key in keys:
        zero = next((row for row in judged if tuple(row[name] for name in KEY) == key), None)
        own = [row for row in trained if tuple(row[name] for name in KEY) == key]
        for steps in sorted({row["steps"] for row in own}) or [None]:
            some = [row for row in own if row["steps"] == steps]
            found.append(_row(key, zero, some, dense, timed))
    return found


def _of_run(row: Row) -> tuple:
    return tuple(row[name] for name in ("model", "seq", "seed", "steps", "lr"))


def _row(
    key: tuple, zero: Row | None, own: list[Row], dense: dict[tuple, Row], timed: list[Row]
) -> Row:
    row = dict(zip(KEY, key))
    policy, wanted = row["policy"], row["wanted"]
    pairs = [(each, dense[_of_run(each)]) for each in own if _of_run(each) in dense]
    more = {
        name: [each[name] / base["dense"] - 1 for each, base in pairs] for name in ("own", "dense")
    }
    one = zero or own[-1]
    row |= dict(
        setting=one["setting"],
        density=zero["density"] if zero else mean(each["density"] for each in own),
        recall=zero["recall"] if zero else mean(each["recall"] for each in own),
        density_trained=mean(each["density"] for each in own),
        recall_trained=mean(each["recall"] for each in own),
        recall_by=SELECTING if policy.endswith(LAST) or policy == "published" else "held-out rows",
        zero_over_dense=zero and zero["zero_over_dense"],
        steps=own[0]["steps"] if own else None, seeds=len(pairs),
    )  # fmt: skip
    for name, values in more.items():
        row[f"trained_{name}_over_dense"] = mean(values)
        row[f"trained_{name}_spread"] = spread(values)
    # Own attention: of the trained model where there is one.
    source, name = (own, "needle_own") if own else ([zero] if zero else [], "needle")
    row["needle"] = mean(each[name] for each in source)
    row["needle_dense"] = mean(each["needle_dense"] for each in own)
    row["needle_of_dense"] = mean(base["needle_dense"] for _, base in pairs) if own else (
        zero and zero["dense_needle"]
    )  # fmt: skip
    name = "answer_loss_own" if own else "answer_loss"
    row["answer_loss"] = mean(each[name] for each in source)
    row["answer_loss_dense"] = mean(each["answer_loss_dense"] for each in own)
    row["ruler"] = None
    used = [*([zero] if zero else []), *own]
    for label, seq in TIMED.items():
        at = _time_of(
            policy, wanted, row["density_trained"], [each for each in timed if each["seq"] == seq]
        )
        row |= {f"{name}_{label}": value for name, value in at.items() if name != "row"}
        used += [at["row"]] if at["row"] else []
    row |= {
        name: ", ".join(dict.fromkeys(str(each[name]) for each in used))
        for name in ("gpu", "torch", "triton", "commit")
    }
    return {**row, "versions": one["versions"], "command": one["command"]}


def _time_of(policy: str, wanted: float | None, density: float | None, timed: list[Row]) -> dict:
    """Times of one length in milliseconds: of the policy's row; of a target, between those of price."""
    found: dict = dict(layer_ms=None, search_ms=None, dense_ms=None, row=None)
    if timed and policy == "dense":
        last = timed[-1]
        whole = last["dense_forward_ms"] + last["dense_backward_ms"]
        return dict(layer_ms=whole, search_ms=0.0, dense_ms=whole, row=last)
    own = [row for row in timed if row.get("forward_ms")]
    if policy != "target":
        own = [row for row in own if (row["policy"], row["wanted"]) == (policy, wanted)]
        return _times([(1.0, own[-1])]) if own else found
    own = sorted((row for row in own if row["policy"] == "price"), key=lambda row: row["density"])
    for low, high in zip(own, own[1:]):
        if density is not None and low["density"] <= density <= high["density"]:
            share = (density - low["density"]) / (high["density"] - low["density"])
            return _times([(1 - share, low), (share, high)])
    return found


def _times(weighted: list[tuple[float, Row]]) -> dict:
    def whole(*names: str) -> float:
        return round(sum(share * row[name] for share, row in weighted for name in names), 4)

    return dict(
        layer_ms=whole("forward_ms", "backward_ms"), search_ms=whole("search_ms"),
        dense_ms=whole("dense_forward_ms", "dense_backward_ms"), row=weighted[-1][1],
    )  # fmt: skip


# Tables.


def percent(value: float | None, digits: int = 1, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:{'+' if sign else ''}.{digits}f}%".replace("-", "−")


def losses(row: Row, name: str) -> str:
    """A loss over dense with its spread over seeds."""
    value, over = row[f"{name}_over_dense"], row[f"{name}_spread"]
    return percent(value, 2, True) + ("" if over is None else f" ± {100 * over:.2f}")


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


def frontier_table(rows: list[Row]) -> str:
    """Markdown of joined rows."""
    header = [
        "model", "tokens", "policy", "density", "recall", "loss, untrained", "steps", "seeds",
        "trained density", "trained loss, own", "trained loss, dense", "needle", "judged dense", "of dense",
        "answer loss", "judged dense", "layer 128K / dense", "512K / dense", "search 128K, ms",
    ]  # fmt: skip
    body = []
    for row in sorted(rows, key=order):
        recall = "" if row["recall"] is None else f"{row['recall']:.3f}"
        recall += "*" if row["recall_by"] == SELECTING and recall else ""
        plain = [
            "" if row[name] is None else f"{row[name]:.2f}"
            for name in (
                "needle",
                "needle_dense",
                "needle_of_dense",
                "answer_loss",
                "answer_loss_dense",
            )
        ]
        search = row["search_ms_128k"]
        body.append(
            [
                row["model"], f"{row['seq'] // 1024}K", name_of(row), percent(row["density"]), recall,
                percent(row["zero_over_dense"], 2, True), row["steps"] or "", row["seeds"] or "",
                percent(row["density_trained"]), losses(row, "trained_own"), losses(row, "trained_dense"),
                *plain, times(row, "128k"), times(row, "512k"), "" if search is None else f"{search:.2f}",
            ]
        )  # fmt: skip
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


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
        ("zero_over_dense", "density", "density, untrained"),
        ("trained_own_over_dense", "density_trained", "density, trained, own attention"),
        ("trained_dense_over_dense", "density_trained", "density, trained, judged dense"),
    ),
    "time": (
        ("trained_dense_over_dense", "128k", "layer's time over cuDNN, 128K tokens"),
        ("trained_dense_over_dense", "512k", "layer's time over cuDNN, 512K tokens"),
        ("zero_over_dense", "512k", "layer's time over cuDNN, 512K tokens, untrained"),
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


def draw(path: Path, rows: list[Row], kind: str) -> Path:
    """Loss over dense against density, or against time; a line a policy, of the longest training that most
    policies have."""
    from megatron_mtraining.tools.report.pictures import COLOURS, pyplot

    steps = [row["steps"] for row in rows if row["steps"]]
    shown = statistics.mode(steps) if steps else None
    rows = [row for row in rows if row["steps"] in (None, shown)]
    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    markers = "os^Dvp<>X*h"
    for axes, (upward, right, label) in zip(panels, PANELS[kind]):
        for policy, places in points(rows, upward, right).items():
            number = list(LABELS).index(policy)
            axes.plot(
                *zip(*places), marker=markers[number % len(markers)], linewidth=1.2,
                color=COLOURS[number % len(COLOURS)], label=LABELS[policy],
            )  # fmt: skip
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel=label, xscale="log")
        axes.set_yscale("symlog", linthresh=0.5)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss over that of dense, % (dotted: 0.5%)")
    named = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())
    }
    if named:
        figure.legend(
            named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False
        )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
