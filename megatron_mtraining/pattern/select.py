# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing a step's pattern at fixed budgets.

Every choice is made from integers that all ranks have alike, with ties broken by position, so that
all ranks choose the same sets; nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import column_mass, diagonal_mass, merge_selections, select_largest
from ..layout import check_layout
from .estimate import draw_sample, sample_lse
from .index import VerticalSlashIndex, full_index, index_of_choice


def choose_index(query, key, config, ring, softmax_scale: float) -> VerticalSlashIndex:
    """The pattern of one attention call, from its own queries and keys.

    Block distances of the local window, and the first columns, always hold. Then each head takes the
    ``config.vertical`` columns with the most mass outside the window, and the ``config.slash`` token
    diagonals with the most mass outside window and columns. A token diagonal crosses two block
    distances unless it is a multiple of the block size; both are taken.

    Args:
        query ``[s, b, h, d]``, key ``[s, b, hk, d]``: this rank's parts, block-striped; detached here.

    Returns:
        The same index on all ranks.

    Raises:
        ConfigError: the sequence is not a multiple of ``block_size`` x ranks (on one rank, any
            length will do), or the budgets do not fit it.
    """
    query, key = query.detach(), key.detach()
    length, batch, heads, _ = query.shape
    block, world = config.block_size, ring.world
    seq_length = length * world
    check_choice(seq_length, config, world)
    if config.keeps_all(seq_length):
        return full_index(batch, heads, seq_length, block, world, ring.inner, query.device)
    num_blocks = -(-seq_length // block)
    # From the first query of a block, the window's farthest key is a block further than from its last.
    near = min(num_blocks, -(-config.window // block) + 1)
    sample = lse = taken = None
    more_columns = config.vertical > config.sink
    if config.slash or more_columns:
        sample = draw_sample(query, config, ring, near, softmax_scale)
        lse = sample_lse(sample, key, ring)
    if more_columns:
        mass = column_mass(sample, key, lse, config.sink)
        columns, cut = _choose_columns(mass, config, ring)
        taken = (mass, cut)
    else:
        columns = torch.arange(config.sink, dtype=torch.int32, device=query.device)
        columns = columns.expand(batch, heads, -1)
    if config.slash:
        mass = diagonal_mass(sample, key, lse, config.sink, taken)
        diagonals = _choose_diagonals(mass, config, ring)
    else:
        diagonals = columns.new_empty(batch, heads, 0)
    return index_of_choice(near, diagonals, columns, seq_length, block, world, ring.inner)


def check_choice(seq_length: int, config, world: int) -> None:
    """Raise :class:`ConfigError` if :func:`choose_index` cannot choose for so many tokens over so many
    ranks."""
    if world > 1:
        check_layout(seq_length, world, config.block_size)
    config.check_budgets(seq_length)


def _choose_columns(mass: Tensor, config, ring) -> tuple[Tensor, Tensor]:
    """The budget's columns with the most mass over all ranks: int32 ``[b, h, C]``, N where none is
    left; and the cut they were taken at (:func:`~megatron_mtraining.kernels.select_largest`).

    Each rank offers its best; the best of all are the same on every rank.
    """
    length = mass.shape[-1]
    seq_length = length * ring.world
    offer, cut = select_largest(
        mass, min(config.vertical, length), seq_length,
        ring.rank, ring.world, ring.inner, config.block_size,
    )  # fmt: skip
    if ring.world > 1:
        count = min(config.vertical, seq_length)
        offer, cut = merge_selections(ring.all_gather(offer), count, seq_length)
    return offer[1], cut


def _choose_diagonals(mass: Tensor, config, ring) -> Tensor:
    """The budget's token diagonals with the most mass over all ranks: int32 ``[b, h, slash]``, N where
    none is left.

    Each rank sums a stretch of the distances over all ranks, and offers its best.
    """
    seq_length = mass.shape[-1]
    mass = ring.reduce_scatter(mass)
    length = mass.shape[-1]
    # With blocks as long as a stretch, positions in the layout of one node are distances.
    offer, _ = select_largest(
        mass, min(config.slash, length), seq_length, ring.rank, ring.world, ring.world, length
    )
    if ring.world > 1:
        count = min(config.slash, seq_length)
        offer, _ = merge_selections(ring.all_gather(offer), count, seq_length)
    return offer[1]
