# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Keys and values of each head's columns gathered from a rank, and the inverse: which column each key is.

Columns travel between ranks in the gathered form, a few MB. Each rank fills in those it has; the sum over
ranks has all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch
from ...common.tiles import block_at, of_rows, owner_of, row_dims
from ...types import PatternOperand, StripedColumns


@triton.jit
def _own_columns(columns, entry, column_len, seq_length, rank, world, inner, BLOCK: tl.constexpr):
    """The row, in this rank's part, of each entry of the list of columns, and whether the rank has it."""
    position = tl.load(columns + entry, mask=entry < column_len, other=seq_length)
    owner, local_block = owner_of(position // BLOCK, world, inner)
    owned = (position < seq_length) & (owner == rank)
    return local_block * BLOCK + position % BLOCK, owned


@triton.jit(do_not_specialize=["rank"])
def _gather_kernel(
    k_ptr,  # [s, b, hk, d]
    v_ptr,  # [s, b, hk, d]
    column_k_ptr,  # [b, h, C, d]
    column_v_ptr,  # [b, h, C, d]
    columns,  # [b, h, C]
    stride_kn,
    stride_kb,
    stride_kh,
    stride_vn,
    stride_vb,
    stride_vh,
    column_len,  # C
    seq_length,
    rank,
    world,
    inner,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr,
):
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // HEADS
    kv_head = bh % HEADS // GROUP
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, owned = _own_columns(
        columns + bh * column_len, entry, column_len, seq_length, rank, world, inner, BLOCK
    )
    row = row.to(tl.int64)[:, None]
    offs_d = row_dims(D)[None, :]
    target = (bh * column_len + entry)[:, None] * D + offs_d  # [BLOCK_N, D]
    inside = of_rows((entry < column_len)[:, None], D)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    # Columns of other ranks are 0: they add nothing to the sum.
    column_k_ptr += target
    k = tl.load(k_ptr + row * stride_kn + offs_d, mask=of_rows(owned[:, None], D), other=0.0)
    tl.store(column_k_ptr, k, mask=inside)
    if VALUES:
        v = tl.load(v_ptr + row * stride_vn + offs_d, mask=of_rows(owned[:, None], D), other=0.0)
        tl.store(column_v_ptr + target, v, mask=inside)


def gather_columns(
    key: Tensor, value: Tensor | None, index: PatternOperand | StripedColumns, rank: int
) -> Tensor:
    """See :func:`..reference.gather_columns`."""
    batch, heads, num_columns = index.columns.shape
    dim, block_n = key.shape[3], 32
    has_values = value is not None
    v = key if value is None else value
    gathered = torch.empty(
        (1 + has_values, batch, heads, num_columns, dim), dtype=key.dtype, device=key.device
    )
    launch(
        _gather_kernel,
        (cdiv(num_columns, block_n), batch * heads),
        k_ptr=key,
        v_ptr=v,
        column_k_ptr=gathered[0],
        column_v_ptr=gathered[-1],
        columns=index.columns,
        stride_kn=key.stride(0),
        stride_kb=key.stride(1),
        stride_kh=key.stride(2),
        stride_vn=v.stride(0),
        stride_vb=v.stride(1),
        stride_vh=v.stride(2),
        column_len=num_columns,
        seq_length=index.seq_length,
        rank=rank,
        world=index.world,
        inner=index.inner,
        HEADS=heads,
        GROUP=heads // key.shape[2],
        D=dim,
        BLOCK=index.block_size,
        BLOCK_N=block_n,
        VALUES=has_values,
    )
    return gathered


@triton.jit(do_not_specialize=["rank"])
def _invert_kernel(
    entries,  # [b, h, s]
    columns,  # [b, h, C]
    column_ptr,  # [b, h, NB + 1]
    column_len,  # C
    ptr_len,  # NB + 1
    key_len,  # s
    rank,
    world,
    inner,
    BLOCK: tl.constexpr,
):
    """One program a block of keys of a head."""
    bh = tl.program_id(1).to(tl.int64)
    first_key = tl.program_id(0) * BLOCK
    offsets = tl.arange(0, BLOCK)
    entries += bh * key_len + first_key
    tl.store(entries + offsets, tl.full([BLOCK], -1, tl.int32), mask=offsets < key_len - first_key)
    tl.debug_barrier()  # entries that other threads have just written are written again
    column_ptr += bh * ptr_len + block_at(tl.program_id(0), rank, world, inner)
    # A block has each of its keys once, so no more columns than keys.
    entry = tl.load(column_ptr) + offsets
    mask = entry < tl.load(column_ptr + 1)
    position = tl.load(columns + bh * column_len + entry, mask=mask, other=0)
    tl.store(entries + position % BLOCK, entry, mask=mask)


def invert_columns(index: PatternOperand, rank: int, key_len: int) -> Tensor:
    """Which entry of the list of columns each key of ``rank`` is: int32 ``[b, h, s]``, -1 if none."""
    batch, heads, num_columns = index.columns.shape
    entries = torch.empty((batch, heads, key_len), dtype=torch.int32, device=index.columns.device)
    launch(
        _invert_kernel,
        (cdiv(key_len, index.block_size), batch * heads),
        entries=entries,
        columns=index.columns,
        column_ptr=index.column_ptr,
        column_len=num_columns,
        ptr_len=index.column_ptr.shape[-1],
        key_len=key_len,
        rank=rank,
        world=index.world,
        inner=index.inner,
        BLOCK=index.block_size,
    )
    return entries
