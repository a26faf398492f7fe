# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Selection of key blocks for each query block: policies moba and xattention.

- :class:`~megatron_mtraining.config.MobaPolicy`: the ``top_k`` blocks by mean query times mean key, as in
  MoBA (arXiv 2502.13189, section 2.2), which scores single queries; here the queries of a block share one
  list.
- :class:`~megatron_mtraining.config.XAttentionPolicy`: the fewest blocks that hold ``threshold`` of the
  softmax of antidiagonal scores (arXiv 2503.16428, section 3), summed to blocks.

A query block attends to the blocks that the queries of the block before it select, and so no token changes
what an earlier query attends to. As published (``lookahead``), its own queries select, and each query sees
what later queries of its block ask for.

Each rank scores its own query blocks. Nothing is sampled. Candidates are ordered by an integer that
does not depend on the number of ranks, ties going to the earlier block; nothing is read back to the host.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..config import BlockListPolicy, MobaPolicy, XAttentionPolicy
from ..cp_group import CPGroup
from ..documents import Documents
from ..kernels.attention.operands import unit_stride
from ..kernels.selection import antidiagonal_lse, top_blocks
from ..layout import block_at, owner_of

CHUNK = 2**26
"""Numbers that exist at once, about: pairs of a query row and a key block. Enough rows for all of a GPU at
512K tokens, where a row has 4096."""


def select_key_blocks(
    query: Tensor,
    key: Tensor,
    policy: BlockListPolicy,
    cp: CPGroup,
    softmax_scale: float,
    *,
    block_size: int = 128,
    window_blocks: int = 1,
    sink_blocks: int = 1,
    documents: Documents | None = None,
) -> Tensor:
    """The key blocks that this rank's query blocks attend to, by one policy for all heads.

    Args:
        query: ``[s, b, h, d]``, this rank's part, block-striped; detached here. On one rank the last block
            may be partial.
        key: ``[s, b, hk, d]``, likewise.
        window_blocks, sink_blocks: how many blocks before a query's own, and how many first ones, are always
            kept, as is its own.
        documents: packed documents; blocks that lie in none of a query block's are not kept. A block that
            has a part of them is scored as a whole.

    Returns:
        uint8 ``[b, h, nb, NB]``, by local query block and global key block: ``blocks`` of
        :func:`~.block_list_index.build_block_index`.

    Raises:
        ValueError: the stride does not fit the block size, or blocks are partial over several ranks.
    """
    stride = policy.stride if isinstance(policy, XAttentionPolicy) else block_size
    if block_size % stride or block_size // stride > 128:
        raise ValueError(f"stride is {stride}: it must divide the block size, {block_size}")
    query, key = unit_stride(query.detach(), key.detach())
    length = query.shape[0]
    missing = -length % block_size
    if missing and cp.world > 1:
        raise ValueError(f"{length} tokens a rank are not a multiple of blocks of {block_size}")
    if missing:
        query, key = (torch.nn.functional.pad(t, (0, 0) * 3 + (0, missing)) for t in (query, key))
    hidden = None  # blocks of other documents
    if documents is not None:
        first = documents.on(cp.rank, cp.world, cp.inner, block_size).kv_block_bounds[:, 0]
        every = torch.arange(first.shape[1] * cp.world, device=query.device)
        hidden = every < first[:, None, :, None]  # [b, 1, nb, NB]
    always = window_blocks, sink_blocks
    if isinstance(policy, MobaPolicy):
        blocks = _top_means(query, key, length, cp, hidden, policy.top_k, block_size, always)
    else:
        blocks = _top_antidiagonals(
            query, key, length, cp, hidden, policy, softmax_scale, block_size, always
        )
    if not policy.lookahead:
        blocks = _of_previous_block(blocks, cp, *always)
    return blocks if hidden is None else blocks.masked_fill_(hidden, 0)


def _of_previous_block(blocks: Tensor, cp: CPGroup, window_blocks: int, sink_blocks: int) -> Tensor:
    """The selection of the query block before each of this rank's, with the blocks that are always kept.
    Over several ranks a collective, as the block before is another rank's.

    Args:
        blocks: uint8 ``[b, h, nb, NB]``, by the query block that selected.
    """
    count, num_blocks = blocks.shape[-2:]
    block = torch.arange(num_blocks, device=blocks.device)
    own = block_at(block[:count], cp.rank, cp.world, cp.inner)[:, None]
    kept = (block <= own) & ((block >= own - window_blocks) | (block < sink_blocks))
    sent, sends = _neighbours(1, count, cp.rank, cp.world, cp.inner, blocks.device)
    arriving, receives = _neighbours(-1, count, cp.rank, cp.world, cp.inner, blocks.device)
    rows = cp.all_to_all(blocks.permute(2, 0, 1, 3).index_select(0, sent), sends, receives)
    previous = kept.to(torch.uint8).expand_as(blocks).clone()
    previous[:, :, arriving] |= rows.permute(1, 2, 0, 3)
    return previous


