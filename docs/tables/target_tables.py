# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Targets beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.model import frontier_tables

from . import backward_tables, frontier_docs
from .common import Row, gpu_name, rows, source, table
from .kernel_tables import CHUNKS, ONE_LAUNCH, backward_rows, kernel_rows, worst_error
from .step_tables import KEPT, over_dense, ratio, step

PRODUCTS = "the backward computes seven matrix products, cuDNN's five"
TILES = "few tiles for each block: going to the next one costs as much as two tiles"
VISITS = "one pass: visits of key blocks cost as much as products"
SHORT = "launch-bound when timed alone"
ENDS = "the gather before the first round, and the last send of gradients"
FEW = "few queries that attend to one distant key weigh little in a mean recall"
UNKNOWN = "not known"
MODELS = ("smol.gguf", "qwen.gguf")
STEEP, RATIO = "0:1.2,0.9:0.15/3", 0.1
"""The schedule with a mean cost nearest to the target's."""
COSTS = "with fewer pairs the loss grows faster than the cost falls"
TWICE = "keys are read twice, for the LSE and for the masses"


Target = tuple[str, str, str, bool, str]
"""What, the target, what was measured, whether it is met, and why not."""


def _targets(group: Iterable[Target], used: list[Row], *files: str) -> str:
    """The targets of a group, missed ones first."""
    found = sorted(group, key=lambda each: each[3])
    body = [
        [what, target, today, "met" if met else "**missed**", "" if met else why]
        for what, target, today, met, why in found
    ]
    return table(["what", "target", "measured", "", "why"], body) + source(used, *files)


def losses() -> str:
    used = [frontier_docs.chosen(model, "target", 0.95) for model in MODELS]
    used += [frontier_docs.with_schedule(model, STEEP) for model in MODELS]
    return _targets([*_losses(), *_scheduled()], frontier_docs.apart(used), "frontier")


def steps() -> str:
    return _targets(_steps(), [step(524288), step(131072)], "pretrain")


def layers() -> str:
    return _targets(_layers(), [_layer(case) for case, *_ in LAYERS], "rings")


def kernels() -> str:
    used = [case["forward mtraining"] for case in kernel_rows()]
    return _targets(_kernels(), used, "kernels", "numerics")


def backward() -> str:
    return _targets(_backward(), [*backward_rows(), *_pruned()], "backward_paths", "backward")


def search() -> str:
    return _targets(_search(), _searches(), "selection")


def _cases(text: str) -> list[dict[str, Row]]:
    found = [case for case in kernel_rows() if text in case["forward mtraining"]["case"]]
    return [case for case in found if not case["forward mtraining"]["documents"]]


def _share(
    what: str, text: str, ahead: float, back: float, over: str = "cudnn", why: str = PRODUCTS
):
    """The lowest rate of the cases with ``text`` in their name, over another implementation's."""

    def lowest(op: str) -> float:
        return min(
            case[f"{op} mtraining"]["tflops"] / case[f"{op} {over}"]["tflops"]
            for case in _cases(text)
            if f"{op} {over}" in case
        )

    found = lowest("forward"), lowest("backward")
    measured = " / ".join(f"{value:.2f}" for value in found)
    met = found[0] >= ahead and found[1] >= back
    return what, f"{ahead:.2f} / {back:.2f}", measured, met, why


def _kernels() -> Iterator[Target]:
    cudnn = "rate over cuDNN dense, forward / backward: "
    yield _share(cudnn + "slashes 5%, 64K", "64K d128 slash 5%", 0.95, 0.85, why=TILES)
    yield _share(cudnn + "slashes 5%, 128K", "128K d128 slash 5%", 0.95, 0.85)
    yield _share(cudnn + "slashes 5%, 256K", "256K d128 slash 5%", 0.95, 0.85)
    yield _share(cudnn + "slashes 25%, 64K to 256K", "d128 slash 25%", 0.95, 0.85)
    yield _share(cudnn + "dense through these kernels, 64K", "d128 all distances", 0.90, 0.80)
    yield _share(cudnn + "slashes and columns, 128K and 512K", "columns", 0.70, 0.65)
    yield _share(cudnn + "dim 64", "d64", 0.85, 0.75)
    flex = "rate over FlexAttention, forward / backward: "
    yield _share(flex + "dim 128", "d128 slash", 1.3, 1.25, "flex")
    yield _share(flex + "dim 64", "d64", 1.3, 1.25, "flex", UNKNOWN)
    worst = worst_error()
    yield "error against float64, over cuDNN's", "1.5", f"{worst:.2f}", worst <= 1.5, ""


def _backward() -> Iterator[Target]:
    """Of the best of the ways of the backward, and of a pruned one where about 3% of the pairs stay."""
    best: dict[str, dict[tuple, float]] = {}
    ways = ("two_kernels", "one_pass", CHUNKS, ONE_LAUNCH)
    latest = {(row["gpu"], row["case"], row["way"]): row for row in backward_rows()}
    for (gpu, case, way), row in latest.items():
        if way in ways and not row["documents"] and row["seq"] >= 65536:
            kind = "with columns" if row["vertical"] else f"slashes, dim {row['dim']}"
            rates = best.setdefault(f"{kind}, {gpu_name(gpu)}", {})
            place = (row["seq"], case)
            rates[place] = max(rates.get(place, 0), row["share_of_cudnn"])
    for what, rates in best.items():
        lowest, highest = min(rates.values()), max(rates.values())
        what = f"rate over cuDNN dense, 5% to 100%, 64K tokens and more, the best way: {what}"
        yield what, "0.95", f"{lowest:.2f} to {highest:.2f}", lowest >= 0.95, VISITS
    for row in _pruned():
        share = backward_tables.over_unpruned(row)
        what = "pruned over unpruned layer, 10% in the forward, 3% in the backward, random operands"
        what += f", {row['seq'] // 1024}K, {gpu_name(row['gpu'])}"
        yield what, "0.45", f"{share:.2f}", share <= 0.45, "the forward stays, and finds the blocks"


