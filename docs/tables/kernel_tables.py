# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels, pattern search, output layer and loss on one GPU."""

from __future__ import annotations

from collections.abc import Callable

from .common import Columns, Row, Table, cell, grouped, rows

CHUNKS = "one_pass_64"
ONE_LAUNCH = "one_pass_64_one_launch"
"""Ways of the one-pass backward in ``backward_paths.jsonl``."""
OTHER_ORDER = ("ae2af38", "e764c4b", "908dac9", "180a6b5")
"""Commits whose one pass has columns in another order, but for ``_by_head``."""


def kernel_rows() -> list[dict[str, Row]]:
    """Of each case: rows by ``op impl``. Of a head dimension, those of the newest commit that has any."""
    found = [
        row for row in rows("kernels") if row["op"] in ("forward", "backward") and row.get("case")
    ]
    newest = {row["dim"]: row["commit"] for row in found}
    cases = grouped(
        (row for row in found if row["commit"] == newest[row["dim"]]), lambda row: row["case"]
    )
    return [{f"{row['op']} {row['impl']}": row for row in case} for case in cases.values()]  # fmt: skip


def selected_of(row: Row) -> str:
    what = "slashes" if not row["vertical"] else f"slashes, {row['vertical']} columns"
    if row["density"] > 0.99:
        what = "dense through these kernels"
    return cell("{density:share}, ", row) + what + (", 16 documents" if row["documents"] else "")


def _cases(_: list[Row]) -> list[Row]:
    found = []
    for case in kernel_rows():
        pair = ahead, back = case["forward mtraining"], case["backward mtraining"]
        if "128K d128" in ahead["case"] and "3500" in ahead["case"]:
            continue  # between its neighbours
        if ahead["dim"] in (96, 192) and ahead["density"] == 1:
            continue  # tiles of 128 and 256, whose rows are there
        others = ((row, case.get(f"{row['op']} flex")) for row in pair)
        flex = [f"{row['tflops'] / other['tflops']:.2f}" for row, other in others if other]
        found.append({**ahead, "back": back, "flex": " / ".join(flex), "used": pair})
    return found


kernels = Table(
    "kernels",
    {
        "tokens, heads, dim": "{seq:K}, {heads}/{kv_heads}, {dim}",
        "density": selected_of,
        "ms": "{ms:.3g} / {back[ms]:.3g}",
        "TFLOP/s": "{tflops:.0f} / {back[tflops]:.0f}",
        "of cuDNN dense": "{share_of_cudnn:.2f} / {back[share_of_cudnn]:.2f}",
        "of FlexAttention": "{flex}",
    },
    find=_cases,
)


def worst_error() -> float:
    """The largest error against float64, over cuDNN's on the same inputs."""
    return max(row["of_dense"] for row in rows("numerics") if row["impl"] == "mtraining")


def searches(found: list[Row]) -> list[Row]:
    """Rows of the newest commit; those between their neighbours are left out."""
    return [
        row for row in found
        if row["commit"] == found[-1]["commit"] and row["vertical"] != 3500
        and (row["seq"], row["world"]) != (131072, 4)
    ]  # fmt: skip


def _searched(row: Row) -> str:
    if row["policy"] == "price":
        columns = "1000 columns" if row["standing_out"] else "all 4096 candidates"
        return f"price, {columns} selected"
    mixed = "every second head price, xattention"
    return {"fixed": cell("fixed, {vertical} columns", row), "mixed": mixed}.get(
        row["policy"], row["policy"]
    )


selection = Table(
    "selection",
    {
        "tokens": "{seq:K}",
        "ranks": "{world}",
        "policy": _searched,
        "sampled rows": "{rows}",
        "GPU ms": lambda row: cell(
            "{ms:.2f}" if row["ms"] else "{launched_ms:.1f} (with host time)", row
        ),
        "host ms": "{host_ms:.2f}",
    },
    where=lambda row: row.get("policy"),
    find=searches,
)


SEARCHES = {
    "kernels": "kernel by kernel",
    "graph": "captured",
    "dense": "none: dense, PyTorch's cuDNN",
}


def _of_parts(what: str, form: str) -> Callable[[Row], str]:
    """Of a short layer's search, forward and backward; what a row has not is left out."""

    def said(row: Row) -> str:
        names = (f"{part}_{what}" for part in ("search", "forward", "backward"))
        return " / ".join(format(row[name], form) for name in names if name in row)

    return said


