# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The sample of query rows that a pattern is estimated from.

MTraining (arXiv 2510.18830) searches the pattern online, in each step, from the last rows of the sequence.
Here rows are spread over all of it, so that columns and diagonals which only earlier parts use are found too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import LastRowsSampling, MTrainingConfig, Sampling
from ..cp_group import CPGroup
from ..kernels.selection import merge_lse, partial_lse
from ..kernels.types import SampledRows
from ..layout import located
from ..visibility import VisibleRanges
from .constants import read


def stratified_rows(seq_length: int, strata: int, rows: int, device=None) -> Tensor:
    """Positions of query rows in every stratum: int64 ``[strata * rows]``, ascending, each once if there are
    no more of them than tokens.

    Each of ``strata`` equal stretches of the sequence has ``rows`` evenly spread rows, at an offset that
    differs from stratum to stratum (multiples of the golden ratio): equal offsets would see only keys at a
    few positions within their blocks. The same in every step, so that a replay under activation recomputation
    selects the same pattern.
    """
    cell = torch.arange(strata * rows, device=device)
    low = cell * seq_length // (strata * rows)
    high = (cell + 1) * seq_length // (strata * rows)
    golden = (cell // rows + 1) * 40503 % 65536  # 65536 x 0.618...
    return low + (high - low) * golden // 65536


def last_rows(seq_length: int, rows: int, device=None) -> Tensor:
    """Positions of the last query rows, as published methods sample: int64 ``[rows]``."""
    return torch.arange(seq_length - rows, seq_length, device=device).clamp(min=0)


def rows_of(
    sampling: Sampling, seq_length: int, device=None, visible: VisibleRanges | None = None
) -> Tensor:
    """Positions of the query rows of a sampling: int64 ``[R]``; of those that are no padding."""
    if visible is not None and visible.rows is not None:
        return visible.rows[rows_of(sampling, len(visible.rows), device)]
    if isinstance(sampling, LastRowsSampling):
        return last_rows(seq_length, sampling.rows, device)
    return stratified_rows(seq_length, sampling.strata, sampling.rows, device)


class _LocalRows(NamedTuple):
    """Where the sampled rows are. The same in every layer, so kept: they take a dozen launches."""

    row: Tensor
    """int32 ``[R]``, their positions."""
    local: Tensor
    """int64 ``[R]``, their positions in this rank's part (0 for other ranks' rows)."""
    elsewhere: Tensor
    """bool ``[R, 1, 1, 1]``, which rows other ranks have."""
    held: HeldRows


class HeldRows(NamedTuple):
    """Where the rows are that measure recall."""

    numbers: Tensor
    """int64 ``[M]``, among the sampled rows."""
    block: Tensor
    """int64 ``[M]``, their query blocks on this rank (0 for other ranks' rows)."""
    here: Tensor
    """uint8 ``[M, 1]``, whether this rank has the row."""


def _place(
    row: Tensor, sampling: Sampling, rank: int, world: int, inner: int, block_size: int
) -> _LocalRows:
    owner, local = located(row, world, block_size, inner)
    here = owner == rank
    local = torch.where(here, local, 0)
    numbers = torch.arange(len(row), device=row.device)
    if not isinstance(sampling, LastRowsSampling):
        numbers = of_held_out(numbers, sampling.rows, sampling.rows - sampling.held_out_rows)
    held = HeldRows(
        numbers.contiguous(), local[numbers] // block_size, here[numbers, None].to(torch.uint8)
    )
    return _LocalRows(row.int(), local, ~here[:, None, None, None], held)


def of_held_out(of_rows: Tensor, rows_per_stratum: int, num_selection_rows: int) -> Tensor:
    """Numbers of the sampled rows, ``[..., R]``, of the held-out ones; of all rows if none are."""
    strata = of_rows.unflatten(-1, (-1, rows_per_stratum))
    return strata[..., num_selection_rows % rows_per_stratum :].flatten(-2)


@lru_cache(maxsize=256)  # more than a stream has captured searches, which look here in each replay
def _local_rows(seq_length: int, sampling: Sampling, device, *layout: int) -> _LocalRows:
    with torch.inference_mode(False):
        return _place(rows_of(sampling, seq_length, device), sampling, *layout)


def gather_rows(
    query: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    out: Tensor | None = None,
    visible: VisibleRanges | None = None,
) -> Tensor:
    """The queries of the sampled rows on all ranks, ``[R, b, h, d]``, in one small collective.

    Args:
        query: ``[s, b, h, d]``, this rank's part, block-striped.
        out: memory for them.
    """
    rows = _rows_on(len(query) * cp.world, query.device, config, cp, visible)
    sampled = torch.index_select(query, 0, rows.local, out=out)
    if cp.world > 1:
        # One rank has each row, so the sum is exact in any dtype.
        sampled = cp.all_reduce(sampled.masked_fill_(rows.elsewhere, 0))
    return sampled


def held_rows(sample: SampledRows, config: MTrainingConfig, cp: CPGroup) -> HeldRows:
    """The rows of a call's sample that measure recall."""
    return _rows_on(sample.seq_length, sample.rows.device, config, cp, sample.visible).held


def _rows_on(
    seq_length: int,
    device: torch.device,
    config: MTrainingConfig,
    cp: CPGroup,
    visible: VisibleRanges | None,
) -> _LocalRows:
    """The rows of a call."""
    at = config.sampling, device, cp.rank, cp.world, cp.inner, config.block_size
    if visible is None or visible.rows is None:
        return read(_local_rows(seq_length, *at))
    sampling, _, *layout = at
    return visible.once(
        ("rows", *at),
        lambda: _place(rows_of(sampling, seq_length, device, visible), sampling, *layout),
    )


def gather_sampled_rows(
    query: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    window_blocks: int,
    softmax_scale: float,
    visible: VisibleRanges | None = None,
) -> SampledRows:
    """The sampled rows on all ranks (:func:`gather_rows`).

    Args:
        query: ``[s, b, h, d]``, this rank's part, block-striped.
        window_blocks: see :class:`SampledRows`.
    """
    block, sampling = config.block_size, config.sampling
    seq_length = query.shape[0] * cp.world
    row = _rows_on(seq_length, query.device, config, cp, visible).row
    sampled = gather_rows(query, config, cp, visible=visible)
    if isinstance(sampling, LastRowsSampling):  # each row is a stratum of its own
        kind = dict(
            rows_per_stratum=1, num_selection_rows=1, drop_max_stratum=False, stratified=False
        )
    else:
        kind = dict(
            rows_per_stratum=sampling.rows,
            num_selection_rows=sampling.rows - sampling.held_out_rows,
            drop_max_stratum=True,
            stratified=True,
        )
    if visible is not None:
        starts = visible.once(
            ("starts", sampling), lambda: visible.start[:, row.long()].contiguous()
        )
        kind.update(visible=visible, starts=starts)
        kind.update(costs=visible.costs(block) if kind["stratified"] else None)
    return SampledRows(
        sampled, row, **kind, window_blocks=window_blocks, seq_length=seq_length,
        rank=cp.rank, world=cp.world, inner=cp.inner, block_size=block, softmax_scale=softmax_scale,
    )  # fmt: skip


def _exposed(
    visible: VisibleRanges | None,
    n: int,
    sampling: Sampling,
    block: int,
    window_blocks: int,
    sink: int,
) -> Tensor:
    """:func:`exposed_rows`, float32 ``[b]``."""
    rows = rows_of(sampling, n, "cpu" if visible is None else visible.start.device, visible)
    if not isinstance(sampling, LastRowsSampling):
        rows = rows.view(-1, sampling.rows)[:, -sampling.held_out_rows :].flatten()
    first_key = rows.new_zeros(1, len(rows)) if visible is None else visible.start[:, rows]
    window = (rows // block - window_blocks + 1) * block
    return (first_key.clamp(min=sink) < window).float().mean(-1)


@lru_cache(maxsize=256)
def _exposed_alone(n: int, *of_pattern) -> float:
    return _exposed(None, n, *of_pattern).item()


def exposed_rows(sample: SampledRows, config: MTrainingConfig) -> float | Tensor:
    """The share of the rows that measure recall from which a pattern can take attention: those that see keys
    beyond the local window and the sinks, which are always kept. A number, or with ranges float32 ``[b]``,
    computed once for all layers."""
    of_pattern = config.sampling, config.block_size, sample.window_blocks, config.sink
    visible = sample.visible
    if visible is None:
        return _exposed_alone(sample.seq_length, *of_pattern)
    return visible.once(of_pattern, lambda: _exposed(visible, sample.seq_length, *of_pattern))


def sampled_lse(sample: SampledRows, key: Tensor, cp: CPGroup) -> Tensor:
    """Log-sum-exp of the sampled rows' scores over the keys of all ranks: float32 ``[b, h, R]``, in one small
    collective. ``key`` ``[s, b, hk, d]`` is this rank's part."""
    return merge_lse(cp.all_gather(partial_lse(sample, key)).flatten(0, 1))
