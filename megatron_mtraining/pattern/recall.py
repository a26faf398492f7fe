# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Recall: the share of the held-out rows' attention that a pattern keeps.

Everywhere ``key`` is ``[s, b, hk, d]``, this rank's part, and ``lse`` the sampled rows' log-sum-exp, float32
``[b, h, R]``. All ranks get the same, by collectives.
"""

from __future__ import annotations

from torch import Tensor

from ..cp_group import CPGroup
from ..kernels.attention import gather_columns
from ..kernels.common.fixed_point import fixed_point_one
from ..kernels.selection import (
    attention_in_blocks,
    attention_masses,
    attention_recall,
    column_masses,
)
from ..kernels.types import SampledRows, StripedColumns
from .sampled_rows import HeldRows, of_held_out


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
    return of_held_out(of_rows, sample.rows_per_stratum, sample.num_selection_rows)


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
    sample: SampledRows, key: Tensor, lse: Tensor, blocks: Tensor, held: HeldRows, cp: CPGroup
) -> Tensor:
    """The share of held-out rows' attention in the key blocks that their own blocks attend to: float32 ``[b,
    h]``.

    Args:
        blocks: uint8 ``[b, h, nb, NB]``, of this rank's query blocks.
        held: where the held-out rows are.
    """
    seen = blocks.index_select(2, held.block)
    if cp.world > 1:
        seen = cp.all_reduce(seen * held.here)
    kept = attention_in_blocks(sample, key, lse, held.numbers, seen)
    return cp.all_reduce(kept) / len(held.numbers)
