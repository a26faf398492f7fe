# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Row sums of ``out * grad_out``, which all gradients need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch
from ...common.tiles import load_rows


@triton.jit
def _delta_kernel(
    out_ptr, grad_ptr, delta_ptr, o_ss, o_sb, o_sh, g_ss, g_sb, g_sh, length,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    out_ptr += bh // HEADS * o_sb + bh % HEADS * o_sh
    grad_ptr += bh // HEADS * g_sb + bh % HEADS * g_sh
    out = load_rows(out_ptr, start, o_ss, rows, length, D, False).to(tl.float32)
    grad = load_rows(grad_ptr, start, g_ss, rows, length, D, False).to(tl.float32)
    delta_ptr += bh * length + start + rows
    tl.store(delta_ptr, tl.sum(out * grad, 1), mask=start + rows < length)


def delta(out: Tensor, grad_out: Tensor) -> Tensor:
    """See :func:`..reference.delta`."""
    length, batch, heads, dim = out.shape
    result = torch.empty(batch, heads, length, dtype=torch.float32, device=out.device)
    rows = 64
    launch(
        _delta_kernel, (cdiv(length, rows), batch * heads),
        out, grad_out, result, *out.stride()[:3], *grad_out.stride()[:3], length,
        HEADS=heads, D=dim, ROWS=rows,
    )  # fmt: skip
    return result
