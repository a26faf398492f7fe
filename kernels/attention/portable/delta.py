# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Row sums of ``out * grad_out``, which all gradients need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch
from ...common.tiles import load_rows

BLOCK_M = 64


@triton.jit
def _delta_kernel(
    out_ptr,  # [s, b, h, d]
    do_ptr,  # [s, b, h, d]
    delta_ptr,  # [b, h, s]
    stride_om,
    stride_ob,
    stride_oh,
    stride_dom,
    stride_dob,
    stride_doh,
    query_len,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    bh = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    out_ptr += bh // HEADS * stride_ob + bh % HEADS * stride_oh
    do_ptr += bh // HEADS * stride_dob + bh % HEADS * stride_doh
    out = load_rows(out_ptr, start, stride_om, offs_m, query_len, D, False).to(tl.float32)
    do = load_rows(do_ptr, start, stride_dom, offs_m, query_len, D, False).to(tl.float32)
    delta_ptr += bh * query_len + start + offs_m
    tl.store(delta_ptr, tl.sum(out * do, 1), mask=start + offs_m < query_len)


def delta(out: Tensor, grad_out: Tensor) -> Tensor:
    """See :func:`..reference.delta`."""
    length, batch, heads, dim = out.shape
    result = torch.empty(batch, heads, length, dtype=torch.float32, device=out.device)
    launch(
        _delta_kernel,
        (cdiv(length, BLOCK_M), batch * heads),
        out_ptr=out,
        do_ptr=grad_out,
        delta_ptr=result,
        stride_om=out.stride(0),
        stride_ob=out.stride(1),
        stride_oh=out.stride(2),
        stride_dom=grad_out.stride(0),
        stride_dob=grad_out.stride(1),
        stride_doh=grad_out.stride(2),
        query_len=length,
        HEADS=heads,
        D=dim,
        BLOCK_M=BLOCK_M,
    )
    return result
