# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels of other packages beside this package's, on the same blocks."""

from __future__ import annotations

import re

from .common import Row, Table, cell, grouped, rows, values

NAMES = {
    "mtraining": "this package",
    "mtraining_one_pass": "this package, one pass",
    "cudnn": "cuDNN dense",
    "flex": "FlexAttention",
    "cudnn_blocks": "cuDNN frontend, block-sparse",
    "cudnn_flex": "cuDNN frontend, flex",
    "fa4_blocks": "FlashAttention-4, blocks",
    "fa4": "FlashAttention-4, dense",
    "flash_msa": "flash-msa",
}
OPS = ("forward", "backward")


OF_MODEL = re.compile(r" \S+ \S+ layer \d+$")
"""What the names of cases of a model's operands end with, ``MODEL TEXT layer N``."""


def peer_rows() -> dict[str, dict[tuple[str, str], Row]]:
    """Rows by case, of the newest commit that has it, then by peer and op."""
    newest = {row["case"]: row["commit"] for row in rows("peers")}
    found = (row for row in rows("peers") if row["commit"] == newest[row["case"]])
    cases = grouped(found, lambda row: row["case"])
    return {case: {values(row, "peer", "op"): row for row in some} for case, some in cases.items()}


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


def _ran(_: list[Row]) -> list[Row]:
    """A row for each case of random operands and each peer that ran. A peer that refuses a case both ways is
    in :data:`refused`."""
    found = []
    for name, case in peer_rows().items():
        if OF_MODEL.search(name):
            continue
        for peer in dict.fromkeys(peer for peer, _ in case):
            pair = [case[peer, op] for op in OPS]
            if any(row["ms"] is not None for row in pair):
                own = [case.get(("mtraining", op)) for op in OPS]
                found.append({**pair[0], "used": pair, "own": own})
    return found


def _both(field: str, digits: str):
    """A figure of forward and backward. Where a time is missing, it is "none"."""

    def said(row: Row) -> str:
        figures = [each[field] for each in row["used"]]
        texts = ["none" if figure is None else format(figure, digits) for figure in figures]
        return " / ".join(texts) if any(figure is not None for figure in figures) else ""

    return said


def _over(row: Row) -> str:
    """A peer's times over this package's, of the same length."""
    texts = []
    for peer, own in zip(row["used"], row["own"]):
        if own is None or own["ms"] is None or own["seq"] != peer["seq"]:
            return ""
        texts.append("none" if peer["ms"] is None else f"{peer['ms'] / own['ms']:.2f}")
    return " / ".join(texts)


def _density(row: Row) -> str:
    density = next((each["density"] for each in row["used"] if each["density"]), 1.0)
    return cell("{density:share}", density=round(density, 4))


peers = Table(
    "peers",
    {
        "tokens, heads, dim": "{seq:K}, {heads}/{kv_heads}, {dim}",
        "kernel": lambda row: NAMES[row["peer"]],
        "density": _density,
        "block": lambda row: (row["block"] or "").replace("x", " x "),
        "ms": _both("ms", ".3g"),
        "TFLOP/s": _both("tflops", ".0f"),
        "of cuDNN dense": _both("share_of_cudnn", ".2f"),
        "time over this package's": _over,
    },
    find=_ran,
)


def _on_operands(_: list[Row]) -> list[Row]:
    """For each length and peer that ran the rows of a model's layers, beside this package's."""
    layers = [
        row for name, case in peer_rows().items() if OF_MODEL.search(name) for row in case.values()
    ]
    groups = grouped(layers, lambda row: values(row, "seq", "peer"))
    return [
        {**some[0], "used": some, "own": groups[seq, "mtraining"]}
        for (seq, _), some in groups.items()
        if any(row["ms"] is not None for row in some)
    ]


def _sums(layers: list[Row]) -> list[float | None]:
    """Milliseconds of all layers, forward and backward; None of what did not run."""
    both = ([each["ms"] for each in layers if each["op"] == op] for op in OPS)
    return [None if None in found else sum(found) for found in both]


def fa4_over_cudnn_on_operands() -> float:
    """How many times as fast FlashAttention-4's dense attention is as cuDNN's on a model's layers, with heads
    of 64, at 128K tokens."""
    found = {row["peer"]: row["used"] for row in _on_operands([]) if row["seq"] == 131072}
    whole = {peer: sum(filter(None, _sums(found[peer]))) for peer in ("cudnn", "fa4")}
    return whole["cudnn"] / whole["fa4"]


def _operand_ms(row: Row) -> str:
    return " / ".join("none" if each is None else f"{each:.3g}" for each in _sums(row["used"]))


def _operand_over(row: Row) -> str:
    """A peer's times over this package's."""
    pairs = zip(_sums(row["used"]), _sums(row["own"]))
    return " / ".join("none" if each is None else f"{each / own:.2f}" for each, own in pairs)


def _operand_rates(row: Row) -> str:
    found = []
    for op in OPS:
        rates = [each["share_of_cudnn"] for each in row["used"] if each["op"] == op]
        found.append("none" if None in rates else f"{min(rates):.2f} to {max(rates):.2f}")
    return " / ".join(found)


def _operand_density(row: Row) -> str:
    found = [each["density"] or 1.0 for each in row["used"] if each["ms"] is not None]
    return cell("{x:share}", x=round(sum(found) / len(found), 4))


operands = Table(
    "peers",
    {
        "tokens": "{seq:K}",
        "kernel": lambda row: NAMES[row["peer"]],
        "density": _operand_density,
        "ms, all layers": _operand_ms,
        "rate over cuDNN dense, by layer": _operand_rates,
        "time over this package's": _operand_over,
    },
    find=_on_operands,
)
"""On the operands of a model's layers."""


def _refusals(_: list[Row]) -> list[Row]:
    """What did not run: a row for each peer, version and reason."""
    missing = (row for case in peer_rows().values() for row in case.values() if row["ms"] is None)
    groups = grouped(missing, lambda row: (row["peer"], row["version"], row["why"]))
    return [{**some[0], "used": some} for some in groups.values()]


refused = Table(
    "peers",
    {
        "kernel": lambda row: NAMES[row["peer"]],
        "version": "{version}",
        "pass": lambda row: " and ".join(
            op for op in OPS if any(each["op"] == op for each in row["used"])
        ),
        "why": lambda row: row["why"].replace("|", "\\|"),
        "cases": lambda row: ", ".join(
            dict.fromkeys(OF_MODEL.sub(" of a model", each["case"]) for each in row["used"])
        ),
    },
    find=_refusals,
)
