# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels and pattern search on one GPU."""

from __future__ import annotations

from .common import Row, gpu_name, last, percent, rows, source, table, tokens

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
    names = {"kernels": "kernel by kernel", "graph": "captured"}
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
