# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pictures of losses: README.md's, of loss and time against density, and those of docs/frontier.md."""

from __future__ import annotations

import statistics

from colours import BLUE, GREEN, ORANGE, RED, SKY
from tables import long_tables, real_tables
from tables.common import Row, cell, last, mean, rows
from tables.frontier_tables import (
    LABELS,
    MODELS,
    decay_name,
    model_of,
    prices_of,
    run_of,
    scheduled,
    times,
    trained,
)


def frontier_data() -> list[dict]:
    """The joined rows, of which the places are."""
    names = [
        "model",
        "seq",
        "policy",
        "steps",
        "seeds",
        "lr",
        "decay",
        "density",
        "density_trained",
        "commit",
    ]
    names += [
        f"trained_{kind}_{part}" for kind in ("own", "dense") for part in ("over_dense", "spread")
    ]
    names += [f"{kind}_ms_128k" for kind in ("layer", "search", "dense")]
    return [{name: row[name] for name in names} for row in rows("frontier")]


def overview_data() -> dict[str, list[dict]]:
    """Of policy price and its target recall: losses of both models, times of a layer and of steps."""
    found = [
        row
        for row in frontier_data()
        if row["policy"] in ("price", "target") and row["steps"] == 300
    ]
    real = [
        dict(density=mean(layers, "density"), share=real_tables.share(layers, "dense"))
        for (_, _, text, seq, price, threshold), layers in real_tables.real_cases().items()
        if (text, seq, threshold) == ("code", 131072, 0) and price
    ]
    names = (
        "tokens",
        "steps",
        "policy",
        "density",
        "dense_loss_over_dense",
        "step_over_dense",
        "layer_over_dense",
    )
    newest = last(rows("long"), *long_tables.CASE)
    long = [{name: row[name] for name in names} for row in newest if row["policy"] != "dense"]
    return dict(losses=found, real=real, long=long)


FEW_STEPS = 10


def draw_overview(figure, data: dict[str, list[dict]]) -> None:
    left, right = figure.subplots(1, 2)
    models = dict(zip(MODELS, (BLUE, ORANGE)))
    for model, colour in models.items():
        own = trained([row for row in data["losses"] if row["model"] == model])
        name = f"{MODELS[model]}, {own[0]['seq'] // 1024}K tokens"
        for policy, places in points(own, "density").items():
            x, y, error = zip(*places)
            style = "o-" if policy == "price" else "*"
            label = f"{name}: {'price' if policy == 'price' else 'target recall 0.95'}"
            left.errorbar(
                x, y, error, fmt=style, color=colour, capsize=3, label=label,
                markersize=5 if policy == "price" else 13,
            )  # fmt: skip
    # After few steps a loss says little.
    trained_at_length = [row for row in data["long"] if row["steps"] > FEW_STEPS]
    for row, marker in zip(trained_at_length, "Pvd"):
        left.plot(
            [row["density"]], [100 * row["dense_loss_over_dense"]], marker, color=GREEN, markersize=8,
            label=cell("Qwen2.5-Coder-0.5B, {tokens:K} tokens, {policy}", row),
        )  # fmt: skip
    left.plot([1], [0], "s", color="black", label="dense training")
    left.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    left.set_ylabel("held-out loss over dense training,\nboth evaluated with dense attention")
    left.set_ylim(-0.1, 3.2)
    left.yaxis.set_major_formatter("{x:g}%")
    steps = dict.fromkeys(cell("{tokens:K}: {steps}", row) for row in trained_at_length)
    left.set_title(f"Loss after 300 steps ({', '.join(steps)}); bars: range over seeds", fontsize=9)

    if data["real"]:
        xy = sorted((row["density"], row["share"]) for row in data["real"])
        right.plot(
            *zip(*xy),
            "D-",
            color=RED,
            label="attention of the 0.5B model, code, 128K / cuDNN",
        )
    for name, colour, label in (
        ("layer_over_dense", SKY, "attention"),
        ("step_over_dense", GREEN, "step"),
    ):
        for tokens, marker in ((2**17, "v-"), (2**18, "d"), (2**19, "*")):
            runs = [row for row in data["long"] if row["tokens"] == tokens]
            xy = sorted((row["density"], row[name]) for row in runs)
            said = cell("{label} of the 0.5B model's runs, {tokens:K}", label=label, tokens=tokens)
            right.plot(*zip(*xy), marker, color=colour, label=said)
    right.plot([1], [1], "s", color="black", label="dense attention")
    right.set_yscale("log")
    right.set_yticks((0.03, 0.1, 0.3, 1), ("0.03", "0.1", "0.3", "1"))
    right.set_ylabel("time / dense time (logarithmic)")
    right.set_title("Time; dense attention is cuDNN's", fontsize=9)
    right.set_ylim(0.02, 1.4)
    for axes in (left, right):
        axes.set(
            xscale="log", xlim=(0.015, 1.4), xlabel="density (share of causal pairs, logarithmic)"
        )
        ticks = (0.02, 0.05, 0.15, 0.3, 1)
        axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(
            frameon=False, fontsize=6.5, loc="upper right" if axes is left else "lower right"
        )


