# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which key blocks the backward keeps, and with which weight, for kernels: see :mod:`..sampling`, which
defines the functions of the same names."""

from __future__ import annotations

import triton
import triton.language as tl

from ..sampling import LISTED as _LISTED
from ..sampling import MAX_LOG2_WEIGHT as _MAX_LOG2_WEIGHT

MAX_LOG2_WEIGHT = tl.constexpr(_MAX_LOG2_WEIGHT)
LISTED = tl.constexpr(_LISTED)


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
def codes_of(marks, seed, line, q_block, k_block, SAMPLING: tl.constexpr):
    """Codes, uint8, of blocks with marks, uint8; the seed is read if SAMPLING."""
    codes = marks
    if SAMPLING:
        missing = 2 * LISTED - marks.to(tl.int32)
        log2_weight = tl.zeros(marks.shape, tl.int32)
        for i in tl.static_range(1, MAX_LOG2_WEIGHT + 1):
            log2_weight += (missing >= 1 << i).to(tl.int32)
        # In two steps: a shift by all 32 bits is undefined.
        rest = random_bits(seed, line, q_block, k_block) >> 1 >> (31 - log2_weight).to(tl.uint32)
        codes = tl.where((rest == 0) & (marks > 0), 1 + log2_weight, 0).to(tl.uint8)
    return codes


@triton.jit
def block_mark(share, least, SAMPLING: tl.constexpr):
    """The mark of a block, int32.

    Args:
        share: of the block in each row, in any unit, [rows].
        least: S in the same unit; infinite for rows that do not count.
    """
    if SAMPLING:
        # What is not a number is above everything.
        ratio = share / least
        most = tl.max(tl.where(ratio <= 3e38, ratio, 3e38), 0)
        mark = LISTED
        for i in tl.static_range(MAX_LOG2_WEIGHT):
            mark += (most * (2 << i) > 1.0).to(tl.int32) << i
    else:
        mark = (tl.sum((share < least).to(tl.int32), 0) < share.shape[0]).to(tl.int32)
    return mark


@triton.jit
def add_mark(words, row, k_block, mark):
    """Or a mark, int32, to the byte of a key block.

    Args:
        row: offset of the query block's marks, in bytes.
    """
    byte = row + k_block
    mark_at = mark << ((byte.to(tl.int32) & 3) * 8)
    tl.atomic_or(words + (byte >> 2), mark_at, mask=mark > 0, sem="relaxed")


@triton.jit
def log2_weight_at(weights, line, q_block, k_block, local_blocks, num_blocks):
    """How many powers of 2 the terms of a block that is kept are multiplied by, float32. ``q_block`` is a
    local number, ``k_block`` one of the sequence; ``weights`` are ``PatternIndex.weights``."""
    code = tl.load(weights + (line.to(tl.int64) * local_blocks + q_block) * num_blocks + k_block)
    return code.to(tl.float32) - 1
