# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Targets beside what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from . import backward_tables, frontier_tables, real_tables
from .common import Row, Table, cell, mean, rows, values
from .kernel_tables import (
    WAYS,
    backward_rows,
    dense_host,
    host_us,
    kernel_rows,
    searches,
    selection,
    shortest_host,
    worst_error,
)
from .step_tables import KEPT, over_dense, ratio, step

PRODUCTS = "the backward computes seven matrix products, cuDNN's five"
TILES = "few tiles for each block: going to the next one costs as much as two tiles"
VISITS = "one pass: visits of key blocks cost as much as products"
SHORT = "launch-bound when timed alone"
ENDS = "the gather before the first round, and the last send of gradients"
FEW = "few queries that attend to one distant key weigh little in a mean recall"
UNKNOWN = "not known"
COSTS = "with fewer pairs the loss grows faster than the cost falls"
TWICE = "keys are read twice, for the LSE and for the masses"
CHAIN = "a search is a chain of short kernels, which take about as long at 8K tokens"
LAUNCHES = "Python between the launches of a forward and a backward"
REST = "the layers outside attention are two thirds of the step"
FINDS = "the forward stays, and finds the blocks"
MODELS = ("smol.gguf", "qwen.gguf")


def target(what: str, wanted: str, measured: str, met: bool, why: str, *used: Row) -> Row:
    """A row: what, the target, what was measured, whether it is met, why if not, and from which rows."""
    return dict(what=what, target=wanted, measured=measured, met=met, why=why, used=used)


def _table(files: str, targets: Callable[[], Iterator[Row]]) -> Table:
    """The targets of a group, missed ones first."""
    return Table(
        files,
        {
            "what": "{what}",
            "target": "{target}",
            "measured": "{measured}",
            "": lambda row: "met" if row["met"] else "**missed**",
            "why": lambda row: "" if row["met"] else row["why"],
        },
        find=lambda _: targets(),
        order=lambda row: (row["met"],),
    )


def _losses() -> Iterator[Row]:
    """Of target recall 0.95 after 300 steps, by text; loss and cost at once of the schedule with a mean cost
    nearest to its target."""
    for model in MODELS:
        row = frontier_tables.chosen(model, "target", 0.95)
        name = frontier_tables.model_of(row) + cell(", {seq:K} tokens, {seeds} seeds", row)
        for judged in ("dense", "own"):
            mean, texts = row[f"trained_{judged}_over_dense"], row[f"trained_{judged}_by_text"]
            for text, loss in {"mean": mean, **texts}.items():
                what = f"{judged}-attention loss, {text}: {name}"
                yield target(what, "0.5%", cell("{x:over}", x=loss), loss <= 0.005, FEW, row)
    for model in MODELS:
        row = frontier_tables.with_schedule(model, "0:1.2,0.9:0.15/3")
        run = f"{frontier_tables.run_of(row)} steps"
        met = row["trained_dense_over_dense"] <= 0.001 and row["mean_cost"] <= 0.1
        what = f"dense-attention loss at a mean cost, schedule `{row['schedule']}`: {run}"
        measured = cell("{trained_dense_over_dense:over} at {mean_cost:.2f}", row)
        yield target(what, "0.10% at 0.10", measured, met, COSTS, row)


def _steps() -> Iterator[Row]:
    for seq, wanted in ((524288, 10), (131072, 3)):
        row = step(seq)
        what = "step of Qwen2.5-3B's shape over dense that keeps attention's output, "
        what += cell(
            "{seq:K}, {world} {gpu:gpu}, 1000 columns and 100 diagonals, random weights", row
        )
        yield target(what, f"{wanted}x", ratio(row, KEPT), over_dense(row) >= wanted, REST, row)


# One layer over four GPUs

LAYERS = (
    ("512K 1000 columns, 100 diagonals", 4.5, 13, UNKNOWN),
    ("512K 3500 columns, 30 diagonals", 6, 21, UNKNOWN),
    ("128K 1000 columns, 100 diagonals", 1.4, 3.6, SHORT),
    ("512K 3% density, 1000 columns", 19, 65, UNKNOWN),
)
"""Layers, and their targets forward and both, in ms."""
EXPOSED = (("512K 1000 columns, 100 diagonals", 0.03), ("128K 1000 columns, 100 diagonals", 0.1))


