# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Arguments that the launches of the forward and of the queries' gradient share on Hopper GPUs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...types import PatternOperand
from ..launch_args import round_arguments
from ..operands import RoundKeys
from .descriptors import chunk_rows, descriptor_heads_first, gathered_descriptor, tile_dim


@functools.cache
def _multiprocessors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(tensor, num_items: int) -> int:
    """Programs to start for that many work items: at most one a multiprocessor."""
    return min(_multiprocessors(tensor.device) if tensor.is_cuda else 132, num_items)


TILE_BYTES = 32 * 1024
"""Of a tile of keys or of values, at most. Two of each are in shared memory, beside queries and results; with
heads of 256 not all of that fits (:func:`stored_by_tma`, ``backward_query.py``)."""


def tile_keys(key: Tensor, block: int) -> int:
    """Keys of a tile: a whole block, where it is not larger than ``TILE_BYTES``."""
    return min(block, TILE_BYTES // (tile_dim(key.shape[-1]) * key.element_size()))


def stored_by_tma(result: Tensor, keys: RoundKeys) -> bool:
    """Whether a result [s, b, h, d] is stored from shared memory: in the last round, which has it in 16 bits,
    where there is room for it."""
    return keys.round.last and result.shape[-1] <= 128


def key_descriptors(keys: RoundKeys, index: PatternOperand) -> dict[str, Any]:
    """Arguments of both kernels: descriptors of a round's keys and values."""
    block_shape = [1, 1, tile_keys(keys.key, index.block_size), tile_dim(keys.key.shape[-1])]
    k, v = (gathered_descriptor(tensor, block_shape) for tensor in (keys.key, keys.value))
    column_k, column_v = k, v  # not read
    if keys.column_kv is not None:
        column_k, column_v = (
            descriptor_heads_first(tensor, block_shape) for tensor in keys.column_kv.unbind()
        )
    return dict(k_desc=k, v_desc=v, column_k_desc=column_k, column_v_desc=column_v)


def item_arguments(
    query: Tensor, keys: RoundKeys, index: PatternOperand, num_items: int, softmax_scale: float
) -> dict[str, Any]:
    """Arguments of both kernels: the pattern of a round and its ranges, the layout of its keys, sizes, and
    options of the compiler."""
    key, round_ = keys.key, keys.round
    first_keys, kv_block_bounds = None, None
    if index.visible is not None:
        local = index.visible.on(round_.rank, index.world, index.inner, index.block_size)
        first_keys, kv_block_bounds = local.start_f32, local.kv_block_bounds
    return dict(
        **round_arguments(index, round_),
        first_keys=first_keys,
        kv_block_bounds=kv_block_bounds,
        query_len=query.shape[0],
        num_items=num_items,
        softmax_scale=softmax_scale,
        chunk_rows=chunk_rows(key),
        GROUP=index.columns.shape[1] // key.shape[3],
        HEAD_DIM=key.shape[-1],
        D=tile_dim(key.shape[-1]),
        BLOCK_N=tile_keys(key, index.block_size),
        STAGES=2,
        COLUMNS=keys.column_kv is not None,
        num_warps=4,
        maxnreg=168,
    )
