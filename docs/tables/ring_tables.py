# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A layer over several GPUs, and balance between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import fsum  # sum rounds otherwise before Python 3.12

from .common import Row, last, last_two, percent, rows, source, table

DENSE_RINGS = {"te_p2p": "Transformer Engine, p2p", "torch_cp_cudnn": "PyTorch, cuDNN"}


def _four_gpus() -> list[Row]:
    """Rows of layers over four GPUs of one host."""
    return [
        row
        for row in rows("rings")
        if row["world"] == 4
        and row["hosts"] == 1
        and row.get("ranks_per_gpu", 1) == 1
        and "NVTE_BATCH" not in row["command"]
    ]


def _of_four(row: Row) -> bool:
    """Whether ``benchmarks.hosts.four`` has measured a row."""
    return "--shape" in row["command"]


def layers() -> str:
    """Layers of 512K tokens."""
    return _layers_of(lambda row: row["seq"] == 512 * 1024 and not row.get("backward_density"))


def layers_shorter() -> str:
    """Layers of fewer tokens, and those with a pruned backward."""
    return _layers_of(lambda row: row["seq"] < 512 * 1024 or row.get("backward_density"))


def _layers_of(wanted: Callable[[Row], object]) -> str:
    found = [row for row in _four_gpus() if _of_four(row)]
    shown = [row for row in found if row["inner"] != 1 and wanted(row)]
    four = last(shown, "case", "impl", "inner")
    body, used = [], []
    names = {**DENSE_RINGS, "mtraining_hier": "2 x 2"}
    for row in sorted(four.values(), key=lambda row: (-row["seq"], row["density"])):
        used.append(row)
        exposed, ranks = row["exposed_comm_ms"], row["imbalance_worker"]
        density = percent(row["density"], 2)
        if row.get("backward_density"):
            density += f"; {percent(row['backward_density'], 2)}"
        dense = _dense_ring_of(row, found)
        body.append(
            [
                row["case"],
                names.get(row["impl"], "all gathered"),
                density,
                f"{row['fwd_ms']:.3g} / {row['fwdbwd_ms']:.4g}",
                _times(dense["fwdbwd_ms"] / row["fwdbwd_ms"]) if dense else "",
                f"{exposed:.2g}" if exposed else "",
                f"{ranks:.3f}" if ranks else "",
                f"{row['peak_gib']:.2f}",
                row["commit"],
            ]
        )
    header = [
        "tokens, pattern",
        "keys",
        "density; of the backward",
        "forward / both, ms",
        "over dense, both",
        "exposed ms",
        "max/mean",
        "peak GiB",
    ]
    return table([*header, "commit"], body) + source(used, "rings")


def _change(times: Iterable[float]) -> str:
    before, now = times
    return f"{100 * (now / before - 1):+.1f}%"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x" if ratio < 20 else f"{ratio:.0f}x"


def layers_before() -> str:
    """Layers over four GPUs that ``benchmarks.hosts.four`` has measured, and an earlier commit."""
    pairs = [
        (before, now)
        for before, now in last_two(_four_gpus(), "case", "impl", "inner")
        if _of_four(now)
    ]
    body = []
    for before, now in pairs:
        inner = now["inner"]
        keys = {0: DENSE_RINGS.get(now["impl"]), 1: "plain ring", 2: "2 x 2", 4: "all gathered"}[
            inner
        ]
        times = [f"{row['fwd_ms']:.3g} / {row['fwdbwd_ms']:.4g}" for row in (before, now)]
        changes = [_change(row["fwdbwd_ms"] for row in (before, now))]
        # Calls of more than 50 ms are not queued.
        ahead = [(row.get("queued") or {}).get("fwdbwd_ms") for row in (before, now)]
        changes += [_change(ahead) if all(ahead) else ""]
        body.append([now["case"], keys, *times, *changes])
    header = ["tokens, pattern", "keys", "before, ms", "now, ms", "both", "both, GPU time"]
    return table(header, body) + source([row for pair in pairs for row in pair], "rings")


def _dense_ring_of(row: Row, found: list[Row]) -> Row | None:
    """Transformer Engine's dense ring in the run of a row of this project's."""
    same = ("commit", "command", "seq")
    for other in found:
        if other["impl"] == "te_p2p" and all(other[name] == row[name] for name in same):
            return other if row["impl"].startswith("mtraining") else None
    return None


def _over_mean(times) -> float:
    return max(times) * len(times) / fsum(times)


