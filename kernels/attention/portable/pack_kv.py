# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Keys and values side by side, as they travel between ranks: one copy of both, whatever their strides."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch
from ...common.tiles import of_rows, row_dims

BLOCK_N = 64


@triton.jit(do_not_specialize=["rows"])  # 1 would be a constant, of no type
def _pack_kernel(
    k_ptr,  # [s, b, hk, d]
    v_ptr,  # [s, b, hk, d]
    out_ptr,  # [2, s, b, hk, d], contiguous
    stride_kn,
    stride_kb,
    stride_kh,
    stride_vn,
    stride_vb,
    stride_vh,
    rows,  # s * b * hk
    batch,  # b
    HEADS: tl.constexpr,  # hk
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(
        0, BLOCK_N
    )  # [BLOCK_N], of the result
    inside = of_rows((row < rows)[:, None], D)
    head = row % HEADS
    b = row // HEADS % batch
    n = row // HEADS // batch
    offs_d = row_dims(D)[None, :]
    target = row[:, None] * D + offs_d  # [BLOCK_N, D]
    k_offsets = (n * stride_kn + b * stride_kb + head * stride_kh)[:, None] + offs_d
    v_offsets = (n * stride_vn + b * stride_vb + head * stride_vh)[:, None] + offs_d
    k = tl.load(k_ptr + k_offsets, mask=inside)
    v = tl.load(v_ptr + v_offsets, mask=inside)
    tl.store(out_ptr + target, k, mask=inside)
    tl.store(out_ptr + rows.to(tl.int64) * D + target, v, mask=inside)


def pack_kv(key: Tensor, value: Tensor, out: Tensor) -> None:
    """See :func:`..reference.pack_kv`."""
    length, batch, heads, dim = key.shape
    rows = length * batch * heads
    launch(
        _pack_kernel,
        (cdiv(rows, BLOCK_N),),
        k_ptr=key,
        v_ptr=value,
        out_ptr=out,
        stride_kn=key.stride(0),
        stride_kb=key.stride(1),
        stride_kh=key.stride(2),
        stride_vn=value.stride(0),
        stride_vb=value.stride(1),
        stride_vh=value.stride(2),
        rows=rows,
        batch=batch,
        HEADS=heads,
        D=dim,
        BLOCK_N=BLOCK_N,
        num_warps=4,
    )
