# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which key blocks the backward keeps, and with which weight: from shares of attention to a code.

The reference implementation; ``portable/sampling.py`` has the same for kernels. The forward gives each block
of the pattern a mark, a byte. It is the bitwise or over the rows of the query block, so rows may be looked at
in any order, by several programs. With ``S`` for the least share:

- without sampling, 1 if a row gives the block at least ``S`` of its attention, else 0
- with sampling, bit ``i`` below :data:`MAX_LOG2_WEIGHT` if a row gives it more than ``S / 2^(i + 1)``; the
  bit :data:`MAX_LOG2_WEIGHT` of all blocks of the pattern

After the forward, a block with a mark gets a code: 0 if it is left out, and ``1 + k`` if its terms of the
gradients are multiplied by ``2^k``. Without sampling, the code is the mark. With a seed, a block whose
largest share is ``m`` is kept with probability ``p = 2^-k`` and weight ``2^k = 1/p``, so that the gradient is
unbiased. ``k`` is the largest whole number from 0 to :data:`MAX_LOG2_WEIGHT` with ``m 2^k <= S``, or 0: ``p``
is ``m / S`` rounded up to a power of 2. Weights are powers of 2 because kernels then add a whole number to
an exponent of base 2, and because ``k`` comes from comparisons alone, without a logarithm that devices round
differently.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import block_at

MAX_LOG2_WEIGHT = 5
"""Weights are at most 32: larger ones give the gradient heavy tails."""

LISTED = 1 << MAX_LOG2_WEIGHT
"""The bit, with sampling, of all blocks of the pattern."""


def largest_mark(sampling: bool) -> int:
    """Of blocks that are kept with weight 1."""
    return 2 * LISTED - 1 if sampling else 1


class BlockMarks(NamedTuple):
    """What the forward finds of the blocks of a pattern, for the backward."""

    words: Tensor
    """int32: the marks, uint8 ``[b, h, nb, NB]`` by local query block and key block of the sequence, of the
    rounds so far; 0 of blocks that are not in the pattern. Padded to whole words, which have an atomic or."""
    least_share: Tensor
    """float32 ``[b]``, above 0."""
    sampling: bool
    """Whether blocks with less are drawn."""

    def marks(self, shape: tuple[int, int, int, int]) -> Tensor:
        """The marks by their shape."""
        return self.words.view(torch.uint8)[: torch.Size(shape).numel()].view(shape)


def new_marks(shape: tuple[int, int, int, int], least_share: Tensor, sampling: bool) -> BlockMarks:
    """Marks of no block, of the shape ``(b, h, nb, NB)``."""
    length = -(-torch.Size(shape).numel() // 4)
    words = torch.zeros(length, dtype=torch.int32, device=least_share.device)
    return BlockMarks(words, least_share, sampling)


def mark_of(shares: Tensor, least_share: Tensor, sampling: bool) -> Tensor:
    """The marks of shares of attention, uint8. A share that is not a number has the largest mark.

    Args:
        shares: of a key block in the attention of a query row.
        least_share: S; broadcasts with shares.
    """
    if not sampling:
        return (~(shares < least_share)).to(torch.uint8)
    mark = torch.full_like(shares, LISTED, dtype=torch.uint8)
    for i in range(MAX_LOG2_WEIGHT):
        mark += (~(shares * 2 ** (i + 1) <= least_share)).to(torch.uint8) << i
    return mark


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


def codes_of(
    marks: Tensor, seed: Tensor | None, line: Tensor, q_block: Tensor, k_block: Tensor
) -> Tensor:
    """The codes of blocks with marks.

    Args:
        marks: uint8.
        seed: int64 ``[1]``, to draw blocks; None without sampling.
        line, q_block, k_block: as for :func:`random_bits`; they broadcast with marks.

    Returns:
        uint8, of the shape of marks.
    """
    if seed is None:
        return marks
    # All bits from k on are set, up to LISTED: what is missing is 2^k.
    missing = 2 * LISTED - marks.long()
    log2_weight = sum((missing >= 2**i).to(torch.int64) for i in range(1, MAX_LOG2_WEIGHT + 1))
    drawn = random_bits(seed, line, q_block, k_block) >> (32 - log2_weight) == 0
    return torch.where(drawn & (marks > 0), 1 + log2_weight, 0).to(torch.uint8)


def code_bits(sampling: bool) -> int:
    """Bits of a code."""
    return 4 if sampling else 1


def pack_codes(marks: Tensor, seed: Tensor | None, rank: int, world: int, inner: int) -> Tensor:
    """The codes of blocks, packed to be kept until the backward.

    Args:
        marks: uint8 ``[b, h, nb, NB]``, of the query blocks of ``rank``.
        seed: int64 ``[1]``, of the draw; None without sampling.
        rank, world, inner: the layout.

    Returns:
        uint8 ``[b, h, nb, ceil(NB / n)]`` with ``n`` codes of :func:`code_bits` in a byte, the first one in
        the lowest bits.
    """
    batch, heads, local_blocks, num_blocks = marks.shape
    device = marks.device
    line = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    q_block = block_at(torch.arange(local_blocks, device=device), rank, world, inner)
    codes = codes_of(marks, seed, line, q_block[:, None], torch.arange(num_blocks, device=device))
    bits = code_bits(seed is not None)
    shifts = torch.arange(0, 8, bits, device=device)
    codes = torch.nn.functional.pad(codes, (0, -num_blocks % len(shifts)))
    return (codes.unflatten(-1, (-1, len(shifts))) << shifts).sum(-1).to(torch.uint8)


def unpack_codes(packed: Tensor, num_blocks: int, sampling: bool) -> Tensor:
    """uint8 ``[b, h, nb, NB]``: the codes that :func:`pack_codes` has packed."""
    bits = code_bits(sampling)
    shifts = torch.arange(0, 8, bits, device=packed.device)
    codes = packed[..., None] >> shifts & (1 << bits) - 1
    return codes.flatten(-2)[..., :num_blocks].to(torch.uint8)
