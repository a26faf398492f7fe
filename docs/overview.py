# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The picture of README.md: loss and time against density."""

from __future__ import annotations

import tables
from colours import BLUE, GREEN, ORANGE, PINK, RED, SKY
from tables import real_tables, step_tables
from tables.common import gpu_name, tokens

from benchmarks.model import frontier_tables


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
    return [{name: row[name] for name in names} for row in tables.rows("frontier")]


def overview_data() -> dict[str, list[dict]]:
    """Of policy price and its target recall: losses of both models, times of a layer and of steps."""
    found = [
        row
        for row in frontier_data()
        if row["policy"] in ("price", "target") and row["steps"] == 300
    ]
    real = [
        dict(density=real_tables.mean(layers, "density"), share=real_tables.share(layers, "dense"))
        for (_, _, text, seq, price, threshold), layers in real_tables.real_cases().items()
        if (text, seq, threshold) == ("code", 131072, 0) and price
    ]
    steps = [
        dict(
            tokens=tokens(seq), density=row["density"], share=1 / step_tables.over_dense(row),
            gpus=f"{row['world']} {gpu_name(row['gpu'])}", measured=step_tables.kept_seconds(row)[1],
        )
        for seq in (131072, 524288)
        for row in (tables.step(seq), step_tables.step_at_price(seq))
    ]  # fmt: skip
    return dict(losses=found, real=real, steps=steps)


def draw_overview(figure, data: dict[str, list[dict]]) -> None:
    left, right = figure.subplots(1, 2)
    models = dict(zip(frontier_tables.MODELS, (BLUE, ORANGE)))
    for model, colour in models.items():
        own = frontier_tables.trained([row for row in data["losses"] if row["model"] == model])
        name = f"{frontier_tables.MODELS[model]}, {own[0]['seq'] // 1024}K tokens"
        for policy, places in frontier_tables.points(own, "density").items():
            x, y, error = zip(*places)
            style = "o-" if policy == "price" else "*"
            label = f"{name}: {'price' if policy == 'price' else 'target recall 0.95'}"
            left.errorbar(
                x, y, error, fmt=style, color=colour, capsize=3, label=label,
                markersize=5 if policy == "price" else 13,
            )  # fmt: skip
    left.plot([1], [0], "s", color="black", label="dense training")
    left.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    left.set_ylabel("held-out loss over dense training,\nboth evaluated with dense attention")
    left.set_ylim(-0.1, 3.2)
    left.yaxis.set_major_formatter("{x:g}%")
    left.set_title("Loss after 300 steps; bars: range over seeds", fontsize=9)

    timed = {
        row["density"]: row
        for row in data["losses"]
        if row["layer_ms_128k"] and row["policy"] == "price"
    }
    xy = sorted(
        (row["density"], float(frontier_tables.times(row, "128k"))) for row in timed.values()
    )
    right.plot(*zip(*xy), "o-", color=SKY, label="attention, 128K, random operands / cuDNN")
    if data["real"]:
        xy = sorted((row["density"], row["share"]) for row in data["real"])
        right.plot(
            *zip(*xy),
            "D-",
            color=RED,
            label="attention of the 0.5B model, code, 128K / cuDNN",
        )
    for length, colour, marker in (("128K", GREEN, "v"), ("512K", PINK, "^")):
        xy = sorted(
            (row["density"], row["share"]) for row in data["steps"] if row["tokens"] == length
        )
        gpus = " and ".join(
            sorted({row["gpus"] for row in data["steps"] if row["tokens"] == length})
        )
        label = f"step of 3B shape, {length}, {gpus}, random weights"
        right.plot(*zip(*xy), f"{marker}-", color=colour, label=label)
    right.plot([1], [1], "s", color="black", label="dense attention")
    right.set_yscale("log")
    right.set_yticks((0.03, 0.1, 0.3, 1), ("0.03", "0.1", "0.3", "1"))
    right.set_ylabel("time / dense time (logarithmic)")
    estimated = sorted({row["tokens"] for row in data["steps"] if not row["measured"]})
    how = f" ({', '.join(estimated)}: estimated)" if estimated else ""
    right.set_title(f"Time; dense steps keep attention's output{how}", fontsize=9)
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
