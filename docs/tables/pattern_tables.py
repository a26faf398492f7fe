# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which density a pattern needs for a recall."""

from __future__ import annotations

from .common import Row, last, rows, source, table, tokens

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


def whole_models() -> list[Row]:
    """Rows of all layers, on a GPU."""
    return [row for row in rows("patterns") if row["gpu"] != "none"]


def curve(
    model: str, text: str, seq: int, policy: str, estimator: str
) -> list[tuple[float, float]]:
    """(density, recall) of each setting, by density."""
    wanted = (model, text, seq, policy, estimator)
    fields = ("model", "text", "seq", "policy", "estimator")
    found = [row for row in whole_models() if tuple(row[field] for field in fields) == wanted]
    found = list(last(found, "setting").values())
    return sorted((row["density"], row["recall"]) for row in found)


def density_at(points: list[tuple[float, float]], recall: float) -> float | None:
    """The density at which a curve reaches ``recall``, on a line between settings; None if it does not."""
    for (low, before), (high, after) in zip(points, points[1:]):
        if before <= recall <= after:
            return low + (high - low) * (recall - before) / max(after - before, 1e-9)
    return None


def patterns_of(model: str, lengths: tuple[int, ...]) -> str:
    places = [(text, seq) for seq in lengths for text in TEXTS]
    used = [row for row in whole_models() if row["model"] == model and row["seq"] in lengths]
    body = []
    for (policy, estimator), name in POLICIES.items():
        cells = []
        for text, seq in places:
            points = curve(model, text, seq, policy, estimator)
            found = [density_at(points, recall) for recall in RECALLS]
            cells.append(
                " / ".join("-" if each is None else f"{each:.3f}".lstrip("0") for each in found)
            )
        body.append([name, *cells])
    header = [
        "policy, rows that select",
        *(f"{TEXTS[text]}, {tokens(seq)}" for text, seq in places),
    ]
    return table(header, body) + source(used, "patterns")


def patterns() -> str:
    return patterns_of("qwen.gguf", (16384, 32768))


def patterns_long() -> str:
    return patterns_of("qwen.gguf", (65536, 131072))


def patterns_smol() -> str:
    return patterns_of("smol.gguf", (8192,))
