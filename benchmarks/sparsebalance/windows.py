# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Density and recall of documents, drawn from the recorded windows of ``record_patterns``.

A document of a kind gets a rank among the recorded windows of its kind, uniformly, and keeps it: the same
quantile at every length, with numbers between two recorded lengths on the line between them in logarithms.
Beyond the longest recorded length the line of the last two goes on; below the shortest, its numbers hold.
Between prices, logarithms of density, and of what recall leaves, are interpolated over the logarithm of the
price.

The search gives one pattern to all documents of a sample. Recorded packed windows say what that changes of
the density that documents have alone, and of what recall leaves (:attr:`Windows.packed_over_single`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ..lib import record
from . import sets

PATTERNS = record.RESULTS / "sparsebalance_patterns.jsonl"
LEAST = 1e-4
"""Of density, and of what recall leaves."""


class Windows:
    """What was recorded of one model.

    Attributes:
        prices: ascending, float64 ``[p]``.
        lengths: recorded lengths by kind, ascending.
        packed_over_single: density of a packed window over that of its documents alone, and the same of what
            recall leaves; geometric means, float64 ``[2, p]``.
    """

    def __init__(self, path: Path = PATTERNS):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line]
        self.prices = np.array(rows[0]["prices"], np.float64)
        self.about = rows[-1]
        single = [row for row in rows if not row["document"]]
        kinds = [kind for kind in sets.KINDS if any(row["kind"] == kind for row in single)]
        self.kinds = tuple(kinds)
        self.lengths: dict[str, np.ndarray] = {}
        self._tables: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for kind in kinds:
            of_kind = [row for row in single if row["kind"] == kind]
            lengths = sorted({row["seq"] for row in of_kind})
            self.lengths[kind] = np.array(lengths, np.float64)
            self._tables[kind] = [
                _table([row for row in of_kind if row["seq"] == length]) for length in lengths
            ]
        ratios = []
        for row in rows:
            if row["document"] and row["kind"] in kinds:
                alone = self.curves(row["kind"], np.array([row["document"]]), np.array([0.5]))
                left = (1 - np.array(row["recall"])) / (1 - alone[1][0])
                ratios.append(np.log([np.array(row["density"]) / alone[0][0], left]))
        self.packed_over_single = (
            np.exp(np.mean(ratios, 0)) if ratios else np.ones((2, len(self.prices)))
        )

    def curves(self, kind: str, lengths, ranks) -> tuple[np.ndarray, np.ndarray]:
        """Density and recall at all prices of documents of ``lengths``, with ``ranks`` of 0 to 1 among the
        windows of their kind: float64 ``[n, p]`` each."""
        known = self.lengths[kind]
        at = np.log(np.maximum(np.asarray(lengths, np.float64), known[0]))
        upper = np.clip(np.searchsorted(np.log(known), at), 1, max(1, len(known) - 1))
        lower = upper - 1
        if len(known) == 1:
            upper = lower
        span = np.log(known[upper]) - np.log(known[lower])
        share = np.where(span > 0, (at - np.log(known[lower])) / np.where(span > 0, span, 1), 0.0)
        found = []
        for part in range(2):
            ends = [
                np.stack(
                    [
                        _quantile(self._tables[kind][place][part], rank)
                        for place, rank in zip(places, ranks)
                    ]
                )
                for places in (lower, upper)
            ]
            found.append(ends[0] + share[:, None] * (ends[1] - ends[0]))
        density = np.exp(np.minimum(found[0], 0.0))
        return density, 1 - np.exp(np.minimum(found[1], 0.0))

    def at_price(self, curves: np.ndarray, prices: np.ndarray, left: bool) -> np.ndarray:
        """Values of curves ``[n, p]`` at prices ``[n]``.

        Args:
            left: interpolate the logarithm of what is left to 1.
        """
        values = np.log(np.maximum(1 - curves if left else curves, LEAST))
        at, known = np.log(prices), np.log(self.prices)
        at = np.clip(at, known[0], known[-1])
        upper = np.clip(np.searchsorted(known, at), 1, len(known) - 1)
        share = (at - known[upper - 1]) / (known[upper] - known[upper - 1])
        n = np.arange(len(values))
        low, high = values[n, upper - 1], values[n, upper]
        found = np.exp(low + share * (high - low))
        return 1 - found if left else found


def _table(rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of density and of what recall leaves, of windows in order of density: ``[windows, p]``."""
    density = np.array([row["density"] for row in rows])
    recall = np.array([row["recall"] for row in rows])
    order = np.argsort(density.mean(1), kind="stable")
    return (
        np.log(np.maximum(density[order], LEAST)),
        np.log(np.maximum(1 - recall[order], LEAST)),
    )


def _quantile(table: np.ndarray, rank: float) -> np.ndarray:
    """Between the rows of a table."""
    at = rank * (len(table) - 1)
    low = int(at)
    high = min(low + 1, len(table) - 1)
    return table[low] + (at - low) * (table[high] - table[low])


def sample_curves(
    windows: Windows, packed: sets.PackedSet, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Density and recall of packed samples at all prices: float64 ``[n, p]`` each.

    Density is the mean over documents by their pairs, recall that by their tokens; and what packing changes.
    """
    rng = np.random.default_rng(seed)
    density = np.empty((len(packed.documents), len(windows.prices)))
    recall = np.empty_like(density)
    for number, (dataset, lengths) in enumerate(zip(packed.datasets, packed.documents)):
        # A source is even in itself: the documents of a sample are drawn around the sample's own rank.
        ranks = np.clip(rng.random() + rng.normal(0, 0.25, len(lengths)), 0, 1)
        found = windows.curves(sets.KINDS[dataset], lengths, ranks)
        pairs = lengths * (lengths + 1.0)
        density[number] = (pairs[:, None] * found[0]).sum(0) / pairs.sum()
        recall[number] = (lengths[:, None] * found[1]).sum(0) / lengths.sum()
        if len(lengths) > 1:
            density[number] *= windows.packed_over_single[0]
            recall[number] = 1 - (1 - recall[number]) * windows.packed_over_single[1]
    return np.minimum(density, 1.0), recall
