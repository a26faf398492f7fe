# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reference implementation of ``lse.py``, ``masses.py`` and ``diagonal_mass.py`` in plain PyTorch.

It materializes the scores of all sampled rows and local keys: for tests and small runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import positions_at
from ..common.fixed_point import fixed_point_one
from ..types import SampledRows


def partial_lse(sampled_rows: SampledRows, key: Tensor) -> Tensor:
    """Log-sum-exp of each sampled row's scores over this rank's keys, in parts.

    Args:
        key: ``[s, b, hk, d]``, this rank's keys, with unit stride in the last dimension.

    Returns:
        float32 ``[parts, b, h, R]``, natural logarithms, for :func:`merge_lse`; -inf for a part without
        keys that the row sees.
    """
    scores, position = _scores(sampled_rows, key)
    scores.masked_fill_(unseen(sampled_rows, position), float("-inf"))
    return torch.logsumexp(scores, -1)[None]


def merge_lse(parts: Tensor) -> Tensor:
    """Log-sum-exp over the first dimension: float32 ``[parts, ...]`` to ``[...]``."""
    return torch.logsumexp(parts, 0)


def attention_masses(
    sampled_rows: SampledRows, key: Tensor, lse: Tensor, num_sinks: int, divide_by_cost: bool
) -> tuple[Tensor, Tensor]:
    """Attention mass of the sampled rows by column and by block distance, over this rank's keys.

    Args:
        sampled_rows: ``num_selection_rows`` of the rows in each stratum select, the others are held out. With
            ``drop_max_stratum`` the stratum with the largest mass is left out of each column's sum.
        key: ``[s, b, hk, d]``, this rank's keys.
        lse: float32 ``[b, h, R]``, the rows' log-sum-exp over the keys of all ranks.
        num_sinks: number of leading columns of the sequence that order before all others.
        divide_by_cost: divide a column's mass by the number of query blocks that see it beyond their window.

    Returns:
        values: int32 ``[b, h, s]``, the float32 bits of each column's mass beyond the rows' window, from the
            selecting rows. The bits order like the masses; sinks have 2^31 - 1.
        masses: int32 ``[2, b, h, NB]``, mass by block distance in fixed point. ``masses[0]`` is from the
            selecting rows: the mass at each token distance is split between the two block distances that its
            diagonal crosses. ``masses[1]`` is from the held-out rows (from all rows if none are held out), at
            the block distance where the row sees it. Sums over ranks are exact.
    """
    rows = sampled_rows
    length, batch, kv_heads, _ = key.shape
    num_heads, block = rows.query.shape[2], rows.block_size
    position = positions(length, rows.rank, rows.world, rows.inner, block, key.device)
    num_blocks = -(-rows.seq_length // block)
    keys = key.permute(1, 2, 0, 3).repeat_interleave(num_heads // kv_heads, 1)
    selecting, held_out = split_strata(rows, probabilities(rows, keys, position, lse))
    row, held_out_row = split_row_positions(rows)
    beyond_window = row[..., None] // block - position // block >= rows.window_blocks
    total = sum_of_strata(rows, torch.where(beyond_window, selecting, 0.0).sum(3))
    if divide_by_cost:
        cost = num_blocks - position // block - rows.window_blocks
        if rows.costs is not None:
            cost = (rows.costs.further[:, position // block] + 1 - rows.window_blocks)[:, None]
        total = torch.where(cost > 0, total / cost.clamp(min=1), 0.0)
    bits = total.float().contiguous().view(torch.int32)
    values = torch.where(position < num_sinks, 2**31 - 1, bits)

    one = fixed_point_one(len(rows.rows))
    masses = torch.zeros(2, batch, num_heads, num_blocks, dtype=torch.int32, device=key.device)
    # By key block: how much of a row's mass belongs to the block distance before, and to the one after.
    local_blocks = -(-length // block)
    selecting, held_out, position = (
        torch.nn.functional.pad(t, (0, local_blocks * block - length)).unflatten(
            -1, (local_blocks, block)
        )
        for t in (selecting, held_out, position)
    )
    offset = (row[..., None, None] % block - position % block).double() / block
    after = (selecting * offset.clamp(min=0)).sum(-1)
    before = (selecting * (-offset).clamp(min=0)).sum(-1)
    distance = row[..., None] // block - position[:, 0] // block
    add_masses(masses[0], distance - 1, before, one)
    add_masses(masses[0], distance, selecting.sum(-1) - before - after, one)
    add_masses(masses[0], distance + 1, after, one)
    if rows.num_selection_rows == rows.rows_per_stratum:
        held_out, held_out_row = selecting, row
    distance = held_out_row[..., None] // block - position[:, 0] // block
    add_masses(masses[1], distance, held_out.sum(-1), one)
    return values, masses


def diagonal_masses(
    sampled_rows: SampledRows,
    key: Tensor,
    lse: Tensor,
    num_sinks: int,
    selected_columns: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention mass by token distance over this rank's keys, beyond the rows' window and outside of the
    selected columns.

    Args:
        sampled_rows, key, lse, num_sinks: as for :func:`attention_masses`. Sinks are columns always. Held-out
            rows do not count.
        selected_columns: the ``values`` of :func:`attention_masses` and the selection threshold over all
            ranks, int32 ``[2, b, h]``, as :func:`~.topk_torch.select_topk` returns it. None if no
            columns but sinks are selected.

    Returns:
        int32 ``[b, h, N]`` by ``row - key``, in fixed point. Sums over ranks are exact.
    """
    rows = sampled_rows
    scores, position = _scores(rows, key)
    distance = (rows.rows // rows.block_size)[:, None] - position // rows.block_size
    excluded = (distance < rows.window_blocks) | unseen(rows, position)
    row_number = torch.arange(len(rows.rows), device=key.device)
    held_out = row_number % rows.rows_per_stratum >= rows.num_selection_rows
    excluded = excluded | held_out[:, None]
    p = torch.exp(scores - lse[..., None]).masked_fill_(excluded, 0)
    p = p.nan_to_num_(nan=0.0).clamp_(max=1)
    excluded = position < num_sinks
    if selected_columns is not None:
        value, (threshold, last_position) = selected_columns
        tied = (value == threshold[..., None]) & (position <= last_position[..., None])
        excluded = excluded | (value > threshold[..., None]) | tied
        excluded = excluded[:, :, None]
    p.masked_fill_(excluded, 0)
    addend = (p * fixed_point_one(len(rows.rows)) + 0.5).int()
    masses = addend.new_zeros(*p.shape[:2], key.shape[0] * rows.world)
    for i, row in enumerate(rows.rows):
        # Keys after the row have probability 0, wherever it is added.
        masses.index_add_(-1, (row - position).clamp(min=0), addend[:, :, i])
    return masses


def positions(length: int, rank: int, world: int, inner: int, block_size: int, device) -> Tensor:
    """Global positions of a rank's tokens: int64 ``[length]``."""
    # Unlike token_positions, also where the last block is partial.
    return positions_at(torch.arange(length, device=device), rank, world, block_size, inner)


def unseen(sampled_rows: SampledRows, position: Tensor) -> Tensor:
    """Keys that rows do not see: later keys, and keys before their ranges. Broadcasts to ``[b, h, R, k]``;
    ``position`` is ``[k]`` or ``[b, h, k]``."""
    later = position[..., None, :] > sampled_rows.rows[:, None]
    if sampled_rows.starts is None:
        return later
    return later | (position[..., None, :] < sampled_rows.starts[:, None, :, None])


def probabilities(sampled_rows: SampledRows, keys: Tensor, position: Tensor, lse: Tensor) -> Tensor:
    """Probabilities of all rows, float64 ``[b, h, R, k]``, 0 for keys that the row does not see.

    Their sums have other lengths on other numbers of ranks, and the selection must not differ: hence float64.

    Args:
        keys: ``[b, h, k, d]``; position: ``[k]`` or ``[b, h, k]``.
    """
    query = sampled_rows.query.permute(1, 2, 0, 3).double() * sampled_rows.softmax_scale
    p = query @ keys.double().transpose(-1, -2)
    p.sub_(lse[..., None].double())
    p.masked_fill_(unseen(sampled_rows, position), float("-inf"))
    return p.exp_().nan_to_num_(nan=0.0).clamp_(max=1)


def split_strata(sampled_rows: SampledRows, p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``[b, h, R, k]`` of the selecting and of the held-out rows, by stratum:
    ``[b, h, strata, rows, k]`` each."""
    strata = p.unflatten(2, (-1, sampled_rows.rows_per_stratum))
    count = sampled_rows.num_selection_rows
    return strata[:, :, :, :count], strata[:, :, :, count:]


def split_row_positions(sampled_rows: SampledRows) -> tuple[Tensor, Tensor]:
    """Positions of the selecting and of the held-out rows: int64 ``[strata, rows]`` each."""
    rows = sampled_rows.rows.long().unflatten(0, (-1, sampled_rows.rows_per_stratum))
    count = sampled_rows.num_selection_rows
    return rows[:, :count], rows[:, count:]


def sum_of_strata(sampled_rows: SampledRows, strata: Tensor) -> Tensor:
    """Mass by key from the masses by stratum, ``[b, h, strata, k]``."""
    total = strata.sum(2)
    if not sampled_rows.drop_max_stratum:
        return total
    return (total - strata.amax(2)).clamp_(min=0)


def add_masses(out: Tensor, distance: Tensor, mass: Tensor, one: int) -> None:
    """Add masses ``[b, h, ..., k]`` in fixed point to ``out``, int32 ``[b, h, NB]``, at distances that
    broadcast to their shape."""
    num_blocks = out.shape[-1]
    inside = (distance >= 0) & (distance < num_blocks)
    addend = torch.where(inside, (mass * one + 0.5).int(), 0)
    distance = distance.clamp(0, num_blocks - 1).expand(mass.shape)
    out.scatter_add_(-1, distance.flatten(2), addend.flatten(2))


def _scores(sampled_rows: SampledRows, key: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of all rows, float32 ``[b, h, R, s]``, and the keys' global positions."""
    rows = sampled_rows
    num_heads, kv_heads = rows.query.shape[2], key.shape[2]
    query = rows.query.permute(1, 2, 0, 3).float()
    keys = key.permute(1, 2, 3, 0).float().repeat_interleave(num_heads // kv_heads, 1)
    position = positions(
        key.shape[0], rows.rank, rows.world, rows.inner, rows.block_size, key.device
    )
    return query @ keys * rows.softmax_scale, position
