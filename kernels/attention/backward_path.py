# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How the backward is computed on Hopper GPUs: in two deterministic kernels, or in one pass over the keys,
and then in which chunks of query blocks. All as measured (``benchmarks.kernels.backward_paths``)."""

from __future__ import annotations

import functools

import torch

ONE_PASS_TOKENS = {"H200": 16384, "H100": 32768}
"""Query tokens on a rank from which one pass over dense attention is faster, by GPU. The dQ that programs at
work at one time add to fits no cache; an H200 has the faster memory."""

CHUNK_BYTES = 2**25
"""Of the queries' gradient that the programs of a chunk add to: it stays in the cache, of 50 MB."""

CHUNKED_BLOCKS = {"H200": 1024, "H100": 512}
"""Query blocks on a rank from which chunks are faster than all at once, with a pattern and heads of 128."""

DENSE_CHUNKED_BLOCKS = {"H200": 256, "H100": 128}
"""The same with dense attention and heads of 128."""

LONG_BLOCKS = 1024
"""Query blocks on a rank from which there are chunks with heads of 64, too; at half of that all at once is as
fast or faster. With dense attention and heads of 128 a launch for each chunk is then faster than one launch,
by 5 to 9%, although the end of each is waited for."""


ONE_PASS_HEAD_DIM = 128
"""The largest head dimension of the Hopper kernels' one pass: what it sums must fit the registers."""


@functools.cache
def gpu_of(device: torch.device) -> str:
    """The key of a device in the tables here: ``H200``, or ``H100`` for all others."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return "H200" if "H200" in name.split() else "H100"


def is_faster_in_one_pass(dense: bool, length: int, gpu: str) -> bool:
    """Whether one pass is faster for ``length`` query tokens on a rank, whatever the heads. How much faster
    it is with a pattern depends on the pattern's density, which the host does not know: with few pairs,
    columns or visible ranges it can be slower."""
    return dense and length >= ONE_PASS_TOKENS[gpu]


def chunk_blocks(group: int, dim: int, block: int) -> int:
    """Query blocks of a chunk: a power of two, 64 for groups of 7 or 8 heads of 128."""
    blocks = CHUNK_BYTES // (group * block * dim * 4)
    return 1 << max(blocks.bit_length() - 1, 3)


def chunks(local_blocks: int, dense: bool, dim: int, gpu: str) -> tuple[bool, bool]:
    """Whether one pass is in chunks, and whether these share a launch. In one launch programs of a key block
    take turns, and no end of a chunk is waited for: 1.00 to 1.11 times as fast with 5 to 12% of the pairs."""
    is_long = local_blocks >= LONG_BLOCKS
    if dim < 128:
        return is_long, True
    if not dense:
        return local_blocks >= CHUNKED_BLOCKS[gpu], True
    return local_blocks >= DENSE_CHUNKED_BLOCKS[gpu], not is_long
