# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention on a trained model's own queries, keys and values, and what later tokens change."""

from __future__ import annotations

from benchmarks.model import frontier_tables, mean_cost
from benchmarks.model.frontier_rows import decay_of
from benchmarks.model.mean_cost import cases, share
from benchmarks.model.real_operands import SETTINGS

from .common import NOT_MEASURED, Row, is_measured, last, percent, rows, source, table, tokens


def real_cases() -> dict[tuple, list[Row]]:
    """By GPU, model, text, length and setting: the newest row of each layer."""
    return cases(rows("real_operands")) if is_measured("real_operands") else {}


def mean(found: list[Row], name: str) -> float:
    return sum(row[name] for row in found) / len(found)


def real_operands() -> str:
    """A line for each usual setting, over the layers."""
    body, used = [], []
    usual = {(each["price"], each["backward_threshold"]) for each in SETTINGS}
    for (*_, text, seq, price, threshold), found in real_cases().items():
        if (price, threshold) not in usual:
            continue
        used += found
        name = f"price {price:g}" if price else "dense forward"
        name += f", threshold {threshold:g}" if threshold else ""
        density = percent(mean(found, "density"))
        if threshold:
            density += f"; {percent(mean(found, 'backward_density'))}"
        layers = [share([row], "dense") for row in found]
        fa4 = share(found, "fa4")
        body.append(
            [
                f"{text}, {tokens(seq)}", name, density, f"{share(found, 'dense'):.3f}",
                "" if fa4 is None else f"{fa4:.3f}", f"{min(layers):.3f} to {max(layers):.3f}", len(found),
            ]
        )  # fmt: skip
    if not body:
        return NOT_MEASURED
    header = ["text, tokens", "setting", "density; of the backward", "time / cuDNN dense"]
    header += ["/ FlashAttention-4 dense", "layers, / cuDNN", "layers"]
    return table(header, body) + source(used, "real_operands")


def price_costs() -> str:
    """What each measured price costs, as mean costs of runs count it: a line a threshold."""
    measured = mean_cost.counted(rows("real_operands"))
    costs = mean_cost.costs_of(measured)
    prices = sorted({price for line in costs.values() for price in line})
    body = [
        [
            f"{threshold:g}" if threshold else "off",
            *(f"{line[p]:.3f}" if p in line else "–" for p in prices),
        ]
        for threshold, line in sorted(costs.items())
    ]
    header = ["threshold", *(f"price {price:g}" if price else "dense" for price in prices)]
    return table(header, body) + source(measured, "real_operands")


def real_share(seq: int, price: float, threshold: float, text: str = "code") -> list[Row]:
    """The layers of a setting; none if it was not measured."""
    wanted = (text, seq, price, threshold)
    found = [rows for (_, _, *key), rows in real_cases().items() if tuple(key) == wanted]
    return found[-1] if found else []


def real_times(seq: int, price: float, threshold: float = 0.0, text: str = "code") -> str:
    """How many times as fast as dense attention on a text: over cuDNN's, and FlashAttention-4's."""
    found = real_share(seq, price, threshold, text)
    if not found:
        return "not measured yet"
    said = f"{1 / share(found, 'dense'):.1f}x cuDNN's dense attention"
    fa4 = share(found, "fa4")
    return said + (f", {1 / fa4:.1f}x FlashAttention-4's" if fa4 else "")


REACH = {"xattention": "its block", "moba": "its block"}
"""How far later tokens reach by construction, where it is not the whole sequence."""


def later_tokens() -> str:
    """How much losses with the pattern move as what follows is replaced: a line a run."""
    if not is_measured("later_tokens"):
        return NOT_MEASURED
    names = ("model", "seq", "steps", "decay", "policy", "wanted", "seed")
    every = ({**row, "decay": decay_of(row)} for row in rows("later_tokens"))
    found = list(last(every, *names).values())
    body = []
    for row in sorted(
        found, key=lambda row: (row["model"], row["policy"], row["wanted"], row["seed"])
    ):
        dense = _dense_run(row)
        near, before, copies = (
            _pooled(row, each) for each in ("32 before the cut", "all before the cut", "copies")
        )
        losses = [row["own"], row["own"] + near[0], row["dense"]]
        own, replaced, judged = (
            "–" if dense is None else frontier_tables.percent(loss / dense["dense"] - 1, 2, True)
            for loss in losses
        )
        if dense is not None:
            replaced += f" ± {100 * near[1] / dense['dense']:.2f}"
        reach = (
            "none"
            if row["policy"].endswith("_previous")
            else REACH.get(row["policy"], "the sequence")
        )
        body.append(
            [
                frontier_tables.run_of(row), f"{frontier_tables.name_of(row)}, {percent(row['density'])}",
                reach, f"{own}; {replaced}", judged, _difference(*near), _difference(*before),
                _difference(*copies),
            ]
        )  # fmt: skip
    header = ["model, tokens, steps", "policy, density", "later tokens that reach a query"]
    header += [
        "own-attention loss over dense; with another future, by the last 32 tokens before a cut",
        "dense-attention loss over dense",
    ]
    header += ["last 32 tokens before a cut, nats", "all before it", "8 tokens of a copied block"]
    return table(header, body) + source(found, "later_tokens")


def _dense_run(row: Row) -> Row | None:
    """The dense run with the seed, data and learning rates of a run; None without one."""
    same = ("model", "seq", "steps", "lr", "seed", "data")
    found = [
        each
        for each in rows("frontier_runs")
        if each["stage"] == "train" and each["policy"] == "dense"
        if all(each.get(name) == row[name] for name in same) and decay_of(each) == decay_of(row)
    ]
    return found[-1] if found else None


def _pooled(row: Row, what: str) -> tuple[float, float]:
    """The mean difference over texts, which have equally many cuts or copies, and its standard error."""
    found = [each for each in row["measured"] if each["tokens"] == what]
    error = sum(each["stderr"] ** 2 for each in found) ** 0.5 / len(found)
    return mean(found, "difference"), error


def _difference(value: float, error: float) -> str:
    return f"{value:+.4f} ± {error:.4f}".replace("-", "−")
