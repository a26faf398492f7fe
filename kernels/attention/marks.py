# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which key blocks the backward keeps: the reference implementation.

The forward gives each block of the pattern a mark, a byte: 1 if a row of the query block gives the key block
at least the least share of its attention, else 0. It is the bitwise or over these rows, so rows may be looked
at in any order, by several programs. After the forward, the marks are packed, to be kept until the backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BlockMarks(NamedTuple):
    """What the forward finds of the blocks of a pattern, for the backward."""

    words: Tensor
    """int32: the marks, uint8 ``[b, h, nb, NB]`` by local query block and key block of the sequence, of the
    rounds so far; 0 of blocks that are not in the pattern. Padded to whole words, which have an atomic or."""
    least_share: Tensor
    """float32 ``[b]``, above 0."""

    def marks(self, shape: tuple[int, int, int, int]) -> Tensor:
        """The marks by their shape."""
        return self.words.view(torch.uint8)[: torch.Size(shape).numel()].view(shape)


def new_marks(shape: tuple[int, int, int, int], least_share: Tensor) -> BlockMarks:
    """Marks of no block, of the shape ``(b, h, nb, NB)``."""
    length = -(-torch.Size(shape).numel() // 4)
    words = torch.zeros(length, dtype=torch.int32, device=least_share.device)
    return BlockMarks(words, least_share)


def pack_marks(marks: Tensor) -> Tensor:
    """The marks of blocks, packed to be kept until the backward.

    Args:
        marks: uint8 ``[b, h, nb, NB]``.

    Returns:
        uint8 ``[b, h, nb, ceil(NB / 8)]``: 8 marks in a byte, the first one in the lowest bit.
    """
    shifts = torch.arange(8, device=marks.device)
    marks = torch.nn.functional.pad(marks, (0, -marks.shape[-1] % 8))
    return (marks.unflatten(-1, (-1, 8)) << shifts).sum(-1).to(torch.uint8)


def unpack_marks(packed: Tensor, num_blocks: int) -> Tensor:
    """uint8 ``[b, h, nb, NB]``: the marks that :func:`pack_marks` has packed."""
    shifts = torch.arange(8, device=packed.device)
    marks = packed[..., None] >> shifts & 1
    return marks.flatten(-2)[..., :num_blocks].to(torch.uint8)
