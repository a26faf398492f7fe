# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Recall: the share of the held-out rows' attention that a pattern keeps.

Everywhere ``key`` is ``[s, b, hk, d]``, this rank's part, and ``lse`` the sampled rows' log-sum-exp, float32
``[b, h, R]``. All ranks get the same, by collectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cp_group import CPGroup
from ..kernels.attention import gather_columns
from ..kernels.common.fixed_point import fixed_point_one
from ..kernels.selection import attention_masses, attention_recall, column_masses
from ..kernels.types import SampledRows, StripedColumns
from ..layout import block_at, owner_of, positions_at


def column_keys(key: Tensor, columns: Tensor, sample: SampledRows, cp: CPGroup) -> Tensor:
    """The keys of columns, of all ranks: ``[b, h, C, d]``.

    Args:
        columns: int32 ``[b, h, C]``, positions; N for none.
    """
    striped = StripedColumns(
        columns, sample.seq_length, sample.block_size, sample.world, sample.inner
    )
    return cp.all_reduce(gather_columns(key, None, striped, cp.rank))[0]


def recall_of(
    sample: SampledRows, masses: Tensor, distances: Tensor, columns: Tensor, held: Tensor
) -> Tensor:
    """The share of attention kept, float32 ``[b, h]``, of held-out rows; of all rows if none are.

    Args:
        masses: int32 ``[2, b, h, NB]``, of ``kernels.selection.attention_masses``, over all ranks.
        distances: uint8 ``[b, h, NB]``.
        columns: int32 ``[b, h, C]``; ``held`` float32 ``[b, h, C]``: what the columns add to these.
    """
    rows = len(sample.rows) // sample.rows_per_stratum
    rows *= sample.rows_per_stratum - sample.num_selection_rows or sample.num_selection_rows
    one = fixed_point_one(len(sample.rows))
    return attention_recall(masses[1], distances, columns, held, sample.seq_length, one, rows)


def held_out(sample: SampledRows, of_rows: Tensor) -> Tensor:
    """Numbers of the sampled rows, ``[..., R]``, of the held-out ones; of all rows if none are."""
    strata = of_rows.unflatten(-1, (-1, sample.rows_per_stratum))
    return strata[..., sample.num_selection_rows % sample.rows_per_stratum :].flatten(-2)


def recall_of_slashes(
    sample: SampledRows,
    key: Tensor,
    lse: Tensor,
    distances: Tensor,
    columns: Tensor,
    sink: int,
    cp: CPGroup,
) -> Tensor:
    """:func:`recall_of` from the beginning: float32 ``[b, h]``."""
    _, masses = attention_masses(sample, key, lse, sink, divide_by_cost=False)
    keys = column_keys(key, columns, sample, cp)
    held = column_masses(sample, keys, columns, lse, distances)
    return recall_of(sample, cp.all_reduce(masses), distances, columns, held)


def recall_of_blocks(
    sample: SampledRows, key: Tensor, lse: Tensor, blocks: Tensor, cp: CPGroup
) -> Tensor:
    """The share of held-out rows' attention in the key blocks that their own blocks attend to: float32 ``[b,
    h]``.

    Every rank scores the rows against its keys, one head at a time: one pass, which takes memory for rows x
    keys of a head.

    Args:
        blocks: uint8 ``[b, h, nb, NB]``, of this rank's query blocks.
    """
    batch, heads, _, num_blocks = blocks.shape
    size, world = sample.block_size, sample.world
    held = held_out(sample, torch.arange(len(sample.rows), device=key.device))
    rows = sample.rows.long()[held]
    owner, local = owner_of(rows // size, world, sample.inner)
    seen = blocks.index_select(2, torch.where(owner == sample.rank, local, 0))
    seen = cp.all_reduce(seen * (owner == sample.rank)[:, None].to(torch.uint8))
    own = block_at(
        torch.arange(-(-len(key) // size), device=key.device), sample.rank, world, sample.inner
    )
    local_tokens = torch.arange(len(key), device=key.device)
    position = positions_at(local_tokens, sample.rank, world, size, sample.inner)
    future = (position > rows[:, None])[None]
    if sample.starts is not None:
        future = future | (position < sample.starts[:, held, None])
    missing = len(own) * size - len(key)
    query = sample.query[held].float()
    kept = torch.zeros(batch, heads, device=key.device)
    for b in range(batch):
        for h in range(heads):
            keys = key[:, b, h * key.shape[2] // heads].float()
            p = torch.exp(query[:, b, h] @ keys.T * sample.softmax_scale - lse[b, h, held, None])
            p = p.masked_fill_(future[b % len(future)], 0).nan_to_num_(nan=0.0).clamp_(max=1)
            p = torch.nn.functional.pad(p, (0, missing)).unflatten(-1, (-1, size)).sum(-1)
            kept[b, h] = (p * seen[b, h][:, own]).sum() / len(rows)
    return cp.all_reduce(kept)
