# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Each head's columns gathered from the keys and values, and where the keys' own columns are in the list.

Columns travel between ranks in this form, a few MB: a rank fills in those it owns, and the sum over
ranks is all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...common.launch import cdiv, launch
from ...common.tiles import owner_of


@triton.jit
def _own_columns(columns, entry, column_len, seq_length, rank, world, inner, BLOCK: tl.constexpr):
    """Rows of this rank's part that entries of the list are, and which entries it owns."""
    position = tl.load(columns + entry, mask=entry < column_len, other=seq_length)
    owner, local_block = owner_of(position // BLOCK, world, inner)
    owned = (position < seq_length) & (owner == rank)
    return local_block * BLOCK + position % BLOCK, owned


@triton.jit(do_not_specialize=["rank"])
def _gather_kernel(
    k_ptr, v_ptr, kc_ptr, vc_ptr, columns,
    k_ss, k_sb, k_sh, v_ss, v_sb, v_sh, column_len, seq_length, rank, world, inner,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // HEADS
    kv_head = bh % HEADS // GROUP
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, owned = _own_columns(
        columns + bh * column_len, entry, column_len, seq_length, rank, world, inner, BLOCK
    )
    row = row.to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    to = (bh * column_len + entry)[:, None] * D + d
    inside = (entry < column_len)[:, None]
    k_ptr += batch * k_sb + kv_head * k_sh
    v_ptr += batch * v_sb + kv_head * v_sh
    # Rows of other ranks are zero: nothing to the sum.
    tl.store(
        kc_ptr + to, tl.load(k_ptr + row * k_ss + d, mask=owned[:, None], other=0.0), mask=inside
    )
    if VALUES:
        value = tl.load(v_ptr + row * v_ss + d, mask=owned[:, None], other=0.0)
        tl.store(vc_ptr + to, value, mask=inside)


def gather_columns(key, value, index, rank):
    """Launch the gathering; see :func:`kernels.gather_columns`."""
    batch, heads, columns = index.columns.shape
    dim, rows = key.shape[3], 32
    values = value is not None
    value = value if values else key
    gathered = torch.empty(
        (1 + values, batch, heads, columns, dim), dtype=key.dtype, device=key.device
    )
    launch(
        _gather_kernel, (cdiv(columns, rows), batch * heads),
        key, value, gathered[0], gathered[-1], index.columns, *key.stride()[:3], *value.stride()[:3],
        columns, index.seq_length, rank, index.world, index.inner,
        HEADS=heads, GROUP=heads // key.shape[2], D=dim, BLOCK=index.block_size, ROWS=rows, VALUES=values,
    )  # fmt: skip
    return gathered


@triton.jit(do_not_specialize=["rank"])
def _invert_kernel(
    entries, columns, column_len, key_len, seq_length, rank, world, inner,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, owned = _own_columns(
        columns + bh * column_len, entry, column_len, seq_length, rank, world, inner, BLOCK
    )
    tl.store(entries + bh * key_len + row, entry, mask=owned)


def invert_columns(index, rank, key_len):
    """Which entry of the list of columns each of a rank's keys is: int32 ``[b, h, s]``, -1 if none."""
    batch, heads, columns = index.columns.shape
    shape = (batch, heads, key_len)
    entries = torch.full(shape, -1, dtype=torch.int32, device=index.columns.device)
    rows = 128
    launch(
        _invert_kernel, (cdiv(columns, rows), batch * heads),
        entries, index.columns, columns, key_len, index.seq_length, rank, index.world, index.inner,
        BLOCK=index.block_size, ROWS=rows,
    )  # fmt: skip
    return entries
