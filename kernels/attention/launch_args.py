# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Launch arguments that the portable and the Hopper kernels share."""

from __future__ import annotations

from ..common.launch import cdiv
from ..types import PatternIndex, RingStep

MEETINGS = [
    f"{what}_{turned}{apart}" for turned in "01" for apart in "01" for what in ("residue", "wrap")
]
"""Parameters of the key kernels; see :func:`meetings`."""


def meetings(index: PatternIndex, ring_step: RingStep) -> list[int]:
    """``RingStep.meetings`` as the kernels take them: where each residue begins in the prefix counts, and its
    wrap, for key blocks that are not turned and that are. Of block lists, where those of the keys' rank begin
    is the first, and there is no other."""
    if index.has_block_lists:
        return [index.rank_start(ring_step.source), *[0] * 7]
    length = cdiv(index.local_blocks, 2)
    return [
        number
        for turned in (0, 1)
        for residue, _, wrap in ring_step.meetings(turned)
        for number in (residue * length, wrap)
    ]


def column_splits(index: PatternIndex, num_heads: int, block_n: int) -> int:
    """Parts that the queries of a column tile are cut in, to have about 4 programs a multiprocessor.

    More splits cost buffer and additions."""
    tiles = max(1, index.columns.shape[-1] // block_n) * num_heads
    splits = 1
    while splits < 8 and tiles * splits < 512 and splits * 4 <= index.local_blocks:
        splits *= 2
    return splits
