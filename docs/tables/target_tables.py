# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Targets beside what was measured."""

from __future__ import annotations

from . import backward_tables
from .common import Row, gpu_name, rows, source, table
from .kernel_tables import CHUNKS, ONE_LAUNCH, backward_rows, kernel_rows, worst_error
from .step_tables import over_dense, step, trained


def targets() -> str:
    body = [*_kernels(), *_backward(), *_search(), *_layers(), *_steps()]
    marked = [
        [what, target, today, "met" if met else "**missed**"] for what, target, today, met in body
    ]
    used = [case["forward mtraining"] for case in kernel_rows()]
    return table(["what", "target", "measured", ""], marked) + source(used, "kernels")


def _cases(text: str) -> list[dict[str, Row]]:
    found = [case for case in kernel_rows() if text in case["forward mtraining"]["case"]]
    return [case for case in found if not case["forward mtraining"]["documents"]]


def _share(what: str, text: str, ahead: float, back: float, over: str = "cudnn"):
    """The lowest rate of the cases with ``text`` in their name, over another implementation's."""

    def lowest(op: str) -> float:
        return min(
            case[f"{op} mtraining"]["tflops"] / case[f"{op} {over}"]["tflops"]
            for case in _cases(text)
            if f"{op} {over}" in case
        )

    found = lowest("forward"), lowest("backward")
    measured = " / ".join(f"{value:.2f}" for value in found)
    return what, f"{ahead:.2f} / {back:.2f}", measured, found[0] >= ahead and found[1] >= back


def _kernels():
    cudnn = "rate over cuDNN dense, forward / backward: "
    yield _share(cudnn + "slashes 5%, 64K", "64K d128 slash 5%", 0.95, 0.85)
    yield _share(cudnn + "slashes 5%, 128K", "128K d128 slash 5%", 0.95, 0.85)
    yield _share(cudnn + "slashes 5%, 256K", "256K d128 slash 5%", 0.95, 0.85)
    yield _share(cudnn + "slashes 25%, 64K to 256K", "d128 slash 25%", 0.95, 0.85)
    yield _share(cudnn + "dense through these kernels, 64K", "d128 all distances", 0.90, 0.80)
    yield _share(cudnn + "slashes and columns, 128K and 512K", "columns", 0.70, 0.65)
    yield _share(cudnn + "dim 64", "d64", 0.85, 0.75)
    flex = "rate over FlexAttention, forward / backward: "
    yield _share(flex + "dim 128", "d128 slash", 1.3, 1.25, "flex")
    yield _share(flex + "dim 64", "d64", 1.3, 1.25, "flex")
    worst = worst_error()
    yield "error against float64, over cuDNN's", "1.5", f"{worst:.2f}", worst <= 1.5


def _backward():
    """Of the best of the ways of the backward, and of a pruned one where about 3% of the pairs stay."""
    best: dict[str, dict[str, float]] = {}
    ways = ("two_kernels", "one_pass", CHUNKS, ONE_LAUNCH)
    latest = {(row["gpu"], row["case"], row["way"]): row for row in backward_rows()}
    for (gpu, case, way), row in latest.items():
        if way in ways and not row["documents"] and row["seq"] >= 65536:
            kind = "with columns" if row["vertical"] else f"slashes, dim {row['dim']}"
            rates = best.setdefault(f"{row['seq'] // 1024}K, {kind}, {gpu_name(gpu)}", {})
            rates[case] = max(rates.get(case, 0), row["share_of_cudnn"])
    for what, rates in best.items():
        lowest, highest = min(rates.values()), max(rates.values())
        what = f"backward over cuDNN dense, 5% to 100%, the best way: {what}"
        yield what, "0.95", f"{lowest:.2f} to {highest:.2f}", lowest >= 0.95
    for row in backward_tables.found("time"):
        if row["forward"] == "price@0.1" and 0.0295 <= row["backward_density"] <= 0.0305:
            share = backward_tables.over_unpruned(row)
            what = (
                "layer with a pruned backward over unpruned, 10% in the forward, 3% in the backward"
            )
            what += f", {row['seq'] // 1024}K, {gpu_name(row['gpu'])}"
            yield what, "0.45", f"{share:.2f}", share <= 0.45