def _layer(case: str, impl: str = "mtraining_flat") -> Row:
    return [
        row for row in rows("rings")
        if (row["case"], row["impl"], row["world"], row["hosts"]) == (case, impl, 4, 1)
        and row["inner"] in (0, 4) and "NVTE_BATCH" not in row["command"]
    ][-1]  # fmt: skip


def _layers() -> Iterator[Row]:
    for case, ahead, both, why in LAYERS:
        row = _layer(case)
        met = row["fwd_ms"] <= ahead and row["fwdbwd_ms"] <= both
        what, wanted = f"layer over 4 H200, forward / both: {case}", f"{ahead} / {both} ms"
        yield target(what, wanted, cell("{fwd_ms:.3g} / {fwdbwd_ms:.3g}", row), met, why, row)
    for case, limit in EXPOSED:
        row = _layer(case)
        share = row["exposed_comm_ms"] / row["fwdbwd_ms"]
        what = f"exposed communication: {case}"
        yield target(what, f"{limit:.0%}", f"{share:.0%}", share <= limit, ENDS, row)
    pair = ours, theirs = _layer("512K all distances"), _layer("512K all distances", "te_p2p")
    ratios = [theirs[name] / ours[name] for name in ("fwd_ms", "fwdbwd_ms")]
    what = "dense 512K: speed over Transformer Engine's ring, forward / both"
    measured = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    yield target(what, "0.95 / 0.95", measured, min(ratios) >= 0.95, PRODUCTS, *pair)


# Kernels

RATES = (
    ("cudnn", "slashes 5%, 64K", "64K d128 slash 5%", 0.95, 0.85, TILES),
    ("cudnn", "slashes 5%, 128K", "128K d128 slash 5%", 0.95, 0.85, PRODUCTS),
    ("cudnn", "slashes 5%, 256K", "256K d128 slash 5%", 0.95, 0.85, PRODUCTS),
    ("cudnn", "slashes 25%, 64K to 256K", "d128 slash 25%", 0.95, 0.85, PRODUCTS),
    ("cudnn", "dense through these kernels, 64K", "d128 all distances", 0.90, 0.80, PRODUCTS),
    ("cudnn", "slashes and columns, 128K and 512K", "d128 .*columns", 0.70, 0.65, PRODUCTS),
    ("cudnn", "dim 64", "d64", 0.85, 0.75, PRODUCTS),
    ("cudnn", "dim 256, 64K: 9%, 12% and all", "d256", 0.85, 0.75, PRODUCTS),
    ("flex", "dim 128", "d128 slash", 1.3, 1.25, PRODUCTS),
    ("flex", "dim 64", "d64", 1.3, 1.25, UNKNOWN),
)
"""Rates over another implementation's: of the cases whose names match a regular expression the lowest, and
their targets forward and backward."""
NAMES = {"cudnn": "cuDNN dense", "flex": "FlexAttention"}


def _cases(pattern: str) -> list[dict[str, Row]]:
    found = [
        case for case in kernel_rows() if re.search(pattern, case["forward mtraining"]["case"])
    ]
    return [case for case in found if not case["forward mtraining"]["documents"]]


def _kernels() -> Iterator[Row]:
    for other, what, text, ahead, back, why in RATES:
        found = [
            min(
                case[f"{op} mtraining"]["tflops"] / case[f"{op} {other}"]["tflops"]
                for case in _cases(text) if f"{op} {other}" in case
            )
            for op in ("forward", "backward")
        ]  # fmt: skip
        measured = " / ".join(f"{value:.2f}" for value in found)
        met = found[0] >= ahead and found[1] >= back
        used = [case["forward mtraining"] for case in _cases(text)]
        what = f"rate over {NAMES[other]}, forward / backward: {what}"
        yield target(what, f"{ahead:.2f} / {back:.2f}", measured, met, why, *used)
    worst = worst_error()
    what = "error against float64, over cuDNN's"
    yield target(what, "1.5", f"{worst:.2f}", worst <= 1.5, "", *rows("numerics"))


