# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plain PyTorch twins of the kernels that choose a pattern, as ``reference.py`` is of attention's.

They write out sampled rows x local keys: for tests and small runs. The selection twins are also what
counts too large for the kernel take, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import positions_at
from ..common.fixed_point import fixed_point_one


def _positions(length: int, rank: int, world: int, inner: int, block_size: int, device) -> Tensor:
    # Unlike token_positions, also where the last block is partial.
    return positions_at(torch.arange(length, device=device), rank, world, block_size, inner)


def _scores(sample, key) -> tuple[Tensor, Tensor]:
    """Scores of all rows, float32 ``[b, h, R, s]``, and the keys' global positions."""
    heads, kv_heads = sample.query.shape[2], key.shape[2]
    query = sample.query.permute(1, 2, 0, 3).float()
    keys = key.permute(1, 2, 3, 0).float().repeat_interleave(heads // kv_heads, 1)
    layout = (sample.rank, sample.world, sample.inner, sample.block_size)
    position = _positions(key.shape[0], *layout, key.device)
    return query @ keys * sample.softmax_scale, position


def unseen(sample, position):
    """Keys that rows do not see: later ones, and those of other documents. Broadcasts to ``[b, h, R, k]``;
    ``position`` is ``[k]`` or ``[b, h, k]``."""
    later = position[..., None, :] > sample.rows[:, None]
    if sample.starts is None:
        return later
    return later | (position[..., None, :] < sample.starts[:, None, :, None])


def _far_probabilities(sample, key, lse) -> tuple[Tensor, Tensor]:
    """Probabilities beyond the window, NaN as 0, and the keys' global positions."""
    scores, position = _scores(sample, key)
    apart = (sample.rows // sample.block_size)[:, None] - position // sample.block_size
    left_out = (apart < sample.window_blocks) | unseen(sample, position)
    # Held-out rows do not count.
    row = torch.arange(len(sample.rows), device=key.device)
    left_out = left_out | (row % sample.rows_per_stratum >= sample.num_selection_rows)[:, None]
    p = torch.exp(scores - lse[..., None]).masked_fill_(left_out, 0)
    return p.nan_to_num_(nan=0.0).clamp_(max=1), position


def lse_parts(sample, key):
    """See :func:`kernels.lse_parts`."""
    scores, position = _scores(sample, key)
    return torch.logsumexp(scores.masked_fill_(unseen(sample, position), float("-inf")), -1)[None]


def merge_lse(parts):
    """See :func:`kernels.merge_lse`."""
    return torch.logsumexp(parts, 0)


def diagonal_mass(sample, key, lse, sink, columns):
    """See :func:`kernels.diagonal_mass`."""
    p, position = _far_probabilities(sample, key, lse)
    left_out = position < sink
    if columns is not None:
        mass, (cut, last) = columns
        tied = (mass == cut[..., None]) & (position <= last[..., None])
        left_out = left_out | (mass > cut[..., None]) | tied
        left_out = left_out[:, :, None]
    p.masked_fill_(left_out, 0)
    addend = (p * fixed_point_one(len(sample.rows)) + 0.5).int()
    total = addend.new_zeros(*p.shape[:2], key.shape[0] * sample.world)
    for i, row in enumerate(sample.rows):
        # Keys after the row have probability 0, wherever it is added.
        total.index_add_(-1, (row - position).clamp(min=0), addend[:, :, i])
    return total


def _select(values, position, count, none):
    # Non-negative; ordered by value, then lower position; what has no value is below every choice.
    key = torch.where(values > 0, (values.long() << 32) + (2**31 - 1 - position), -1)
    best = key.topk(count).values
    taken = best >= 0
    value = torch.where(taken, best >> 32, 0)
    place = torch.where(taken, 2**31 - 1 - (best & (2**32 - 1)), none)
    least = best.amin(-1)
    cut = torch.where(least >= 0, least >> 32, 0)
    last = torch.where(least >= 0, 2**31 - 1 - (least & (2**32 - 1)), -1)
    return torch.stack((value, place)).int(), torch.stack((cut, last)).int()


def select_largest(values, count, none, rank, world, inner, block_size):
    """See :func:`kernels.select_largest`."""
    position = _positions(values.shape[-1], rank, world, inner, block_size, values.device)
    return _select(values, position, count, none)


def merge_selections(offers, count, none):
    """See :func:`kernels.merge_selections`."""
    values, positions = offers.permute(1, 2, 3, 0, 4).flatten(-2)
    return _select(values, positions.long(), count, none)


def _sorted_list(member, classes: int) -> tuple[Tensor, Tensor]:
    """Members by (residue, quotient) of so many classes, and the prefix counts."""
    length = -(-member.shape[-1] // classes)
    member = torch.nn.functional.pad(member, (0, length * classes - member.shape[-1]))
    flat = member.unflatten(-1, (length, classes)).transpose(-1, -2).flatten(-2)
    count = flat.cumsum(-1, dtype=torch.int32)
    entry = torch.arange(flat.shape[-1], device=flat.device, dtype=torch.int32)
    # What is no member fills the list from its end, with zeros.
    slot = torch.where(flat, count - 1, flat.shape[-1] - 1 - (entry - count)).long()
    quotient = torch.where(flat, entry % length, 0)
    ordered = torch.zeros_like(count).scatter_(-1, slot, quotient)
    return ordered.short(), torch.nn.functional.pad(count, (1, 0))


def index_lists(distances, diagonals, near, columns, seq_length, block_size, world, inner):
    """See :func:`kernels.index_lists`."""
    num_blocks = -(-seq_length // block_size)
    if distances is None:
        shape = (*columns.shape[:2], num_blocks + 1)
        marks = torch.zeros(shape, dtype=torch.bool, device=columns.device)
        marks[..., :near] = True
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
