# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The prices that a run has reached, as a settings file: ``mtraining convert prices``."""

from __future__ import annotations

import statistics
from argparse import Namespace
from pathlib import Path

from ...config import (
    BY_NAME,
    MOVING,
    ConfigError,
    MTrainingConfig,
    Policy,
    check_settings_file,
    has_price,
    head_policies,
    option,
)
from ...config.options import policy_values
from ...megatron.options import attribute, config_from_args
from ...megatron.windows import has_window
from ...models.megatron_folder import find_iteration
from ...pattern.steering import check_prices
from .to_hf import read_args

OF_ALL_LAYERS = ("window", "sink", "block_size", "estimator")
"""Settings of the pattern that are not a policy's."""
DIGITS = 6
"""Significant digits of a price: float32 has no more."""


def prices_of(
    source: Path, settings: Path | None = None
) -> tuple[dict, list[list[float]], Path | None]:
    """The settings that a run trains with at its last checkpoint, with fixed prices in place of its target.

    Args:
        source: a checkpoint folder, or the folder of one iteration.
        settings: the settings file of the run, if it had one and that is elsewhere now.

    Returns:
        The content of a settings file; the prices of each layer's heads, of those that have one, in layers
        without a sliding window; and the settings file that was read, if any.

    Raises:
        ConfigError: the checkpoint cannot be read or has no prices.
    """
    folder = find_iteration(source, "SRC")
    args = read_args(folder)
    reached = getattr(args, "mtraining_price_reached", None)
    if reached is None:
        points = getattr(args, attribute("schedule"), None)
        raise ConfigError(
            f"SRC is {source}, whose run had no {option('target_recall')}: its prices "
            + (
                "did not move, and are those that it was started with"
                if points is None
                else f"are those of {option('schedule')} {points}"
            )
        )
    check_prices(reached)
    config = _config(args, settings)
    layers, heads = args.num_layers, args.num_attention_heads
    length = getattr(args, "seq_length", None)
    if config.settings is not None:
        check_settings_file(config, layers, heads)
    if isinstance(reached, list) and (len(reached), len(reached[0])) != (layers, heads):
        raise ConfigError(
            f"SRC is {source}, which has prices of {len(reached)} layers and {len(reached[0])} heads, but a "
            f"model of {layers} and {heads}: it is damaged"
        )
    found = _of_all_layers(args, config)
    of_run = config.policy.price or 0.0
    prices: list[list[float]] = []
    of_layers = {}
    for layer in range(layers):
        if has_window(args, layer):  # whose heads have no price
            continue
        policies = head_policies(config, layer, layers, heads) or (config.policy,) * heads
        row = reached[layer] if isinstance(reached, list) else [reached] * heads
        own, of_heads = [], {}
        for head, (policy, price) in enumerate(zip(policies, row)):
            if has_price(policy):
                own.append(_rounded(price * policy.price / of_run))
                of_heads[str(head)] = {
                    "price": own[-1],
                    **_changed(policy, config.policy, length),
                }
            elif policy.price is not None:
                of_heads[str(head)] = {"dense": True}
            else:
                of_heads[str(head)] = {
                    "policy": policy.name,
                    **_changed(policy, None, length),
                }
        prices.append(own)
        of_layers[str(layer)] = {"heads": of_heads}
    if not any(prices):
        raise ConfigError(
            f"SRC is {source}, a model in which no head has a price: nothing is written"
        )
    found["price"] = _rounded(statistics.median(price for own in prices for price in own))
    if isinstance(reached, list) or config.settings is not None:
        found["layers"] = of_layers
    return found, prices, config.settings and Path(config.settings)


def _rounded(price: float) -> float:
    return float(f"{price:.{DIGITS}g}")


def _config(args: Namespace, settings: Path | None) -> MTrainingConfig:
    """The settings that a run was started with."""
    given = vars(args).get(attribute("settings"))
    if given is not None and settings is None and not Path(given).is_file():
        raise ConfigError(
            f"the run had {option('settings')} {given}, which is not there: give the file as --settings"
        )
    if settings is not None:
        if given is None:
            raise ConfigError(
                f"--settings is {settings}, but the run had no settings file: leave it out"
            )
        setattr(args, attribute("settings"), str(settings))
    return config_from_args(args)


def _of_all_layers(args: Namespace, config: MTrainingConfig) -> dict:
    """The run's settings of the pattern, but for the price and its target: Megatron saves all of them."""
    flat = config.options()
    return {
        name: flat[name]
        for name, each in BY_NAME.items()
        if (each.sections or name in OF_ALL_LAYERS)
        and name not in (*MOVING, "price")
        and flat[name] is not None
        and getattr(args, attribute(name), None) is not None
    }


def _changed(policy: Policy, run: Policy | None, length: int | None) -> dict:
    """The settings of a head's policy, but for its price, that the run's policy has not. No cap on slashes is
    written as one that does not bind: the sequence's length."""
    base = {} if run is None else policy_values(run)
    changed = {
        name: length if value is None else value
        for name, value in policy_values(policy).items()
        if name not in ("policy", "price", *MOVING) and base.get(name) != value
    }
    return {name: value for name, value in changed.items() if value is not None}
