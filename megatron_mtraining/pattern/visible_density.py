# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How much an index attends to where queries do not see all keys: only visible pairs count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import block_at, positions_at


def visible_pairs(index, rank: int) -> Tensor:
    """Pairs of a query and a key that it sees, without those of padding, by own query block of a rank and key
    block: float64 ``[b, nb, NB]``."""
    visible, block = index.visible, index.block_size
    start = visible.on(rank, index.world, index.inner, block).start.long()
    batch, length = start.shape
    num_blocks, device = index.member.shape[-1], start.device
    nb = num_blocks // index.world
    local = torch.arange(length, device=device)
    own = block_at(torch.arange(nb, device=device), rank, index.world, index.inner)
    position = positions_at(local, rank, index.world, block, index.inner)
    begins = start // block
    earlier = begins < position // block
    at = (local // block) * (num_blocks + 1) + begins
    flat = torch.zeros(batch, nb * (num_blocks + 1), dtype=torch.float64, device=device)
    part = flat.scatter_add(1, at, torch.where(earlier, block - start % block, 0).double())
    rows = flat.scatter_add(1, at + 1, earlier.double())  # they see all of the blocks from there on
    part, rows = (t.unflatten(1, (nb, num_blocks + 1))[..., :num_blocks] for t in (part, rows))
    pairs = part + rows.cumsum(-1) * block
    key_block = torch.arange(num_blocks, device=device)
    inside = (position - torch.maximum(start, position // block * block) + 1).double()
    if index.visible.rows is not None:  # padding sees itself alone
        counts = torch.zeros(index.seq_length, dtype=torch.float64, device=device)
        inside *= counts.index_fill(0, index.visible.rows, 1.0)[position]
    diagonal = torch.zeros(batch, nb, dtype=torch.float64, device=device)
    diagonal.scatter_add_(1, (local // block).expand(batch, -1), inside)
    pairs = torch.where(key_block < own[:, None], pairs, 0.0)
    return torch.where(key_block == own[:, None], diagonal[:, :, None], pairs)


def _column_ends(index) -> tuple[Tensor, Tensor, Tensor]:
    """Of each column: its block, the last token that may see it, and whether it is one; ``[b, h, C]``."""
    there = index.columns < index.seq_length
    column = torch.where(there, index.columns, 0).long()
    ends = index.visible.end.long()[:, None].expand(-1, column.shape[1], -1).gather(-1, column)
    return column // index.block_size, ends, there


def density(index) -> Tensor:
    """Share of the visible pairs that a vertical-slash index attends to: float32 ``[b,
    h]``."""
    pairs = index.visible.pairs(index.block_size)
    kept = (index.distances() * pairs[:, None]).sum(-1)
    return ((kept + _column_pairs(index)) / pairs.sum(-1, keepdim=True)).float()


def pruned_density(index, kept: Tensor, rank: int) -> Tensor:
    """Share of the visible pairs that is attended to if of an index's blocks only those stay
    where ``kept`` is not 0 (``[b, h, nb, NB]``, by own query block of a rank), and its columns: float32 ``[b,
    h]``. The mean over ranks is that of the whole. Nothing is read on the host."""
    pairs = visible_pairs(index, rank)
    # One head at a time: the blocks of all heads in float64 may take more memory than attention.
    heads = [((kept[:, head] > 0) * pairs).sum((-1, -2)) for head in range(kept.shape[1])]
    every = index.visible.pairs(index.block_size).sum(-1, keepdim=True)
    own = torch.stack(heads, 1) * index.world
    return ((own + _column_pairs(index)) / every).float()


def _column_pairs(index) -> Tensor | int:
    """Pairs that are attended to in columns: ``[b, h]``."""
    if not index.columns.shape[-1]:
        return 0
    block = index.block_size
    column, end, there = _column_ends(index)
    apart = end // block - column
    outside = ~index.distances()
    upto = outside.long().cumsum(-1)
    # Query blocks before the last that sees the column see it with all rows.
    seen = upto.gather(-1, (apart - 1).clamp(min=0)) * block
    seen += outside.gather(-1, apart) * (end % block + 1)
    return torch.where(there & (apart > 0), seen, 0).sum(-1)


def work(index, ranks) -> Tensor:
    """Attended pairs of the queries of ``ranks``: float64 ``[b, h, rank, round]``, 0 for other ranks."""
    batch, heads, num_blocks = index.member.shape
    block, outer, device = index.block_size, index.outer, index.member.device
    result = torch.zeros(batch, heads, index.world, outer, dtype=torch.float64, device=device)
    column, end, there = _column_ends(index)
    for rank in ranks:
        mask, pairs = index.block_mask(rank), visible_pairs(index, rank)
        own = torch.arange(num_blocks // index.world, device=device)
        own = block_at(own, rank, index.world, index.inner)
        number = (own[:, None] - torch.arange(num_blocks, device=device)) % outer
        for head in range(heads):
            kept = torch.where(mask[:, head], pairs, 0.0)
            for o in range(outer):
                result[:, head, rank, o] = torch.where(number == o, kept, 0.0).sum((-1, -2))
            apart = own[:, None] - column[:, head, None]
            covered = index.distances()[:, head].gather(-1, apart.clamp(min=0).flatten(1))
            seen = (apart > 0) & ~covered.view(apart.shape) & there[:, head, None]
            rows = (end[:, head, None] + 1 - own[:, None] * block).clamp(0, block)
            result[:, head, rank, head * outer // heads] += torch.where(seen, rows, 0).sum((-1, -2))
    return result
