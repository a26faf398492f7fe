# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""From the forward's marks to the codes of blocks, packed as they are kept until the backward, and back. The
kernels run on any GPU, Hopper GPUs too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import cdiv, launch, next_power_of_2
from ...common.tiles import block_at
from ..sampling import code_bits
from .sampling import codes_of


@triton.jit(do_not_specialize=["rank"])
def _pack_kernel(
    marks_ptr,  # [b, h, nb, NB]
    seed_ptr,  # [1], read if SAMPLING
    packed_ptr,  # [b, h, nb, row_bytes]
    num_blocks,
    local_blocks,
    row_bytes,
    rank,
    world,
    inner,
    BITS: tl.constexpr,
    SAMPLING: tl.constexpr,
    BYTES: tl.constexpr,
):
    """One program packs BYTES bytes of one query block."""
    codes_per_byte: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)  # [BYTES]
    place = tl.arange(0, codes_per_byte)
    k_block = byte[:, None] * codes_per_byte + place[None, :]  # [BYTES, codes_per_byte]
    marks = tl.load(marks_ptr + row * num_blocks + k_block, mask=k_block < num_blocks, other=0)
    seed = 0
    if SAMPLING:
        seed = tl.load(seed_ptr)
    line = (row // local_blocks).to(tl.int32)
    q_block = block_at((row % local_blocks).to(tl.int32), rank, world, inner)
    codes = codes_of(marks, seed, line, q_block, k_block, SAMPLING).to(tl.int32)
    packed = tl.sum(codes << (place * BITS)[None, :], 1).to(tl.uint8)
    tl.store(packed_ptr + row * row_bytes + byte, packed, mask=byte < row_bytes)


@triton.jit
def _unpack_kernel(
    packed_ptr,  # [b, h, nb, row_bytes]
    codes_ptr,  # [b, h, nb, NB]
    num_blocks,
    row_bytes,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """One program unpacks BYTES bytes of one query block."""
    codes_per_byte: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)  # [BYTES]
    place = tl.arange(0, codes_per_byte)
    k_block = byte[:, None] * codes_per_byte + place[None, :]  # [BYTES, codes_per_byte]
    packed = tl.load(packed_ptr + row * row_bytes + byte, mask=byte < row_bytes, other=0)
    codes = packed.to(tl.int32)[:, None] >> (place * BITS)[None, :] & ((1 << BITS) - 1)
    tl.store(codes_ptr + row * num_blocks + k_block, codes.to(tl.uint8), mask=k_block < num_blocks)


def pack_codes(marks: Tensor, seed: Tensor | None, rank: int, world: int, inner: int) -> Tensor:
    """See :func:`..sampling.pack_codes`."""
    batch, heads, local_blocks, num_blocks = marks.shape
    bits = code_bits(seed is not None)
    row_bytes = cdiv(num_blocks * bits, 8)
    packed = torch.empty(
        batch, heads, local_blocks, row_bytes, dtype=torch.uint8, device=marks.device
    )
    num_bytes = min(256, next_power_of_2(row_bytes))
    launch(
        _pack_kernel,
        (batch * heads * local_blocks, cdiv(row_bytes, num_bytes)),
        marks_ptr=marks,
        seed_ptr=seed,
        packed_ptr=packed,
        num_blocks=num_blocks,
        local_blocks=local_blocks,
        row_bytes=row_bytes,
        rank=rank,
        world=world,
        inner=inner,
        BITS=bits,
        SAMPLING=seed is not None,
        BYTES=num_bytes,
        num_warps=4,
    )
    return packed


def unpack_codes(packed: Tensor, num_blocks: int, sampling: bool) -> Tensor:
    """See :func:`..sampling.unpack_codes`."""
    *lines, row_bytes = packed.shape
    codes = torch.empty(*lines, num_blocks, dtype=torch.uint8, device=packed.device)
    num_bytes = min(256, next_power_of_2(row_bytes))
    launch(
        _unpack_kernel,
        (packed[..., 0].numel(), cdiv(row_bytes, num_bytes)),
        packed_ptr=packed,
        codes_ptr=codes,
        num_blocks=num_blocks,
        row_bytes=row_bytes,
        BITS=code_bits(sampling),
        BYTES=num_bytes,
        num_warps=4,
    )
    return codes
