# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policies with one knob each, and the place of the knob at which a policy has a wanted density."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_mtraining import ConfigError, MTrainingConfig

from .coverage import from_options

Setting = dict[str, Any]
"""Flat options of :func:`.coverage.from_options`."""
DENSE = "dense"
TOLERANCE = 0.04
"""A density is as wanted if it is off by no more than this share of it."""
MOST = 14
"""Settings that are tried, at most."""
CLOSE = 0.2
"""A row's density is off by no more than this share of the wanted one, or the policy cannot have it."""


class Family(NamedTuple):
    """A policy and its knob: greater is denser.

    Attributes:
        setting: the options at a place of the knob, in sequences of so many tokens, with blocks of so many.
        low, high: the knob's ends; it moves in logarithms.
    """

    setting: Callable[[float, int, int], Setting]
    low: float
    high: float
    what: str


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _price(place: float, seq: int, block: int) -> Setting:
    return dict(policy="price", price=_digits(1 / place))


def _fixed(place: float, seq: int, block: int) -> Setting:
    vertical, slash = (min(seq - 1, round(count * place)) for count in (1000, 100))
    # The sink columns are always among the columns.
    return dict(policy="fixed", vertical=max(MTrainingConfig().sink, vertical), slash=slash)


def _coverage(place: float, seq: int, block: int) -> Setting:
    share = min(0.9999, _digits(place / (1 + place)))
    return dict(policy="coverage", coverage=share, slash_cap=seq)


def _xattention(place: float, seq: int, block: int) -> Setting:
    share = min(0.9999, _digits(place / (1 + place)))
    return dict(policy="xattention", block_threshold=share)


def _moba(place: float, seq: int, block: int) -> Setting:
    return dict(policy="moba", block_top_k=min(seq // block - 1, round(place)))


def _window(place: float, seq: int, block: int) -> Setting:
    window = min(seq - block, block * max(1, round(place)))
    return dict(policy="fixed", vertical=0, slash=0, window=window)


def _own(setting: Callable) -> Callable:
    """The same, selected by a query block's own queries, as published."""
    return lambda *given: dict(setting(*given), block_lookahead=True)


def _last(setting: Callable) -> Callable:
    """The same, from the last 64 rows, as published."""
    return lambda *given: dict(setting(*given), estimator="last")


FAMILIES = {
    "price": Family(_price, 1 / 100, 1e4, "policy price"),
    "fixed": Family(_fixed, 1e-3, 1e3, "columns and diagonals, 10 to 1 as in the published 1000 and 100"),
    "coverage": Family(_coverage, 1e-4, 1e4, "policy coverage"),
    "coverage_last": Family(_last(_coverage), 1e-4, 1e4, "coverage, from the last 64 rows, as published"),
    "fixed_last": Family(_last(_fixed), 1e-3, 1e3, "fixed, from the last 64 rows, as published"),
    "price_last": Family(_last(_price), 1 / 100, 1e4, "policy price from the last 64 rows"),
    "xattention": Family(_own(_xattention), 1e-4, 1e4, "key blocks by antidiagonal scores, as published"),
    "moba": Family(_own(_moba), 0.4, 1e5, "key blocks by mean keys, as published"),
    "xattention_previous": Family(_xattention, 1e-4, 1e4, "those of the block before"),
    "moba_previous": Family(_moba, 0.4, 1e5, "those of the block before"),
    "window": Family(_window, 1, 1e5, "a sliding window and the first 4 tokens"),
}  # fmt: skip
"""All policies but dense, by name."""
AS_PUBLISHED_BY_BLOCK = ("xattention", "moba")
"""Those in which a query block's own queries select, and so look ahead within the block."""
AS_PUBLISHED = dict(policy="fixed", vertical=1000, slash=100, estimator="last")


def config_of(setting: Setting, block: int) -> MTrainingConfig:
    """A setting with blocks of ``block`` tokens."""
    return from_options(**setting, block_size=block)


class Found(NamedTuple):
    """The setting of a policy at a wanted density, and the density that it has."""

    setting: Setting
    density: float
    place: float

    def is_near(self, wanted: float) -> bool:
        """Whether the density is the wanted one, up to :data:`CLOSE`."""
        return abs(self.density / wanted - 1) <= CLOSE


def at_density(
    name: str,
    wanted: float,
    seq: int,
    block: int,
    density_of: Callable[[Setting], float],
    known: dict[float, Found] | None = None,
) -> Found:
    """The setting of a policy whose density is nearest to ``wanted``: by bisection of the logarithm of the
    knob, by interpolation where both ends are known.

    Args:
        density_of: measures a setting; called at most :data:`MOST` times.
        known: what was tried before in this policy, by place; added to.

    Raises:
        ConfigError: no setting of the policy can be measured.
    """
    family, known = FAMILIES[name], {} if known is None else known
    low, high = family.low, min(family.high, 2.0 * seq)
    tried: dict[tuple, float] = {
        tuple(sorted(each.setting.items())): each.density for each in known.values()
    }
    for count in range(MOST):
        below = [p for p, each in known.items() if low <= p and each.density < wanted]
        above = [p for p, each in known.items() if p <= high and each.density >= wanted]
        low, high = max([low, *below]), min([high, *above])
        if low >= high:  # a density that falls as the knob rises
            break
        if known:
            best = min(known.values(), key=lambda each: abs(math.log(each.density / wanted)))
            if abs(best.density / wanted - 1) <= TOLERANCE or high / low < 1.0005:
                break
        share = 0.5
        if low in known and high in known and count % 3 != 2:
            ends = math.log(known[low].density), math.log(known[high].density)
            share = (math.log(wanted) - ends[0]) / (ends[1] - ends[0])
            share = min(0.95, max(0.05, share))
        place = low * (high / low) ** share
        setting = family.setting(place, seq, block)
        key = tuple(sorted(setting.items()))
        if key not in tried:
            tried[key] = density_of(setting)
        known[place] = Found(setting, tried[key], place)
    if not known:
        raise ConfigError(f"no setting of {name} was measured")
    return min(known.values(), key=lambda each: abs(math.log(each.density / wanted)))
