# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Selection by a budget: fixed numbers of columns and diagonals per head.

Candidates are ordered as integers, ties by position, so that all ranks select the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import FixedPolicy
from ..cp_group import CPGroup
from ..kernels.selection import attention_masses, diagonal_masses, merge_topk, select_topk
from .constants import constant
from .sampled_rows import SampledRows

SINK = 2**31 - 1
"""The value that stands for the mass of a sink column."""


def top_columns(
    values: Tensor, count: int, sample: SampledRows, cp: CPGroup
) -> tuple[Tensor, Tensor]:
    """The ``count`` columns with the largest values over all ranks: int32 ``[2, b, h, count]``, values and
    positions (0 and N where none is left); and the threshold of the selection (see
    ``kernels.selection.select_topk``).

    Each rank offers its top columns; the top of all offers are the same on every rank.

    Args:
        values: int32 ``[b, h, s]``, of this rank's columns.
    """
    count = min(count, sample.seq_length)
    offer, threshold = select_topk(
        values, min(count, values.shape[-1]), sample.seq_length,
        cp.rank, cp.world, cp.inner, sample.block_size,
    )  # fmt: skip
    if cp.world > 1:
        offer, threshold = merge_topk(cp.all_gather(offer), count, sample.seq_length)
    return offer, threshold


def top_diagonals(mass: Tensor, count: int, seq_length: int, cp: CPGroup) -> Tensor:
    """The ``count`` token diagonals with the most mass over all ranks: int32 ``[2, b, h, count]``, masses and
    distances (0 and N where none is left).

    Each rank sums the mass of a stretch of the distances over all ranks, and offers its top diagonals.
    """
    mass = cp.reduce_scatter(mass)
    length = mass.shape[-1]
    # With blocks as long as a stretch, positions in the layout of one inner group are distances.
    offer, _ = select_topk(
        mass, min(count, length), seq_length, cp.rank, cp.world, cp.world, length
    )
    if cp.world > 1:
        offer, _ = merge_topk(cp.all_gather(offer), min(count, seq_length), seq_length)
    return offer


def in_order(offer: Tensor) -> tuple[Tensor, Tensor]:
    """Values and positions, the largest value first, ties to the lower position."""
    value, position = offer.long()
    order = ((value << 32) - position).argsort(-1, descending=True)
    return value.gather(-1, order), position.gather(-1, order)


def _first(counts: list[int], value: Tensor) -> Tensor:
    """Which of the sorted values are among the first ``counts`` of each head, and above 0."""
    count = constant(tuple(counts), value.device, torch.int64)[:, None]
    return (torch.arange(value.shape[-1], device=value.device) < count) & (value > 0)


def _threshold(taken: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """The threshold of a selection of the first of sorted values: a value and a position."""
    last = (taken.sum(-1, keepdim=True) - 1).clamp(min=0)
    some = taken[..., 0]
    value, position = (each.gather(-1, last)[..., 0] for each in (value, position))
    # None are selected: no value reaches the largest one.
    return torch.stack((torch.where(some, value, SINK), torch.where(some, position, -1))).int()


def select_fixed(
    sample: SampledRows,
    key: Tensor,
    lse: Tensor,
    policies: Sequence[FixedPolicy],
    sink: int,
    cp: CPGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``vertical`` columns and ``slash`` token diagonals with the most mass. Columns are judged by their
    mass outside of the window, diagonals by that outside of the columns.

    Args:
        key: ``[s, b, hk, d]``, this rank's part.
        lse: the rows' log-sum-exp, float32 ``[b, h, R]``.
        policies: of each head.
        sink: first columns that are always kept.

    Returns:
        Columns, int32 ``[b, h, C]``, and token diagonals, ``[b, h, K]``, N for none; int32 ``[2, b, h, NB]``,
        the masses by block distance of ``kernels.selection.attention_masses``, over all ranks.
    """
    values, masses = attention_masses(sample, key, lse, sink, divide_by_cost=False)
    masses = cp.all_reduce(masses)
    batch, seq_length = values.shape[0], sample.seq_length
    verticals = [min(max(policy.vertical, sink), seq_length) for policy in policies]
    slashes = [min(policy.slash, seq_length) for policy in policies]
    if max(verticals) > sink:
        offer, threshold = top_columns(values, max(verticals), sample, cp)
        columns = offer[1]
        if min(verticals) < max(verticals):
            value, position = in_order(offer)
            taken = _first(verticals, value)
            columns = torch.where(taken, position, seq_length).int()
            threshold = _threshold(taken, value, position)
        taken = values, threshold
    else:
        columns = torch.arange(sink, dtype=torch.int32, device=key.device)
        columns, taken = columns.expand(batch, len(policies), -1).contiguous(), None
    if not max(slashes):
        return columns, columns.new_empty(batch, len(policies), 0), masses
    mass = diagonal_masses(sample, key, lse, sink, taken)
    offer = top_diagonals(mass, max(slashes), seq_length, cp)
    diagonals = offer[1]
    if min(slashes) < max(slashes):
        value, position = in_order(offer)
        diagonals = torch.where(_first(slashes, value), position, seq_length).int()
    return columns, diagonals, masses
