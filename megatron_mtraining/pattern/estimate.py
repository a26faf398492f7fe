# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention mass of this step's own queries and keys, from a sample of query rows.

Follows the idea of MTraining (arXiv 2510.18830): the pattern is found online, in each step. Its sample is
the last rows of the sequence; here rows are spread over all of it, so that columns and diagonals
that only earlier parts use are seen too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import diagonal_mass
from ..layout import locate, token_positions


@dataclass
class SampledAttention:
    """Softmax probabilities of sampled query rows over this rank's keys.

    Attributes:
        probabilities: float32 ``[b, h, R, s]``; each row sums to 1 over all ranks.
        rows: int64 ``[R]``, global positions of the rows, ascending, ``sample_rows`` a stratum.
        keys: int64 ``[s]``, global positions of this rank's keys, ascending.
    """

    probabilities: Tensor
    rows: Tensor
    keys: Tensor


def sample_rows(seq_length: int, strata: int, rows: int, device=None) -> Tensor:
    """Query rows to look at: int64 ``[strata * rows]``, ascending, each once if there are no more of
    them than tokens.

    The sequence is cut into ``strata`` stretches with ``rows`` evenly spread rows in each, at an
    offset that differs from stretch to stretch (multiples of the golden ratio): equal offsets would
    see only keys at a few positions within their blocks. The same in every step, so that a replay
    under activation recomputation chooses the same pattern.
    """
    cell = torch.arange(strata * rows, device=device)
    low = cell * seq_length // (strata * rows)
    high = (cell + 1) * seq_length // (strata * rows)
    golden = (cell // rows + 1) * 40503 % 65536  # 65536 x 0.618...
    return low + (high - low) * golden // 65536


def sample_attention(query, key, config, ring, softmax_scale: float) -> SampledAttention:
    """Score the sampled rows against this rank's keys in float32; softmax over all ranks' keys.

    Args:
        query ``[s, b, h, d]``, key ``[s, b, hk, d]``: this rank's parts, block-striped.

    Two small collectives: the rows themselves, and each rank's log-sum-exp.
    """
    length, batch, heads, dim = query.shape
    kv_heads, seq_length = key.shape[2], length * ring.world
    rows = sample_rows(seq_length, config.sample_strata, config.sample_rows, query.device)
    owner, local = locate(rows, ring.world, config.block_size)
    mine = owner == ring.rank
    sampled = query.index_select(0, torch.where(mine, local, 0)).float()
    sampled = ring.all_reduce(sampled.masked_fill(~mine[:, None, None, None], 0))
    # [R, b, h, d] -> [b, hk, group * R, d], to multiply a group's heads with their keys at once.
    sampled = sampled.permute(1, 2, 0, 3).reshape(batch, kv_heads, -1, dim) * softmax_scale
    scores = sampled @ key.permute(1, 2, 3, 0).float()
    scores = scores.view(batch, heads, rows.numel(), length)
    if seq_length % config.block_size == 0:
        keys = token_positions(seq_length, ring.rank, ring.world, config.block_size, query.device)
    else:  # a partial last block, on one rank alone
        keys = torch.arange(seq_length, device=query.device)
    scores.masked_fill_(keys[None, :] > rows[:, None], float("-inf"))
    lse = torch.logsumexp(ring.all_gather(torch.logsumexp(scores, -1)), 0)
    return SampledAttention(scores.sub_(lse[..., None]).exp_(), rows, keys)


def column_mass(sample: SampledAttention, rows_in_stratum: int) -> Tensor:
    """Mass of each of this rank's columns: float32 ``[b, h, s]``.

    The largest share that a single stratum gives is left out: a column must show in two strata, or it
    is a sighting that only hides diagonals.
    """
    mass = sample.probabilities
    if rows_in_stratum > 1:
        mass = mass.unflatten(2, (-1, rows_in_stratum)).sum(3)
    return (mass.sum(2) - mass.amax(2)).clamp_(min=0)


def slash_mass(sample: SampledAttention, config, ring) -> Tensor:
    """Mass of each token diagonal, over all ranks: float32 ``[b, h, N]``, by ``query - key``."""
    seq_length = sample.keys.numel() * ring.world
    mass = diagonal_mass(
        sample.probabilities, sample.rows, seq_length, ring.rank, ring.world, config.block_size
    )
    return ring.all_reduce(mass)
