# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Coefficients of the latency model from measurements, and how far it is from those that were held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from ...balance import KINDS, Latency, LatencyModel
from ...balance.terms import PARTS, PROCESSORS, Entry, Error, quantities
from .measure import Measurement

TERMS = {
    ("search", "vertical_slash"): ("launch", "heads", "rows", "packed_rows", "candidates"),
    ("search", "block_lists"): ("launch", "rows", "square"),
    ("search", "dense"): ("launch", "rows"),
    ("forward", "block_lists"): ("launch", "rows", "packed_rows", "pairs"),
    ("backward", "block_lists"): ("launch", "rows", "pairs", "key_span"),
}
"""Terms that are fitted, by part and kind, where they are not all of the part's. Chosen by leaving shapes out
of the fit of H200 measurements, one after the other; never by those that are held out."""
IN_COLUMNS = {"forward": ("rows", "query_path"), "backward": ("heads", "key_rows")}
"""Terms by which a pattern with columns takes longer than one of slashes alone."""
PER_SHARE = ("query_path",)
"""Those of them that grow with the columns' share of the pairs; for the others there are columns or none."""


def fit(measured: Sequence[Measurement], processors: int = PROCESSORS) -> tuple[Entry, ...]:
    """The entries of the kinds and head dimensions that were measured, from those not held out.

    Args:
        processors: multiprocessors of the GPU.

    Vertical-slash and dense attention run the same kernels, and are fitted together. A pattern's columns have
    terms of their own. Since a prediction does not know them, the entry of vertical-slash patterns has these
    terms with the mean share of those that were measured, and the entry of dense attention is without.
    """
    fitted = [each for each in measured if not each.case.held_out]
    entries = []
    for head_dim in sorted({each.case.shape.head_dim for each in fitted}):
        own = {kind: _of(fitted, kind, head_dim) for kind in KINDS}
        together = own["vertical_slash"] + own["dense"]
        found: dict[str, dict] = {kind: {} for kind in KINDS}
        for part in PARTS:
            if part in IN_COLUMNS:
                found["vertical_slash"][part], found["dense"][part] = _with_columns(
                    part, together, processors
                )
            for kind in KINDS:
                if part not in found[kind]:
                    found[kind][part] = _coefficients(part, kind, own[kind], processors)
        entries += [
            Entry(kind, head_dim, found[kind], _host(own[kind])) for kind in KINDS if own[kind]
        ]
    return tuple(sorted(entries, key=lambda entry: KINDS.index(entry.kind)))


def _of(measured: Sequence[Measurement], kind: str, head_dim: int) -> list[Measurement]:
    return [m for m in measured if (m.case.kind, m.case.shape.head_dim) == (kind, head_dim)]


def _coefficients(
    part: str, kind: str, measured: Sequence[Measurement], processors: int
) -> dict[str, float]:
    if not measured:
        return {}
    terms = TERMS.get((part, kind), PARTS[part])
    columns = np.array(
        [[_quantities(each, processors)[term] for term in terms] for each in measured]
    )
    return _rounded(dict(zip(terms, least_relative_squares(columns, _times(part, measured)))))


def _with_columns(part: str, measured: Sequence[Measurement], processors: int) -> tuple[dict, dict]:
    """Coefficients of one part of patterns with columns, at their mean share, and of those without."""
    if not measured:
        return {}, {}
    terms, more = PARTS[part], IN_COLUMNS[part]
    shares = [each.case.columns for each in measured]
    columns = []
    for each, share in zip(measured, shares):
        amounts = _quantities(each, processors)
        row = [amounts[term] for term in terms]
        row += [amounts[term] * (share if term in PER_SHARE else share > 0) for term in more]
        columns.append(row)
    solution = least_relative_squares(np.array(columns), _times(part, measured))
    without = dict(zip(terms, solution))
    there = [share for share in shares if share > 0]
    mean = sum(there) / len(there) if there else 0.0
    having = dict(without)
    for term, coefficient in zip(more, solution[len(terms) :]):
        having[term] += coefficient * (mean if term in PER_SHARE else bool(there))
    return _rounded(having), _rounded(without)


def _rounded(coefficients: Mapping[str, float]) -> dict[str, float]:
    return {term: float(f"{x:.5g}") for term, x in coefficients.items() if x > 0}


def _times(part: str, measured: Sequence[Measurement]) -> np.ndarray:
    return np.array([getattr(each, part).gpu for each in measured])


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
    return model.predict(
        case.tokens,
        measured.pairs,
        measured.density,
        case.shape,
        kind=case.kind,
        packed=case.documents > 1,
    )


def _quantities(measured: Measurement, processors: int) -> dict:
    case = measured.case
    return quantities(
        case.tokens,
        measured.pairs,
        measured.density,
        case.shape,
        kind=case.kind,
        packed=case.documents > 1,
        processors=processors,
    )


def _host(measured: Sequence[Measurement]) -> Latency:
    """The host's time to launch each part: the lower quartile over cases. It does not depend on their size,
    and what else the host does only adds to it."""
    return Latency(
        *(
            round(float(np.quantile([getattr(m, part).host for m in measured], 0.25)), 4)
            for part in PARTS
        )
    )
