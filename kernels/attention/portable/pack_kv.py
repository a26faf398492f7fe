# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Keys and values side by side, as they travel: one copy of both, whatever their strides."""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.launch import cdiv, launch


@triton.jit(do_not_specialize=["rows"])  # 1 would be a constant, of no type
def _pack_kernel(
    k_ptr, v_ptr, out_ptr,
    k_ss, k_sb, k_sh, v_ss, v_sb, v_sh, rows, batch,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # A row is a head's at a position, in the order of the result.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    head = row % HEADS
    entry = row // HEADS % batch
    at = row // HEADS // batch
    d = tl.arange(0, D)[None, :]
    to = row[:, None] * D + d
    key = (at * k_ss + entry * k_sb + head * k_sh)[:, None] + d
    value = (at * v_ss + entry * v_sb + head * v_sh)[:, None] + d
    key = tl.load(k_ptr + key, mask=inside)
    value = tl.load(v_ptr + value, mask=inside)
    tl.store(out_ptr + to, key, mask=inside)
    tl.store(out_ptr + rows.to(tl.int64) * D + to, value, mask=inside)


def pack_kv(key, value, out):
    """Launch the copy; see :func:`kernels.pack`."""
    length, batch, heads, dim = key.shape
    rows = 64
    launch(
        _pack_kernel, (cdiv(length * batch * heads, rows),),
        key, value, out, *key.stride()[:3], *value.stride()[:3], length * batch * heads, batch,
        HEADS=heads, D=dim, ROWS=rows, num_warps=4,
    )  # fmt: skip
