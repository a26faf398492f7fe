# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reference implementation of ``antidiagonal.py``, ``block_topk.py`` and ``block_recall.py`` in plain
PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...layout import block_at, owner_of, positions_at
from ..types import SampledRows


def antidiagonal_lse(
    query: Tensor,
    keys: Tensor,
    stride: int,
    block_size: int,
    first_block: int,
    rank: int,
    inner: int,
    softmax_scale: float,
    seen_from: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of antidiagonal scores by key block: each score is a sum over ``stride`` queries and keys.

    Args:
        query: ``[s', b, h, d]``, whole query blocks of ``rank``, from local block ``first_block`` on.
        keys: ``[W, s, b, hk, d]``, the keys of all ranks, in whole blocks.
        stride: tokens that one row of scores stands for; divides the block size.
        rank, inner: the striped layout, and the rank whose queries these are.
        seen_from: int32 ``[b, nb]``, contiguous: the first key block that counts, of each query block of the
            rank; None if all count.

    Returns:
        parts: ``[b, h, s' / stride, NB]``, base-2 log-sum-exp over each key block; -inf for later blocks and
            those that do not count.
        lse: ``[b, h, s' / stride]``, over all of these.

        float32; float64 from the reference implementation. The bits of a row do not depend on the number of
        ranks.
    """
    world, num_heads = keys.shape[0], query.shape[2]
    squares, device = block_size // stride, query.device
    num_blocks = world * keys.shape[1] // block_size
    owner, local = owner_of(torch.arange(num_blocks, device=device), world, inner)
    # In the order of the sequence.
    keys = keys.unflatten(1, (-1, block_size))[owner, local].flatten(0, 1)
    # [b, h, row, stride, d]: a query row with the key rows it meets on its antidiagonal.
    q, k = (t.double().unflatten(0, (-1, stride)).permute(2, 3, 0, 1, 4) for t in (query, keys))
    k = k.repeat_interleave(num_heads // keys.shape[2], 1)
    scores = q.flip(3).flatten(-2) @ k.flatten(-2).transpose(-1, -2)
    row = torch.arange(len(query) // stride, device=device)
    own = block_at(first_block + row // squares, rank, world, inner) * squares + row % squares
    square = torch.arange(scores.shape[-1], device=device)
    seen = own[:, None] >= square
    if seen_from is not None:
        first = seen_from[:, first_block + row // squares, None] * squares
        seen = seen & (square >= first)[:, None]
    scores = (scores * (softmax_scale / stride)).masked_fill(~seen, float("-inf"))
    parts = scores.unflatten(-1, (num_blocks, squares)).logsumexp(-1) / math.log(2)
    return parts, scores.logsumexp(-1) / math.log(2)


def block_masses(parts: Tensor, lse: Tensor, squares: int, num_rows: int) -> Tensor:
    """Attention of each query block's rows to key blocks.

    Args:
        parts, lse: of :func:`antidiagonal_lse`, float32.
        squares: rows of a query block, at most 128.
        num_rows: the rows after these are padding and count nothing.

    Returns:
        int32 ``[b, h, query blocks, NB]``, with 2^23 for a probability of 1: the rows of a block add up
        exactly, to less than 2^31. What is not a number has no mass.
    """
    share = ((parts - lse[..., None]).exp2() * 2**23 + 0.5).floor()
    share = share.nan_to_num(0.0, 0.0, 0.0).to(torch.int32)
    share[:, :, num_rows:] = 0
    return share.unflatten(2, (-1, squares)).sum(3).int()


def attention_in_blocks(
    sampled_rows: SampledRows, key: Tensor, lse: Tensor, held: Tensor, seen: Tensor
) -> Tensor:
    """Attention of some sampled rows in the key blocks that they see, of this rank's keys, over all of these
    rows.

    Args:
        key: ``[s, b, hk, d]``, this rank's part.
        lse: float32 ``[b, h, R]``, the rows' log-sum-exp over all ranks.
        held: int64 ``[M]``, the numbers of the rows.
        seen: uint8 ``[b, h, M, NB]``, by global key block.

    Returns:
        float32 ``[b, h]``.
    """
    rows = sampled_rows
    batch, heads = lse.shape[:2]
    size, layout = rows.block_size, (rows.rank, rows.world, rows.inner)
    local = torch.arange(len(key), device=key.device)
    block = block_at(local // size, *layout)
    position = positions_at(local, rows.rank, rows.world, size, rows.inner)
    future = (position > rows.rows[held, None])[None]
    if rows.starts is not None:
        future = future | (position < rows.starts[:, held, None])
    query = rows.query[held].double()
    kept = torch.zeros(batch, heads, device=key.device)
    for b in range(batch):
        for h in range(heads):  # memory for the pairs of one head
            keys = key[:, b, h * key.shape[2] // heads].double()
            scores = query[:, b, h] @ keys.T * rows.softmax_scale
            p = torch.exp(scores - lse[b, h, held, None]).nan_to_num_(nan=0.0).clamp_(max=1)
            p = p.masked_fill_(future[b % len(future)], 0)
            kept[b, h] = (p * seen[b, h][:, block]).sum()
    return kept


def top_blocks(
    values: Tensor,
    by_mass: bool,
    target: int,
    first_block: int,
    previous_blocks: int,
    sink_blocks: int,
    rank: int,
    world: int,
    inner: int,
) -> Tensor:
    """The key blocks with the largest values of each query block; of equal values, the earlier blocks.

    Args:
        values: int32 ``[b, h, count, NB]``, by own query block, from local block ``first_block`` on, and by
            key block. Blocks with a value of 0 or less are not selected. With ``by_mass``, a row adds up
            to less than 2^31.
        by_mass: whether ``target`` is a fraction of the sum of a row's causal values, in units of 2^-30, to
            which the blocks that are always selected count; or a number of blocks beside those.
        previous_blocks, sink_blocks: number of blocks before a query's own, and of leading blocks, that are
            always selected, as is the query's own block.
        rank, world, inner: the striped layout, and the rank whose query blocks these are.

    Returns:
        uint8 ``[b, h, count, NB]``: the fewest blocks that reach the target, none later than the query block.
    """
    count, num_blocks = values.shape[-2:]
    local = torch.arange(first_block, first_block + count, device=values.device)
    own = block_at(local, rank, world, inner)[:, None]
    block = torch.arange(num_blocks, device=values.device)
    causal = block <= own
    always = causal & ((block >= own - previous_blocks) | (block < sink_blocks))
    values = torch.where(causal, values.long(), 0)
    free = torch.where(always, 0, values)
    if by_mass:
        target = -(-values.sum(-1, keepdim=True) * target // 2**30)  # rounded up
        target = target - torch.where(always, values, 0).sum(-1, keepdim=True)
    # All different: by value, then by earlier block.
    order = (free * num_blocks + num_blocks - 1 - block).argsort(-1, descending=True)
    ordered = free.gather(-1, order)
    weight = ordered if by_mass else (ordered > 0).long()
    selected = (weight.cumsum(-1) - weight < target) & (ordered > 0)
    selected = torch.zeros_like(selected).scatter_(-1, order, selected)
    return (selected | always).to(torch.uint8)
