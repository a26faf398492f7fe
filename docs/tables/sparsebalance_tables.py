# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance over data-parallel ranks: recorded patterns, simulated and measured steps, training."""

from __future__ import annotations

import statistics

from .common import Row, last, percent, rows, source, table, tokens

MODES = {
    "off": "off",
    "length": "batching by length",
    "cost": "batching by cost",
    "tuning": "tuning alone",
    "both": "**batching by cost, tuning**",
}
KINDS = {
    "code": "Python sources",
    "c": "C headers",
    "json": "JSON, API descriptions",
    "book": "a novel",
    "speech": "speeches",
}
WAITS = {
    "step": "at the end of a step",
    "microbatch": "in each micro-batch (expert parallelism)",
    "pipeline": "in a pipeline of 4 stages",
}
SETS = ("bimodal", "8K-72K", "long-tailed", "to 256K")
AT_PRICE = 0.3
GPUS = 64
PRICE, LOW_PRICE = 0.25, 0.06
FIELDS = ("source", "price", "set", "gpus", "waits", "mode")


def found(kind: str, price: float = PRICE) -> dict[tuple, Row]:
    """The last simulated, or measured, row of each set, number of GPUs, way to wait, and mode."""
    every = last(rows("sparsebalance"), *FIELDS)
    return {key[2:]: row for key, row in every.items() if key[:2] == (kind, price)}


def sets_of(some: dict[tuple, Row]) -> list[str]:
    return [name for name in SETS if any(key[0] == name for key in some)]


def ratio(slow: Row, fast: Row, name: str) -> str:
    return f"{slow[name] / fast[name]:.2f}x"


def recorded() -> str:
    """Density and recall by kind of text and length."""
    every = [row for row in rows("sparsebalance_patterns") if not row["document"]]
    lengths = sorted({row["seq"] for row in every})
    body = []
    for kind, name in KINDS.items():
        cells = []
        for length in lengths:
            some = [row for row in every if (row["kind"], row["seq"]) == (kind, length)]
            at = some[0]["prices"].index(AT_PRICE)
            density = [row["density"][at] for row in some]
            recall = statistics.mean(row["recall"][at] for row in some)
            low, high = (f"{100 * edge(density):.0f}" for edge in (min, max))
            spread = f"{low}%" if low == high else f"{low}-{high}%"
            cells.append(f"{spread}, {recall:.2f}".replace("0.", "."))
        body.append([name, *cells])
    return table(["text", *map(tokens, lengths)], body) + source(every, "sparsebalance_patterns")


def row_of(row: Row, off: Row, length: Row) -> list[str]:
    return [
        f"{row['max_over_mean']:.2f}",
        f"{row['attention_ms']:.0f}",
        ratio(off, row, "attention_ms"),
        ratio(length, row, "attention_ms"),
        percent(row["idle_share"]),
        f"{row['step_ms'] / 1000:.2f}",
        ratio(off, row, "step_ms"),
        percent(row["density"]),
        f"{row['recall']:.3f}",
    ]


HEAD = [
    "max/mean",
    "attention, slowest rank, ms",
    "over off",
    "over length",
    "attention idle",
    "s / step",
    "over off",
    "density",
    "recall",
]


def simulated(price: float = PRICE) -> str:
    """All sets and modes on 64 GPUs."""
    some, body, used = found("simulated", price), [], []
    for name in sets_of(some):
        own = {mode: some[name, GPUS, "step", mode] for mode in MODES}
        used += own.values()
        for mode, label in MODES.items():
            body.append([name, label, *row_of(own[mode], own["off"], own["length"])])
    return table(["set", "mode", *HEAD], body) + source(used, "sparsebalance")


def denser() -> str:
    """The same at a lower price."""
    return simulated(LOW_PRICE)


def by_gpus() -> str:
    """Max/mean of attention by number of GPUs, and what that is in time."""
    some, body, used = found("simulated"), [], []
    for name in sets_of(some):
        for gpus in sorted({key[1] for key in some if key[0] == name and key[2] == "step"}):
            own = {mode: some[name, gpus, "step", mode] for mode in MODES}
            used += own.values()
            both = own["both"]
            shape = f"{both['gpus']} = {both['dp']} x {both['cp']}"
            body.append(
                [name, shape]
                + [f"{row['max_over_mean']:.2f}" for row in own.values()]
                + [ratio(own[mode], both, "attention_ms") for mode in ("off", "length")]
                + [ratio(own[mode], both, "step_ms") for mode in ("off", "length")]
            )
    header = ["set", "GPUs = DP x CP", *(label.strip("*") for label in MODES.values())]
    header += ["attention: off / both", "length / both", "step: off / both", "length / both"]
    return table(header, body) + source(used, "sparsebalance")


