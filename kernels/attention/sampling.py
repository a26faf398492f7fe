# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which key blocks the backward keeps, and with which weight: from shares of attention to a code.

The reference implementation; ``portable/sampling.py`` has the same for kernels. A code is 0 for a block that
is left out, and ``1 + k`` for a block whose terms of the gradients are multiplied by ``2^k``.

With a seed, a block whose largest share is ``m`` is kept with probability ``p = 2^-k`` and weight ``2^k =
1/p``, so that the gradient is unbiased. ``k`` is the largest whole number from 0 to :data:`MAX_LOG2_WEIGHT`
with ``m 2^k <= S``, or 0: ``p`` is ``m / S`` rounded up to a power of 2. Weights are powers of 2 because
kernels then add a whole number to an exponent of base 2, and because ``k`` comes from comparisons alone,
without a logarithm that devices round differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG2_WEIGHT = 5
"""Weights are at most 32: larger ones give the gradient heavy tails."""

# The finalizer of MurmurHash3, and the golden ratio as a step between its inputs.
_FACTOR_1, _FACTOR_2, _STEP = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9
_WORD = 0xFFFFFFFF


def _mixed(hash_: Tensor, word: Tensor) -> Tensor:
    """A hash of 32 bits and one more word of 32 bits; all in int64, whose products keep the low bits."""
    x = ((hash_ ^ word) + _STEP) & _WORD
    x = ((x ^ (x >> 16)) * _FACTOR_1) & _WORD
    x = ((x ^ (x >> 13)) * _FACTOR_2) & _WORD
    return x ^ (x >> 16)


def random_bits(seed: Tensor, line: Tensor, q_block: Tensor, k_block: Tensor) -> Tensor:
    """32 random bits for each pair of blocks: a hash, so that they depend on nothing else.

    Args:
        seed: int64, not negative.
        line: ``batch entry * heads + head``.
        q_block, k_block: blocks of the sequence. All are int64 and broadcast.

    Returns:
        int64, from 0 to 2^32 - 1.
    """
    bits = seed & _WORD
    for word in (seed >> 32, line, q_block, k_block):
        bits = _mixed(bits, word)
    return bits


def kept_code(
    shares: Tensor,
    dim: int,
    least_share: Tensor,
    seed: Tensor | None,
    line: Tensor,
    q_block: Tensor,
    k_block: Tensor,
) -> Tensor:
    """The codes of blocks. The query block itself, the block before it, and blocks with a share that is not a
    number are kept with weight 1.

    Args:
        shares: share of the attention of query rows in a key block; the rows are in dimension ``dim``.
        least_share: S, above 0. Broadcasts with shares, as the others do with shares without rows.
        seed: int64 ``[1]``, to draw blocks below S; None to leave them out.
        line, q_block, k_block: as for :func:`random_bits`.

    Returns:
        uint8, with the dimensions of shares but ``dim``.
    """
    near = q_block - k_block <= 1
    if seed is None:
        above = ~(shares < least_share)
        return (above.any(dim) | near).to(torch.uint8)
    log2_weight = sum(
        (shares * 2**k <= least_share).to(torch.int64) for k in range(1, MAX_LOG2_WEIGHT + 1)
    )
    log2_weight = log2_weight.amin(dim).masked_fill(near, 0)
    drawn = random_bits(seed, line, q_block, k_block) >> (32 - log2_weight) == 0
    return torch.where(drawn, 1 + log2_weight, 0).to(torch.uint8)
