# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows of tensors in global memory that are read and written by pointers, not by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import Pointer, Scalar, aggregate


@aggregate
class GlobalRows:
    """A tensor [s, b, h, d] in global memory, d at unit stride."""

    ptr: Pointer
    stride_m: Scalar
    stride_b: Scalar
    stride_h: Scalar

    @gluon.jit
    def head_ptr(self, batch, head):
        return self.ptr + batch.to(gl.int64) * self.stride_b + head.to(gl.int64) * self.stride_h

    @gluon.jit
    def tile(self, head_ptr, rows, d):
        """Pointers to rows of a head: [rows, d]."""
        return head_ptr + rows.to(gl.int64)[:, None] * self.stride_m + d[None, :]


@gluon.jit
def of_rows(mask, d, HEAD_DIM: gl.constexpr):
    """A mask of rows, [n], as one of their elements d, [n, D]: those past the head dimension are only in
    tiles."""
    mask = mask[:, None]
    if d.shape[0] > HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    return mask
