# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Coefficients of the latency model from measurements, and how far the model is from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from ...balance.latency import KINDS, PARTS, Entry, LatencyModel, quantities
from .measure import Measurement

TERMS = {
    ("search", "vertical_slash"): ("launch", "heads", "rows", "packed_rows", "candidates"),
    ("search", "block_lists"): ("launch", "rows", "square"),
    ("search", "dense"): ("launch", "rows"),
    ("forward", "block_lists"): ("launch", "rows", "packed_rows", "pairs"),
    ("backward", "block_lists"): ("launch", "rows", "pairs", "key_span"),
}
"""Terms that are fitted, by part and kind, where they are not all of the part's."""


def fit(measured: Sequence[Measurement], processors: int) -> tuple[Entry, ...]:
    """An entry of each kind that was measured, all of one head dimension."""
    entries = []
    for kind in KINDS:
        own = [each for each in measured if each.case.kind == kind]
        if not own:
            continue
        amounts = [_quantities(each, processors) for each in own]
        coefficients = {}
        for part in PARTS:
            terms = TERMS.get((part, kind), PARTS[part])
            columns = np.array([[each[term] for term in terms] for each in amounts])
            solution = least_relative_squares(
                columns, np.array([getattr(each, part) for each in own])
            )
            coefficients[part] = {
                term: float(f"{x:.5g}") for term, x in zip(terms, solution) if x > 0
            }
        entries.append(Entry(kind, own[0].shape.head_dim, coefficients))
    return tuple(entries)


def least_relative_squares(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Coefficients of 0 or more with the least sum of squares of relative errors.

    Of a few columns, each set is tried: the best set of non-negative coefficients is that of the solution.

    Args:
        columns: ``[measurements, terms]``.
        times: ``[measurements]``, positive.
    """
    scaled = columns / times[:, None]
    size = np.maximum(np.abs(scaled).max(0), 1e-300)  # of like size, for the solver
    wanted, count = np.ones(len(times)), columns.shape[1]
    best, least = np.zeros(count), float(len(times))
    for number in range(1, min(count, len(times)) + 1):
        for used in map(list, combinations(range(count), number)):
            found, *_ = np.linalg.lstsq(scaled[:, used] / size[used], wanted, rcond=None)
            if (found < 0).any():
                continue
            squares = ((scaled[:, used] / size[used] @ found - wanted) ** 2).sum()
            if squares < least - 1e-12:
                least, best = squares, np.zeros(count)
                best[used] = found / size[used]
    return best


def relative_errors(model: LatencyModel, measured: Sequence[Measurement]) -> list[float]:
    """Of each measurement: how far the predicted time of search, forward and backward is from it."""
    found = []
    for each in measured:
        predicted = model.predict(
            each.case.tokens, each.pairs, each.density, each.shape,
            kind=each.case.kind, packed=each.case.documents > 1,
        )  # fmt: skip
        time = each.search + each.forward + each.backward
        found.append(abs(float(predicted.total_ms) / time - 1))
    return found


def _quantities(each: Measurement, processors: int) -> dict:
    return quantities(
        each.case.tokens, each.pairs, each.density, each.shape,
        kind=each.case.kind, packed=each.case.documents > 1, processors=processors,
    )  # fmt: skip