def _backward() -> Iterator[Row]:
    """Of the best of the ways of the backward, and of a pruned one where about 3% of the pairs stay."""
    best: dict[str, dict[tuple, Row]] = {}
    latest = {values(row, "gpu", "case", "way"): row for row in backward_rows()}
    for row in latest.values():
        if row["way"] in WAYS and not row["documents"] and row["seq"] >= 65536:
            kind = "with columns" if row["vertical"] else f"slashes, dim {row['dim']}"
            rates = best.setdefault(cell("{kind}, {gpu:gpu}", row, kind=kind), {})
            place = values(row, "seq", "case")
            rates[place] = max(rates.get(place, row), row, key=lambda each: each["share_of_cudnn"])
    for what, rates in best.items():
        shares = [row["share_of_cudnn"] for row in rates.values()]
        what = f"rate over cuDNN dense, 5% to 100%, 64K tokens and more, the best way: {what}"
        measured = f"{min(shares):.2f} to {max(shares):.2f}"
        yield target(what, "0.95", measured, min(shares) >= 0.95, VISITS, *rates.values())
    for row in backward_tables.times.shown():
        if row["forward"] == "price@0.1" and 0.0295 <= row["backward_density"] <= 0.0305:
            share = backward_tables.over_unpruned(row)
            what = "pruned over unpruned layer, 10% in the forward, 3% in the backward, random operands"
            what += cell(", {seq:K}, {gpu:gpu}", row)
            yield target(what, "0.45", f"{share:.2f}", share <= 0.45, FINDS, row)


def _search() -> Iterator[Row]:
    measured = [
        row for row in searches(list(filter(selection.where, rows("selection")))) if row["ms"]
    ]

    def slowest(*wanted) -> Row:
        fields = ("seq", "world", "rows", "policy")
        same = [row for row in measured if values(row, *fields) == wanted]
        return max(same, key=lambda row: row["ms"])

    few, many = slowest(524288, 4, 64, "fixed"), slowest(524288, 4, 256, "price")
    for what, row, limit in (
        ("pattern search, 512K over 4 ranks, 64 rows", few, 0.6),
        ("the same, 256 rows (default)", many, 1.5),
    ):
        yield target(what, f"{limit} ms", cell("{ms:.2f} ms", row), row["ms"] <= limit, TWICE, row)
    size = many["index_bytes"] / 2**20
    yield target("index of a layer, 512K", "1 MiB", f"{size:.2f} MiB", size <= 1, UNKNOWN, many)
    [case] = _cases("128K d128 slash 5%")
    attention = case["forward mtraining"]["ms"] + case["backward mtraining"]["ms"]
    row = slowest(131072, 1, 256, "price")
    share = row["ms"] / attention
    what = "pattern search over attention, 5%, 128K"
    yield target(what, "3%", f"{share:.1%}", share <= 0.03, TWICE, row)
    for seq, limit in ((131072, 0.05), (32768, 0.12)):
        found = real_tables.real_share(seq, 0.31, 0.0)
        took = [
            sum(each[f"{part}_ms"] for each in found) for part in ("search", "forward", "backward")
        ]
        share = took[0] / sum(took)
        what = cell(
            "pattern search over its layer, a model's operands of code, price 0.31, {x:K}", x=seq
        )
        yield target(what, f"{limit:.0%}", f"{share:.1%}", share <= limit, CHAIN, *found)
    pairs = mean(found, "density")
    over = real_tables.share(found, "dense") / pairs
    what = "such a layer at 32K over dense, for each share of the pairs"
    why = f"attention alone takes {over * (1 - share):.2f} times its share, the search the rest"
    yield target(what, "1.3", f"{over:.2f}", over <= 1.3, why, *found)
    over, found = real_tables.xattention_over("fa4", 16384)
    what = "policy xattention over FlashAttention-4's dense attention, operands of code, 16K"
    yield target(what, "1", f"{over:.2f}", over <= 1, UNKNOWN, *found)
    row = shortest_host()
    us = host_us(row)
    what = cell("host time of a short layer, forward and backward, the least: {seq:K}", row)
    why, dense = LAUNCHES, dense_host(row)
    for each in dense:
        why += f"; PyTorch's dense attention takes {host_us(each):.0f} us"
    yield target(what, "300 us", f"{us:.0f} us", us <= 300, why, row, *dense)


losses = _table("frontier", _losses)
steps = _table("pretrain", _steps)
layers = _table("rings", _layers)
kernels = _table("kernels numerics", _kernels)
backward = _table("backward_paths backward", _backward)
search = _table("selection real_operands short_layers", _search)
