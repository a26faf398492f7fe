# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which density a pattern needs for a recall."""

from __future__ import annotations

from .common import Columns, Row, Table, cell, last, rows, values

POLICIES = {
    ("price", "strata"): "**price, strata** (default)",
    ("price", "oracle"): "price, all rows select (oracle)",
    ("coverage", "last"): "coverage, last 64 rows (published)",
    ("coverage", "strata"): "coverage, strata",
    ("xattention", "own"): "xattention (block-sparse)",
    ("moba", "own"): "moba (block-sparse)",
}
RECALLS = (0.9, 0.95, 0.98)
TEXTS = {"code": "code", "moby.txt": "prose"}
FIELDS = ("model", "text", "seq", "policy", "estimator")


def curve(*wanted: object) -> list[tuple[float, float]]:
    """(density, recall) of each setting of all layers of a model, on a GPU, by density; ``wanted`` are the
    values of :data:`FIELDS`."""
    found = (
        row for row in rows("patterns") if row["gpu"] != "none" and values(row, *FIELDS) == wanted
    )
    return sorted((row["density"], row["recall"]) for row in last(found, "setting"))


def density_at(points: list[tuple[float, float]], recall: float) -> float | None:
    """The density at which a curve reaches ``recall``, on a line between settings; None if it does not."""
    for (low, before), (high, after) in zip(points, points[1:]):
        if before <= recall <= after:
            return low + (high - low) * (recall - before) / max(after - before, 1e-9)
    return None


def _patterns_of(model: str, *lengths: int) -> Table:
    """A row a policy, a column a text and length: the densities of :data:`RECALLS`."""

    def densities(text: str, seq: int):
        def said(row: Row) -> str:
            points = curve(model, text, seq, *row["kind"])
            found = [density_at(points, recall) for recall in RECALLS]
            return " / ".join("-" if d is None else f"{d:.3f}".lstrip("0") for d in found)

        return said

    places = [(text, seq) for seq in lengths for text in TEXTS]
    columns: Columns = {
        cell("{text}, {seq:K}", text=TEXTS[text], seq=seq): densities(text, seq)
        for text, seq in places
    }
    return Table(
        "patterns",
        {"policy, rows that select": lambda row: POLICIES[row["kind"]], **columns},
        where=lambda row: row["gpu"] != "none" and row["model"] == model and row["seq"] in lengths,
        find=lambda found: [dict(kind=kind, used=found) for kind in POLICIES],
    )


patterns = _patterns_of("qwen.gguf", 16384, 32768)
patterns_long = _patterns_of("qwen.gguf", 65536, 131072)
patterns_smol = _patterns_of("smol.gguf", 8192)
