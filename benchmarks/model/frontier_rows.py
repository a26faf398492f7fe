# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows of the frontier joined: a row for each policy, density and length of training."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from math import fsum  # sum rounds otherwise before Python 3.12

from megatron_mtraining.tools.eval.noise import mean_of

from .mean_cost import Costs, costs_of, mean_cost

Row = dict
KEY = ("model", "seq", "policy", "wanted")
LENGTH = ("steps", "lr", "decay")
DATA = ("data", "seed", *LENGTH)
"""What a run of training has in common with the dense run that it is compared with."""
CONSTANT = "constant"
"""The decay of the learning rate in rows that do not say it."""
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


def decay_of(row: Row) -> str:
    """How the learning rate of a run of training decays."""
    return row.get("decay", CONSTANT)


def joined(rows: Iterable[Row], measured: Iterable[Row] = ()) -> list[Row]:
    """A row for each model, length, policy, wanted density, and number of training steps with a learning rate
    and its decay (None: not trained).

    Losses are ratios to dense attention's, less 1: of training, of the dense run on the same text with the
    same seed, steps, learning rate and decay; means over seeds, with half of their range (``_spread``). Runs
    on several texts (``data``): those on the text of the last run are a row, the others are left out.

    Args:
        measured: rows of real operands, for the mean cost of a run.
    """
    rows = [{**row, "decay": decay_of(row)} if row["stage"] == "train" else row for row in rows]
    costs = costs_of(measured)
    judged = newest((row for row in rows if row["stage"] == "zero"), *KEY)
    trained = newest((row for row in rows if row["stage"] == "train"), *KEY, *DATA)
    timed = newest((row for row in rows if row["stage"] == "time"), "policy", "wanted", "seq")
    dense = {_of_run(row): row for row in trained if row["policy"] == "dense"}
    keys = {tuple(row[name] for name in KEY): None for row in judged + trained}
    found = []
    for key in keys:
        zero = next((row for row in judged if tuple(row[name] for name in KEY) == key), None)
        own = [row for row in trained if tuple(row[name] for name in KEY) == key]
        lengths = sorted({_length(row) for row in own})
        for length in lengths or [None]:
            some = [row for row in own if _length(row) == length]
            some = [row for row in some if row.get("data") == some[-1].get("data")]
            found.append(_row(key, zero, some, dense, timed, costs))
    return found


def _length(row: Row) -> tuple:
    return tuple(row[name] for name in LENGTH)


def _of_run(row: Row) -> tuple:
    return tuple(row.get(name) for name in ("model", "seq", *DATA))


def _row(
    key: tuple, zero: Row | None, own: list[Row], dense: dict[tuple, Row], timed: list[Row], costs: Costs
) -> Row:  # fmt: skip
    row = dict(zip(KEY, key))
    policy, wanted = row["policy"], row["wanted"]
    pairs = [(each, dense[_of_run(each)]) for each in own if _of_run(each) in dense]
    more = {
        name: [each[name] / base["dense"] - 1 for each, base in pairs] for name in ("own", "dense")
    }
    one = zero or own[-1]
    setting, length = one["setting"] or {}, _length(own[0]) if own else [None] * len(LENGTH)
    row |= dict(
        setting=one["setting"],
        density=zero["density"] if zero else mean(each["density"] for each in own),
        recall=zero["recall"] if zero else mean(each["recall"] for each in own),
        density_trained=mean(each["density"] for each in own),
        recall_trained=mean(each["recall"] for each in own),
        recall_by=SELECTING if policy.endswith(LAST) or policy == "published" else "held-out rows",
        zero_over_dense=zero and zero["zero_over_dense"],
        **dict(zip(LENGTH, length)), seeds=len(pairs), data=own[0].get("data") if own else None,
        schedule=setting.get("schedule"), backward_threshold=setting.get("backward_threshold", 0.0),
        mean_cost=mean_cost(one["setting"], length[0], costs),
    )  # fmt: skip
    for name, values in more.items():
        row[f"trained_{name}_over_dense"] = mean(values)
        row[f"trained_{name}_spread"] = spread(values)
        row[f"trained_{name}_by_text"] = _by_text(pairs, f"{name}_by_text")
    # Own attention: of the trained model where there is one.
    source, name = (own, "needle_own") if own else ([zero] if zero else [], "needle")
    row["needle"] = mean(each[name] for each in source)
    row |= {
        f"zero_{name}": zero and zero.get(name) for name in ("needle", "needle_tail", "answer_loss")
    }
    row["needle_tail"] = mean(each.get("needle_tail") for each in source)
    row["needle_dense"] = mean(each["needle_dense"] for each in own)
    row["needle_of_dense"] = mean(base["needle_dense"] for _, base in pairs) if own else (
        zero and zero["dense_needle"]
    )  # fmt: skip
    name = "answer_loss_own" if own else "answer_loss"
    row["answer_loss"] = mean(each[name] for each in source)
    row["answer_loss_dense"] = mean(each["answer_loss_dense"] for each in own)
    row |= _ruler(own, pairs)
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


def _by_text(pairs: list[tuple[Row, Row]], name: str) -> dict[str, float] | None:
    """Losses over the dense runs' by kind of text, means over seeds; None without."""
    pairs = [(each, base) for each, base in pairs if name in each]
    kinds = [kind for kind in pairs[0][0][name] if kind != "all"] if pairs else []
    return {
        kind: mean(each[name][kind] / base["dense_by_text"][kind] - 1 for each, base in pairs)
        for kind in kinds
    } or None


def _ruler(own: list[Row], pairs: list[tuple[Row, Row]]) -> dict:
    """RULER's samples, of those runs that were judged by them: the share that is right (``ruler``) and the
    loss of the right answers (``ruler_loss``), with own and with dense attention, and of the dense run
    (``_of_dense``); with dense attention also the difference from the dense run (``_more``) with its 95%
    interval by bootstrap over samples."""
    judged = [each for each in own if "ruler_own" in each]
    found: dict = dict.fromkeys(("ruler_samples", "ruler_more", "ruler_loss_more"))
    for value, name in (("right", "ruler"), ("loss", "ruler_loss")):
        for kind, label in (("own", name), ("tail", f"{name}_tail"), ("dense", f"{name}_dense")):
            found[label] = mean(
                x for each in judged if f"ruler_{kind}" in each for x in _samples(each, kind, value)
            )
        both = [(row, base) for row, base in pairs if "ruler_own" in row and "ruler_own" in base]
        found[f"{name}_of_dense"] = mean(
            x for _, base in both for x in _samples(base, "dense", value)
        )
        more = [
            one - other
            for row, base in both
            for one, other in zip(_samples(row, "dense", value), _samples(base, "dense", value))
        ]
        if more:
            found[f"{name}_more"] = [
                round(each, 4) for each in mean_of(more)[:3] if each is not None
            ]
            found["ruler_samples"] = len(more)
    return found


def _samples(row: Row, kind: str, value: str) -> list[float]:
    """Of all tasks."""
    return [
        each for task in sorted(row[f"ruler_{kind}"]) for each in row[f"ruler_{kind}"][task][value]
    ]


def _time_of(
    policy: str, wanted: float | str | None, density: float | None, timed: list[Row]
) -> dict:
    """Times of one length in milliseconds: of the policy's row; where prices move, between those of price."""
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
        return round(fsum(share * row[name] for share, row in weighted for name in names), 4)

    return dict(
        layer_ms=whole("forward_ms", "backward_ms"), search_ms=whole("search_ms"),
        dense_ms=whole("dense_forward_ms", "dense_backward_ms"), row=weighted[-1][1],
    )  # fmt: skip