def by_waits() -> str:
    """Where ranks wait for each other in each micro-batch, or in a pipeline."""
    some, body, used = found("simulated"), [], []
    for name in sets_of(some):
        for waits in ("microbatch", "pipeline"):
            own = {mode: some[name, GPUS, waits, mode] for mode in MODES}
            used += own.values()
            for mode, label in MODES.items():
                row = own[mode]
                body.append(
                    [
                        name,
                        WAITS[waits],
                        label,
                        f"{row['max_over_mean']:.2f}",
                        f"{row['step_ms'] / 1000:.2f}",
                        ratio(own["off"], row, "step_ms"),
                        percent(row["step_idle_share"]),
                        percent(row["density"]),
                        f"{row['recall']:.3f}",
                    ]
                )
    header = ["set", "ranks wait", "mode", "max/mean", "s / step", "over off", "step idle"]
    return table([*header, "density", "recall"], body) + source(used, "sparsebalance")


def measured() -> str:
    """One GPU, micro-batches one after the other."""
    some, body = found("measured"), []
    for row in some.values():
        off = some[row["set"], row["gpus"], row["waits"], "off"]
        length = some[row["set"], row["gpus"], row["waits"], "length"]
        cells = row_of(row, off, length)
        body.append(
            [row["set"], MODES[row["mode"]], *cells[:5], *cells[7:]]
            + [f"{row['predicted_over_measured']:.2f}"]
            + [
                f"{percent(row[f'error_median{end}'])} / {percent(row[f'error_worst{end}'])}"
                for end in ("", "_at_density")
            ]
        )
    header = ["set", "mode", *HEAD[:5], *HEAD[7:], "predicted / measured"]
    header += ["error, median / worst", "the same at the measured density"]
    return table(header, body) + source(some.values(), "sparsebalance")


def over_ranks() -> str:
    """Whole steps of Megatron over data-parallel ranks, the modes of each layout and weights."""
    layout = ("gpus", "dp", "cp", "set", "weights", "texts")
    every = [row for row in rows("sparsebalance") if row["source"] == "ranks"]
    some, body = last(every, *layout, "mode"), []
    for own in sorted({key[:-1] for key in some}):
        off, length = (some[(*own, mode)] for mode in ("off", "length"))
        for mode, label in MODES.items():
            row = some[(*own, mode)]
            low, high = row["multipliers"] or (1, 1)
            shape = f"{row['gpus']} = {row['dp']} x {row['cp']}"
            cells = [shape, label, *row_of(row, off, length)]
            cells.append(f"{statistics.mean(row['losses'][-row['steps'] :]):.4f}")
            cells.append(f"{low:.2f} to {high:.2f}" if low < high else "1")
            body.append([*cells, f"{row['predicted_over_measured']:.2f}"])
    header = ["GPUs = DP x CP", "mode", *HEAD, "loss", "multipliers of the price"]
    return table([*header, "predicted / measured"], body) + source(some.values(), "sparsebalance")


def spread(values: list[float]) -> str:
    """Mean, and half of the distance between the lowest and the highest."""
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else mean


def over_off(own: list[Row], off: list[Row], name: str) -> str:
    """What a loss has more than that of the run without, of the same seed."""
    of_seed = {row["seed"]: row[name] for row in off}
    more = [row[name] - of_seed[row["seed"]] for row in own if row["seed"] in of_seed]
    return f"{spread(more)}".replace("-", "−")


def trained_with() -> str:
    """A model trained on, with tuning and without."""
    every = list(last(rows("sparsebalance_loss"), "run", "seed", "seq", "steps").values())
    labels = {"dense": "dense", "off": "off", "both": "batching by cost, tuning"}
    off = [row for row in every if row["run"] == "off"]
    body = []
    for run, label in labels.items():
        own = [row for row in every if row["run"] == run]
        held_out = []
        for name in ("held_out_after", "held_out_after_dense"):
            held_out += [spread([row[name] for row in own])]
            held_out += [over_off(own, off, name) if run != "off" else ""]
        low, high = (
            edge(row["multipliers"][end] for row in own) for end, edge in ((0, min), (1, max))
        )
        density, recall, over = (
            statistics.mean(row[name] for row in own)
            for name in ("density", "recall", "max_over_mean")
        )
        body.append(
            [
                label,
                len(own),
                over_off(own, off, "loss_last_50") if run != "off" else "",
                *held_out,
                percent(density),
                f"{recall:.4f}",
                f"{low:.2f} to {high:.2f}" if run == "both" else "1",
                f"{over:.3f}",
            ]
        )
    header = [
        "run",
        "seeds",
        "training loss of the last 50 steps, more than off",
        "held-out, own attention",
    ]
    header += ["more than off", "held-out, dense attention", "more than off", "density", "recall"]
    header += ["multipliers of the price", "predicted max/mean"]
    return table(header, body) + source(every, "sparsebalance_loss")