def rounds() -> str:
    """Four GPUs, a ring of single ranks: the kernels of each rank in each round."""
    plain = (row for row in _four_gpus() if row["inner"] == 1 and row.get("rounds_ms"))
    found = list(last(plain, "case").values())
    body = []
    for row in found:
        cells = []
        for way in ("forward", "backward"):
            ranks = row["rounds_ms"][way]
            whole = [fsum(rank) for rank in ranks]
            cells += [
                f"{min(whole):.3g} to {max(whole):.3g}",
                f"{_over_mean(whole):.3f}",
                f"{max(map(_over_mean, zip(*ranks))):.3f}",
            ]
        body.append([row["case"], percent(row["density"], 2), *cells, row["commit"]])
    each = ("ms of a rank", "max/mean over ranks", "of the worst round")
    header = [f"{way}: {what}" for way in ("forward", "backward") for what in each]
    return table(["tokens, pattern", "density", *header, "commit"], body) + source(found, "rings")


def layers_two() -> str:
    """Two GPUs, with host time and in GPU time."""
    found = [
        row
        for row in rows("rings")
        if row["world"] == 2 and row.get("queued") and row["hop_gb_s"] > 200
    ]
    commit = found[-1]["commit"]
    found = [row for row in found if row["commit"] == commit]
    body = [
        [
            row["case"],
            percent(row["density"], 2),
            f"{row['fwd_ms']:.2f} / {row['fwdbwd_ms']:.1f}",
            f"{row['queued']['fwd_ms']:.2f} / {row['queued']['fwdbwd_ms']:.1f}",
            f"{row['queued']['index_ms']:.2f}",
        ]
        for row in found
    ]
    header = ["tokens, pattern", "density", "with host time, ms", "GPU time, ms", "search, GPU ms"]
    return table(header, body) + source(found, "rings")


def slow_link() -> str:
    """Two emulated hosts of two ranks: inner groups of one rank and of two."""
    found = [row for row in rows("rings") if row["hosts"] == 2]
    body = []
    for (case, inner, _), row in sorted(
        last(found, "case", "inner", "ranks_per_gpu").items(), key=str
    ):
        exposed = row["exposed_comm_ms"]
        body.append(
            [
                case,
                f"{inner} x {4 // inner}",
                row["world"] // row.get("ranks_per_gpu", 1),
                f"{row['hop_gb_s']:.1f}",
                f"{row['fwd_ms']:.1f} / {row['fwdbwd_ms']:.0f}",
                f"{exposed:.1f} ({100 * exposed / row['fwdbwd_ms']:.0f}%)",
                row["commit"],
            ]
        )
    header = [
        "tokens, pattern",
        "groups",
        "GPUs",
        "GB/s per link",
        "forward / both, ms",
        "exposed, both",
    ]
    return table([*header, "commit"], body) + source(found, "rings")


# Balance

PATTERNS = {
    "1000 columns, 100 local diagonals": "1000 columns, 100 local diagonals",
    "3%, heads unequal, 1000 columns": "3%, unequal heads, 1000 columns",
    "real layer08, stretched": "layer 8 of a 0.5B model, stretched",
    "all distances": "dense",
}
WORLDS = (8, 32, 64, 256)


def balance_row(pattern: str, world: int, layout: str) -> Row:
    found = [
        row for row in rows("balance")
        if (row["pattern"], row["world"], row["inner"], row["layout"], row["seq"])
        == (pattern, world, 0, layout, 524288)
    ]  # fmt: skip
    return found[-1]


def balance() -> str:
    body, used = [], []
    for pattern, name in PATTERNS.items():
        for layout in ("striped", "zigzag"):
            found = [balance_row(pattern, world, layout) for world in WORLDS]
            used += found
            cells = [f"{row['worker_imbalance']:.3f} / {row['exposed']:.3f}" for row in found]
            body.append(
                [
                    name if layout == "striped" else "",
                    layout.replace("striped", "block-striped"),
                    *cells,
                ]
            )
    header = ["pattern, 512K tokens", "layout", *(f"{world} ranks" for world in WORLDS)]
    return table(header, body) + source(used, "balance")


def balance_short() -> str:
    """Few blocks per rank: real layers' patterns at their own 16K tokens, the range over three layers."""
    body, used = [], []
    for world, blocks in ((4, 32), (8, 16), (32, 4), (64, 2)):
        cells = []
        for layout in ("striped", "one direction", "zigzag"):
            found = [
                row for row in rows("balance")
                if (row["seq"], row["world"], row["inner"], row["layout"]) == (16384, world, 0, layout)
            ]  # fmt: skip
            used += found
            ratios = [row["worker_imbalance"] for row in found]
            cells.append(f"{min(ratios):.3f} to {max(ratios):.3f}")
        body.append([world, blocks, *cells])
    header = ["ranks", "blocks per rank", "block-striped", "without the snake order", "zigzag"]
    return table(header, body) + source(used, "balance")
