# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A layer over several GPUs, and balance between ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum  # sum rounds otherwise before Python 3.12

from .common import Columns, Row, Table, cell, last, rows

DENSE_RINGS = {"te_p2p": "Transformer Engine, p2p", "torch_cp_cudnn": "PyTorch, cuDNN"}
SAME = ("case", "impl", "inner")


def is_of_four(row: Row) -> bool:
    """Whether a layer ran over four GPUs of one host."""
    return (
        (row["world"], row["hosts"], row.get("ranks_per_gpu", 1)) == (4, 1, 1)
        and "NVTE_BATCH" not in row["command"]
    )  # fmt: skip


def _is_of_hosts(row: Row) -> bool:
    """Whether ``benchmarks.hosts.one_host`` has measured a row on four GPUs."""
    return is_of_four(row) and "--shape" in row["command"]


def _layers_of(wanted: Callable[[Row], object]) -> Table:
    return Table(
        "rings",
        {
            "tokens, pattern": "{case}",
            "keys": lambda row: {**DENSE_RINGS, "mtraining_hier": "2 x 2"}.get(
                row["impl"], "all gathered"
            ),
            "density; of the backward": lambda row: (
                cell("{density:share2}", row)
                + cell("; {backward_density:share2}" if row.get("backward_density") else "", row)
            ),
            "forward / both, ms": "{fwd_ms:.3g} / {fwdbwd_ms:.4g}",
            "over dense, both": _over_dense_ring,
            "exposed ms": lambda row: cell("{x:.2g}", x=row["exposed_comm_ms"] or None),
            "max/mean": lambda row: cell("{x:.3f}", x=row["imbalance_worker"] or None),
            "peak GiB": "{peak_gib:.2f}",
            "commit": "{commit}",
        },
        where=lambda row: _is_of_hosts(row) and row["inner"] != 1 and wanted(row),
        newest=SAME,
        order=lambda row: (-row["seq"], row["density"]),
    )


def _over_dense_ring(row: Row) -> str:
    """Transformer Engine's dense ring in the run of a row of this project's, over it."""
    same = ("commit", "command", "seq")
    for other in filter(_is_of_hosts, rows("rings")):
        if other["impl"] == "te_p2p" and all(other[name] == row[name] for name in same):
            if not row["impl"].startswith("mtraining"):
                return ""
            ratio = other["fwdbwd_ms"] / row["fwdbwd_ms"]
            return f"{ratio:.{2 if ratio < 2 else 1 if ratio < 20 else 0}f}x"
    return ""


def _is_whole(row: Row) -> bool:
    """Whether a layer has 512K tokens, and its backward is not pruned."""
    return row["seq"] == 512 * 1024 and not row.get("backward_density")


layers = _layers_of(_is_whole)
layers_shorter = _layers_of(lambda row: not _is_whole(row))


borders = Table(
    "borders",
    {
        "hidden size": "{hidden:,}",
        "ms, one sequence": lambda row: cell("{ms:.1f}", row),
        "ms, 16 packed sequences": lambda row: cell("{ms:.1f}", row["used"][1]),
    },
    newest=("hidden", "sequences", "tokens", "ranks"),
    find=lambda found: [
        {**one, "used": (one, other)}
        for one in found
        for other in found
        if one["sequences"] < other["sequences"] and one["hidden"] == other["hidden"]
    ],
)


def _over_mean(times) -> float:
    return max(times) * len(times) / fsum(times)


def _rounds(way: str) -> Columns:
    """A ring of single ranks: the kernels of each rank in each round."""

    def whole(row: Row) -> list[float]:
        return [fsum(rank) for rank in row["rounds_ms"][way]]

    return {
        f"{way}: ms of a rank": lambda row: f"{min(whole(row)):.3g} to {max(whole(row)):.3g}",
        f"{way}: max/mean over ranks": lambda row: f"{_over_mean(whole(row)):.3f}",
        f"{way}: of the worst round": lambda row: (
            f"{max(map(_over_mean, zip(*row['rounds_ms'][way]))):.3f}"
        ),
    }


rounds = Table(
    "rings",
    {
        "tokens, pattern": "{case}",
        "density": "{density:share2}",
        **_rounds("forward"),
        **_rounds("backward"),
        "commit": "{commit}",
    },
    where=lambda row: is_of_four(row) and row["inner"] == 1 and row.get("rounds_ms"),
    newest=("case",),
)

