# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pruned backward: what of the gradient stays, and what time."""

from __future__ import annotations

from benchmarks.model import frontier_tables
from benchmarks.model.frontier_rows import decay_of, mean, spread

from .common import Row, gpu_name, last, percent, rows, source, table, tokens

TEXTS = {"code": "code", "book": "novel, essays", "speech": "speeches"}


def found(stage: str) -> list[Row]:
    """The rows of a stage."""
    return [row for row in rows("backward") if row["stage"] == stage]


def forward_of(row: Row) -> str:
    policy, _, density = row["forward"].partition("@")
    return f"{policy}, {percent(float(density))} wanted" if density else policy


def threshold_of(row: Row) -> str:
    return f"{row['threshold']:g}" if row["threshold"] else "off"


def what_of(row: Row) -> str:
    if row["what"] == "forward":
        return "the forward's pattern against a dense forward"
    if row["what"] == "pruned":
        return f"T = {threshold_of(row)}"
    return row["what"]


def gradient() -> str:
    """The gradient of all parameters beside the unpruned one's, and beside two yardsticks."""
    names = ("forward", "text", "what", "threshold", "seq", "data")
    every = [*last(found("gradient"), *names).values()]
    order = {name: number for number, name in enumerate(("pruned", "forward", "another window"))}
    every.sort(
        key=lambda row: (
            row["forward"],
            row.get("data") or "",
            row["text"],
            order[row["what"]],
            row["threshold"],
        )
    )
    header = [
        "tokens",
        "forward",
        "text",
        "texts",
        "gradient",
        "density of the backward",
        "attention left out",
    ]
    header += ["cosine", "relative error", "norm / unpruned, Q K V projections"]
    body = [
        [
            tokens(row["seq"]), forward_of(row),
            TEXTS[row["text"]], row.get("data") or "earlier", what_of(row),
            percent(row["backward_density"]), percent(row["dropped_mass"]), f"{row['cos_grad']:.4f}",
            f"{row['err_grad']:.3f}", f"{row['norm_qkv']:.3f}",
        ]
        for row in every
    ]  # fmt: skip
    return table(header, body) + source(every, "backward")


def over(some: list[Row], judged: str, forward: str) -> str:
    """A loss (``dense`` or ``own``) of runs over unpruned runs with a forward, of the same seeds and texts:
    the mean over seeds, with half of their range."""
    ratios = [row[judged] / base[judged] - 1 for row, base in _pairs(some, forward)]
    return frontier_tables.with_spread(mean(ratios), spread(ratios))


def over_by_text(some: list[Row], forward: str) -> str:
    """The dense-attention loss over those runs by text; nothing where it was not recorded."""
    pairs = _pairs(some, forward)
    if not all("dense_by_text" in row for pair in pairs for row in pair):
        return ""
    means = (
        mean(row["dense_by_text"][text] / base["dense_by_text"][text] - 1 for row, base in pairs)
        for text in TEXTS
    )
    return ", ".join(frontier_tables.percent(value, 2, True) for value in means)


def _pairs(some: list[Row], forward: str) -> list[tuple[Row, Row]]:
    """Each run with the unpruned one of a forward, of the same seed, text and learning rates."""

    def kind(row: Row) -> tuple:
        return (
            *(row[name] for name in ("model", "seq", "seed", "steps", "lr", "data")),
            decay_of(row),
        )

    bases = {(row["forward"], *kind(row)): row for row in found("train") if not row["threshold"]}
    return [(row, bases[(forward, *kind(row))]) for row in some]


def trained() -> str:
    """Losses after training, over the unpruned run of the same forward and over the dense run."""
    every = found("train")
    groups: dict[tuple, list[Row]] = {}
    for row in every:
        kind = (
            row["model"],
            row["seq"],
            row["steps"],
            row["forward"],
            row["threshold"],
            decay_of(row),
        )
        groups.setdefault(kind, []).append(row)
    header = [
        "tokens",
        "steps",
        "forward",
        "T",
        "runs",
        "density of the backward",
        "attention left out",
    ]
    header += [
        "dense-attention loss over unpruned",
        "own-attention loss over unpruned",
        "dense-attention loss over dense",
    ]
    body = []
    for some in groups.values():
        one = some[-1]
        compared = (("dense", one["forward"]), ("own", one["forward"]), ("dense", "dense"))
        body.append(
            [
                tokens(one["seq"]), one["steps"], forward_of(one),
                threshold_of(one), len(some),
                *(
                    percent(mean(row[name] for row in some), digits)
                    for name, digits in (("backward_density", 1), ("dropped_mass", 2))
                ),
                *(over(some, *each) for each in compared),
            ]
        )  # fmt: skip
    return table(header, body) + source(every, "backward")


def over_unpruned(row: Row) -> float:
    """A layer's time over that of the unpruned one of the same call."""
    names = ("gpu", "forward", "seq", "commit")
    whole = last((each for each in found("time") if not each["threshold"]), *names)
    return row["layer_ms"] / whole[tuple(row[name] for name in names)]["layer_ms"]


def over_dense_layer(row: Row) -> float:
    """A layer's time over that of cuDNN's dense forward and backward."""
    return row["layer_ms"] / (row["dense_forward_ms"] + row["dense_backward_ms"])


def times() -> str:
    """One layer's forward and backward, and what it takes of the unpruned one's."""
    every = found("time")
    header = [
        "GPU",
        "tokens",
        "forward",
        "density",
        "T",
        "density of the backward",
        "forward ms",
        "backward ms",
    ]
    header += ["layer / unpruned", "layer / cuDNN dense"]
    body = []
    for row in every:
        body.append(
            [
                gpu_name(row["gpu"]), tokens(row["seq"]), forward_of(row), percent(row["forward_density"]),
                threshold_of(row),
                percent(row["backward_density"]), f"{row['forward_ms']:.1f}", f"{row['backward_ms']:.1f}",
                f"{over_unpruned(row):.2f}", f"{over_dense_layer(row):.2f}",
            ]
        )  # fmt: skip
    return table(header, body) + source(every, "backward")
