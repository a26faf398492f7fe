# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Operands of the pattern search's kernels, and their attention written out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_mtraining.kernels.selection import reference_masses
from megatron_mtraining.layout import stripe
from megatron_mtraining.pattern.sampled_rows import SampledRows, stratified_rows
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import random_operands

SCALE = 0.3


class Case(NamedTuple):
    seq_length: int
    world: int
    batch: int
    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    strata: int
    rows_per_stratum: int
    window_blocks: int
    num_sinks: int

    def __str__(self) -> str:
        return (
            f"N{self.seq_length}-cp{self.world}-b{self.batch}-H{self.num_heads}-KV{self.kv_heads}"
            f"-D{self.head_dim}-B{self.block_size}-rows{self.strata}x{self.rows_per_stratum}"
        )


CASES = [
    Case(200, 1, 2, 7, 1, 64, 64, 9, 1, 2, 3),
    Case(300, 1, 1, 2, 2, 64, 128, 5, 3, 1, 0),
    Case(384, 2, 1, 4, 2, 128, 64, 8, 2, 2, 70),
    Case(576, 3, 1, 2, 1, 64, 64, 40, 1, 0, 4),
    Case(256, 2, 1, 2, 1, 96, 64, 8, 2, 1, 3),
    Case(200, 1, 1, 2, 2, 256, 128, 5, 1, 1, 2),
]


def case_operands(case: Case, dtype=torch.float32, device="cpu"):
    """Query, key and value of the whole sequence."""
    return random_operands(
        case.seq_length, case.batch, case.num_heads, case.kv_heads, case.head_dim, dtype, device
    )[:3]


def sampled_rows(
    query, rank, world, block_size, strata, rows_per_stratum, window_blocks, held_out=0
) -> SampledRows:
    """Sampled rows of a whole sequence's queries, as one rank holds them."""
    rows = stratified_rows(query.shape[0], strata, rows_per_stratum, query.device)
    return SampledRows(
        query=query.index_select(0, rows),
        rows=rows.int(),
        rows_per_stratum=rows_per_stratum,
        num_selection_rows=rows_per_stratum - held_out,
        drop_max_stratum=True,
        stratified=True,
        window_blocks=window_blocks,
        seq_length=len(query),
        rank=rank,
        world=world,
        inner=world,
        block_size=block_size,
        softmax_scale=SCALE,
    )


def rows_of_case(case: Case, query, rank: int, held_out: int = 0) -> SampledRows:
    return sampled_rows(
        query, rank, case.world, case.block_size, case.strata, case.rows_per_stratum,
        case.window_blocks, held_out,
    )  # fmt: skip


def local_part(tensor, rank, world, block_size):
    """A rank's part of a tensor of the whole sequence."""
    return tensor if world == 1 else stripe(tensor, rank, world, block_size)


def dense_probabilities(query, key, rows, scale):
    """Causal attention of some rows: float64 ``[b, h, R, N]``."""
    group = query.shape[2] // key.shape[2]
    q = query.index_select(0, rows).permute(1, 2, 0, 3).double()
    k = key.permute(1, 2, 3, 0).double().repeat_interleave(group, 1)
    future = torch.arange(len(key), device=rows.device) > rows[:, None]
    return (q @ k * scale).masked_fill(future, float("-inf")).softmax(-1)


def dense_masses(query, key, rows, rows_per_stratum, window_blocks, block_size, scale, taken=None):
    """Mass by column and by token distance beyond the window: float64 ``[b, h, N]`` each. Columns in
    ``taken``, bool ``[b, h, N]``, are left out of the distances' sums."""
    p = dense_probabilities(query, key, rows, scale)
    position = torch.arange(len(key))
    p = p.masked_fill(rows[:, None] // block_size - position // block_size < window_blocks, 0)
    strata = p.unflatten(2, (-1, rows_per_stratum)).sum(3)
    columns = strata.sum(2) - strata.amax(2)
    if taken is not None:
        p = p.masked_fill(taken[:, :, None], 0)
    diagonals = torch.zeros_like(columns)
    for i, row in enumerate(rows.tolist()):
        diagonals[..., : row + 1] += p[:, :, i, : row + 1].flip(-1)
    return columns, diagonals


class ColumnOperands(NamedTuple):
    rows: SampledRows
    key: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    lse: torch.Tensor


def column_operands(device, packed: bool, dim: int = 64) -> ColumnOperands:
    """70 random columns of each head of a sequence of 500 tokens, 9 in the first head. One row of three in a
    stratum is held out."""
    torch.manual_seed(8)
    query, key, _, _ = random_operands(500, 2, 4, 2, dim, torch.float32, device)
    rows = sampled_rows(query, 0, 1, 64, 8, 3, 2, held_out=1)
    if packed:
        ranges = VisibleRanges.from_lengths([[60, 1, 300, 139], [500]], 500, device).windowed(400)
        starts = ranges.start[:, rows.rows.long()].contiguous()
        rows = replace(rows, visible=ranges, starts=starts, costs=ranges.costs(64))
    lse = reference_masses.merge_lse(reference_masses.partial_lse(rows, key))
    positions = torch.stack([torch.randperm(500)[:70] for _ in range(8)]).view(2, 4, 70).int()
    positions[0, 0, 9:] = 500
    keys = key.permute(1, 2, 0, 3).repeat_interleave(2, 1)
    at = positions.long().clamp(max=499)[..., None].expand(-1, -1, -1, dim).to(device)
    return ColumnOperands(rows, key, keys.gather(2, at).contiguous(), positions.to(device), lse)


def planted_operands(dtype=torch.float32, seq_length=768, device="cpu", block_size=64, dim=64):
    """Queries and keys in which the third block of keys is like the last block of queries."""
    query, key, _, _ = random_operands(seq_length, 2, 4, 2, dim, dtype, device)
    key[block_size * 2 : block_size * 3] += query[-block_size:, :, ::2]
    return query, key
