# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels and pattern search on one GPU, a layer over several, and balance."""

from __future__ import annotations

from math import fsum  # sum rounds otherwise before Python 3.12

from .common import Row, gpu_name, last, last_two, percent, rows, source, table, tokens

CHUNKS = "one_pass_64"
ONE_LAUNCH = "one_pass_64_one_launch"
"""Ways of the one-pass backward in ``backward_paths.jsonl``."""
OTHER_ORDER = ("ae2af38", "e764c4b", "908dac9", "180a6b5")
"""Commits whose one pass has columns in another order, but for ``_by_head``."""


def kernel_rows() -> list[dict[str, Row]]:
    """Of each case of the newest commit that has ``mtraining`` rows: rows by ``op impl``."""
    found = [
        row for row in rows("kernels") if row["op"] in ("forward", "backward") and row.get("case")
    ]
    commit = found[-1]["commit"]
    cases: dict[str, dict[str, Row]] = {}
    for row in found:
        if row["commit"] == commit:
            cases.setdefault(row["case"], {})[f"{row['op']} {row['impl']}"] = row
    return list(cases.values())


def selected_of(row: Row) -> str:
    what = "slashes" if not row["vertical"] else f"slashes, {row['vertical']} columns"
    if row["density"] > 0.99:
        what = "dense through these kernels"
    return f"{percent(row['density'])}, {what}" + (", 16 documents" if row["documents"] else "")


def kernels() -> str:
    body, used = [], []
    for case in kernel_rows():
        if "128K d128" in (name := case["forward mtraining"]["case"]) and "3500" in name:
            continue  # between its neighbours
        ahead, back = case["forward mtraining"], case["backward mtraining"]
        used += [ahead, back]
        flex = [
            f"{row['tflops'] / case[f'{op} flex']['tflops']:.2f}" if f"{op} flex" in case else ""
            for op, row in (("forward", ahead), ("backward", back))
        ]
        body.append(
            [
                f"{tokens(ahead['seq'])}, {ahead['heads']}/{ahead['kv_heads']}, {ahead['dim']}",
                selected_of(ahead),
                f"{ahead['ms']:.3g} / {back['ms']:.3g}",
                f"{ahead['tflops']:.0f} / {back['tflops']:.0f}",
                f"{ahead['share_of_cudnn']:.2f} / {back['share_of_cudnn']:.2f}",
                " / ".join(flex) if any(flex) else "",
            ]
        )
    header = [
        "tokens, heads, dim",
        "density",
        "ms",
        "TFLOP/s",
        "of cuDNN dense",
        "of FlexAttention",
    ]
    return table(header, body) + source(used, "kernels")


def worst_error() -> float:
    """The largest error against float64, over cuDNN's on the same inputs."""
    return max(row["of_dense"] for row in rows("numerics") if row["impl"] == "mtraining")


def selection() -> str:
    found = [row for row in rows("selection") if row.get("policy")]
    commit = found[-1]["commit"]
    found = [row for row in found if row["commit"] == commit and row["vertical"] != 3500]
    found = [row for row in found if (row["seq"], row["world"]) != (131072, 4)]
    body = []
    for row in found:
        what = row["policy"]
        if what == "price":
            what += (
                ", 1000 columns selected"
                if row["standing_out"]
                else ", all 4096 candidates selected"
            )
        elif what == "fixed":
            what += f", {row['vertical']} columns"
        elif what == "mixed":
            what = "every second head price, xattention"
        gpu = f"{row['ms']:.2f}" if row["ms"] else f"{row['launched_ms']:.1f} (with host time)"
        body.append(
            [tokens(row["seq"]), row["world"], what, row["rows"], gpu, f"{row['host_ms']:.2f}"]
        )
    header = ["tokens", "ranks", "policy", "sampled rows", "GPU ms", "host ms"]
    return table(header, body) + source(found, "selection")


