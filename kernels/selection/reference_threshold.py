# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reference implementation of ``threshold.py`` in plain PyTorch, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ...visibility import Costs
from ..common.fixed_point import fixed_point_one, float_bits
from ..types import SampledRows
from .reference_masses import (
    add_masses,
    probabilities,
    split_row_positions,
    split_strata,
    sum_of_strata,
)


def slash_mass_in_columns(
    sampled_rows: SampledRows,
    keys: Tensor,
    positions: Tensor,
    values: Tensor,
    min_value: float,
    lse: Tensor,
    num_blocks: int,
) -> Tensor:
    """Mass by block distance that lies in some columns: the part of ``masses[0]`` of
    :func:`~.reference_masses.attention_masses` from columns whose value is at least ``min_value``.

    Args:
        keys: ``[b, h, C, d]``, contiguous, the columns' keys.
        positions: int32 ``[b, h, C]``, their global positions; N for no column.
        values: int32 ``[b, h, C]``, their values as :func:`~.reference_masses.attention_masses` returns them.
        min_value: above 0.
        lse: float32 ``[b, h, R]``, the rows' log-sum-exp over all ranks.

    Returns:
        int32 ``[b, h, NB]`` in the same fixed point, rounded for each column.
    """
    rows = sampled_rows
    positions = torch.where(values >= float_bits(min_value), positions, rows.seq_length)
    # Few columns are taken: move those to the front and drop the entries that no head needs.
    missing = positions >= rows.seq_length
    most = int((~missing).sum(-1).max())
    order = missing.to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    positions = positions.gather(-1, order)
    keys = keys.gather(2, order[..., None].expand(-1, -1, -1, keys.shape[-1]))
    p, _ = split_strata(rows, probabilities(rows, keys, positions, lse))
    distance = split_row_positions(rows)[0][..., None] - positions[:, :, None, None]
    p = torch.where(positions[:, :, None, None] < rows.seq_length, p, 0.0)
    block, one = rows.block_size, fixed_point_one(len(rows.rows))
    part = (distance % block).double() / block
    masses = torch.zeros(*positions.shape[:2], num_blocks, dtype=torch.int32, device=keys.device)
    add_masses(masses, distance // block, p * (1 - part), one)
    add_masses(masses, distance // block + 1, p * part, one)
    return masses


def select_slashes_by_price(
    slash_mass: Tensor,
    mass_in_columns: Tensor,
    price: Tensor,
    reference_price: float,
    window_blocks: int,
    cost_per_block_pair: float,
    fixed_point_one: int,
    stratified: bool,
    costs: Costs | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select the block distances whose mass over cost is at least the price.

    Args:
        slash_mass: int32 ``[b, h, NB]``, mass by block distance in fixed point.
        mass_in_columns: int32 ``[b, h, NB]``, the part of it that columns have.
        price: float32 ``[h]``.
        reference_price: the price of the slashes that columns are judged against, the same in all runs.
        window_blocks: number of leading distances that are selected whatever they cost.
        cost_per_block_pair: cost of one pair of blocks, in units of one row's attention.
        fixed_point_one: the integer that stands for one row's attention.
        stratified: whether the rows are spread over the sequence. The last rows see all distances, so that
            their mass at a distance that few rows have would weigh too much: every distance costs the same
            for them.
        costs: of visible ranges, or None.

    Returns:
        slashes: uint8 ``[b, h, NB]``, 1 for the selected distances.
        reference_slashes: uint8 ``[b, h, NB]``, 1 for those selected at the reference price.
        num_outside: int32 ``[b, h, NB]``, how many distances up to this one are not in ``reference_slashes``.
        value: float32 ``[b, h, NB]``, mass over cost.
    """
    num_blocks = slash_mass.shape[-1]
    distance = torch.arange(num_blocks, device=slash_mass.device)
    block_pairs = num_blocks - distance if stratified else num_blocks
    if costs is not None:
        block_pairs = costs.seen[:, None]
    mass = (slash_mass - mass_in_columns).clamp(min=0).float()
    value = mass / fixed_point_one / (cost_per_block_pair * block_pairs)
    if costs is not None:  # no range is as long: not a number would rank before all others
        value = torch.where(block_pairs > 0, value, 0.0)
    in_window = distance < window_blocks
    slashes = in_window | (value >= price[:, None])
    reference_slashes = in_window | (value >= reference_price)
    num_outside = (~reference_slashes).cumsum(-1, dtype=torch.int32)
    return slashes.to(torch.uint8), reference_slashes.to(torch.uint8), num_outside, value


def select_columns_by_price(
    sampled_rows: SampledRows,
    keys: Tensor,
    positions: Tensor,
    lse: Tensor,
    slashes: Tensor,
    reference_slashes: Tensor,
    num_outside: Tensor,
    price: Tensor,
    num_sinks: int,
    cost_per_block: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the columns whose mass outside of the reference slashes, over their cost there, is at least the
    price.

    Args:
        keys, positions, lse: as for :func:`slash_mass_in_columns`.
        slashes, reference_slashes, num_outside: as :func:`select_slashes_by_price` returns them.
        price: float32 ``[h]``.
        num_sinks: number of leading columns of the sequence that are selected whatever they cost.
        cost_per_block: cost of a column in one query block, in units of one row's attention.

    Returns:
        columns: int32 ``[b, h, C]``, the positions of the selected columns; N for the others.
        value: float32 ``[b, h, C]``, mass over cost.
        mass: float32 ``[b, h, C]``, see :func:`column_masses`.
    """
    rows, num_blocks = sampled_rows, slashes.shape[-1]
    block = rows.block_size
    p = probabilities(rows, keys, positions, lse)
    strata = split_strata(rows, _outside_slashes(rows, p, positions, reference_slashes))[0].sum(3)
    mass = _column_masses(rows, p, positions, slashes)
    present = positions < rows.seq_length
    last_distance = (num_blocks - 1 - positions // block).clamp(min=0).long()
    if rows.costs is not None:
        key_block = (positions // block).clamp(max=num_blocks - 1).long().flatten(1)
        last_distance = rows.costs.further.gather(1, key_block).view(positions.shape).long()
    total, query_blocks = sum_of_strata(rows, strata), num_outside.gather(-1, last_distance)
    if not rows.stratified:
        query_blocks = torch.full_like(query_blocks, num_blocks)
    query_blocks = query_blocks.clamp(min=1)
    if rows.costs is not None:
        query_blocks = query_blocks * rows.costs.factor[:, None, None]
    value = torch.where(present, total / (cost_per_block * query_blocks), 0.0).float()
    selected = present & (((total > 0) & (value >= price[:, None])) | (positions < num_sinks))
    return torch.where(selected, positions, rows.seq_length), value, mass


def column_masses(
    sampled_rows: SampledRows, keys: Tensor, positions: Tensor, lse: Tensor, slashes: Tensor
) -> Tensor:
    """Attention mass of columns outside of the slashes, of the held-out rows (of all rows if none are held
    out): float32 ``[b, h, C]``. Arguments as for :func:`select_columns_by_price`."""
    p = probabilities(sampled_rows, keys, positions, lse)
    return _column_masses(sampled_rows, p, positions, slashes)


def attention_recall(
    slash_mass: Tensor,
    slashes: Tensor,
    columns: Tensor,
    column_mass: Tensor,
    seq_length: int,
    fixed_point_one: int,
    num_rows: int,
) -> Tensor:
    """The fraction of attention in the selected slashes and columns: float32 ``[b, h]``.

    Args:
        slash_mass: int32 ``[b, h, NB]``, ``masses[1]`` of :func:`~.reference_masses.attention_masses` over
            all ranks.
        slashes: uint8 ``[b, h, NB]``, the selected distances.
        columns, column_mass: int32 and float32 ``[b, h, C]``, positions (N for no column) and mass as
            :func:`select_columns_by_price` returns them.
        fixed_point_one: the integer that stands for one row's attention.
        num_rows: number of rows that ``slash_mass`` was summed over.
    """
    mass = (slash_mass * slashes).sum(-1, dtype=torch.float32) / fixed_point_one
    return (mass + torch.where(columns < seq_length, column_mass, 0.0).sum(-1)) / num_rows


def _outside_slashes(
    sampled_rows: SampledRows, p: Tensor, positions: Tensor, slashes: Tensor
) -> Tensor:
    """Probabilities ``[b, h, R, C]`` with 0 at block distances that are slashes."""
    block = sampled_rows.block_size
    distance = sampled_rows.rows.long()[:, None] // block - positions[:, :, None] // block
    distance = distance.clamp(0, slashes.shape[-1] - 1).flatten(2)
    return p.masked_fill(slashes.gather(-1, distance).view(p.shape) != 0, 0)


def _column_masses(
    sampled_rows: SampledRows, p: Tensor, positions: Tensor, slashes: Tensor
) -> Tensor:
    selecting, held_out = split_strata(
        sampled_rows, _outside_slashes(sampled_rows, p, positions, slashes)
    )
    return (held_out if held_out.shape[3] else selecting).sum((2, 3)).float()
