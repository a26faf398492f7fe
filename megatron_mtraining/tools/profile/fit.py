# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Coefficients of the latency model from measurements, and how far it is from those that were held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from ...balance import KINDS, Latency, LatencyModel
from ...balance.terms import PARTS, Entry, Error, quantities
from .measure import Measurement


def fit(measured: Sequence[Measurement]) -> tuple[Entry, ...]:
    """The entries of the kinds and head dimensions that were measured, from those not held out."""
    fitted = [each for each in measured if not each.case.held_out]
    entries = []
    for kind in KINDS:
        for head_dim in sorted({each.case.shape.head_dim for each in fitted}):
            own = [m for m in fitted if (m.case.kind, m.case.shape.head_dim) == (kind, head_dim)]
            if not own:
                continue
            # Everything is one more density of the same kernels.
            more = [
                m for m in fitted if m.case.kind == "dense" and m.case.shape.head_dim == head_dim
            ]
            shared = own + more if kind == "vertical_slash" else own
            coefficients = {
                part: _coefficients(part, kind, own if part == "search" else shared)
                for part in PARTS
            }
            entries.append(Entry(kind, head_dim, coefficients, _host(own)))
    return tuple(entries)


def _coefficients(part: str, kind: str, measured: Sequence[Measurement]) -> dict[str, float]:
    terms = [term for term in PARTS[part] if term != "square" or kind == "block_lists"]
    columns = np.array([[_quantities(each)[term] for term in terms] for each in measured])
    times = np.array([getattr(each, part).gpu for each in measured])
    solution = least_relative_squares(columns, times)
    return {term: float(f"{x:.5g}") for term, x in zip(terms, solution) if x > 0}


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


def errors(model: LatencyModel, measured: Sequence[Measurement]) -> dict[str, Error]:
    """Relative errors on what was held out: of each part, of all three together ("total"), and of the total
    by kind."""
    held_out = [each for each in measured if each.case.held_out]
    found: dict[str, list[float]] = {name: [] for name in ("total", *PARTS)}
    for each in held_out:
        for name, error in relative_errors(model, each).items():
            found[name].append(abs(error))
            if name == "total":
                found.setdefault(each.case.kind, []).append(abs(error))
    return {
        name: Error(round(float(np.median(own)), 4), round(max(own), 4), len(own))
        for name, own in found.items()
        if own
    }


def relative_errors(model: LatencyModel, measured: Measurement) -> Mapping[str, float]:
    """Predicted over measured time, less 1: of each part and of the total."""
    predicted = predict(model, measured)
    times = {part: getattr(measured, part).gpu for part in PARTS}
    found = {part: float(time) / times[part] - 1 for part, time in zip(PARTS, predicted)}
    return {"total": float(predicted.total_ms) / sum(times.values()) - 1, **found}


def predict(model: LatencyModel, measured: Measurement) -> Latency:
    """What the model has for a measured case."""
    case = measured.case
    return model.predict(case.tokens, measured.pairs, measured.density, case.shape, kind=case.kind)


def _quantities(measured: Measurement) -> dict:
    case = measured.case
    return quantities(case.tokens, measured.pairs, measured.density, case.shape)


def _host(measured: Sequence[Measurement]) -> Latency:
    """The host's time to launch each part: what it was at least for half of the cases."""
    return Latency(
        *(round(float(np.median([getattr(m, part).host for m in measured])), 4) for part in PARTS)
    )
