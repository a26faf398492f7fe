# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which settings to start from, and what each costs in loss and time."""

from __future__ import annotations

from benchmarks.model import frontier_tables
from megatron_mtraining.config.schedule import NAMED

from . import backward_tables, frontier_docs, real_tables, step_tables
from .common import Row, percent, source, table, tokens

SMALL, SECOND = "smol.gguf", "qwen.gguf"
LENGTHS = (131072, 524288)
THRESHOLD = 3


def _line(why: str, options: str, row: Row, layer: str | None = None) -> list:
    name = f"{frontier_tables.MODELS[row['model']]}, {tokens(row['seq'])}"
    loss = f"{frontier_tables.losses(row, 'trained_dense')} ({row['seeds']})"
    texts = frontier_tables.by_text(row, "trained_dense")
    return [
        why,
        options,
        name,
        percent(row["density_trained"]),
        loss,
        texts,
        layer or frontier_tables.times(row, "128k"),
    ]


def _schedules() -> tuple[list[list], list[Row]]:
    """The lines of the named schedules, with the mean cost of the run, and the rows that they are from."""
    lines, used = [], []
    for why, name in (("the usual start", "anneal"), ("less loss", "anneal-low")):
        for model in (SMALL, SECOND):
            row = frontier_docs.with_schedule(model, f"{NAMED['schedule'][name]}/{THRESHOLD}")
            options = f"`--mtraining-schedule {name} --mtraining-backward-threshold {THRESHOLD}`"
            cost = f"{row['mean_cost']:.3f} (real operands, mean of the run)"
            lines.append(_line(why if model == SMALL else "", options, row, cost))
            used.append(row)
    return lines, used


def _exact() -> tuple[list, list[Row]]:
    """The line of a dense forward with a pruned backward, and the rows that it is from; its time is of real
    operands, as random ones leave the backward far less than a model does."""
    trained = [
        row for row in backward_tables.found("train")
        if (row["forward"], row["threshold"]) == ("dense", THRESHOLD)
    ]  # fmt: skip
    timed = real_tables.real_share(131072, 0.0, THRESHOLD)
    density = percent(backward_tables.mean(row["backward_density"] for row in trained))
    line = [
        "an exact forward", f"`--mtraining-price 0 --mtraining-backward-threshold {THRESHOLD}`",
        f"{frontier_tables.MODELS[trained[0]['model']]}, {tokens(trained[0]['seq'])}",
        f"100%; backward {density}",
        f"{backward_tables.over(trained, 'dense', 'dense')} ({len(trained)})",
        backward_tables.over_by_text(trained, "dense"),
        f"{real_tables.share(timed, 'dense'):.3f} (real operands)" if timed else "not measured yet",
    ]  # fmt: skip
    return line, [*trained, *timed]


def settings() -> str:
    """The settings to start from."""
    start, second = (
        frontier_docs.chosen(SMALL, "target", 0.95),
        frontier_docs.chosen(SECOND, "target", 0.95),
    )
    denser, sparser = (
        frontier_docs.chosen(SMALL, "price", 0.3),
        frontier_docs.chosen(SMALL, "price", 0.08),
    )
    exact, used = _exact()
    scheduled, trained = _schedules()
    target = "`--mtraining-target-recall 0.95`"

    def price(row: Row) -> str:
        return f"`--mtraining-price {row['setting']['price']:.2g}`"

    steps = [step_tables.step(seq) for seq in LENGTHS]
    fixed = " and ".join(f"{percent(row['density'])} at {tokens(row['seq'])}" for row in steps)
    body = [
        *scheduled,
        _line("one target for the run", target, start),
        _line("", target, second),
        _line("one price", price(denser), denser),
        exact,
        _line("more speed, and more loss", price(sparser), sparser),
        [
            "a step time that does not vary", "`--mtraining-vertical 1000 --mtraining-slash 100`",
            "Qwen2.5-3B's shape, random weights", fixed, "not known", "", "",
        ],
    ]  # fmt: skip
    header = [
        "you want",
        "options",
        "model, tokens",
        "density",
        "dense-attention loss over dense (seeds)",
    ]
    header += ["code, book, speeches", "layer 128K / cuDNN dense"]
    joined = frontier_docs.apart([start, second, *trained, denser, sparser])
    files = ("frontier", "backward", "pretrain", *(["real_operands"] if len(used) > 3 else []))
    return table(header, body) + source([*joined, *used, *steps], *files)
