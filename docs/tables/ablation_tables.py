# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What each part of the method costs in loss and in time."""

from __future__ import annotations

from benchmarks.model.ablations import LAYERS, VARIANTS
from benchmarks.model.frontier_rows import decay_of, newest
from benchmarks.model.frontier_rows import mean as mean_of
from benchmarks.model.frontier_settings import split

from . import frontier_tables, ring_tables
from .common import Columns, Row, Table, cell, grouped, rows, values

MEANS = ("density", "loss_over_dense", "own_over_dense", "step_ms", "over_base")


def _times(row: Row, label: str) -> str:
    """The attention time of all steps over that of dense steps: from the base's layer times and the share of
    dense steps or layers."""
    kind = (*split(row["base"]), row["model"])
    base = [
        times for each in rows("frontier")
        if values(each, "policy", "wanted", "model") == kind
        and (times := frontier_tables.times(each, label))
    ]  # fmt: skip
    if not base:
        return ""
    layers = sum(VARIANTS[row["variant"]].dense_layers) / row.get("layers", LAYERS)
    share = row["dense_share"] + layers
    return f"{share + (1 - share) * float(base[-1]):.3f}"


def _means(found: list[Row]) -> list[Row]:
    """A row for each setting: the mean over seeds."""
    names = ("what", "setting", "seq", "base", "model", "steps")
    means = []
    for some in grouped(found, lambda row: (*values(row, *names), decay_of(row))).values():
        some = newest(some, "seed")
        mean = {name: mean_of(row.get(name) for row in some) for name in MEANS}
        means.append({**some[-1], **mean, "runs": len(some), "used": some})
    return means


by_loss = Table(
    "ablations",
    {
        "model, tokens": lambda row: frontier_tables.model_of(row) + cell(", {seq:K}", row),
        "what": "{what}: {setting}",
        "runs": "{runs}",
        "density": "{density:share}",
        "dense-attention loss over dense": "{loss_over_dense:over}",
        "own-attention loss over dense": "{own_over_dense:over}",
        "attention 128K / dense": lambda row: _times(row, "128k"),
        "512K / dense": lambda row: _times(row, "512k"),
    },
    where=lambda row: "variant" in row,
    find=_means,
)
"""In loss, after training; policies are in the table after training."""

LAYOUTS = ("striped", "zigzag", "contiguous")


def _with_layouts(found: list[Row]) -> list[Row]:
    """The busiest rank over the mean of a real layer's pattern, by layout, then rows of recomputation."""
    shown = []
    for world in (4, *ring_tables.WORLDS):
        some = [
            ring_tables.balance_rows(524288, layout, world, ring_tables.REAL)[0]
            for layout in LAYOUTS
        ]
        for row in some:
            what = f"layout: {row['layout']}, {world} ranks"
            over = row["exposed"] / some[0]["exposed"]
            shown.append(dict(what=what, density=None, step_ms=None, over_base=over, used=[row]))
    for row in found:
        what = cell("recomputation: {setting}, {seq:K}", row)
        shown.append({**row, "what": what, "used": [row]})
    return shown


by_time = Table(
    "ablations balance",
    {
        "what": "{what}",
        "density": "{density:share}",
        "ms": "{step_ms:.2f}",
        "over base": "{over_base:.2f}",
    },
    where=lambda row: row["what"] == "recomputation",
    find=_with_layouts,
)


def _pairs(found: list[Row]) -> list[Row]:
    """By place and pattern: for each length the newest layer with two groups of ranks, and with inner groups
    of two, of one commit and GPU."""
    pairs: dict[tuple, dict[int, list[Row]]] = {}
    names = ("case", "world", "hosts", "commit", "gpu")
    for some in grouped(found, lambda row: values(row, *names)).values():
        impls = {row["impl"]: row for row in some}
        if len(impls) == 2:
            base = impls["mtraining_flat"]
            gpus = base["world"] // base.get("ranks_per_gpu", 1)
            where = f"{base['world']} ranks on {gpus} GPUs"
            where += f", {base['hosts']} hosts emulated" if base["hosts"] > 1 else ""
            place = where, base["case"].partition(" ")[2]
            pairs.setdefault(place, {})[base["seq"]] = [base, impls["mtraining_hier"]]
    return [
        dict(where=where, pattern=pattern, pairs=by, used=[row for seq in sorted(by) for row in by[seq]])
        for (where, pattern), by in sorted(pairs.items())
    ]  # fmt: skip


def _lengths(found: list[Row]) -> Columns:
    def ratio(seq: int):
        def said(row: Row) -> str:
            if seq not in row["pairs"]:
                return ""
            flat, groups = (each["fwdbwd_ms"] for each in row["pairs"][seq])
            return f"{groups / flat:.2f} ({flat:.4g} to {groups:.4g})"

        return said

    lengths = sorted({seq for row in found for seq in row["pairs"]})
    return {
        "where": "{where}",
        "pattern": "{pattern}",
        **{cell("{n:K}", n=seq): ratio(seq) for seq in lengths},
    }


by_ring = Table(
    "rings",
    _lengths,
    # A plain ring within one host is measured for its balance alone.
    where=lambda row: (
        row["impl"] in ("mtraining_flat", "mtraining_hier")
        and (row["inner"] != 1 or row["hosts"] > 1)
    ),
    find=_pairs,
)
"""Inner groups of two ranks over one group, by pattern and length."""
