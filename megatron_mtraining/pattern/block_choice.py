# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing lists of key blocks for each query block, at two prices.

- ``moba``: the mean of a block's queries against the mean of each block's keys, and the ``top_k`` best. As in
  MoBA (arXiv 2502.13189, section 2.2), which scores single queries; a block of queries has one list here.
- ``xattention``: antidiagonal scores (arXiv 2503.16428, section 3) and their softmax, summed to blocks; the
  fewest blocks that hold ``threshold`` of it.

Each rank chooses for its own query blocks. Nothing is sampled, and what decides is an integer that does not
depend on the number of ranks, ties going to the earlier block; nothing is read back to the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..cp_group import CPGroup
from ..documents import Documents
from ..kernels.attention.operands import unit_stride
from ..kernels.selection import antidiagonal_lse, top_blocks
from ..layout import block_at

SOURCES = ("moba", "xattention")
CHUNK = 2**26
"""Numbers that are written out at once, about: pairs of a query row and a key block. Enough rows for all of a
GPU at 512K tokens, where a row has 4096."""


def choose_block_lists(
    query: Tensor,
    key: Tensor,
    cp: CPGroup,
    softmax_scale: float,
    *,
    source: str = "xattention",
    stride: int = 16,
    threshold: float = 0.9,
    top_k: int = 16,
    block_size: int = 128,
    window_blocks: int = 1,
    sink_blocks: int = 1,
    documents: Documents | None = None,
) -> Tensor:
    """The key blocks that this rank's query blocks are to see, from the call's own queries and keys.

    Args:
        query ``[s, b, h, d]``, key ``[s, b, hk, d]``: this rank's parts, block-striped; detached here. On one
            rank the last block may be partial.
        cp: the context-parallel group.
        source: "moba" or "xattention".
        stride: xattention: tokens a row of scores; divides the block size.
        threshold: xattention: the share of a query block's attention to keep, above 0, at most 1.
        top_k: moba: blocks to take beside those that always are.
        window_blocks, sink_blocks: so many blocks before a query's own, and so many first ones, are always
            taken, as is its own.
        documents: packed ones; blocks that lie in none of a query block's are not taken. A block that has a
            part of them is scored as a whole.

    Returns:
        uint8 ``[b, h, nb, NB]``, by own query block and global key block: ``blocks`` of
        :func:`~.block_index.build_block_index`.

    Raises:
        ValueError: an option is out of range, or blocks are partial over several ranks.
    """
    if source not in SOURCES:
        raise ValueError(f"source is {source!r}: it must be one of {SOURCES}")
    if stride < 1 or block_size % stride or block_size // stride > 128:
        raise ValueError(f"stride is {stride}: it must divide the block size, {block_size}")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}: it must be above 0 and at most 1")
    if min(top_k, window_blocks, sink_blocks) < 0:
        raise ValueError(
            f"top_k, window_blocks and sink_blocks are {top_k}, {window_blocks}, {sink_blocks}: "
            "none may be negative"
        )
    query, key = unit_stride(query.detach(), key.detach())
    length = query.shape[0]
    missing = -length % block_size
    if missing and cp.world > 1:
        raise ValueError(f"{length} tokens a rank are not a multiple of blocks of {block_size}")
    if missing:
        query, key = (torch.nn.functional.pad(t, (0, 0) * 3 + (0, missing)) for t in (query, key))
    apart = None
    if documents is not None:
        first = documents.on(cp.rank, cp.world, cp.inner, block_size).kv_block_bounds[:, 0]
        every = torch.arange(first.shape[1] * cp.world, device=query.device)
        apart = every < first[:, None, :, None]  # [b, 1, nb, NB]
    if source == "moba":
        rest = block_size, top_k, window_blocks, sink_blocks
        blocks = _pooled(query, key, length, cp, apart, *rest)
    else:
        rest = softmax_scale, stride, threshold, block_size, window_blocks, sink_blocks
        blocks = _antidiagonal(query, key, length, cp, apart, *rest)
    return blocks if apart is None else blocks.masked_fill_(apart, 0)


def _integers(tensor: Tensor, over, bits: int) -> Tensor:
    """Rounded to whole numbers below ``2 ** bits``, as float64: times the same power of 2 wherever the
    largest ``over`` some dimensions is the same. What is not finite is 0."""
    tensor = tensor.nan_to_num(0.0, 0.0, 0.0)
    _, exponent = torch.frexp(tensor.abs().amax(over, keepdim=True))
    return (tensor * (bits - exponent.clamp(min=-900)).double().exp2()).round()


