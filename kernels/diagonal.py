# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention mass by token distance, summed in a fixed order (no atomics)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rank"])
def _diagonal_kernel(
    p_ptr, rows_ptr, out_ptr, num_rows, length, seq_length, rank, world,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    distance = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    p_ptr += bh * num_rows * length
    mass = tl.zeros([WIDTH], tl.float32)
    for i in range(num_rows):
        key = tl.load(rows_ptr + i) - distance
        block = key // BLOCK
        here = (key >= 0) & (block % world == rank)
        local = block // world * BLOCK + key % BLOCK
        mass += tl.load(p_ptr + local, mask=here, other=0.0)
        p_ptr += length
    tl.store(out_ptr + bh * seq_length + distance, mass, mask=distance < seq_length)


def diagonal_mass(probabilities, rows, seq_length, rank, world, block_size):
    """Launch the sums; see :func:`kernels.diagonal_mass`."""
    batch, heads, num_rows, length = probabilities.shape
    mass = torch.empty(batch, heads, seq_length, dtype=torch.float32, device=probabilities.device)
    width = 256
    _diagonal_kernel[(triton.cdiv(seq_length, width), batch * heads)](
        probabilities, rows, mass, num_rows, length, seq_length, rank, world,
        BLOCK=block_size, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return mass
