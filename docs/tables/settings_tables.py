# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which settings to start from, and what each costs in loss and time."""

from __future__ import annotations

from megatron_mtraining.config.schedule import NAMED

from . import backward_tables, frontier_tables, real_tables, step_tables
from .common import Row, Table, cell, mean

SMALL, SECOND = "smol.gguf", "qwen.gguf"
THRESHOLD = 3


def _trained(why: str, options: str, row: Row, layer: str | None = None) -> Row:
    """A setting that a joined row has trained."""
    return dict(
        why=why, options=f"`{options}`", of=frontier_tables.model_of(row) + cell(", {seq:K}", row),
        density=cell("{density_trained:share}", row),
        loss=f"{frontier_tables.losses(row, 'trained_dense')} ({row['seeds']})",
        texts=frontier_tables.by_text(row, "trained_dense"),
        layer=layer or cell("~{x:.3f}", x=real_tables.by_density(row["density_trained"])), used=[row],
    )  # fmt: skip


def _scheduled(why: str, name: str, model: str) -> Row:
    """A named schedule, with the mean cost of the run."""
    row = frontier_tables.with_schedule(model, f"{NAMED['schedule'][name]}/{THRESHOLD}")
    options = f"--mtraining-schedule {name} --mtraining-backward-threshold {THRESHOLD}"
    return _trained(why, options, row, cell("{mean_cost:.3f}, mean of the run", row))


def _exact() -> Row:
    """A dense forward with a pruned backward."""
    trained = [
        row for row in backward_tables.trained_rows()
        if (row["forward"], row["threshold"]) == ("dense", THRESHOLD)
    ]  # fmt: skip
    timed = real_tables.real_share(131072, 0.0, THRESHOLD)
    return dict(
        why="an exact forward",
        options=f"`--mtraining-price 0 --mtraining-backward-threshold {THRESHOLD}`",
        of=frontier_tables.model_of(trained[0]) + cell(", {seq:K}", trained[0]),
        density=cell("100%; backward {x:share}", x=mean(trained, "backward_density")),
        loss=f"{backward_tables.over(trained, 'dense', 'dense')} ({len(trained)})",
        texts=backward_tables.over_by_text(trained, "dense"),
        layer=f"{real_tables.share(timed, 'dense'):.3f}", used=[*trained, *timed],
    )  # fmt: skip


def _starts(_: list[Row]) -> list[Row]:
    chosen, target = frontier_tables.chosen, "--mtraining-target-recall 0.95"

    def price(why: str, wanted: float) -> Row:
        row = chosen(SMALL, "price", wanted)
        return _trained(why, f"--mtraining-price {row['setting']['price']:.2g}", row)

    steps = [step_tables.step(seq) for seq in (131072, 524288)]
    return [
        _scheduled("the usual start", "anneal", SMALL),
        _scheduled("", "anneal", SECOND),
        _scheduled("less loss", "anneal-low", SMALL),
        _scheduled("", "anneal-low", SECOND),
        _trained("one target for the run", target, chosen(SMALL, "target", 0.95)),
        _trained("", target, chosen(SECOND, "target", 0.95)),
        price("one price", 0.3),
        _exact(),
        price("more speed, and more loss", 0.08),
        dict(
            why="a step time that does not vary", options="`--mtraining-vertical 1000 --mtraining-slash 100`",
            of="Qwen2.5-3B's shape, random weights", loss="not known", texts="", layer="", used=steps,
            density=" and ".join(cell("{density:share} at {seq:K}", row) for row in steps),
        ),
    ]  # fmt: skip


settings = Table(
    "frontier backward pretrain real_operands",
    {
        "you want": "{why}",
        "options": "{options}",
        "model, tokens": "{of}",
        "density": "{density}",
        "dense-attention loss over dense (seeds)": "{loss}",
        "code, book, speeches": "{texts}",
        "attention, 128K of code / cuDNN dense": "{layer}",
    },
    find=_starts,
)
