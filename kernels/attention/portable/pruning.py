# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The forward's marks of blocks, packed as they are kept until the backward, and back. The kernels run on any
GPU, Hopper GPUs too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch, next_power_of_2


@triton.jit
def _pack_kernel(
    marks_ptr,  # [b, h, nb, NB]
    packed_ptr,  # [b, h, nb, row_bytes]
    num_blocks,
    row_bytes,
    BYTES: tl.constexpr,
):
    """One program packs BYTES bytes of one query block."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)  # [BYTES]
    place = tl.arange(0, 8)
    k_block = byte[:, None] * 8 + place[None, :]  # [BYTES, 8]
    marks = tl.load(marks_ptr + row * num_blocks + k_block, mask=k_block < num_blocks, other=0)
    packed = tl.sum(marks.to(tl.int32) << place[None, :], 1).to(tl.uint8)
    tl.store(packed_ptr + row * row_bytes + byte, packed, mask=byte < row_bytes)


@triton.jit
def _unpack_kernel(
    packed_ptr,  # [b, h, nb, row_bytes]
    marks_ptr,  # [b, h, nb, NB]
    num_blocks,
    row_bytes,
    BYTES: tl.constexpr,
):
    """One program unpacks BYTES bytes of one query block."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)  # [BYTES]
    place = tl.arange(0, 8)
    k_block = byte[:, None] * 8 + place[None, :]  # [BYTES, 8]
    packed = tl.load(packed_ptr + row * row_bytes + byte, mask=byte < row_bytes, other=0)
    marks = packed.to(tl.int32)[:, None] >> place[None, :] & 1
    tl.store(marks_ptr + row * num_blocks + k_block, marks.to(tl.uint8), mask=k_block < num_blocks)


def pack_marks(marks: Tensor) -> Tensor:
    """See :func:`..marks.pack_marks`."""
    *lines, num_blocks = marks.shape
    row_bytes = cdiv(num_blocks, 8)
    packed = torch.empty(*lines, row_bytes, dtype=torch.uint8, device=marks.device)
    num_bytes = min(256, next_power_of_2(row_bytes))
    launch(
        _pack_kernel,
        (packed[..., 0].numel(), cdiv(row_bytes, num_bytes)),
        marks_ptr=marks,
        packed_ptr=packed,
        num_blocks=num_blocks,
        row_bytes=row_bytes,
        BYTES=num_bytes,
        num_warps=4,
    )
    return packed


def unpack_marks(packed: Tensor, num_blocks: int) -> Tensor:
    """See :func:`..marks.unpack_marks`."""
    *lines, row_bytes = packed.shape
    marks = torch.empty(*lines, num_blocks, dtype=torch.uint8, device=packed.device)
    num_bytes = min(256, next_power_of_2(row_bytes))
    launch(
        _unpack_kernel,
        (packed[..., 0].numel(), cdiv(row_bytes, num_bytes)),
        packed_ptr=packed,
        marks_ptr=marks,
        num_blocks=num_blocks,
        row_bytes=row_bytes,
        BYTES=num_bytes,
        num_warps=4,
    )
    return marks
