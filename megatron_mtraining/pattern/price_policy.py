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

from ..config import PricePolicy
from ..cp_group import CPGroup
from ..kernels.attention import gather_columns
from ..kernels.common.fixed_point import fixed_point_one
from ..kernels.selection import (
    attention_masses,
    attention_recall,
    select_columns_by_price,
    select_slashes_by_price,
    slash_mass_in_columns,
)
from .constants import constant
from .fixed_policy import top_columns
from .sampled_rows import SampledRows

REFERENCE_PRICE = 0.4
"""The price by which slashes and columns are judged by each other."""


class Selection(NamedTuple):
    """The slashes and columns of each head that its policy has selected."""

    distances: Tensor
    """uint8 ``[b, h, NB]``, by block distance."""
    columns: Tensor
    """int32 ``[b, h, C]``, positions; N for none."""
    recall: Tensor
    """float32 ``[b, h]``: the share of the held-out rows' attention that these keep."""


class StripedColumns(NamedTuple):
    """Columns and their layout, as ``kernels.attention.gather_columns`` takes them."""

    columns: Tensor
    """int32 ``[b, h, C]``, positions; N for none."""
    seq_length: int
    block_size: int
    world: int
    inner: int


def cost_units(sample: SampledRows) -> tuple[float, float]:
    """Cost of a pair of blocks, and of a column in a query block: shares of the causal pairs, times the
    number of selection rows, to be compared with a mass that is summed over these."""
    rows = len(sample.rows) // sample.rows_per_stratum * sample.num_selection_rows
    column = sample.block_size * rows / (sample.seq_length * (sample.seq_length + 1) / 2)
    return column * sample.block_size, column


class PriceCandidates(NamedTuple):
    """Slashes and columns that a price selects from. Prices share them: only :func:`select_at_price` reads
    the price."""

    masses: Tensor
    """int32 ``[2, b, h, NB]``: ``kernels.selection.attention_masses`` over all ranks."""
    positions: Tensor
    """int32 ``[b, h, C]``: the columns; N for none."""
    keys: Tensor
    """``[b, h, C, d]``: their keys."""
    in_columns: Tensor
    """int32 ``[b, h, NB]``: the part of ``masses[0]`` in columns (``slash_mass_in_columns``)."""


def price_candidates(
    sample: SampledRows,
    key: Tensor,
    lse: Tensor,
    policies: Sequence[PricePolicy],
    sink: int,
    cp: CPGroup,
) -> PriceCandidates:
    """The candidates of each head. Arguments as for :func:`select_by_price`."""
    cap = min(max(policy.vertical_cap for policy in policies), sample.seq_length)
    values, masses = attention_masses(sample, key, lse, sink, divide_by_cost=sample.stratified)
    masses = cp.all_reduce(masses)
    (values, positions), _ = top_columns(values, cap, sample, cp)
    candidates = StripedColumns(
        positions, sample.seq_length, sample.block_size, sample.world, sample.inner
    )
    keys = cp.all_reduce(gather_columns(key, None, candidates, cp.rank))[0]
    num_blocks = masses.shape[-1]
    least = REFERENCE_PRICE * cost_units(sample)[1] * (1 if sample.stratified else num_blocks)
    if sample.costs is not None:  # pairs of other documents cost nothing, so the others cost more
        bound = (least * sample.costs.factor).view(torch.int32)[:, None, None]
        values = torch.where(values >= bound, values, 0)
    inside = slash_mass_in_columns(sample, keys, positions, values, least, lse, num_blocks)
    return PriceCandidates(masses, positions, keys, inside)


def select_at_price(
    sample: SampledRows,
    candidates: PriceCandidates,
    lse: Tensor,
    policies: Sequence[PricePolicy],
    sink: int,
    price: Tensor,
) -> Selection:
    """The candidates of each head whose mass per unit of cost is at least its price. Arguments as for
    :func:`select_by_price`."""
    masses, positions, keys, inside = candidates
    pair_cost, column_cost = cost_units(sample)
    slashes, at_reference, outside, value = select_slashes_by_price(
        masses[0], inside, price, REFERENCE_PRICE, sample.window_blocks, pair_cost,
        fixed_point_one(len(sample.rows)), sample.stratified, sample.costs,
    )  # fmt: skip
    slashes = _cap_slashes(slashes, value, sample.window_blocks, policies)
    columns, value, held = select_columns_by_price(
        sample, keys, positions, lse, slashes, at_reference, outside, price, sink, column_cost
    )
    columns = _cap_columns(columns, positions, value, sample.seq_length, sink, policies)
    return Selection(slashes, columns, recall_of(sample, masses, slashes, columns, held))


def select_by_price(
    sample: SampledRows,
    key: Tensor,
    lse: Tensor,
    policies: Sequence[PricePolicy],
    sink: int,
    cp: CPGroup,
    price: Tensor,
) -> Selection:
    """Distances and columns of each head at its price.

    Args:
        key: ``[s, b, hk, d]``, this rank's part.
        lse: the rows' log-sum-exp, float32 ``[b, h, R]``.
        policies: of each head; their caps are read.
        sink: first columns that are always kept.
        price: float32 ``[h]``.
    """
    candidates = price_candidates(sample, key, lse, policies, sink, cp)
    return select_at_price(sample, candidates, lse, policies, sink, price)


def recall_of(
    sample: SampledRows, masses: Tensor, slashes: Tensor, columns: Tensor, held: Tensor
) -> Tensor:
    """The share of attention kept, float32 ``[b, h]``, of held-out rows; of all rows if none are.

    Args:
        masses: int32 ``[2, b, h, NB]``, of ``kernels.selection.attention_masses``, over all ranks.
        slashes: uint8 ``[b, h, NB]``.
        columns: int32 ``[b, h, C]``; ``held`` float32 ``[b, h, C]``: what the columns add to slashes.
    """
    rows = len(sample.rows) // sample.rows_per_stratum
    rows *= sample.rows_per_stratum - sample.num_selection_rows or sample.num_selection_rows
    one = fixed_point_one(len(sample.rows))
    return attention_recall(masses[1], slashes, columns, held, sample.seq_length, one, rows)


def _ranks(value: Tensor) -> Tensor:
    """The place of each value along the last dimension, largest first, ties to the lower index."""
    order = value.argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(value.shape[-1], device=value.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def _per_head(numbers: list[int], device: torch.device) -> Tensor:
    """One number a head, to compare with ``[b, h, ...]``: ``[h, 1]``."""
    return constant(tuple(numbers), device, torch.int64)[:, None]


def _cap_slashes(
    slashes: Tensor, value: Tensor, window: int, policies: Sequence[PricePolicy]
) -> Tensor:
    """The slashes, but of each head at most the ``slash_cap`` with the largest value beside the window."""
    far = value.shape[-1] - window
    caps = [far if policy.slash_cap is None else min(policy.slash_cap, far) for policy in policies]
    if far <= 0 or min(caps) == far:
        return slashes
    kept = slashes[..., window:].bool() & (
        _ranks(value[..., window:]) < _per_head(caps, value.device)
    )
    return torch.cat((slashes[..., :window], kept.to(torch.uint8)), -1)


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
