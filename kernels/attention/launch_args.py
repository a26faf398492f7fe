# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Launch arguments that the portable and the Hopper kernels share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..common.launch import cdiv
from ..types import PatternOperand, RingStep, Round
from .marks import BlockMarks

BLOCK_DISTANCES = [
    f"{what}_{parity}{apart}" for parity in "01" for apart in "01" for what in ("residue", "wrap")
]
"""Parameters of the gradient of keys, see :func:`block_distances`. ``parity`` is the key block's local number
modulo 2, ``apart`` whether the query block's differs."""


CHAIN = 256
"""Query tiles of a chain, at least: what tensor cores sum for a tile of keys or columns before the sum is put
aside, in float32.

Tensor cores round towards zero as they add: a column's sum over 524288 rows, in one chain, is 0.3% short."""


def chain_tiles(most: int, least: int = 1) -> int:
    """Query tiles of a chain, ``least`` or more; 0, for no end, if none has more than ``most``."""
    chain = max(CHAIN, least)
    return chain if most > chain else 0


def partial_sums(
    grad_kv: Tensor, accumulator: Tensor | None, chain: int, segments: bool = False
) -> Tensor:
    """Where sums of keys are put aside, of chains or of segments: float32 ``[2, s, b, hk, d]`` with the
    strides of ``grad_kv``."""
    if accumulator is not None:
        return accumulator
    if (chain == 0 and not segments) or grad_kv.dtype == torch.float32:
        return grad_kv
    # Not touched unless a key block has more tiles to add.
    return torch.empty_like(grad_kv, dtype=torch.float32)


def sizes_of(index: PatternOperand) -> tuple:
    """All of an index that numbers among the arguments follow from."""
    return (
        index.has_block_lists, index.visible is None, index.member.shape, index.columns.shape,
        index.column_ptr.shape, index.list_strides, index.block_size, index.world, index.inner,
    )  # fmt: skip


def round_arguments(index: PatternOperand, round_: Round) -> dict[str, Any]:
    """Arguments of kernels that hold queries: which keys of a round they attend to, and constants of that."""
    return {**round_tensors(index), **round_numbers(index, round_)}


def round_tensors(index: PatternOperand) -> dict[str, Tensor]:
    """Those of :func:`round_arguments` that are tensors."""
    return dict(
        block_ptr=index.round_ptr,
        block_list=index.round_list,
        member=index.member,
        columns=index.columns,
        column_ptr=index.column_ptr,
    )


def round_numbers(index: PatternOperand, round_: Round) -> dict[str, Any]:
    """Those of :func:`round_arguments` that are numbers."""
    return dict(
        ptr_len=index.column_ptr.shape[-1],
        list_len=index.list_strides[0],
        column_len=index.columns.shape[-1],
        local_blocks=index.local_blocks,
        round_start=index.round_start(round_.round_index),
        wrap=round_.wrap,
        rank=round_.rank,
        world=index.world,
        round_index=round_.round_index,
        outer=index.outer,
        INNER=index.inner,
        HEADS=index.columns.shape[1],
        BLOCK=index.block_size,
        FIRST=round_.first,
        LISTS=index.has_block_lists,
        RANGES=index.visible is not None,
    )


def block_distances(index: PatternOperand, ring_step: RingStep) -> list[int]:
    """``RingStep.block_distances`` as the kernels take them: for key blocks of even and of odd local number,
    where the counts of each residue begin in a head's ``rank_ptr``, and the wrap. With block lists, the first
    is where the counts of the keys' rank begin, and the others are not read."""
    if index.has_block_lists:
        batch, heads, _ = index.member.shape
        return [ring_step.source * batch * heads * index.local_blocks, *[0] * 7]
    return list(_block_distances(ring_step, index.local_blocks))


@functools.lru_cache(maxsize=1024)
def _block_distances(ring_step: RingStep, local_blocks: int) -> tuple[int, ...]:
    length = cdiv(local_blocks, 2)
    return tuple(
        number
        for parity in (0, 1)
        for residue, _, wrap in ring_step.block_distances(parity)
        for number in (residue * length, wrap)
    )


def column_splits(index: PatternOperand, num_heads: int, block_n: int) -> int:
    """Into how many splits to divide the queries of each tile of ``block_n`` columns, for about 4 programs a
    multiprocessor. More splits cost memory and additions."""
    tiles = max(1, index.columns.shape[-1] // block_n) * num_heads
    splits = 1
    while splits < 8 and tiles * splits < 512 and splits * 4 <= index.local_blocks:
        splits *= 2
    return splits


def column_arguments(index: PatternOperand, rank: int, splits: int) -> dict[str, Any]:
    """Arguments of kernels that hold columns, for the queries of ``rank``: the columns of each head, and
    which query blocks attend to them as columns."""
    return dict(
        member=index.member,
        columns=index.columns,
        column_ptr=index.column_ptr,
        ptr_len=index.column_ptr.shape[-1],
        local_blocks=index.local_blocks,
        rank=rank,
        world=index.world,
        inner=index.inner,
        HEADS=index.columns.shape[1],
        BLOCK=index.block_size,
        SPLITS=splits,
        RANGES=index.visible is not None,
    )


def key_ranges(index: PatternOperand, rank: int) -> dict[str, Tensor | None]:
    """Visible ranges as kernels that hold keys take them, for the queries of ``rank``. Without ranges
    None, which compiles to nothing."""
    if index.visible is None:
        return dict(first_keys=None, q_block_bounds=None)
    local = index.visible.on(rank, index.world, index.inner, index.block_size)
    return dict(first_keys=local.start, q_block_bounds=local.q_block_bounds)


def mark_arguments(marks: BlockMarks | None) -> dict[str, Any]:
    """Arguments of the forward kernels, for the marks of blocks."""
    return dict(**mark_tensors(marks), MARKS=marks is not None)


def mark_tensors(marks: BlockMarks | None) -> dict[str, Tensor | None]:
    """Those of :func:`mark_arguments` that are tensors."""
    if marks is None:
        return dict(words=None, least_share_ptr=None)
    return dict(words=marks.words, least_share_ptr=marks.least_share)
