# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block striping: which tokens live on which context-parallel rank.

``W = O x I`` ranks, rank ``x * I + y`` is number y of node x (:func:`inner_size`). With blocks of ``B``
tokens, consecutive blocks live on consecutive nodes; those of a node, ``j`` with ``j % O == x``, are dealt
to its ranks one each, there and back: the ranks 0 to I - 1, then I - 1 to 0, and so on. So a rank's local
block ``a`` is one of the stripe ``a`` of W blocks. Pure index arithmetic over tensors: nothing here knows of
process groups or of Megatron.

Whether a query attends to a block of keys depends on how many blocks they are apart. Between two nodes these
distances have one residue modulo O, and all ranks of a node have about as many query blocks from which
so many keys are in reach: the reason why every rank has the same work in every round of a ring. Dealt in one
direction only, rank I - 1 would always be later than rank 0, and have more: by a part in the number of
its blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ConfigError

GATHERED = 8
"""Ranks whose keys a rank has at hand at once, at most, unless it is told otherwise."""


def check_layout(seq_length: int, cp_size: int, block_size: int) -> None:
    """Raise :class:`ConfigError` unless ``seq_length`` is a multiple of ``block_size * cp_size``."""
    if cp_size < 1 or seq_length <= 0 or seq_length % (block_size * cp_size):
        raise ConfigError(
            f"a sequence of {seq_length} tokens cannot be striped in blocks of {block_size} over "
            f"{cp_size} context-parallel ranks: its length must be a multiple of "
            f"{block_size} x {cp_size} = {block_size * cp_size}"
        )


def inner_size(cp_size: int, inner: int | None = None) -> int:
    """How many ranks' keys are attended to in one round: ``inner`` if given, else the largest divisor of
    ``cp_size`` up to :data:`GATHERED`.

    Raises:
        ConfigError: ``inner`` does not divide ``cp_size``.
    """
    if inner is None:
        return max(size for size in range(1, GATHERED + 1) if cp_size % size == 0)
    if inner < 1 or cp_size % inner:
        raise ConfigError(
            f"{cp_size} context-parallel ranks cannot be cut into inner groups of {inner}: use a divisor"
        )
    return inner


def block_at(local_block, cp_rank, cp_size: int, inner: int | None = None):
    """The global block that is a rank's local block; of numbers or of tensors."""
    inner = inner_size(cp_size, inner)
    x, y = cp_rank // inner, cp_rank % inner
    turned = local_block % 2
    return (local_block * inner + y + turned * (inner - 1 - 2 * y)) * (cp_size // inner) + x


def owner_of(block, cp_size: int, inner: int | None = None):
    """The inverse of :func:`block_at`: the rank that a global block lives on, and its local block there."""
    inner = inner_size(cp_size, inner)
    outer = cp_size // inner
    of_node = block // outer
    local, u = of_node // inner, of_node % inner
    y = u + local % 2 * (inner - 1 - 2 * u)
    return block % outer * inner + y, local


def stripe(
    tensor: Tensor,
    cp_rank: int,
    cp_size: int,
    block_size: int,
    dim: int = 0,
    inner: int | None = None,
) -> Tensor:
    """The part of a full-sequence tensor that lives on ``cp_rank``.

    Args:
        tensor: any dtype, ``seq_length`` long in dimension ``dim``.
        cp_rank, cp_size: position in, and size of, the context-parallel group.
        block_size: tokens in a block.
        dim: the sequence dimension.
        inner: ranks of a node, as for :func:`inner_size`.

    Returns:
        A contiguous tensor, ``seq_length // cp_size`` long in ``dim`` (the tensor itself at size 1).

    Raises:
        ConfigError: the length is not a multiple of ``block_size * cp_size``.
    """
    dim = dim % tensor.dim()
    seq_length = tensor.shape[dim]
    check_layout(seq_length, cp_size, block_size)
    if cp_size == 1:
        return tensor
    local = torch.arange(seq_length // (block_size * cp_size), device=tensor.device)
    blocks = tensor.unflatten(dim, (-1, block_size))
    blocks = blocks.index_select(dim, block_at(local, cp_rank, cp_size, inner))
    return blocks.flatten(dim, dim + 1).contiguous()


def unstripe(
    parts: list[Tensor], block_size: int, dim: int = 0, inner: int | None = None
) -> Tensor:
    """The inverse of :func:`stripe`: the full sequence from every rank's part, in rank order.

    Args:
        parts: one tensor a rank, all of one shape.
        block_size: tokens in a block.
        dim: the sequence dimension.
        inner: ranks of a node, as for :func:`inner_size`.
    """
    if not parts:
        raise ConfigError("unstripe needs the part of every context-parallel rank, and got none")
    dim, cp_size = dim % parts[0].dim(), len(parts)
    check_layout(parts[0].shape[dim] * cp_size, cp_size, block_size)
    blocks = torch.stack([part.unflatten(dim, (-1, block_size)) for part in parts], dim)
    local_blocks = blocks.shape[dim + 1]
    rank, local = owner_of(
        torch.arange(cp_size * local_blocks, device=blocks.device), cp_size, inner
    )
    blocks = blocks.flatten(dim, dim + 1).index_select(dim, rank * local_blocks + local)
    return blocks.flatten(dim, dim + 1)


def token_positions(
    seq_length: int,
    cp_rank: int,
    cp_size: int,
    block_size: int,
    device=None,
    inner: int | None = None,
) -> Tensor:
    """Global positions of the tokens on ``cp_rank``: int64 ``[seq_length // cp_size]``, ascending."""
    check_layout(seq_length, cp_size, block_size)
    local = torch.arange(seq_length // cp_size, device=device)
    return positions_at(local, cp_rank, cp_size, block_size, inner)


def locate(
    positions: Tensor, cp_size: int, block_size: int, inner: int | None = None
) -> tuple[Tensor, Tensor]:
    """Where tokens live: the rank, and the position within that rank's part, of global positions."""
    rank, local = owner_of(positions // block_size, cp_size, inner)
    return rank, local * block_size + positions % block_size


def positions_at(
    local: Tensor, cp_rank, cp_size: int, block_size: int, inner: int | None = None
) -> Tensor:
    """The inverse of :func:`locate`: global positions of the tokens at ``local`` in the part of
    ``cp_rank``, a number or a tensor of them."""
    block = block_at(local // block_size, cp_rank, cp_size, inner)
    return block * block_size + local % block_size


def stripe_batch(
    batch: dict, cp_rank: int, cp_size: int, block_size: int, inner: int | None = None
) -> dict:
    """Slice a Megatron batch for one rank; the striped twin of ``get_batch_on_this_cp_rank``.

    Args:
        batch: ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` ``[b, s]`` and, if made,
            ``attention_mask`` ``[b, 1, s, s]`` (sliced by query row); entries that are None stay so.

    Returns:
        The same dict, its tensors replaced by this rank's parts.
    """
    for name, value in batch.items():
        if isinstance(value, Tensor):
            dim = 2 if name == "attention_mask" else 1
            batch[name] = stripe(value, cp_rank, cp_size, block_size, dim, inner)
    return batch