def _pooled(query, key, length, cp: CPGroup, apart, block_size, top_k, window, sink) -> Tensor:
    """Means in float64, rounded to integers whose products add up exactly: so the scores, of which a float32
    is kept, are the same bits in whatever order they are summed."""
    nb, (_, batch, heads, dim) = query.shape[0] // block_size, query.shape
    num_blocks, world = nb * cp.world, cp.world
    own, layout = torch.arange(nb, device=query.device), (cp.rank, world, cp.inner)

    def means(tensor):
        tokens = tensor.unflatten(0, (nb, block_size))
        count = (length - own * block_size).clamp(max=block_size)
        return (tokens.sum(1, dtype=torch.float64) / count[:, None, None, None]).permute(1, 2, 0, 3)

    keys = torch.empty(batch, key.shape[2], num_blocks, dim, dtype=torch.float64, device=key.device)
    for rank, part in enumerate(cp.all_gather(means(key))):
        keys[:, :, block_at(own, rank, world, cp.inner)] = part
    bits = (52 - dim.bit_length()) // 2
    keys = _integers(keys, (-1, -2), bits).transpose(-1, -2)
    queries = _integers(means(query), -1, bits).unflatten(1, (key.shape[2], -1))
    blocks = torch.empty(batch, heads, nb, num_blocks, dtype=torch.uint8, device=query.device)
    for first, count in _chunks(nb, 4 * batch * heads * num_blocks):
        rows = queries[:, :, :, first : first + count]
        scores = (rows.flatten(2, 3) @ keys).unflatten(2, rows.shape[2:4]).flatten(1, 2)
        # Floats as integers of the same order: all but the last bit, and all positive.
        order = scores.float().view(torch.int32) >> 1
        order = torch.where(order < 0, -(order & 0x3FFFFFFF), order) + 2**30
        order = order.clamp(min=1)
        if apart is not None:
            order = order.masked_fill(apart[:, :, first : first + count], 0)
        blocks[:, :, first : first + count] = top_blocks(
            order, False, top_k, first, window, sink, *layout
        )
    return blocks


def _antidiagonal(
    query,
    key,
    length,
    cp: CPGroup,
    apart,
    softmax_scale,
    stride,
    threshold,
    block_size,
    window,
    sink,
) -> Tensor:
    """Keys of all ranks are gathered for one KV head at a time."""
    nb, (_, batch, heads, _) = query.shape[0] // block_size, query.shape
    kv_heads, num_blocks = key.shape[2], nb * cp.world
    group = heads // kv_heads
    blocks = torch.empty(batch, heads, nb, num_blocks, dtype=torch.uint8, device=query.device)
    squares, wanted = block_size // stride, math.ceil(threshold * 2**30)
    for kv in range(kv_heads):
        keys = cp.all_gather(key[:, :, kv : kv + 1])
        its = slice(kv * group, (kv + 1) * group)
        for first, count in _chunks(nb, batch * group * squares * num_blocks):
            rows = query[first * block_size : (first + count) * block_size, :, its]
            parts, lse = antidiagonal_lse(
                rows, keys, stride, block_size, first, cp.rank, cp.inner, softmax_scale
            )
            if apart is not None:
                own = apart[:, :, first : first + count].repeat_interleave(squares, 2)
                parts = parts.masked_fill(own, float("-inf"))
                lse = torch.logsumexp(parts * math.log(2), -1) / math.log(2)
            mass = _fixed_point(parts, lse)
            mass[:, :, -(-length // stride) - first * squares :] = 0  # past the end of the sequence
            mass = mass.unflatten(2, (count, squares)).sum(3)
            blocks[:, its, first : first + count] = top_blocks(
                mass.int(), True, wanted, first, window, sink, cp.rank, cp.world, cp.inner
            )
    return blocks


def _fixed_point(parts: Tensor, lse: Tensor) -> Tensor:
    """Each row's share of its key blocks, a probability of 1 being 2^23: what all rows of a block have, up to
    128, adds up exactly and to less than 2^31. What is not a number has no mass. ``parts`` is used up."""
    share = parts.sub_(lse[..., None]).exp2_().mul_(2**23).round_()
    return share.nan_to_num_(0.0, 0.0, 0.0).to(torch.int32)


def _chunks(count: int, numbers: int):
    """(first, how many) of as many as may be written out at once, each of so many numbers."""
    step = max(1, CHUNK // numbers)
    return [(first, min(step, count - first)) for first in range(0, count, step)]
