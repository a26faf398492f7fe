# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Selection at a price: the columns and slashes with the most attention mass per unit of cost, over all
heads.

A candidate, a block distance or a column, has a mass (the share of attention that it adds) and a cost (the
share of the causal query-key pairs that it adds). Those whose mass per unit of cost is at least the price
are kept: the price is the Lagrange multiplier of density. Heads that need few keys become sparse, and others
stay dense.

The mass of a slash excludes what columns hold, and that of a column what slashes hold. Both exclusions use a
fixed reference price, so a candidate's mass does not depend on the run's price: selection is monotone, and a
lower price keeps everything that a higher one keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import PricePolicy
from ...kernels.common.fixed_point import fixed_point_one
from ...kernels.selection import (
    attention_masses,
    select_columns_by_price,
    select_slashes_by_price,
    slash_mass_in_columns,
)
from ...kernels.types import SampledRows
from ..constants import constant
from ..recall import column_keys, recall_of
from ..selector import Pattern, Selected, Selector, SelectorCall, selects_for
from .candidates import top_columns

REFERENCE_PRICE = 0.4
"""The price by which slashes and columns are judged by each other."""


def cost_units(sample: SampledRows) -> tuple[float, float]:
    """Cost of a pair of blocks, and of a column in a query block: shares of the causal pairs, times the
    number of selection rows, to be compared with a mass that is summed over these."""
    rows = len(sample.rows) // sample.rows_per_stratum * sample.num_selection_rows
    column = sample.block_size * rows / (sample.seq_length * (sample.seq_length + 1) / 2)
    return column * sample.block_size, column


class PriceCandidates(NamedTuple):
    """Distances and columns that a price selects from. Prices share them."""

    masses: Tensor
    """int32 ``[2, b, h, NB]``: ``kernels.selection.attention_masses`` over all ranks."""
    positions: Tensor
    """int32 ``[b, h, C]``: the columns; N for none."""
    keys: Tensor
    """``[b, h, C, d]``: their keys."""
    in_columns: Tensor
    """int32 ``[b, h, NB]``: the part of ``masses[0]`` in columns (``slash_mass_in_columns``)."""


@selects_for(PricePolicy)
class PriceSelector(Selector):
    """The distances and columns whose mass per unit of cost is at least each head's price, which is that of
    the call; policies say the caps."""

    reads_query = False

    @classmethod
    def is_captured(cls, world: int) -> bool:
        return True

    def select(self, query: Tensor, key: Tensor, call: SelectorCall) -> Selected:
        return self.select_from(self.candidates(key, call), call)

    def candidates(self, key: Tensor, call: SelectorCall) -> PriceCandidates:
        """The candidates of each head. The prices of the call are not read."""
        sample, cp = call.sample, call.cp
        cap = min(max(policy.vertical_cap for policy in self.policies), sample.seq_length)
        values, masses = attention_masses(
            sample, key, call.lse, call.sink, divide_by_cost=sample.stratified
        )
        masses = cp.all_reduce(masses)
        (values, positions), _ = top_columns(values, cap, sample, cp)
        keys = column_keys(key, positions, sample, cp)
        num_blocks = masses.shape[-1]
        least = REFERENCE_PRICE * cost_units(sample)[1] * (1 if sample.stratified else num_blocks)
        if (
            sample.costs is not None
        ):  # pairs that are not visible cost nothing, so the others cost more
            bound = (least * sample.costs.factor).view(torch.int32)[:, None, None]
            values = torch.where(values >= bound, values, 0)
        inside = slash_mass_in_columns(sample, keys, positions, values, least, call.lse, num_blocks)
        return PriceCandidates(masses, positions, keys, inside)

    def select_from(self, candidates: PriceCandidates, call: SelectorCall) -> Selected:
        """The candidates of each head that are worth its price."""
        masses, positions, keys, inside = candidates
        sample, sink, prices = call.sample, call.sink, call.prices
        pair_cost, column_cost = cost_units(sample)
        distances, at_reference, outside, value = select_slashes_by_price(
            masses[0], inside, prices, REFERENCE_PRICE, sample.window_blocks, pair_cost,
            fixed_point_one(len(sample.rows)), sample.stratified, sample.costs,
        )  # fmt: skip
        distances = _cap_distances(distances, value, sample.window_blocks, self.policies)
        columns, value, held = select_columns_by_price(
            sample, keys, positions, call.lse, distances, at_reference, outside, prices, sink, column_cost
        )  # fmt: skip
        columns = _cap_columns(columns, positions, value, sample.seq_length, sink, self.policies)
        recall = recall_of(sample, masses, distances, columns, held)
        return Selected(Pattern(distances, columns), {"recall": recall})


def _ranks(value: Tensor) -> Tensor:
    """The place of each value along the last dimension, largest first, ties to the lower index."""
    order = value.argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(value.shape[-1], device=value.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def _per_head(numbers: list[int], device: torch.device) -> Tensor:
    """One number a head, to compare with ``[b, h, ...]``: ``[h, 1]``."""
    return constant(tuple(numbers), device, torch.int64)[:, None]


def _cap_distances(
    distances: Tensor, value: Tensor, window: int, policies: Sequence[PricePolicy]
) -> Tensor:
    """The distances, but of each head at most the ``slash_cap`` with the largest value beside the window."""
    far = value.shape[-1] - window
    caps = [far if policy.slash_cap is None else min(policy.slash_cap, far) for policy in policies]
    if far <= 0 or min(caps) == far:
        return distances
    kept = distances[..., window:].bool() & (
        _ranks(value[..., window:]) < _per_head(caps, value.device)
    )
    return torch.cat((distances[..., :window], kept.to(torch.uint8)), -1)


def _cap_columns(
    columns: Tensor,
    positions: Tensor,
    value: Tensor,
    seq_length: int,
    sink: int,
    policies: Sequence[PricePolicy],
) -> Tensor:
    """The columns, but of each head at most the ``vertical_cap`` with the largest value, sinks first."""
    caps = [policy.vertical_cap for policy in policies]
    if min(caps) == max(caps):
        return columns
    there = positions < seq_length
    value = torch.where(positions < sink, float("inf"), torch.where(there, value, -1.0))
    kept = (columns < seq_length) & (_ranks(value) < _per_head(caps, value.device))
    return torch.where(kept, positions, seq_length)