short_layers = Table(
    "short_layers",
    {
        "GPU": "{gpu:gpu}",
        "tokens": "{seq:K}",
        "policy": "{policy}",
        "search": lambda row: SEARCHES[row["search"]],
        "launches": _of_parts("launches", ""),
        "host us, from an idle GPU": _of_parts("host_us", ".0f"),
        "host us, back-to-back": _of_parts("back_to_back_us", ".0f"),
        "GPU ms": _of_parts("ms", ".2f"),
    },
    where=lambda row: "MTRAINING_TRITON_LAUNCH=1" not in row["command"],
    newest=("gpu", "seq", "policy", "search"),
    order=lambda row: (row["gpu"], row["seq"], row["policy"] or ""),
)  # fmt: skip


def shortest_host() -> Row:
    """The short layer of policy price on an H200 whose forward and backward took the host the least time."""
    found = [
        row for row in short_layers.shown() if "H200" in row["gpu"] and row["policy"] == "price"
    ]
    return min(found, key=host_us)


def dense_host(like: Row) -> list[Row]:
    """The short layer of dense attention of the same GPU and length, if there is one."""
    return [
        row
        for row in short_layers.shown()
        if row["search"] == "dense" and (row["gpu"], row["seq"]) == (like["gpu"], like["seq"])
    ]


def host_us(row: Row) -> float:
    """Host time of a short layer's forward and backward, back-to-back where that was measured."""
    kind = "back_to_back_us" if "forward_back_to_back_us" in row else "host_us"
    return row[f"forward_{kind}"] + row[f"backward_{kind}"]


def host_ms(row: Row) -> str:
    """It in milliseconds."""
    return f"{host_us(row) / 1000:.1f} ms"


# The backward's ways


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


WAYS = {
    "two_kernels": "two kernels", "one_pass": "one pass, all at once", CHUNKS: "one pass in chunks of 64",
    ONE_LAUNCH: "chunks in one launch",
}  # fmt: skip


def _by_way(_: list[Row]) -> list[Row]:
    """The ways of the backward, in turns in one run, beside cuDNN: a row a case."""
    shown = (row for row in backward_rows() if row["way"] in WAYS)
    found = []
    for case in grouped(shown, lambda row: (row["gpu"], row["case"])).values():
        ways = {row["way"]: row for row in case}
        found.append({**ways["two_kernels"], "ways": ways, "used": ways.values()})
    return found


def _ways(field: str, digits: int, header: str) -> Columns:
    def of(way: str):
        return lambda row: cell(f"{{{field}:.{digits}f}}", row["ways"].get(way) or {field: None})

    return {header.format(name): of(way) for way, name in WAYS.items()}


backward_paths = Table(
    "backward_paths",
    {
        "GPU": "{gpu:gpu}",
        "tokens": "{seq:K}",
        "heads x dimension": "{heads}/{kv_heads} x {dim}",
        "pairs": selected_of,
        **_ways("ms", 1, "{}, ms"),
        **_ways("share_of_cudnn", 2, "rate of {} / cuDNN"),
    },
    find=_by_way,
    order=lambda row: (
        row["gpu"], -row["dim"], bool(row["documents"]), row["vertical"], row["seq"], row["heads"],
        row["density"],
    ),
)  # fmt: skip


# Output layer and loss

LOSSES = {
    "chunked": "in chunks of 4096", "megatron": "Megatron", "megatron_fused": "Megatron, fused",
    "megatron_te": "Megatron, fused by Transformer Engine",
}  # fmt: skip


def _losses(found: list[Row]) -> list[Row]:
    """A row for each implementation, with those of both lengths."""
    commit = [row for row in found if row["impl"].startswith("megatron")][-1]["commit"]
    newest = [row for row in found if row["commit"] == commit]
    groups = grouped(newest, lambda row: (row["impl"], row["main_grad"]))
    return [{**some[0], **{f"{row['tokens']}": row for row in some}, "used": some}
            for some in groups.values()]  # fmt: skip


def _of_length(tokens: int) -> Columns:
    def times(row: Row) -> str:
        own = row[str(tokens)]
        return "out of memory" if own["out_of_memory"] else cell("{fwd_ms:.1f} / {bwd_ms:.1f}", own)

    def peak(row: Row) -> str:
        own = row[str(tokens)]
        return "" if own["out_of_memory"] else cell("{peak_gib:.1f}", own)

    return {cell("{n:K} tokens: ms", n=tokens): times, cell("{n:K}: GiB", n=tokens): peak}


loss = Table(
    "loss",
    {
        "output layer and loss": lambda row: (
            LOSSES[row["impl"]] + (", into `main_grad`" if row["main_grad"] else "")
        ),
        **_of_length(16384),
        **_of_length(131072),
    },
    find=_losses,
)
