# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing a pattern at a price: what keeps most attention for its cost, in all heads alike.

A candidate, a block distance or a column, has a mass (the share of attention that it adds) and a cost (the
share of the causal pairs that it adds). Those with mass over cost at or above the price are kept: heads
that need few keys become sparse, others stay dense, by themselves.

A slash's mass is what columns leave to it, and a column's what slashes leave. Both are judged by the others
that would be kept at one usual price: so each candidate has a worth of its own, whatever the price is, and a
lower price keeps all that a higher one does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
from .counted import best_columns
from .estimate import SampledRows

USUAL = 0.4
"""The price at which candidates meet each other."""


class Chosen(NamedTuple):
    """What a policy has chosen for each head."""

    distances: Tensor
    """uint8 or bool ``[b, h, NB]``, by block distance."""
    columns: Tensor
    """int32 ``[b, h, C]``, positions; N for none."""
    recall: Tensor | None
    """float32 ``[b, h]``: the share of the held-out rows' attention that these keep."""


class Listed(NamedTuple):
    """Columns in the layout, as :func:`~megatron_mtraining.kernels.gather_columns` takes them."""

    columns: Tensor
    seq_length: int
    block_size: int
    world: int
    inner: int


def listed(columns: Tensor, sample: SampledRows) -> Listed:
    """Column positions ``[b, h, C]`` in the layout of a sample's keys."""
    return Listed(columns, sample.seq_length, sample.block_size, sample.world, sample.inner)


def units(sample: SampledRows) -> tuple[float, float]:
    """Cost of a pair of blocks, and of a column in a query block, as shares of the causal pairs, times the
    rows that choose: what a mass summed over those is compared to."""
    rows = len(sample.rows) // sample.rows_per_stratum * sample.num_selection_rows
    column = sample.block_size * rows / (sample.seq_length * (sample.seq_length + 1) / 2)
    return column * sample.block_size, column


def choose_by_price(
    sample: SampledRows, key: Tensor, lse: Tensor, policies, sink: int, cp: CPGroup, price: Tensor
) -> Chosen:
    """Distances and columns of each head at its price.

    Args:
        key ``[s, b, hk, d]``: this rank's part.
        lse: the rows' log-sum-exp, float32 ``[b, h, R]``.
        policies: a :class:`~megatron_mtraining.config.PricePolicy` for each head.
        sink: first columns that are always kept.
        price: float32 ``[h]``.
    """
    cap = min(max(policy.vertical_cap for policy in policies), sample.seq_length)
    values, masses = attention_masses(sample, key, lse, sink, divide_by_cost=sample.stratified)
    masses = cp.all_reduce(masses)
    (values, positions), _ = best_columns(values, cap, sample, cp)
    keys = cp.all_reduce(gather_columns(key, None, listed(positions, sample), cp.rank))[0]
    pair, column = units(sample)
    one, num_blocks = fixed_point_one(len(sample.rows)), masses.shape[-1]
    least = USUAL * column * (1 if sample.stratified else num_blocks)
    inside = slash_mass_in_columns(sample, keys, positions, values, least, lse, num_blocks)
    slashes, usual, outside, value = select_slashes_by_price(
        masses[0], inside, price, USUAL, sample.window_blocks, pair, one, sample.stratified,
        sample.costs,
    )  # fmt: skip
    slashes = _cap_slashes(slashes, value, sample.window_blocks, policies)
    columns, value, held = select_columns_by_price(
        sample, keys, positions, lse, slashes, usual, outside, price, sink, column
    )
    columns = _cap_columns(columns, positions, value, sample.seq_length, sink, policies)
    return Chosen(slashes, columns, recall_of(sample, masses, slashes, columns, held))


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


def per_head(numbers, device, dtype=torch.int64) -> Tensor:
    """Numbers of the heads, to compare with ``[b, h, ...]``: ``[h, 1]``."""
    return torch.tensor(numbers, device=device, dtype=dtype)[:, None]


def _cap_slashes(slashes, value, near, policies) -> Tensor:
    """At most the cap's best distances beside the window."""
    far = value.shape[-1] - near
    caps = [far if policy.slash_cap is None else min(policy.slash_cap, far) for policy in policies]
    if far <= 0 or min(caps) == far:
        return slashes
    kept = slashes[..., near:].bool() & (_ranks(value[..., near:]) < per_head(caps, value.device))
    return torch.cat((slashes[..., :near], kept.to(torch.uint8)), -1)


def _cap_columns(columns, positions, value, seq_length, sink, policies) -> Tensor:
    """At most the cap's best columns, sinks first."""
    caps = [policy.vertical_cap for policy in policies]
    if min(caps) == max(caps):
        return columns
    there = positions < seq_length
    value = torch.where(positions < sink, float("inf"), torch.where(there, value, -1.0))
    kept = (columns < seq_length) & (_ranks(value) < per_head(caps, value.device))
    return torch.where(kept, positions, seq_length)
