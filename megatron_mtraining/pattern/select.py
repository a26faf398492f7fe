# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing a step's pattern at fixed budgets.

Every choice is made from numbers that all ranks have alike, with ties broken by position, so that all
ranks choose the same sets; nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import check_layout
from .estimate import column_mass, sample_attention, slash_mass
from .index import VerticalSlashIndex, build_index, full_index


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
    if world > 1:
        check_layout(seq_length, world, block)
    config.check_budgets(seq_length)
    if config.keeps_all(seq_length):
        return full_index(batch, heads, seq_length, block, world, query.device)
    num_blocks = -(-seq_length // block)
    # From the first query of a block, the window's farthest key is a block further than from its last.
    near = min(num_blocks, -(-config.window // block) + 1)
    distances = torch.zeros(batch, heads, num_blocks, dtype=torch.bool, device=query.device)
    distances[..., :near] = True
    columns = torch.arange(config.sink, device=query.device)
    columns = columns.expand(batch, heads, -1)
    more_columns = config.vertical > columns.shape[-1]
    if config.slash or more_columns:
        sample = sample_attention(query, key, config, ring, softmax_scale)
        blocks_apart = sample.rows[:, None] // block - sample.keys[None, :] // block
        sample.probabilities.masked_fill_(blocks_apart < near, 0)
        if more_columns:
            columns = _choose_columns(column_mass(sample, config.sample_rows), sample, config, ring)
        if config.slash:
            _leave_out_columns(sample, columns)
            chosen = _largest(slash_mass(sample, config, ring), config.slash)
            _add_diagonals(distances, chosen, block)
    return build_index(distances, columns, seq_length, block, world)


def _sort_key(mass: Tensor, position: Tensor, mandatory: Tensor | None = None) -> Tensor:
    """int64 keys that order by mass, then by lower position, and are all different.

    Non-negative floats order like their bits. ``mandatory`` ones come before all others; what has no
    mass gets -1 - position, below every choice.
    """
    # What is not a number counts as no mass: its bits have a sign and an order of their own.
    mass = torch.nan_to_num(mass, nan=0.0)
    bits = mass.contiguous().view(torch.int32).long()
    if mandatory is not None:
        bits = torch.where(mandatory, 2**31 - 1, bits)
    return torch.where(bits > 0, (bits << 32) + (2**31 - 1 - position), -1 - position)


def _from_sort_key(key: Tensor, none: int) -> Tensor:
    """Positions of chosen keys; ``none`` for those without mass."""
    return torch.where(key >= 0, 2**31 - 1 - (key & (2**32 - 1)), none)


def _largest(mass: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest along the last dimension, its length where there is no mass
    left to take."""
    length = mass.shape[-1]
    key = _sort_key(mass, torch.arange(length, device=mass.device))
    return _from_sort_key(key.topk(min(count, length)).values, length)


def _choose_columns(mass: Tensor, sample, config, ring) -> Tensor:
    """The budget's columns with the most mass over all ranks: int64 ``[b, h, C]``, N where none is left.

    Each rank offers its best; the best of all are the same on every rank.
    """
    key = _sort_key(mass, sample.keys, sample.keys < config.sink)
    count = min(config.vertical, key.shape[-1])
    offers = ring.all_gather(key.topk(count).values)
    offers = offers.movedim(0, -1).flatten(-2)
    best = offers.topk(min(config.vertical, offers.shape[-1])).values
    return _from_sort_key(best, sample.keys.numel() * ring.world)


def _leave_out_columns(sample, columns: Tensor) -> None:
    """Set the probabilities of chosen columns to 0, in place."""
    length = sample.keys.numel()
    # Where each column lies in this rank's ascending keys, if it does.
    slot = torch.searchsorted(sample.keys, columns.contiguous()).clamp_(max=length - 1)
    slot = torch.where(sample.keys[slot] == columns, slot, length)
    flags = torch.zeros(*columns.shape[:2], length + 1, dtype=torch.bool, device=slot.device)
    flags.scatter_(-1, slot, True)
    sample.probabilities.masked_fill_(flags[:, :, None, :length], 0)


def _add_diagonals(distances: Tensor, diagonals: Tensor, block: int) -> None:
    """Add the block distances that token diagonals cross, in place; positions of N or more are none."""
    num_blocks = distances.shape[-1]
    spare = torch.nn.functional.pad(distances, (0, 1))
    first = (diagonals // block).clamp(max=num_blocks)
    second = ((diagonals + block - 1) // block).clamp(max=num_blocks)
    spare.scatter_(-1, first, True).scatter_(-1, second, True)
    distances.copy_(spare[..., :num_blocks])