def _search():
    found = [row for row in rows("selection") if row.get("policy")]
    found = [row for row in found if row["commit"] == found[-1]["commit"] and row["ms"]]

    def slowest(seq: int, world: int, number: int, policy: str) -> Row:
        wanted = (seq, world, number, policy)
        fields = ("seq", "world", "rows", "policy")
        same = [row for row in found if tuple(row[field] for field in fields) == wanted]
        return max((row for row in same if row["vertical"] != 3500), key=lambda row: row["ms"])

    few, many = slowest(524288, 4, 64, "fixed"), slowest(524288, 4, 256, "price")
    yield (
        "pattern search, 512K over 4 ranks, 64 rows",
        "0.6 ms",
        f"{few['ms']:.2f} ms",
        few["ms"] <= 0.6,
    )
    yield "the same, 256 rows (default)", "1.5 ms", f"{many['ms']:.2f} ms", many["ms"] <= 1.5
    size = many["index_bytes"] / 2**20
    yield "index of a layer, 512K", "1 MiB", f"{size:.2f} MiB", size <= 1
    [case] = _cases("128K d128 slash 5%")
    attention = case["forward mtraining"]["ms"] + case["backward mtraining"]["ms"]
    share = slowest(131072, 1, 256, "price")["ms"] / attention
    yield "pattern search over attention, 5%, 128K", "3%", f"{share:.1%}", share <= 0.03


def _layer(case: str, impl: str = "mtraining_flat") -> Row:
    found = [
        row for row in rows("rings")
        if (row["case"], row["impl"], row["world"], row["hosts"]) == (case, impl, 4, 1)
        and row["inner"] in (0, 4) and "NVTE_BATCH" not in row["command"]
    ]  # fmt: skip
    return found[-1]


def _layers():
    for case, ahead, both in (
        ("512K 1000 columns, 100 diagonals", 4.5, 13),
        ("512K 3500 columns, 30 diagonals", 6, 21),
        ("128K 1000 columns, 100 diagonals", 1.4, 3.6),
        ("512K 3% density, 1000 columns", 19, 65),
    ):
        row = _layer(case)
        measured = f"{row['fwd_ms']:.3g} / {row['fwdbwd_ms']:.3g}"
        met = row["fwd_ms"] <= ahead and row["fwdbwd_ms"] <= both
        yield f"layer over 4 H200, forward / both: {case}", f"{ahead} / {both} ms", measured, met
    for case, limit in (
        ("512K 1000 columns, 100 diagonals", 0.03),
        ("128K 1000 columns, 100 diagonals", 0.1),
    ):
        row = _layer(case)
        share = row["exposed_comm_ms"] / row["fwdbwd_ms"]
        yield f"exposed communication: {case}", f"{limit:.0%}", f"{share:.0%}", share <= limit
    ours, theirs = _layer("512K all distances"), _layer("512K all distances", "te_p2p")
    ratios = [theirs[name] / ours[name] for name in ("fwd_ms", "fwdbwd_ms")]
    measured = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    what = "dense 512K: speed over Transformer Engine's ring, forward / both"
    yield what, "0.95 / 0.95", measured, min(ratios) >= 0.95


def _steps():
    for seq, target in ((524288, 10), (131072, 3)):
        ratio = over_dense(step(seq))
        what = f"step of Qwen2.5-3B's shape over dense, {seq // 1024}K, 4 H200 (random weights)"
        yield what, f"{target}x", f"{ratio:.1f}x", ratio >= target
    what = "training loss over dense, 16K, 300 steps, one seed, trained weights (SmolLM2-135M): recall 0.95"
    for run, how in (("overrides", "a target for each head"), ("price", "one target")):
        share = trained()[run]["loss_last_50_over_dense"]
        yield f"{what}, {how}", "0.5%", f"{share:.2%}", share <= 0.005
