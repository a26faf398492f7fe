# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pruned backward: what of the gradient stays, and what time."""

from __future__ import annotations

from benchmarks.model.frontier_rows import decay_of, spread
from benchmarks.model.frontier_rows import mean as mean_of

from . import frontier_tables
from .common import Row, Table, cell, grouped, rows, values

TEXTS = {"code": "code", "book": "novel, essays", "speech": "speeches"}
ORDER = ("pruned", "forward", "another window")
"""What a gradient is compared with."""


def forward_of(row: Row) -> str:
    policy, _, density = row["forward"].partition("@")
    return policy + (cell(", {d:share} wanted", d=float(density)) if density else "")


def threshold_of(row: Row) -> str:
    return f"{row['threshold']:g}" if row["threshold"] else "off"


def what_of(row: Row) -> str:
    if row["what"] == "forward":
        return "the forward's pattern against a dense forward"
    return f"T = {threshold_of(row)}" if row["what"] == "pruned" else row["what"]


gradient = Table(
    "backward",
    {
        "tokens": "{seq:K}",
        "forward": forward_of,
        "text": lambda row: TEXTS[row["text"]],
        "texts": lambda row: row.get("data") or "earlier",
        "gradient": what_of,
        "density of the backward": "{backward_density:share}",
        "attention left out": "{dropped_mass:share}",
        "cosine": "{cos_grad:.4f}",
        "relative error": "{err_grad:.3f}",
        "norm / unpruned, Q K V projections": "{norm_qkv:.3f}",
    },
    where=lambda row: row["stage"] == "gradient",
    newest=("forward", "text", "what", "threshold", "seq", "data"),
    order=lambda row: (
        row["forward"], row.get("data") or "", row["text"], ORDER.index(row["what"]), row["threshold"]
    ),
)  # fmt: skip
"""The gradient of all parameters beside the unpruned one's, and beside two yardsticks."""


# Training


def trained_rows() -> list[Row]:
    return [row for row in rows("backward") if row["stage"] == "train"]


def over(some: list[Row], judged: str, forward: str) -> str:
    """A loss (``dense`` or ``own``) of runs over unpruned runs with a forward, of the same seeds and texts:
    the mean over seeds, with half of their range."""
    ratios = [row[judged] / base[judged] - 1 for row, base in _pairs(some, forward)]
    return frontier_tables.with_spread(mean_of(ratios), spread(ratios))


def over_by_text(some: list[Row], forward: str) -> str:
    """The dense-attention loss over those runs by text; nothing where it was not recorded."""
    pairs = _pairs(some, forward)
    if not all("dense_by_text" in row for pair in pairs for row in pair):
        return ""
    means = (
        mean_of(row["dense_by_text"][text] / base["dense_by_text"][text] - 1 for row, base in pairs)
        for text in TEXTS
    )
    return ", ".join(cell("{x:over}", x=value) for value in means)


def _pairs(some: list[Row], forward: str) -> list[tuple[Row, Row]]:
    """Each run with the unpruned one of a forward, of the same seed, text and learning rates."""

    def kind(row: Row) -> tuple:
        return *values(row, "model", "seq", "seed", "steps", "lr", "data"), decay_of(row)

    bases = {(row["forward"], *kind(row)): row for row in trained_rows() if not row["threshold"]}
    return [(row, bases[(forward, *kind(row))]) for row in some]


def _runs(found: list[Row]) -> list[Row]:
    """A row for each setting, with its runs."""
    names = ("model", "seq", "steps", "forward", "threshold")
    groups = grouped(found, lambda row: (*values(row, *names), decay_of(row)))
    return [
        {**some[-1], "used": some,
         **{name: mean_of(row[name] for row in some) for name in ("backward_density", "dropped_mass")}}
        for some in groups.values()
    ]  # fmt: skip


trained = Table(
    "backward",
    {
        "tokens": "{seq:K}",
        "steps": "{steps}",
        "forward": forward_of,
        "T": threshold_of,
        "runs": lambda row: len(row["used"]),
        "density of the backward": "{backward_density:share}",
        "attention left out": "{dropped_mass:share2}",
        "dense-attention loss over unpruned": lambda row: over(
            row["used"], "dense", row["forward"]
        ),
        "own-attention loss over unpruned": lambda row: over(row["used"], "own", row["forward"]),
        "dense-attention loss over dense": lambda row: over(row["used"], "dense", "dense"),
    },
    where=lambda row: row["stage"] == "train",
    find=_runs,
)
"""Losses after training, over the unpruned run of the same forward and over the dense run."""


# Time


def over_unpruned(row: Row) -> float:
    """A layer's time over that of the unpruned one of the same call."""
    names = ("gpu", "forward", "seq", "commit")
    whole = [
        other for other in rows("backward")
        if other["stage"] == "time" and not other["threshold"]
        and values(other, *names) == values(row, *names)
    ]  # fmt: skip
    return row["layer_ms"] / whole[-1]["layer_ms"]


def _over_dense(row: Row) -> str:
    """A layer's time over that of cuDNN's dense forward and backward."""
    return f"{row['layer_ms'] / (row['dense_forward_ms'] + row['dense_backward_ms']):.2f}"


times = Table(
    "backward",
    {
        "GPU": "{gpu:gpu}",
        "tokens": "{seq:K}",
        "forward": forward_of,
        "density": "{forward_density:share}",
        "T": threshold_of,
        "density of the backward": "{backward_density:share}",
        "forward ms": "{forward_ms:.1f}",
        "backward ms": "{backward_ms:.1f}",
        "layer / unpruned": lambda row: f"{over_unpruned(row):.2f}",
        "layer / cuDNN dense": _over_dense,
    },
    where=lambda row: row["stage"] == "time",
)