def short_layers() -> str:
    all_rows = [
        {**row, "launch": "Triton" if "MTRAINING_TRITON_LAUNCH=1" in row["command"] else "direct"}
        for row in rows("short_layers")
    ]
    found = last(all_rows, "gpu", "seq", "policy", "search", "launch")
    names = {
        "kernels": "kernel by kernel",
        "graph": "captured",
        "attention": "captured, attention too",
    }
    parts = ("search", "forward", "backward")

    def all_parts(row: Row, what: str, form: str) -> str:
        return " / ".join(f"{row[f'{part}_{what}']:{form}}" for part in parts)

    body = [
        [
            gpu_name(row["gpu"]),
            tokens(row["seq"]),
            row["policy"],
            names[row["search"]],
            row["launch"],
            all_parts(row, "launches", "d"),
            all_parts(row, "host_us", ".0f"),
            all_parts(row, "ms", ".2f"),
        ]
        for row in sorted(found.values(), key=lambda row: (row["gpu"], row["seq"], row["launch"]))
    ]
    header = ["GPU", "tokens", "policy", "search", "launched by", "launches", "host us", "GPU ms"]
    return table(header, body) + source(found.values(), "short_layers")


def backward_rows() -> list[Row]:
    """Rows of the backward with their ``way``; of one pass with columns only those of today's order of
    programs (``benchmarks.kernels.backward_paths`` says which)."""
    found = []
    for row in rows("backward_paths"):
        path = row["path"] or ""
        other_order = row["commit"] in OTHER_ORDER and not path.endswith("_by_head")
        if path and not (row["vertical"] and path.startswith("one_pass") and other_order):
            found.append({**row, "way": path.removesuffix("_by_head")})
    return found


def backward_paths() -> str:
    """The ways of the backward, in turns in one run, beside cuDNN."""
    ways = {
        "two_kernels": "two kernels", "one_pass": "one pass, all at once", CHUNKS: "one pass in chunks of 64",
        ONE_LAUNCH: "chunks in one launch",
    }  # fmt: skip
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in backward_rows():
        if row["way"] in ways:
            cases.setdefault((row["gpu"], row["case"]), {})[row["way"]] = row
    body = []

    def place(case):
        row = case["two_kernels"]
        return (
            row["gpu"],
            -row["dim"],
            bool(row["documents"]),
            row["vertical"],
            row["seq"],
            row["heads"],
            row["density"],
        )

    for case in sorted(cases.values(), key=place):
        one = case["two_kernels"]
        found = [case.get(way) for way in ways]
        what = [
            tokens(one["seq"]),
            f"{one['heads']}/{one['kv_heads']} x {one['dim']}",
            selected_of(one),
        ]
        times = [f"{each['ms']:.1f}" if each else "" for each in found]
        rates = [f"{each['share_of_cudnn']:.2f}" if each else "" for each in found]
        body.append([gpu_name(one["gpu"]), *what, *times, *rates])
    header = [
        "GPU",
        "tokens",
        "heads x dimension",
        "pairs",
        *(f"{way}, ms" for way in ways.values()),
    ]
    header += [f"rate of {way} / cuDNN" for way in ways.values()]
    used = [row for case in cases.values() for row in case.values()]
    return table(header, body) + source(used, "backward_paths")


# One layer over several GPUs


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


def layers() -> str:
    found = _four_gpus()
    four = last((row for row in found if row["inner"] != 1), "case", "impl", "inner")
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


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x" if ratio < 20 else f"{ratio:.0f}x"


def layers_before() -> str:
    """Layers over four GPUs that ``benchmarks.hosts.four`` has measured, and an earlier commit."""
    pairs = [
        (before, now)
        for before, now in last_two(_four_gpus(), "case", "impl", "inner")
        if "--shape" in now["command"]
    ]
    body = []
    for before, now in pairs:
        inner = now["inner"]
        keys = {0: DENSE_RINGS.get(now["impl"]), 1: "plain ring", 2: "2 x 2", 4: "all gathered"}[
            inner
        ]
        times = [f"{row['fwd_ms']:.3g} / {row['fwdbwd_ms']:.4g}" for row in (before, now)]
        change = now["fwdbwd_ms"] / before["fwdbwd_ms"] - 1
        body.append([now["case"], keys, *times, f"{100 * change:+.1f}%"])
    header = ["tokens, pattern", "keys", "before, ms", "now, ms", "both"]
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
