# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plain PyTorch twins of the kernels that choose block lists and make them, as ``reference.py`` is of
attention's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...layout import block_at, owner_of


def _by_round(blocks, member, world, inner, rank) -> tuple[Tensor, Tensor]:
    """What each own query block sees, by round and quotient: bool ``[O, b, h, nb, NB / O]``; and which of
    it is in ``blocks`` alone."""
    nb, num_blocks = blocks.shape[-2:]
    rounds = world // inner
    device = blocks.device
    own = block_at(torch.arange(nb, device=device), rank, world, inner)
    distance = torch.arange(num_blocks, device=device)
    block = own[:, None] - distance
    given = blocks.bool().gather(-1, block.clamp(min=0).expand_as(blocks))
    near = member.bool()[:, :, None]
    seen, alone = ((given | near) & (block >= 0), given & ~near & (block >= 0))
    return (t.unflatten(-1, (-1, rounds)).movedim(-1, 0) for t in (seen, alone))


def _by_rank(blocks, member, world, inner, rank) -> Tensor:
    """Which own query blocks see each key block: bool ``[W, b, h, nb of keys, nb]``."""
    nb, num_blocks = blocks.shape[-2:]
    local = torch.arange(nb, device=blocks.device)
    ranks = torch.arange(world, device=blocks.device)
    own = block_at(local, rank, world, inner)
    block = block_at(local, ranks[:, None], world, inner).flatten()
    apart = own[:, None] - block
    near = member.bool()[:, :, apart.clamp(min=0)]
    seen = (blocks.bool()[..., block] | near) & (apart >= 0)
    return seen.unflatten(-1, (world, nb)).movedim(-2, 0).transpose(-1, -2)


def _prefix(seen: Tensor) -> Tensor:
    counts = seen.sum(-1).flatten().cumsum(0)
    return torch.nn.functional.pad(counts, (1, 0)).int()


def block_counts(blocks, member, world, inner, rank):
    """See :func:`kernels.block_counts`."""
    operands = (blocks, member, world, inner, rank)
    seen, alone = _by_round(*operands)
    return _prefix(seen), _prefix(_by_rank(*operands)), alone.sum((0, -1, -2)).int()


def block_lists(blocks, member, world, inner, rank, round_ptr, rank_ptr, capacity):
    """See :func:`kernels.block_lists`."""
    operands = (blocks, member, world, inner, rank)
    seen, _ = _by_round(*operands)
    lists = []
    for by in (seen, _by_rank(*operands)):
        # In the order of the memory: by line, and ascending in it.
        entries = by.nonzero()[:, -1][:capacity].short()
        lists.append(torch.nn.functional.pad(entries, (0, capacity - len(entries))))
    return tuple(lists)


def strided_lse(query, keys, stride, block_size, first_block, rank, inner, softmax_scale):
    """See :func:`kernels.strided_lse`; in float64, of whatever operands."""
    world, heads = keys.shape[0], query.shape[2]
    squares, device = block_size // stride, query.device
    num_blocks = world * keys.shape[1] // block_size
    rank_of, local = owner_of(torch.arange(num_blocks, device=device), world, inner)
    keys = keys.unflatten(1, (-1, block_size))[rank_of, local].flatten(0, 1)  # in their order
    # [b, h, row, stride, d]: a query row with the key rows it meets on its antidiagonal.
    q, k = (t.double().unflatten(0, (-1, stride)).permute(2, 3, 0, 1, 4) for t in (query, keys))
    k = k.repeat_interleave(heads // keys.shape[2], 1)
    scores = q.flip(3).flatten(-2) @ k.flatten(-2).transpose(-1, -2)
    row = torch.arange(len(query) // stride, device=device)
    own = block_at(first_block + row // squares, rank, world, inner) * squares + row % squares
    seen = own[:, None] >= torch.arange(scores.shape[-1], device=device)
    scores = (scores * (softmax_scale / stride)).masked_fill(~seen, float("-inf"))
    parts = scores.unflatten(-1, (num_blocks, squares)).logsumexp(-1) / math.log(2)
    return parts, scores.logsumexp(-1) / math.log(2)


def take_blocks(values, share, wanted, first_block, window, sink, rank, world, inner):
    """See :func:`kernels.take_blocks`."""
    count, num_blocks = values.shape[-2:]
    local = torch.arange(first_block, first_block + count, device=values.device)
    own = block_at(local, rank, world, inner)[:, None]
    block = torch.arange(num_blocks, device=values.device)
    causal = block <= own
    always = causal & ((block >= own - window) | (block < sink))
    values = torch.where(causal, values.long(), 0)
    free = torch.where(always, 0, values)
    if share:
        wanted = -(-values.sum(-1, keepdim=True) * wanted // 2**30)  # rounded up
        wanted = wanted - torch.where(always, values, 0).sum(-1, keepdim=True)
    # All different: in the order of value and, at ties, of the earlier block first.
    place = (free * num_blocks + num_blocks - 1 - block).argsort(-1, descending=True)
    counted = free.gather(-1, place)
    weight = counted if share else (counted > 0).long()
    taken = (weight.cumsum(-1) - weight < wanted) & (counted > 0)
    return (torch.zeros_like(taken).scatter_(-1, place, taken) | always).to(torch.uint8)
