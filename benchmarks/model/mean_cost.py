# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The attention time of a run over that of a dense run, from its prices and layers on real operands.

A layer's time on real operands (``benchmarks.model.real_operands``) is search, forward and backward over
cuDNN's dense forward and backward. All runs are counted by what one model takes at 128K tokens of code,
whatever their own model and length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import fsum  # sum rounds otherwise before Python 3.12

from megatron_mtraining.config.schedule import parse

Row = dict
Costs = dict[float, dict[float, float]]
"""By threshold of the backward and by price: time over dense attention. Price 0 is a dense step."""
SETTING = ("gpu", "model", "text", "seq", "price", "backward_threshold")
COUNTED = ("coder.gguf", "code", 131072)
"""Model, text and length whose layers count."""


def counted(rows: Iterable[Row]) -> list[Row]:
    """The rows of real operands that costs are from."""
    return [row for row in rows if (row["model"], row["text"], row["seq"]) == COUNTED]


def cases(rows: Iterable[Row]) -> dict[tuple, list[Row]]:
    """By :data:`SETTING`, of policy price: the newest row of each layer."""
    found: dict[tuple, dict[int, Row]] = {}
    for row in rows:
        if "price" not in row:
            continue
        found.setdefault(tuple(row[name] for name in SETTING), {})[row["layer"]] = row
    return {key: list(layers.values()) for key, layers in found.items()}


def share(
    layers: list[Row], dense: str, parts: tuple[str, ...] = ("forward", "backward")
) -> float | None:
    """Time of the layers, with the search, over that of dense attention: ``dense`` is cuDNN's, ``fa4``
    FlashAttention-4's. None where that was not measured."""
    names = [f"{dense}_{part}_ms" for part in parts]
    if any(row[name] is None for row in layers for name in names):
        return None
    own = fsum(row[f"{part}_ms"] for row in layers for part in ("search", *parts))
    return own / fsum(row[name] for row in layers for name in names)


def costs_of(measured: Iterable[Row]) -> Costs:
    """What rows of real operands say; of several GPUs, the last that measured a price."""
    found: Costs = {0.0: {0.0: 1.0}}
    for (*_, price, threshold), layers in cases(counted(measured)).items():
        found.setdefault(threshold, {})[price] = share(layers, "dense")
    return found


def at(price: float, costs: dict[float, float]) -> float | None:
    """The time of a step: geometric in the price between measured ones, None outside of them."""
    if price in costs:
        return costs[price]
    known = sorted(each for each in costs if each)
    for low, high in zip(known, known[1:]):
        if low < price < high:
            between = math.log(price / low) / math.log(high / low)
            return costs[low] * (costs[high] / costs[low]) ** between
    return None


def prices_of(setting: dict | None, steps: int | None) -> list[float]:
    """The price of each step of a run, or one if it is fixed; none if prices move by themselves, or the
    search is another than the measured one.

    Args:
        setting: the options that a run attends with; None for dense.
    """
    if setting is None:
        return [0.0]
    given = setting.keys() - {"policy", "backward_threshold"}
    if given == {"schedule"}:
        schedule = parse("schedule", setting["schedule"])
        return [schedule.at(step / steps) for step in range(steps)]
    return [setting["price"]] if given == {"price"} else []


def mean_cost(setting: dict | None, steps: int | None, costs: Costs) -> float | None:
    """The mean over a run of attention's time over dense attention's; None if a price was not measured."""
    by_price = costs.get((setting or {}).get("backward_threshold", 0.0), {})
    found = [at(price, by_price) for price in prices_of(setting, steps)]
    known = [cost for cost in found if cost is not None]
    return round(fsum(known) / len(known), 5) if known and len(known) == len(found) else None