layers_two = Table(
    "rings",
    {
        "tokens, pattern": "{case}",
        "density": "{density:share2}",
        "with host time, ms": "{fwd_ms:.2f} / {fwdbwd_ms:.1f}",
        "GPU time, ms": "{queued[fwd_ms]:.2f} / {queued[fwdbwd_ms]:.1f}",
        "search, GPU ms": "{queued[index_ms]:.2f}",
    },
    where=lambda row: row["world"] == 2 and row.get("queued") and row["hop_gb_s"] > 200,
    find=lambda found: [row for row in found if row["commit"] == found[-1]["commit"]],
)

slow_link = Table(
    "rings",
    {
        "tokens, pattern": "{case}",
        "groups": lambda row: f"{row['inner']} x {4 // row['inner']}",
        "GPUs": lambda row: row["world"] // row.get("ranks_per_gpu", 1),
        "GB/s per link": "{hop_gb_s:.1f}",
        "forward / both, ms": "{fwd_ms:.1f} / {fwdbwd_ms:.0f}",
        "exposed, both": lambda row: (
            cell("{exposed_comm_ms:.1f} ", row)
            + f"({100 * row['exposed_comm_ms'] / row['fwdbwd_ms']:.0f}%)"
        ),
        "commit": "{commit}",
    },
    where=lambda row: row["hosts"] == 2,
    newest=("case", "inner", "ranks_per_gpu"),
    order=lambda row: (row["case"], row["inner"], -row.get("ranks_per_gpu", 1)),
)


# Balance

REAL = "real layer08, stretched"
PATTERNS = {
    "1000 columns, 100 local diagonals": "1000 columns, 100 local diagonals",
    "3%, heads unequal, 1000 columns": "3%, unequal heads, 1000 columns",
    REAL: "layer 8 of a 0.5B model, stretched",
    "all distances": "dense",
}
WORLDS = (8, 32, 64, 256)


def balance_rows(seq: int, layout: str, world: int, pattern: str | None = None) -> list[Row]:
    """The last row of each pattern, or of one, without inner groups."""
    return [
        row for row in last(rows("balance"), "seq", "layout", "world", "pattern", "inner")
        if (row["seq"], row["layout"], row["world"], row["inner"]) == (seq, layout, world, 0)
        and pattern in (None, row["pattern"])
    ]  # fmt: skip


def _by_layout(_: list[Row]) -> list[Row]:
    return [
        dict(pattern=PATTERNS[pattern] if layout == "striped" else "", layout=layout,
             used=[balance_rows(524288, layout, world, pattern)[0] for world in WORLDS])
        for pattern in PATTERNS for layout in ("striped", "zigzag")
    ]  # fmt: skip


balance = Table(
    "balance",
    {
        "pattern, 512K tokens": "{pattern}",
        "layout": lambda row: row["layout"].replace("striped", "block-striped"),
        **{
            f"{world} ranks": f"{{used[{at}][worker_imbalance]:.3f}} / {{used[{at}][exposed]:.3f}}"
            for at, world in enumerate(WORLDS)
        },
    },
    find=_by_layout,
)

SHORT = {
    "block-striped": "striped", "without the snake order": "one direction", "zigzag": "zigzag"
}  # fmt: skip


def _few_blocks(_: list[Row]) -> list[Row]:
    """Few blocks per rank: real layers' patterns at their own 16K tokens, the range over three layers."""
    found = []
    for world in (4, 8, 32, 64):
        by = {layout: balance_rows(16384, layout, world) for layout in SHORT.values()}
        used = [row for some in by.values() for row in some]
        ranges = {name: [row["worker_imbalance"] for row in some] for name, some in by.items()}
        found.append(dict(world=world, blocks=128 // world, used=used, **ranges))
    return found


def _range(layout: str):
    return lambda row: f"{min(row[layout]):.3f} to {max(row[layout]):.3f}"


balance_short = Table(
    "balance",
    {
        "ranks": "{world}",
        "blocks per rank": "{blocks}",
        **{name: _range(layout) for name, layout in SHORT.items()},
    },
    find=_few_blocks,
)
