# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The block distances of a pattern in the forms that other kernels take: lists of blocks, intervals of keys.

The pattern is bool ``[heads, NB]``: whether the blocks at each distance are attended to, distance 0 always.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _kept(distances: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """The distances from ``first`` on that each head keeps, ascending, int64 ``[heads, most]``, padded with
    0; how many of them are at most each distance, ``[heads, NB]``; the distances themselves, ``[NB]``."""
    kept = distances.clone()
    kept[:, :first] = False
    blocks = torch.arange(kept.shape[-1], device=kept.device)
    most = max(1, int(kept.sum(-1).max()))
    ascending = torch.where(kept, blocks, len(blocks)).sort(-1).values[:, :most]
    return ascending.where(ascending < len(blocks), 0), kept.cumsum(-1), blocks


def key_blocks(distances: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The key blocks of each query block.

    Args:
        distances: bool ``[heads, NB]``.
        first: the shortest distance that is listed; 1 leaves out the blocks on the diagonal.

    Returns:
        How many key blocks each query block has, int32 ``[1, heads, NB]``, and their numbers, ascending,
        int32 ``[1, heads, NB, most]``, padded with 0.
    """
    ascending, count, blocks = _kept(distances, first)
    heads, most = ascending.shape
    # A far key block comes first: the list of query block i is its distances, the longest first.
    at = count[..., None] - 1 - torch.arange(most, device=distances.device)
    chosen = ascending[:, None].expand(heads, len(blocks), most).gather(-1, at.clamp(min=0))
    order = torch.where(at >= 0, blocks[:, None] - chosen, 0)
    return count[None].int(), order[None].int().contiguous()


def query_blocks(distances: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The query blocks of each key block: :func:`key_blocks` transposed."""
    ascending, count, blocks = _kept(distances, first)
    count = count.flip(-1)
    order = blocks[:, None] + ascending[:, None]
    used = torch.arange(order.shape[-1], device=distances.device) < count[..., None]
    return count[None].int(), torch.where(used, order, 0)[None].int().contiguous()


def key_intervals(distances: Tensor, seq: int, block: int) -> Tensor:
    """The keys of each query as intervals: ``[0, F0)``, ``[F1, F2)``, and so on, under the causal mask.

    Returns:
        The endpoints F, int32 ``[heads, 1 + 2 * runs, seq]``, ascending. ``runs`` is the largest number of
        runs of neighbouring distances that a head has. A query with fewer has empty intervals after its own.
    """
    edge = torch.zeros_like(distances[:, :1])
    begins = distances & ~torch.cat((edge, distances[:, :-1]), -1)
    ends = distances & ~torch.cat((distances[:, 1:], edge), -1)
    shortest, count, blocks = _kept(begins, 0)
    longest = _kept(ends, 0)[0]
    heads, runs = shortest.shape
    # Of the runs that reach query block i, the one with the longest distances has the first keys.
    at = (
        count[:, None] - 1 - torch.arange(runs, device=distances.device)[:, None]
    )  # [heads, runs, NB]
    after = (blocks + 1).expand_as(at)

    def of_runs(values: Tensor) -> Tensor:
        return values[..., None].expand(heads, runs, len(blocks)).gather(1, at.clamp(min=0))

    low = torch.where(at >= 0, (blocks - of_runs(longest)).clamp(min=0), after)
    high = torch.where(at >= 0, blocks - of_runs(shortest) + 1, after)
    bounds = (torch.stack((low, high), 2).flatten(1, 2) * block).int()
    bounds = torch.cat((torch.zeros_like(bounds[:, :1]), bounds), 1)
    # Only what ends at the query's own block ends beyond the query: there the causal mask cuts it.
    position = torch.arange(seq, dtype=torch.int32, device=distances.device)
    found = bounds.repeat_interleave(block, -1)[..., :seq].contiguous()
    return torch.minimum(found, position + 1, out=found)  # in place: it has gigabytes
