# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Arguments that the launches of the forward and of the queries' gradient share on Hopper GPUs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...common.launch import Constants, ConstantsCache
from ...types import PatternOperand
from ..launch_args import round_numbers, round_tensors, sizes_of
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
    k = gathered_descriptor(keys.key, block_shape)
    v = gathered_descriptor(keys.value, block_shape)
    column_k, column_v = k, v  # not read
    if keys.column_kv is not None:
        column_keys, column_values = keys.column_kv.unbind()
        column_k = descriptor_heads_first(column_keys, block_shape)
        column_v = descriptor_heads_first(column_values, block_shape)
    return dict(k_desc=k, v_desc=v, column_k_desc=column_k, column_v_desc=column_v)


def item_tensors(keys: RoundKeys, index: PatternOperand) -> dict[str, Tensor | None]:
    """Arguments of both kernels: the pattern of a round and its ranges."""
    first_keys, kv_block_bounds = None, None
    if index.visible is not None:
        local = index.visible.on(keys.round.rank, index.world, index.inner, index.block_size)
        first_keys, kv_block_bounds = local.start_f32, local.kv_block_bounds
    return dict(
        **round_tensors(index),
        first_keys=first_keys,
        kv_block_bounds=kv_block_bounds,
    )


_CONSTANTS = ConstantsCache()


def item_constants(
    query: Tensor,
    keys: RoundKeys,
    index: PatternOperand,
    num_items: int,
    softmax_scale: float,
    stored: dict[str, Tensor],
    **own: Any,
) -> Constants:
    """Arguments of both kernels: the layout of a round's keys and of what is ``stored``, ``[s, b, h, d]``
    each, by the name that its strides have; sizes; and options of the compiler. And a kernel's own."""
    key = keys.key
    strides = {name: each.stride() for name, each in stored.items()}

    def make() -> dict[str, Any]:
        by_name = {
            f"stride_{name}{what}": stride
            for name, each in strides.items()
            for what, stride in zip("mbh", each)
        }
        return dict(
            **round_numbers(index, keys.round),
            **by_name,
            **own,
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

    given = (
        query.shape[0], key.shape, key.stride(), key.dtype, keys.round, keys.column_kv is None, num_items,
        softmax_scale, TILE_BYTES, *sizes_of(index), *strides.items(), *own.items(),
    )  # fmt: skip
    return _CONSTANTS.get(given, make)
