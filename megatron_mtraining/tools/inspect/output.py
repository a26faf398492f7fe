# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a run: numbers, settings, and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from torch import Tensor

from .collect import DrawnHead
from .measure import density_picture
from .options import Options
from .results import Measured, Recommendation, by_difficulty


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def settings_bytes(path: Path, settings: dict) -> bytes:
    """The content of a settings file, YAML or JSON by its name."""
    if path.suffix in (".yaml", ".yml"):
        import yaml

        return yaml.safe_dump(settings, sort_keys=False).encode()
    return (json.dumps(settings, indent=1) + "\n").encode()


def draw(
    folder: Path,
    measured: list[Measured],
    recommended: Recommendation,
    heads: list[DrawnHead],
    rows: Tensor,
    length: int,
    options: Options,
) -> None:
    """Write all pictures into ``folder``."""
    from ..report import pictures

    title = f"{options.model.name or options.model}, {length} tokens"
    curves = {
        one.series.label: (
            one.density.mean((1, 2)),
            one.recall.mean((1, 2)),
            np.quantile(one.recall, 0.1, axis=(1, 2)),
        )
        for one in measured
    }
    target = options.target_recall
    path = folder / "recall_density.png"
    pictures.recall_density(path, curves, target, f"{title}: mean over all heads")
    best, setting = recommended.measured, recommended.point.denser
    pictures.layers_by_heads(
        folder / "density_needed.png",
        best.needed,
        f"{title}\n{best.series.label}; crossed out: recall not reached",
        f"density at which a head's recall is {target:.0%}",
    )
    number = sum(len(one.series.settings) for one in measured[: measured.index(best)]) + setting
    described = best.series.describe(best.series.settings[setting])
    places = tuple(np.array([(head.layer, head.head) for head in heads]).T)
    order = by_difficulty(best.needed[places], best.recall[setting][places])
    ranks = {"easiest": 0, "middle": len(order) // 2, "hardest": -1}
    named = {name: heads[order[rank]] for name, rank in ranks.items()}
    for head in heads:
        if (head.layer, head.head) in options.heads:
            named[f"layer{head.layer}_head{head.head}"] = head
    for name, head in named.items():
        recall = best.recall[setting, head.layer, head.head]
        density = best.density[setting, head.layer, head.head]
        cells = len(head.picture)
        pictures.attention_and_pattern(
            folder / f"head_{name}.png",
            head.picture.numpy(),
            density_picture(head.patterns[number], rows, length, cells).numpy(),
            length,
            f"{title}, layer {head.layer}, head {head.head}: {best.series.label}, {described}: "
            f"recall {recall:.1%} at density {density:.1%}",
        )
