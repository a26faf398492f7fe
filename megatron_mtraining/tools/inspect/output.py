# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a run: numbers, settings, and pictures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np

from .options import PAGE, Options
from .results import Measured, by_difficulty
from .settled import Settled

RANKS = "easiest", "middle", "hardest"
"""Heads that are always drawn."""


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
    at = 0, len(order) // 2, -1
    named = {name: places[order[rank]] for name, rank in zip(RANKS, at)}
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
    summary: str,
) -> None:
    """Write all pictures into ``folder``, and the page with them.

    Args:
        settled: the recommended settings, whose series' densities are shown, and the heads drawn with them.
        named: from :func:`heads_to_draw`.
        summary: tables in text, for the page.
    """
    from ..report import pictures
    from ..report.page import Group, document, text_block
    from ..report.themes import svg_by_theme

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
    by_density = partial(
        pictures.recall_density, curves=curves, target=target, title=f"{title}: mean over all heads"
    )
    needed = partial(
        pictures.layers_by_heads,
        values=best.needed,
        title=f"{title}\n{best.series.policy}; crossed out: recall not reached",
        label=f"density at which a head's recall is {target:.0%}",
        layers=best.layers,
    )
    by_density(folder / "recall_density.png")
    needed(folder / "density_needed.png")
    of_model = {"Recall by density": by_density, "Density that heads need": needed}
    groups = [Group("", {name: svg_by_theme(drawing) for name, drawing in of_model.items()})]
    for name, (place, head) in named.items():
        setting = settled.settings.setting_of(place, head)
        described = "dense"
        if setting is not None:
            described = f"{best.series.policy}, {best.series.describe(setting)}"
        recall, density = settled.recall[place][head], settled.density[place][head]
        attention, pattern = settled.drawn[place, head]
        maps = partial(
            pictures.attention_and_pattern,
            mass=attention.numpy(),
            density=pattern.numpy(),
            seq_length=length,
        )
        of_head = (
            f"layer {best.layers[place]}, head {head}: {described}: recall {recall:.1%} at density "
            f"{density:.1%}"
        )
        maps(folder / f"head_{name}.png", title=f"{title}, {of_head}")
        charts = {
            part.capitalize(): svg_by_theme(partial(maps, title="", parts=[part]))
            for part in ("dense attention", "pattern")
        }
        kind = f"{name.capitalize()} head: " if name in RANKS else ""
        groups.append(Group(f"{kind}{of_head}", charts))
    page = document(f"Attention of {title}", str(options.model), [], text_block(summary), groups)
    (folder / PAGE).write_text(page, encoding="utf-8")
