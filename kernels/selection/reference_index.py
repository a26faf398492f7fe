# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reference implementation of ``vertical_slash_index.py``, ``density.py`` and ``block_list_index.py`` in
PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import block_at
from ..limits import check_blocks_per_round, fits_int32


def vertical_slash_lists(
    distances: Tensor | None,
    diagonals: Tensor | None,
    window_blocks: int,
    columns: Tensor,
    seq_length: int,
    block_size: int,
    world: int,
    inner: int,
) -> tuple[Tensor, ...]:
    """The seven tensors of a :class:`~megatron_mtraining.pattern.vertical_slash_index.VerticalSlashIndex`.

    Args:
        distances: bool ``[b, h, NB]``, the selected block distances; None to take them from ``diagonals`` and
            ``window_blocks``, which are not read otherwise.
        diagonals: int ``[b, h, K]``, token distances; the block distances that they cross are selected. N or
            more for no diagonal.
        window_blocks: number of leading block distances that are selected.
        columns: int ``[b, h, C]``, token positions, each once; N or more for no column.
        inner: number of ranks whose keys are attended to in one round.

    Returns:
        member, round_list, round_ptr, rank_list, rank_ptr, columns, column_ptr. Lists are 0 past their
        counts.

    Raises:
        ValueError: the ranks of a round have too many blocks.
    """
    check_blocks_per_round(seq_length, block_size, world, inner)
    num_blocks = -(-seq_length // block_size)
    if distances is None:
        shape = (*columns.shape[:2], num_blocks + 1)
        marks = torch.zeros(shape, dtype=torch.bool, device=columns.device)
        marks[..., :window_blocks] = True
        diagonals = torch.where(diagonals < seq_length, diagonals, num_blocks * block_size)
        # A token diagonal crosses two block distances, unless it is a multiple of the block.
        for crossed in (diagonals // block_size, (diagonals + block_size - 1) // block_size):
            marks.scatter_(-1, crossed.long().clamp(max=num_blocks), True)
        distances = marks[..., :num_blocks]
    # A copy: the caller's distances stay as they are.
    member = distances.clone(memory_format=torch.contiguous_format)
    member[..., 0] = True
    rounds, ranks = _sorted_list(member, world // inner), _sorted_list(member, 2 * world)

    columns = columns.long().clamp(max=seq_length).sort(-1).values
    starts = torch.arange(num_blocks + 1, device=columns.device) * block_size
    starts = starts.clamp(max=seq_length).expand(*columns.shape[:-1], -1)
    column_ptr = torch.searchsorted(columns, starts.contiguous())
    return member.to(torch.uint8), *rounds, *ranks, columns.int(), column_ptr.int()


def vertical_slash_density(
    member: Tensor, column_ptr: Tensor, seq_length: int, block_size: int
) -> Tensor:
    """The share of the visible pairs that a vertical-slash pattern has: float32 ``[b, h]``,
    rounded once.

    Args:
        member: uint8 ``[b, h, NB]``, contiguous: the selected block distances, 0 among them.
        column_ptr: int32 ``[b, h, NB + 1]``, contiguous: how many columns come before each block.
    """
    num_blocks, distances = member.shape[-1], member.bool()
    far = torch.arange(num_blocks, device=member.device)
    slash = (distances.double() * (num_blocks - far)).sum(-1) * block_size * block_size
    slash = slash - num_blocks * block_size * (block_size - 1) / 2
    # A column in block c is seen by the distances up to NB - 1 - c that are not selected.
    counts, outside = column_ptr.diff(dim=-1), (~distances).long()
    pairs = slash + (counts * outside.cumsum(-1).flip(-1).double()).sum(-1) * block_size
    # Queries that the last block lacks: the mean of their keys.
    missing = num_blocks * block_size - seq_length
    keys = (distances.sum(-1) - 1) * block_size + (counts * outside.flip(-1)).sum(-1)
    pairs = pairs - missing * (keys + (2 * block_size - missing + 1) / 2)
    return (pairs / (seq_length * (seq_length + 1) / 2)).float()


def block_list_offsets(
    blocks: Tensor, member: Tensor, world: int, inner: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The prefix counts of a :class:`~megatron_mtraining.pattern.block_list_index.BlockListIndex`.

    Args:
        blocks: bool or uint8 ``[b, h, nb, NB]``, by own query block and global key block.
        member: uint8 ``[b, h, NB]``, by block distance, with distance 0. Query blocks see the union of both.
        world, inner, rank: the striped layout, and the rank whose query blocks these are.

    Returns:
        round_ptr, rank_ptr: as in the index, but int64 if there may be too many entries for int32.
        num_extra: int32 ``[b, h, nb]``, number of a query block's pairs in ``blocks`` at distances that are
            not in ``member``.
    """
    seen, extra = _by_round(blocks, member, world, inner, rank)
    by_rank = _by_rank(blocks, member, world, inner, rank)
    return _prefix_counts(seen), _prefix_counts(by_rank), extra.sum((0, -1)).int()


def block_lists(
    blocks: Tensor,
    member: Tensor,
    world: int,
    inner: int,
    rank: int,
    round_ptr: Tensor,
    rank_ptr: Tensor,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """The lists for the prefix counts of :func:`block_list_offsets`, as int32: round_list and rank_list,
    int16 ``[capacity]``. The caller checks that no list has more entries; further entries are left out."""
    seen, _ = _by_round(blocks, member, world, inner, rank)
    lists = []
    for selected in (seen, _by_rank(blocks, member, world, inner, rank)):
        # In the order of memory: list by list, ascending within each.
        there = selected.flatten()
        slot = torch.where(there, there.cumsum(0) - 1, capacity).clamp(max=capacity)
        entry = torch.arange(selected.shape[-1], device=slot.device).expand_as(selected).flatten()
        lists.append(slot.new_zeros(capacity + 1).scatter_(0, slot, entry)[:-1].short())
    return tuple(lists)


def _sorted_list(member: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Members ``d`` sorted by (``d % classes``, ``d // classes``), as quotients, and the prefix counts."""
    length = -(-member.shape[-1] // classes)
    member = torch.nn.functional.pad(member, (0, length * classes - member.shape[-1]))
    flat = member.unflatten(-1, (length, classes)).transpose(-1, -2).flatten(-2)
    count = flat.cumsum(-1, dtype=torch.int32)
    entry = torch.arange(flat.shape[-1], device=flat.device, dtype=torch.int32)
    # Distances that are no members fill the list from its end, with zeros.
    slot = torch.where(flat, count - 1, flat.shape[-1] - 1 - (entry - count)).long()
    quotient = torch.where(flat, entry % length, 0)
    ordered = torch.zeros_like(count).scatter_(-1, slot, quotient)
    return ordered.short(), torch.nn.functional.pad(count, (1, 0))


def _by_round(blocks, member, world, inner, rank) -> tuple[Tensor, Tensor]:
    """What each own query block sees, by round and quotient: bool ``[O, b, h, nb, NB / O]``; and which of
    it is in ``blocks`` alone."""
    nb, num_blocks = blocks.shape[-2:]
    rounds = world // inner
    device = blocks.device
    own = block_at(torch.arange(nb, device=device), rank, world, inner)
    distance = torch.arange(num_blocks, device=device)
    block = own[:, None] - distance
    listed = blocks.bool().gather(-1, block.clamp(min=0).expand_as(blocks))
    slash = member.bool()[:, :, None]
    seen, extra = ((listed | slash) & (block >= 0), listed & ~slash & (block >= 0))
    return tuple(t.unflatten(-1, (-1, rounds)).movedim(-1, 0) for t in (seen, extra))


def _by_rank(blocks, member, world, inner, rank) -> Tensor:
    """Which own query blocks see each key block: bool ``[W, b, h, nb of keys, nb]``."""
    nb, num_blocks = blocks.shape[-2:]
    local = torch.arange(nb, device=blocks.device)
    ranks = torch.arange(world, device=blocks.device)
    own = block_at(local, rank, world, inner)
    block = block_at(local, ranks[:, None], world, inner).flatten()
    distance = own[:, None] - block
    slash = member.bool()[:, :, distance.clamp(min=0)]
    seen = (blocks.bool()[..., block] | slash) & (distance >= 0)
    return seen.unflatten(-1, (world, nb)).movedim(-2, 0).transpose(-1, -2)


def _prefix_counts(seen: Tensor) -> Tensor:
    dtype = torch.int32 if fits_int32(seen.numel()) else torch.int64
    counts = seen.sum(-1).flatten().cumsum(0, dtype=dtype)
    return torch.nn.functional.pad(counts, (1, 0))
