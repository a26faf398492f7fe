# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a run: numbers, settings, and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .options import Options
from .results import Measured, by_difficulty
from .settled import Settled


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def heads_to_draw(best: Measured, asked: list[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """(place of the layer, head) of each picture of a head, by its name: the easiest, middle and hardest of
    all, and those that were asked for.

    Args:
        asked: (layer, head).
    """
    places = list(np.ndindex(best.needed.shape))
    order = by_difficulty(best.needed.flatten(), best.point.of(best.recall).flatten())
    ranks = {"easiest": 0, "middle": len(order) // 2, "hardest": -1}
    named = {name: places[order[rank]] for name, rank in ranks.items()}
    for layer, head in asked:
        named[f"layer{layer}_head{head}"] = best.layers.index(layer), head
    return named


def draw(
    folder: Path,
    measured: list[Measured],
    settled: Settled,
    named: dict[str, tuple[int, int]],
    length: int,
    options: Options,
) -> None:
    """Write all pictures into ``folder``.

    Args:
        settled: the recommended settings, whose series' densities are shown, and the heads drawn with them.
        named: from :func:`heads_to_draw`.
    """
    from ..report import pictures

    title = f"{options.model.name or options.model}, {length} tokens"
    curves = {
        one.series.policy: (
            one.density.mean((1, 2)),
            one.recall.mean((1, 2)),
            np.quantile(one.recall, 0.1, axis=(1, 2)),
        )
        for one in measured
    }
    best, target = settled.settings.measured, options.target_recall
    path = folder / "recall_density.png"
    pictures.recall_density(path, curves, target, f"{title}: mean over all heads")
    pictures.layers_by_heads(
        folder / "density_needed.png",
        best.needed,
        f"{title}\n{best.series.policy}; crossed out: recall not reached",
        f"density at which a head's recall is {target:.0%}",
        layers=best.layers,
    )
    for name, (place, head) in named.items():
        setting = settled.settings.setting_of(place, head)
        described = "dense"
        if setting is not None:
            described = f"{best.series.policy}, {best.series.describe(setting)}"
        recall, density = settled.recall[place][head], settled.density[place][head]
        drawn = settled.drawn[place, head]
        pictures.attention_and_pattern(
            folder / f"head_{name}.png",
            drawn.attention.numpy(),
            drawn.pattern.numpy(),
            length,
            f"{title}, layer {best.layers[place]}, head {head}: {described}: "
            f"recall {recall:.1%} at density {density:.1%}",
        )
