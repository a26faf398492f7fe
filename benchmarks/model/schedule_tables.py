# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The table and the picture of schedules, from joined rows."""

from __future__ import annotations

from .frontier_rows import Row
from .frontier_tables import (
    COLOURS,
    LOSS_TICKS,
    by_text,
    decay_name,
    losses,
    markdown,
    name_of,
    percent,
    prices_of,
    run_of,
    scheduled,
    trained,
)


def schedule_table(rows: list[Row]) -> str:
    """Markdown of joined rows: prices and learning rates that change over a run."""
    header = [
        "model, tokens, steps", "learning rate", "price, by share of the run", "threshold", "seeds",
        "pairs", "mean cost", "dense-attention loss over dense", "code, book, speeches",
        "own-attention loss",
    ]  # fmt: skip
    body = [
        [
            run_of(row), f"{row['lr']:g}, {decay_name(row)}",
            prices_of(row) if row["schedule"] else name_of(row),
            f"{row['backward_threshold']:g}" if row["backward_threshold"] else "off", row["seeds"],
            percent(row["density_trained"]), cost_of(row), losses(row, "trained_dense"),
            by_text(row, "trained_dense"), losses(row, "trained_own"),
        ]
        for row in scheduled(rows)
    ]  # fmt: skip
    return markdown(header, body)


def cost_of(row: Row) -> str:
    return "–" if row["mean_cost"] is None else f"{row['mean_cost']:.3f}"


def places(rows: list[Row]) -> list[dict]:
    """What the picture shows: of the models that have a schedule with a mean cost, all runs with one."""
    found = [
        dict(
            run=run_of(row), decay=decay_name(row), cost=row["mean_cost"],
            prices=prices_of(row).strip("`") if row["schedule"] else "",
            changes="," in (row["schedule"] or ""),
            loss=100 * row["trained_dense_over_dense"], spread=100 * (row["trained_dense_spread"] or 0),
        )
        for row in [*trained(rows), *scheduled(rows)]
        if None not in (row["mean_cost"], row["trained_dense_over_dense"])
    ]  # fmt: skip
    runs = {place["run"] for place in found if place["changes"]}
    return [place for place in found if place["run"] in runs]


def draw_schedules(figure, shown: list[dict]) -> None:
    """Loss over dense against the mean cost of the run: a panel a model. Schedules that no other run beats in
    both have their points."""
    runs = sorted({place["run"] for place in shown})
    decays = dict(zip(sorted({place["decay"] for place in shown}), COLOURS[::3]))
    panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, runs):
        own = [place for place in shown if place["run"] == run]
        for place in own:
            what, marker = ("schedule", "*") if place["changes"] else ("fixed price", "o")
            axes.errorbar(
                place["cost"], place["loss"], place["spread"], fmt=marker, color=decays[place["decay"]],
                capsize=3, markersize=9, label=f"{what}, learning rate {place['decay']}",
            )  # fmt: skip
            beaten = any(o["cost"] <= place["cost"] and o["loss"] < place["loss"] for o in own)
            if place["changes"] and not beaten:
                axes.annotate(
                    place["prices"], (place["cost"], place["loss"]), xytext=(5, 5),
                    textcoords="offset points", fontsize=7,
                )  # fmt: skip
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(f"{run} steps", fontsize=9)
        axes.set_xlabel("mean cost of the run (attention / dense)")
        axes.margins(x=0.3, y=0.15)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("dense-attention loss over dense\n(linear to 0.5%, then logarithmic)")
    panels[0].set_yscale("symlog", linthresh=0.5)
    panels[0].set_yticks(LOSS_TICKS, [f"{tick:g}%" for tick in LOSS_TICKS])
    named = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())
    }
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
