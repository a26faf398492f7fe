# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The settings that are tried: a series for each policy, from sparse to dense."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...config import ConfigError, MTrainingConfig

POINTS = 7
"""Settings in a series whose values are spaced geometrically."""
PRICES = (3.0, 0.02)
THRESHOLDS = (0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98)
"""Of policy xattention."""
TOP_K = (1 / 64, 1 / 2)
"""Fraction of the key blocks that policy moba selects."""
SLASHES = (1 / 128, 1)
"""Fraction of the block distances that policy fixed keeps; a quarter of it of the tokens are columns."""


@dataclass(frozen=True)
class Series:
    """Settings of one policy, from the sparsest to the densest.

    Attributes:
        policy: its name.
        changing: the options that are swept.
        settings: options of MTrainingConfig for each setting, without defaults.
    """

    policy: str
    changing: tuple[str, ...]
    settings: tuple[dict, ...]

    def configs(self) -> list[MTrainingConfig]:
        return [MTrainingConfig.from_options(**setting) for setting in self.settings]

    def describe(self, setting: dict) -> str:
        """The swept options of a setting."""
        return " ".join(f"{name} {setting[name]:.4g}" for name in self.changing)

    def between(self, before: int, fraction: float) -> dict:
        """The setting at a fraction of the way from setting ``before`` to the next denser one."""
        if fraction == 0:
            return dict(self.settings[before])
        low, high = self.settings[before], self.settings[before + 1]
        setting = dict(low)
        for name in self.changing:
            a, b = low[name], high[name]
            if name == "block_threshold":
                # 1 minus such a value spans orders of magnitude.
                value = 1 - _geometric(1 - a, 1 - b, fraction)
            elif min(a, b) > 0:
                value = _geometric(a, b, fraction)
            else:
                value = a + (b - a) * fraction
            setting[name] = round(value) if isinstance(a, int) else float(f"{value:.4g}")
        return setting


def series_for(seq_length: int, base: dict, policies: list[str] | None = None) -> list[Series]:
    """All series for a sequence length.

    Args:
        base: options of MTrainingConfig that all settings have.
        policies: names, or None for all.

    Raises:
        ConfigError: a policy is unknown, or settings do not fit the sequence length.
    """
    config = MTrainingConfig.from_options(**base)
    blocks = -(-seq_length // config.block_size)
    top_k = sorted({max(1, round(blocks * fraction)) for fraction in _grid(*TOP_K)})
    swept = [
        ("price", [{"price": value} for value in _grid(*PRICES)]),
        ("fixed", _budgets(seq_length, blocks, config.sink)),
        ("xattention", [{"block_threshold": value} for value in THRESHOLDS]),
        ("moba", [{"block_top_k": value} for value in top_k]),
    ]
    names = sorted(policy for policy, _ in swept)
    for name in policies or ():
        if name not in names:
            raise ConfigError(f"--policy is {name}: use some of {', '.join(names)}")
    found = []
    for policy, values in swept:
        if policies is not None and policy not in policies:
            continue
        settings = tuple({**base, "policy": policy, **value} for value in values)
        found.append(Series(policy, tuple(values[0]), settings))
        for config in found[-1].configs():
            _check(config, seq_length)
    return found


def _check(config: MTrainingConfig, seq_length: int) -> None:
    """Raise :class:`ConfigError`, in terms of this command's options, if settings do not fit the tokens."""
    longer = "give a longer text, or a larger --seq"
    if config.window > seq_length:
        raise ConfigError(
            f"--window is {config.window}, more than the {seq_length} tokens of the text: use at most "
            f"{seq_length}, or {longer}"
        )
    rows = config.sampling.num_rows
    if rows > seq_length and not config.keeps_all(seq_length):
        raise ConfigError(
            f"there are {seq_length} tokens, fewer than the {rows} rows that patterns are estimated from: "
            f"{longer}"
        )
    try:
        config.check_sequence(seq_length, 1)
    except ConfigError as error:
        text = str(error).replace("--seq-length", "--seq").replace("--mtraining-", "--")
        raise ConfigError(text) from None


def _budgets(seq_length: int, blocks: int, sink: int) -> list[dict]:
    """Budgets of policy fixed; short sequences have few different ones."""
    budgets = [
        {
            "vertical": max(sink, round(seq_length * fraction / 4)),
            "slash": max(1, round(blocks * fraction)),
        }
        for fraction in _grid(*SLASHES)
    ]
    return [budget for number, budget in enumerate(budgets) if budget not in budgets[:number]]


def _grid(first: float, last: float) -> list[float]:
    steps = POINTS - 1
    return [float(f"{_geometric(first, last, i / steps):.4g}") for i in range(POINTS)]


def _geometric(a: float, b: float, fraction: float) -> float:
    return math.exp((1 - fraction) * math.log(a) + fraction * math.log(b))
