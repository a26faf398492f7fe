# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which key blocks the backward keeps, and with which weight, for kernels: see :mod:`..sampling`, which
defines the functions of the same names."""

from __future__ import annotations

import triton
import triton.language as tl

from ..sampling import MAX_LOG2_WEIGHT as _MAX_LOG2_WEIGHT

MAX_LOG2_WEIGHT = tl.constexpr(_MAX_LOG2_WEIGHT)


@triton.jit
def _mixed(hash_, word):
    x = (hash_ ^ word.to(tl.uint32)) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def random_bits(seed, line, q_block, k_block):
    """uint32; the seed is int64."""
    bits = _mixed(seed.to(tl.uint32), seed >> 32)
    bits = _mixed(bits, line)
    bits = _mixed(bits, q_block)
    return _mixed(bits, k_block)


@triton.jit
def kept_code(share, least_share, seed, line, q_block, k_block, SAMPLING: tl.constexpr):
    """The code of one block, uint8.

    Args:
        share: of the block in each row, [rows].
        seed: read if SAMPLING; else blocks below ``least_share`` are left out.
    """
    near = q_block - k_block <= 1
    if SAMPLING:
        # What is not a number is below nothing: such a block is kept, with weight 1.
        log2_weight = tl.zeros(share.shape, tl.int32)
        for k in tl.static_range(1, MAX_LOG2_WEIGHT + 1):
            log2_weight += (share * (1 << k) <= least_share).to(tl.int32)
        log2_weight = tl.where(near, 0, tl.min(log2_weight, 0))
        # In two steps: a shift by all 32 bits is undefined.
        rest = random_bits(seed, line, q_block, k_block) >> 1 >> (31 - log2_weight).to(tl.uint32)
        code = tl.where(rest == 0, 1 + log2_weight, 0).to(tl.uint8)
    else:
        above = tl.sum((share < least_share).to(tl.int32), 0) < share.shape[0]
        code = (above | near).to(tl.uint8)
    return code


@triton.jit
def log2_weight_at(weights, line, q_block, k_block, local_blocks, num_blocks):
    """How many powers of 2 the terms of a block that is kept are multiplied by, float32. ``q_block`` is a
    local number, ``k_block`` one of the sequence; ``weights`` are ``PatternIndex.weights``."""
    code = tl.load(weights + (line.to(tl.int64) * local_blocks + q_block) * num_blocks + k_block)
    return code.to(tl.float32) - 1
