# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sizes that the kernels support. It imports nothing, so that settings can be checked without torch."""

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dimensions of query, key and value. Tiles have sizes of powers of two: 96 and 192 take the time of 128
and 256."""

LIBRARY_HEAD_DIM = 128
"""The largest head dimension of dense attention by a library (``MTRAINING_DENSE``)."""

MAX_BLOCKS = 32768
"""Blocks on a rank, and blocks of the ranks of one round: the index stores block numbers in 16 bits. With
blocks of 128 tokens this is 4M tokens."""


def fits_int32(count: int) -> bool:
    """Whether numbers up to this one fit into 32 bits with a sign."""
    return count < 2**31


def check_blocks_per_round(seq_length: int, block_size: int, world: int, inner: int) -> None:
    """Raise ValueError if the ``inner`` ranks of a round have more than :data:`MAX_BLOCKS` blocks."""
    rounds = world // inner
    if seq_length > MAX_BLOCKS * block_size * rounds:
        raise ValueError(
            f"{seq_length} tokens in {rounds} rounds of {inner} context-parallel ranks are more "
            f"than {MAX_BLOCKS} blocks of {block_size} in each: use more rounds, of fewer ranks"
        )
