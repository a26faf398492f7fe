# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the gradients of keys and of columns share: tiles of query rows, and what they add.

A program holds [BLOCK_N, D] keys and values and loops over tiles of [BLOCK_M, D] query rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...common.tiles import LOG2E, load_line, load_rows, store_rows
from ..operands import BackwardInputs


def query_arguments(inputs: BackwardInputs) -> dict[str, Any]:
    """Arguments of all kernels of the backward: the queries."""
    query, grad_out = inputs.query, inputs.grad_out
    return dict(
        q_ptr=query,
        do_ptr=grad_out,
        lse_ptr=inputs.lse,
        delta_ptr=inputs.delta,
        stride_qm=query.stride(0),
        stride_qb=query.stride(1),
        stride_qh=query.stride(2),
        stride_dom=grad_out.stride(0),
        stride_dob=grad_out.stride(1),
        stride_doh=grad_out.stride(2),
        query_len=query.shape[0],
        softmax_scale=inputs.softmax_scale,
    )


@triton.jit
def query_tile(
    start,
    offs_m,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    stride_qm,
    stride_dom,
    query_len,
    D: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Query rows from ``start`` on: q and do [BLOCK_M, D], lse (of base 2) and delta [BLOCK_M]. A row past
    the end has lse = inf, hence p = 0."""
    q = load_rows(q_ptr, start, stride_qm, offs_m, query_len, D, EVEN)
    do = load_rows(do_ptr, start, stride_dom, offs_m, query_len, D, EVEN)
    lse = load_line(lse_ptr, start, offs_m, query_len, float("inf"), EVEN) * LOG2E
    delta = load_line(delta_ptr, start, offs_m, query_len, 0.0, EVEN)
    return q, do, lse, delta


@triton.jit
def add_tile(
    q,  # [BLOCK_M, D]
    k,  # [BLOCK_N, D]
    v,  # [BLOCK_N, D]
    do,  # [BLOCK_M, D]
    mask,  # [BLOCK_N, BLOCK_M], read if MASKED
    dk,  # [BLOCK_N, D]
    dv,  # [BLOCK_N, D]
    lse,  # [BLOCK_M], of base 2
    delta,  # [BLOCK_M]
    scale,
    MASKED: tl.constexpr,
    PREC: tl.constexpr,
):
    """dk (without the factor ``softmax_scale``) and dv with one tile of query rows added.

    Scores are transposed, keys in rows, so that no operand has to be transposed in registers.
    """
    scores = tl.dot(k, tl.trans(q), input_precision=PREC)  # [BLOCK_N, BLOCK_M]
    # Both products are issued before the exponentials, which hide behind the second.
    dp = tl.dot(v, tl.trans(do), input_precision=PREC)  # [BLOCK_N, BLOCK_M]
    if MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    p = tl.math.exp2(scores * scale - lse[None, :])
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PREC)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC)
    return dk, dv


@triton.jit
def put_aside(
    base, start, stride, offs, limit, total, is_first, D: tl.constexpr, EVEN: tl.constexpr
):
    """Add a chain's sum (``launch_args.CHAIN``) to rows of float32, or store it if it is the first. No other
    program writes there."""
    total += load_rows(base, start, stride, offs, tl.where(is_first, 0, limit), D, False)
    store_rows(base, start, stride, offs, limit, total, D, EVEN)
    tl.debug_barrier()  # other threads may read it