@lru_cache(maxsize=64)
def _neighbours(
    step: int, count: int, rank: int, world: int, inner: int, device
) -> tuple[Tensor, list[int]]:
    """A rank's local blocks whose next (``step`` 1) or previous (-1) block exists, int64, by the rank that
    has it, in the order of the earlier block of each pair; and how many each rank has."""
    with torch.inference_mode(False):
        local = torch.arange(count)
        block = block_at(local, rank, world, inner) + step
        local, block = (each[(block >= 0) & (block < count * world)] for each in (local, block))
        owner, theirs = owner_of(block, world, inner)
        order = (owner * count + (local if step == 1 else theirs)).argsort()
        return local[order].to(device), owner.bincount(minlength=world).tolist()


def _to_integers(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The tensor as whole numbers below ``2 ** bits``, float64, times a power of 2 for each last dimension,
    which depends on its largest entry alone. What is not finite is 0."""
    tensor = tensor.nan_to_num(0.0, 0.0, 0.0)
    _, exponent = torch.frexp(tensor.abs().amax(-1, keepdim=True))
    shift = (bits - exponent.clamp(min=-900)).double()
    return (tensor * shift.exp2()).round(), (-shift).exp2()


def _top_means(
    query: Tensor,
    key: Tensor,
    length: int,
    cp: CPGroup,
    hidden: Tensor | None,
    top_k: int,
    block_size: int,
    always: tuple[int, int],
) -> Tensor:
    """The ``top_k`` blocks by mean query times mean key.

    Means are in float64, rounded to integers whose products add up exactly: so the scores, rounded to
    float32, are the same bits in whatever order they are summed. The rounding of a block depends on that
    block alone: no later key changes how earlier ones compare.
    """
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
    keys, unit = (each.transpose(-1, -2) for each in _to_integers(keys, bits))
    queries = _to_integers(means(query), bits)[0].unflatten(1, (key.shape[2], -1))
    blocks = torch.empty(batch, heads, nb, num_blocks, dtype=torch.uint8, device=query.device)
    for first, count in _chunks(nb, 4 * batch * heads * num_blocks):
        rows = queries[:, :, :, first : first + count]
        scores = (rows.flatten(2, 3) @ keys * unit).unflatten(2, rows.shape[2:4]).flatten(1, 2)
        # Floats as integers of the same order: all but the last bit, and all positive.
        order = scores.float().view(torch.int32) >> 1
        order = torch.where(order < 0, -(order & 0x3FFFFFFF), order) + 2**30
        order = order.clamp(min=1)
        if hidden is not None:
            order = order.masked_fill(hidden[:, :, first : first + count], 0)
        blocks[:, :, first : first + count] = top_blocks(
            order, False, top_k, first, *always, *layout
        )
    return blocks


def _top_antidiagonals(
    query: Tensor,
    key: Tensor,
    length: int,
    cp: CPGroup,
    hidden: Tensor | None,
    policy: XAttentionPolicy,
    softmax_scale: float,
    block_size: int,
    always: tuple[int, int],
) -> Tensor:
    """The fewest blocks that hold the threshold of antidiagonal scores' softmax. Keys of all ranks are
    gathered for one KV head at a time."""
    nb, (_, batch, heads, _) = query.shape[0] // block_size, query.shape
    kv_heads, num_blocks = key.shape[2], nb * cp.world
    group = heads // kv_heads
    blocks = torch.empty(batch, heads, nb, num_blocks, dtype=torch.uint8, device=query.device)
    stride, wanted = policy.stride, math.ceil(policy.threshold * 2**30)
    squares = block_size // stride
    for kv in range(kv_heads):
        keys = cp.all_gather(key[:, :, kv : kv + 1])
        heads_of_kv = slice(kv * group, (kv + 1) * group)
        for first, count in _chunks(nb, batch * group * squares * num_blocks):
            rows = query[first * block_size : (first + count) * block_size, :, heads_of_kv]
            parts, lse = antidiagonal_lse(
                rows, keys, stride, block_size, first, cp.rank, cp.inner, softmax_scale
            )
            if hidden is not None:
                own = hidden[:, :, first : first + count].repeat_interleave(squares, 2)
                parts = parts.masked_fill(own, float("-inf"))
                lse = torch.logsumexp(parts * math.log(2), -1) / math.log(2)
            mass = _fixed_point(parts, lse)
            mass[:, :, -(-length // stride) - first * squares :] = 0  # past the end of the sequence
            mass = mass.unflatten(2, (count, squares)).sum(3)
            blocks[:, heads_of_kv, first : first + count] = top_blocks(
                mass.int(), True, wanted, first, *always, cp.rank, cp.world, cp.inner
            )
    return blocks


def _fixed_point(parts: Tensor, lse: Tensor) -> Tensor:
    """Each row's attention to the key blocks, with 2^23 for a probability of 1: the rows of a block, up to
    128, add up exactly and to less than 2^31. What is not a number has no mass. ``parts`` is used up."""
    share = parts.sub_(lse[..., None]).exp2_().mul_(2**23).round_()
    return share.nan_to_num_(0.0, 0.0, 0.0).to(torch.int32)


def _chunks(count: int, numbers: int) -> list[tuple[int, int]]:
    """(first, how many) of chunks of ``count`` items that each take ``numbers`` numbers, about
    :data:`CHUNK` in all."""
    step = max(1, CHUNK // numbers)
    return [(first, min(step, count - first)) for first in range(0, count, step)]
