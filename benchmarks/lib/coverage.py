# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policy coverage, a baseline: the fewest columns, and the fewest token diagonals, that each hold a share of
a head's attention beyond window and sinks. With estimator last, as published (arXiv 2510.18830), the window
counts, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import Policy
from megatron_mtraining.kernels.selection import attention_masses, diagonal_masses
from megatron_mtraining.pattern.constants import constant
from megatron_mtraining.pattern.selector import SelectorCall, selects_for
from megatron_mtraining.pattern.selectors.candidates import (
    SINK,
    in_order,
    top_columns,
    top_diagonals,
)
from megatron_mtraining.pattern.selectors.fixed import FixedSelector


@dataclass(frozen=True)
class CoveragePolicy(Policy):
    """Columns and diagonals each hold the share ``coverage`` of attention.

    Attributes:
        vertical_cap, slash_cap: most columns, and token diagonals beside the local window, per head.
    """

    name: ClassVar[str] = "coverage"

    coverage: float = 0.9
    vertical_cap: int = 4096
    slash_cap: int = 4096


def from_options(**options) -> MTrainingConfig:
    """:meth:`MTrainingConfig.from_options`, also with policy coverage and its fields."""
    if options.get("policy") != CoveragePolicy.name:
        return MTrainingConfig.from_options(**options)
    del options["policy"]
    own = options.keys() & {each.name for each in fields(CoveragePolicy)}
    policy = CoveragePolicy(**{name: options.pop(name) for name in own})
    return MTrainingConfig.from_options(**options).with_policy(policy)


@selects_for(CoveragePolicy)
class CoverageSelector(FixedSelector):
    """The fewest columns, and diagonals, that hold each head's share."""

    def choose(self, key: Tensor, call: SelectorCall) -> tuple[Tensor, Tensor, Tensor]:
        device, seq_length, sink = key.device, call.sample.seq_length, call.sink
        window_blocks = call.sample.window_blocks if call.sample.stratified else 0
        sample = replace(call.sample, window_blocks=window_blocks, drop_max_stratum=False)
        values, masses = attention_masses(sample, key, call.lse, sink, divide_by_cost=False)
        share = constant(tuple(each.coverage for each in self.policies), device, torch.float64)

        def fewest(offer: Tensor, whole: Tensor, kind: str, least: int) -> Tensor:
            value, position = in_order(offer)
            weight = _weight(value.int()) if kind == "vertical" else value.double()
            count = (weight.cumsum(-1) < (share * whole)[..., None]).sum(-1, keepdim=True) + 1
            caps = [max(least, getattr(each, f"{kind}_cap")) for each in self.policies]
            count = count.clamp(min=least).minimum(
                constant(tuple(caps), device, torch.int64)[:, None]
            )
            taken = (torch.arange(value.shape[-1], device=device) < count) & (value > 0)
            return torch.where(taken, position, seq_length).int()

        whole = call.cp.all_reduce(_weight(values).sum(-1))
        offer, _ = top_columns(
            values, max(each.vertical_cap for each in self.policies), sample, call.cp
        )
        columns = fewest(offer, whole, "vertical", sink)
        mass = diagonal_masses(sample, key, call.lse, sink, None)
        whole = call.cp.all_reduce(mass.sum(-1, dtype=torch.float64))
        most = max(max(each.slash_cap for each in self.policies), 1)
        diagonals = fewest(top_diagonals(mass, most, seq_length, call.cp), whole, "slash", 0)
        return columns, diagonals, call.cp.all_reduce(masses)


def _weight(bits: Tensor) -> Tensor:
    """Masses of columns from their bits; 0 for sinks, which come before all others whatever they hold."""
    sinks = bits == SINK
    return torch.where(sinks, 0, bits).view(torch.float32).double()
