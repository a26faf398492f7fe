# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The settings that are tried, from sparse to dense."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...config import ConfigError, MTrainingConfig

POINTS = 7
"""Settings of a series."""
PRICES = (3.0, 0.02)
COVERAGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
THRESHOLDS = (0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98)
"""Of policy xattention."""
LISTED = (1 / 64, 1 / 2)
"""Share of the blocks that policy moba takes."""
FIXED = (1 / 128, 1)
"""Share of the block distances that are slashes; a quarter of it, of the tokens, are columns."""
ESTIMATORS = ("strata", "last")


@dataclass(frozen=True)
class Series:
    """Settings of one policy and estimator, from the sparsest to the densest.

    Attributes:
        policy: its name; estimator: its name, or None where there is only one.
        changing: the fields that are swept.
        settings: what is not the default, a dict of fields of MTrainingConfig for each setting.
    """

    policy: str
    estimator: str | None
    changing: tuple[str, ...]
    settings: tuple[dict, ...]

    @property
    def label(self) -> str:
        return self.policy if self.estimator is None else f"{self.policy}, {self.estimator}"

    def describe(self, setting: dict) -> str:
        """The swept fields of a setting, in words."""
        return " ".join(f"{name} {setting[name]:.4g}" for name in self.changing)

    def between(self, before: int, share: float) -> dict:
        """The setting that is ``share`` of the way from setting ``before`` to the next denser one."""
        if share == 0:
            return dict(self.settings[before])
        low, high = self.settings[before], self.settings[before + 1]
        setting = dict(low)
        for name in self.changing:
            a, b = low[name], high[name]
            # Of shares, what is left out is what spans orders of magnitude.
            if name in ("coverage", "block_threshold"):
                value = 1 - _geometric(1 - a, 1 - b, share)
            elif min(a, b) > 0:
                value = _geometric(a, b, share)
            else:
                value = a + (b - a) * share
            setting[name] = round(value) if isinstance(a, int) else float(f"{value:.4g}")
        return setting


def series_for(seq_length: int, base: dict, policies: list[str] | None = None) -> list[Series]:
    """All that is swept for sequences of so many tokens.

    Args:
        base: fields of MTrainingConfig that hold for all settings.
        policies: names, or None for every policy there is.

    Raises:
        ConfigError: a policy that is not known, or settings that do not fit.
    """
    found = []
    swept = {"price": _grid(*PRICES), "coverage": COVERAGES}
    for policy, values in swept.items():
        for estimator in ESTIMATORS:
            chosen = {**base, "policy": policy, "estimator": estimator}
            settings = tuple({**chosen, policy: value} for value in values)
            found.append(Series(policy, estimator, (policy,), settings))
    budgets = tuple({**base, "policy": "fixed", **value} for value in _budgets(seq_length, base))
    found.append(Series("fixed", None, ("vertical", "slash"), budgets))
    blocks = -(-seq_length // MTrainingConfig.from_options(**base).block_size)
    top = sorted({max(1, round(blocks * share)) for share in _grid(*LISTED)})
    lists = ("xattention", "block_threshold", THRESHOLDS), ("moba", "block_top_k", top)
    for policy, field, values in lists:
        settings = tuple({**base, "policy": policy, field: value} for value in values)
        found.append(Series(policy, None, (field,), settings))
    if policies is not None:
        names = {series.policy for series in found}
        for name in policies:
            if name not in names:
                raise ConfigError(f"--policy is {name}: use some of {', '.join(sorted(names))}")
        found = [series for series in found if series.policy in policies]
    for series in found:
        for setting in series.settings:
            _check(MTrainingConfig.from_options(**setting), seq_length)
    return found


def _check(config: MTrainingConfig, seq_length: int) -> None:
    """Raise :class:`ConfigError`, in words of this command's options, if settings do not fit the tokens."""
    longer = "give a longer text, or a larger --seq"
    if config.window > seq_length:
        raise ConfigError(
            f"--window is {config.window}, more than the {seq_length} tokens to run over: use at most "
            f"{seq_length}, or {longer}"
        )
    rows = config.sampling.num_rows
    if rows > seq_length and not config.keeps_all(seq_length):
        raise ConfigError(
            f"there are {seq_length} tokens, fewer than the {rows} rows that patterns are estimated "
            f"from: {longer}"
        )
    try:
        config.check_sequence(seq_length, 1)
    except ConfigError as error:
        text = str(error).replace("--seq-length", "--seq").replace("--mtraining-", "--")
        raise ConfigError(text) from None


def _budgets(seq_length: int, base: dict) -> list[dict]:
    config = MTrainingConfig.from_options(**base)
    blocks = -(-seq_length // config.block_size)
    budgets = []
    for share in _grid(*FIXED):
        vertical = max(config.sink, round(seq_length * share / 4))
        budget = {"vertical": vertical, "slash": max(1, round(blocks * share))}
        if budget not in budgets:  # short sequences have few different ones
            budgets.append(budget)
    return budgets


def _grid(first: float, last: float) -> list[float]:
    steps = POINTS - 1
    return [float(f"{_geometric(first, last, i / steps):.4g}") for i in range(POINTS)]


def _geometric(a: float, b: float, share: float) -> float:
    return math.exp((1 - share) * math.log(a) + share * math.log(b))
