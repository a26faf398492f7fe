# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels of other packages beside this package's, on the same blocks."""

from __future__ import annotations

from .common import Row, percent, rows, source, table, tokens

NAMES = {
    "mtraining": "this package",
    "mtraining_one_pass": "this package, one pass",
    "cudnn": "cuDNN dense",
    "flex": "FlexAttention",
    "cudnn_blocks": "cuDNN frontend, block-sparse",
    "cudnn_flex": "cuDNN frontend, flex",
    "fa4_blocks": "FlashAttention-4, blocks",
    "fa4": "FlashAttention-4, dense",
    "fa3": "FlashAttention-3, dense",
    "flash_msa": "flash-msa",
    "flash_sparse": "flash-sparse-attn",
}
OPS = ("forward", "backward")


def peer_rows() -> dict[str, dict[tuple[str, str], Row]]:
    """Rows by case, of the newest commit that has it, then by peer and op."""
    found = rows("peers")
    newest = {row["case"]: row["commit"] for row in found}
    cases: dict[str, dict[tuple[str, str], Row]] = {}
    for row in found:
        if row["commit"] == newest[row["case"]]:
            cases.setdefault(row["case"], {})[row["peer"], row["op"]] = row
    return cases


def fa4_over_cudnn() -> float:
    """How many times as fast FlashAttention-4's dense attention is as cuDNN's, forward and backward: 128K
    tokens, 16 query and 2 KV heads, dimension 128, in one run."""
    cases = [
        case for case in peer_rows().values()
        if ("fa4", "forward") in case
        and {(row["seq"], row["heads"], row["dim"]) for row in case.values()} == {(131072, 16, 128)}
    ]  # fmt: skip
    whole = {peer: sum(cases[-1][peer, op]["ms"] for op in OPS) for peer in ("cudnn", "fa4")}
    return whole["cudnn"] / whole["fa4"]


def _both(pair: list[Row], field: str, digits: str) -> str:
    """A figure of forward and backward. Where a time is missing, it is "none"."""
    cells = ["none" if row[field] is None else format(row[field], digits) for row in pair]
    return " / ".join(cells) if any(row[field] is not None for row in pair) else ""


def _over(pair: list[Row], case: dict[tuple[str, str], Row]) -> str:
    """A peer's times over this package's, of the same length."""
    cells = []
    for row in pair:
        own = case.get(("mtraining", row["op"]))
        if own is None or own["ms"] is None or own["seq"] != row["seq"]:
            return ""
        cells.append("none" if row["ms"] is None else f"{row['ms'] / own['ms']:.2f}")
    return " / ".join(cells)


def peers() -> str:
    """What ran: a line for each case and peer. Peers that refuse a case both ways are in :func:`refused`."""
    body, used = [], []
    for case in peer_rows().values():
        for name in dict.fromkeys(peer for peer, _ in case):
            pair = [case[name, op] for op in OPS]
            if all(row["ms"] is None for row in pair):
                continue
            used += pair
            row = pair[0]
            density = next((each["density"] for each in pair if each["density"]), 1.0)
            body.append(
                [
                    f"{tokens(row['seq'])}, {row['heads']}/{row['kv_heads']}, {row['dim']}",
                    NAMES[name],
                    percent(round(density, 4)),
                    (row["block"] or "").replace("x", " x "),
                    _both(pair, "ms", ".3g"),
                    _both(pair, "tflops", ".0f"),
                    _both(pair, "share_of_cudnn", ".2f"),
                    _over(pair, case),
                ]
            )
    header = ["tokens, heads, dim", "kernel", "density", "block", "ms", "TFLOP/s", "of cuDNN dense"]
    return table([*header, "time over this package's"], body) + source(used, "peers")


def refused() -> str:
    """What did not run, and why."""
    reasons: dict[tuple[str, str, str], list[Row]] = {}
    for case in peer_rows().values():
        for (name, _), row in case.items():
            if row["ms"] is None:
                reasons.setdefault((name, row["version"], row["why"]), []).append(row)
    body, used = [], []
    for (name, version, why), found in reasons.items():
        used += found
        ops = " and ".join(op for op in OPS if any(row["op"] == op for row in found))
        cases = ", ".join(dict.fromkeys(row["case"] for row in found))
        body.append([NAMES[name], version, ops, why.replace("|", "\\|"), cases])
    return table(["kernel", "version", "pass", "why", "cases"], body) + source(used, "peers")