# Loss against density and time, and against the mean cost of schedules

SIZE = (8.5, 7.6)
ACROSS = {
    "density": "density (share of causal pairs, logarithmic)",
    "128k": "layer, 128K tokens / cuDNN dense (random operands, log)",
}
"""What is to the right, from the upper line of panels on."""
TICKS = {"density": (0.04, 0.08, 0.15, 0.3), "128k": (0.05, 0.1, 0.2, 0.4)}
LOSS_TICKS = (0, 0.1, 0.25, 0.5, 1, 2, 4)
COLOURS = (
    "#0072b2", "#56b4e9", "#1b3b6f", "#d55e00", "#a0522d", "#009e73", "#66c2a5", "#cc79a7", "#e69f00",
    "#7b5ea7", "#b8860b", "#7f7f7f", "#e41a1c", "#4daf4a",
)  # fmt: skip
MARKERS = "osD^v<>pX*Ph"


def shown(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows to plot, by model: trained for the steps and at the length of most of its rows."""
    found = {}
    for model in sorted({row["model"] for row in trained(rows)}, reverse=True):
        own = [row for row in trained(rows) if row["model"] == model]
        usual = statistics.mode((row["seq"], row["steps"]) for row in own)
        found[model] = [row for row in own if (row["seq"], row["steps"]) == usual]
    return found


Place = tuple[float, float, float]
"""Right, upward in percent, and half of the range over seeds (0 of one)."""


def points(rows: list[Row], right: str) -> dict[str, list[Place]]:
    """By policy: places, in order. Upward is the dense-attention loss."""
    found: dict[str, list[Place]] = {}
    for row in rows:
        word = "" if right == "density" else times(row, right)
        place = row["density_trained"] if right == "density" else float(word) if word else None
        loss = row["trained_dense_over_dense"]
        if place is not None and loss is not None:
            spread = row["trained_dense_spread"] or 0.0
            found.setdefault(row["policy"], []).append((place, 100 * loss, 100 * spread))
    return {policy: sorted(places) for policy, places in found.items()}


def draw_panels(figure, rows: list[Row]) -> None:
    """Loss over dense against density and against time: a column a model, a line a policy."""
    models = shown(rows)
    panels = figure.subplots(len(ACROSS), len(models), sharey=True, squeeze=False)
    policies = [name for name in LABELS if name != "dense"]
    for line, right in zip(panels, ACROSS):
        line[0].set_ylabel("dense-attention loss over dense\n(linear to 0.5%, then logarithmic)")
        for axes, own in zip(line, models.values()):
            for policy, places in points(own, right).items():
                at = policies.index(policy)
                x, y, error = zip(*places)
                axes.errorbar(
                    x, y, error, marker=MARKERS[at % len(MARKERS)], color=COLOURS[at % len(COLOURS)],
                    linewidth=2.2 if policy == "price" else 1.0, capsize=3, label=LABELS[policy],
                )  # fmt: skip
            axes.axhline(0, color="black", linewidth=0.8)
            axes.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
            ticks = TICKS[right]
            axes.set(xlabel=ACROSS[right], xscale="log", xlim=(0.75 * ticks[0], 1.3 * ticks[-1]))
            axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            if right == next(iter(ACROSS)):
                axes.set_title(title_of(own), fontsize=9)
    first = panels[0, 0]
    first.set_yscale("symlog", linthresh=0.5)
    first.set_ylim(-0.1, 6)
    first.set_yticks(LOSS_TICKS, [f"{tick:g}%" for tick in LOSS_TICKS])
    first.text(
        0.02, 0, "dense training: 0", transform=first.get_yaxis_transform(), va="bottom", fontsize=7
    )
    named = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels())
    }
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )  # fmt: skip


def title_of(own: list[Row]) -> str:
    """Model, tokens, steps and seeds."""
    row, seeds = own[0], sorted({row["seeds"] for row in own})
    said = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seeds"
    first = f"{model_of(row)}, {row['seq'] // 1024}K tokens, {row['steps']} steps"
    return f"{first}\n{said}; bars: range over seeds"


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