def _pruned() -> list[Row]:
    """Layers with 10% in the forward and 3% in the backward."""
    return [
        row for row in backward_tables.found("time")
        if row["forward"] == "price@0.1" and 0.0295 <= row["backward_density"] <= 0.0305
    ]  # fmt: skip


def _searches() -> list[Row]:
    found = [row for row in rows("selection") if row.get("policy")]
    return [row for row in found if row["commit"] == found[-1]["commit"] and row["ms"]]


def _search() -> Iterator[Target]:
    found = _searches()

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
        TWICE,
    )
    yield "the same, 256 rows (default)", "1.5 ms", f"{many['ms']:.2f} ms", many["ms"] <= 1.5, TWICE
    size = many["index_bytes"] / 2**20
    yield "index of a layer, 512K", "1 MiB", f"{size:.2f} MiB", size <= 1, UNKNOWN
    [case] = _cases("128K d128 slash 5%")
    attention = case["forward mtraining"]["ms"] + case["backward mtraining"]["ms"]
    share = slowest(131072, 1, 256, "price")["ms"] / attention
    yield "pattern search over attention, 5%, 128K", "3%", f"{share:.1%}", share <= 0.03, TWICE


def _layer(case: str, impl: str = "mtraining_flat") -> Row:
    found = [
        row for row in rows("rings")
        if (row["case"], row["impl"], row["world"], row["hosts"]) == (case, impl, 4, 1)
        and row["inner"] in (0, 4) and "NVTE_BATCH" not in row["command"]
    ]  # fmt: skip
    return found[-1]


LAYERS = (
    ("512K 1000 columns, 100 diagonals", 4.5, 13, UNKNOWN),
    ("512K 3500 columns, 30 diagonals", 6, 21, UNKNOWN),
    ("128K 1000 columns, 100 diagonals", 1.4, 3.6, SHORT),
    ("512K 3% density, 1000 columns", 19, 65, UNKNOWN),
)


def _layers() -> Iterator[Target]:
    for case, ahead, both, why in LAYERS:
        row = _layer(case)
        measured = f"{row['fwd_ms']:.3g} / {row['fwdbwd_ms']:.3g}"
        met = row["fwd_ms"] <= ahead and row["fwdbwd_ms"] <= both
        yield (
            f"layer over 4 H200, forward / both: {case}",
            f"{ahead} / {both} ms",
            measured,
            met,
            why,
        )
    for case, limit in (
        ("512K 1000 columns, 100 diagonals", 0.03),
        ("128K 1000 columns, 100 diagonals", 0.1),
    ):
        row = _layer(case)
        share = row["exposed_comm_ms"] / row["fwdbwd_ms"]
        yield f"exposed communication: {case}", f"{limit:.0%}", f"{share:.0%}", share <= limit, ENDS
    ours, theirs = _layer("512K all distances"), _layer("512K all distances", "te_p2p")
    ratios = [theirs[name] / ours[name] for name in ("fwd_ms", "fwdbwd_ms")]
    measured = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    what = "dense 512K: speed over Transformer Engine's ring, forward / both"
    yield what, "0.95 / 0.95", measured, min(ratios) >= 0.95, PRODUCTS


def _steps() -> Iterator[Target]:
    for seq, wanted in ((524288, 10), (131072, 3)):
        row = step(seq)
        what = (
            f"step of Qwen2.5-3B's shape over dense that keeps attention's output, {seq // 1024}K, "
        )
        what += (
            f"{row['world']} {gpu_name(row['gpu'])}, 1000 columns and 100 diagonals, random weights"
        )
        why = "the layers outside attention are two thirds of the step"
        yield what, f"{wanted}x", ratio(row, KEPT), over_dense(row) >= wanted, why


def _losses() -> Iterator[Target]:
    """Of target recall 0.95 after 300 steps, by text."""
    for model in MODELS:
        row = frontier_docs.chosen(model, "target", 0.95)
        name = (
            f"{frontier_tables.MODELS[model]}, {row['seq'] // 1024}K tokens, {row['seeds']} seeds"
        )
        for judged in ("dense", "own"):
            found = {
                "mean": row[f"trained_{judged}_over_dense"],
                **row[f"trained_{judged}_by_text"],
            }
            for text, loss in found.items():
                what = f"{judged}-attention loss, {text}: {name}"
                yield what, "0.5%", f"{loss:+.2%}".replace("-", "−"), loss <= 0.005, FEW


def _scheduled() -> Iterator[Target]:
    """Loss and cost at once, of the schedule that comes nearest to both."""
    for model in MODELS:
        row = frontier_docs.with_schedule(model, STEEP)
        loss, cost = row["trained_dense_over_dense"], row["mean_cost"]
        run = f"{frontier_tables.run_of(row)} steps"
        what = f"dense-attention loss at a mean cost, schedule `{STEEP[:-2]}`: {run}"
        measured = f"{loss:+.2%} at {cost:.2f}"
        met = loss <= 0.001 and cost <= RATIO
        yield what, f"0.10% at {RATIO:.2f}", measured, met, COSTS
