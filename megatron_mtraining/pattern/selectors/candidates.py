# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The best columns and diagonals over all ranks.

Candidates are ordered as integers, ties by position, so that all ranks select the same.
"""

from __future__ import annotations

from torch import Tensor

from ...cp_group import CPGroup
from ...kernels.selection import merge_topk, select_topk
from ...kernels.types import SampledRows

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
