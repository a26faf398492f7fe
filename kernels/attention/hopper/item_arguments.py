# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Arguments that the launches of the forward and of the queries' gradient share on Hopper GPUs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...types import PatternIndex, Round
from .descriptors import chunk_rows, descriptor_heads_first, gathered_descriptor


@functools.cache
def _multiprocessors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(tensor, num_items: int) -> int:
    """Programs to start for that many work items: at most one a multiprocessor."""
    return min(_multiprocessors(tensor.device) if tensor.is_cuda else 132, num_items)


def key_descriptors(
    key: Tensor, value: Tensor, column_kv: Tensor | None, block: int
) -> dict[str, Any]:
    """Arguments of both kernels: descriptors of a round's keys and values; operands as in
    ``portable/forward.py``."""
    block_shape = [1, 1, block, key.shape[-1]]
    keys, values = (gathered_descriptor(tensor, block_shape) for tensor in (key, value))
    column_keys, column_values = keys, values  # not read
    if column_kv is not None:
        column_keys, column_values = (
            descriptor_heads_first(tensor, block_shape) for tensor in column_kv.unbind()
        )
    return dict(k_desc=keys, v_desc=values, column_k_desc=column_keys, column_v_desc=column_values)


def index_tensors(index: PatternIndex, rank: int) -> dict[str, Tensor | None]:
    """Arguments of both kernels: the tensors of the index, and of packed documents."""
    starts, kv_block_bounds = None, None
    if index.documents is not None:
        local = index.documents.on(rank, index.world, index.inner, index.block_size)
        starts, kv_block_bounds = local.start_f32, local.kv_block_bounds
    return dict(
        slash_ptr=index.round_ptr,
        slash_list=index.round_list,
        member=index.member,
        columns=index.columns,
        column_ptr=index.column_ptr,
        document_starts=starts,
        kv_block_bounds=kv_block_bounds,
    )


def round_numbers(
    index: PatternIndex,
    round_: Round,
    key: Tensor,
    query_len: int,
    num_items: int,
    softmax_scale: float,
) -> dict[str, Any]:
    """Arguments of both kernels: sizes, where the round is in the index, and the layout of its keys."""
    return dict(
        ptr_len=index.column_ptr.shape[-1],
        list_len=index.list_strides[0],
        column_len=index.columns.shape[-1],
        query_len=query_len,
        local_blocks=index.local_blocks,
        num_items=num_items,
        softmax_scale=softmax_scale,
        round_start=index.round_start(round_.round_index),
        wrap=round_.wrap,
        chunk_rows=chunk_rows(key),
        rank=round_.rank,
        world=index.world,
        round_index=round_.round_index,
        outer=index.outer,
    )


def constants(index: PatternIndex, round_: Round, key: Tensor, has_columns: bool) -> dict[str, Any]:
    """Arguments of both kernels that are constants to the compiler, and its options."""
    heads = index.columns.shape[1]
    return dict(
        INNER=index.inner,
        HEADS=heads,
        GROUP=heads // key.shape[3],
        D=key.shape[-1],
        BLOCK=index.block_size,
        STAGES=2,
        FIRST=round_.first,
        LAST=round_.last,
        COLUMNS=has_columns,
        LISTS=index.has_block_lists,
        PACKED=index.documents is not None,
        num_warps=4,
        maxnreg=168,
    )
