# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block striping: which tokens live on which context-parallel rank.

With blocks of ``B`` tokens and ``W`` ranks, global block ``b`` lives on rank ``b % W`` as its local
block ``b // W``. Pure index arithmetic over tensors: nothing here knows of process groups or of
Megatron.

The distance between a query block of rank ``r`` and a key block of rank ``s`` is ``t = (r - s) % W``
modulo ``W``, whatever the two blocks: the reason why every rank has the same work.

Where ranks form several nodes, a rank has another *place* in this order (:func:`place_of`), and every
function below takes places for ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import ConfigError

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
            f"{cp_size} context-parallel ranks cannot be cut into nodes of {inner}: use a divisor"
        )
    return inner


def place_of(cp_rank: int, cp_size: int, inner: int | None = None) -> int:
    """The place of a rank in the layout: the rank, where all ranks are one node or each is its own.

    Where rank ``x * inner + y`` is number y of node x, consecutive blocks live on consecutive nodes. In each
    round of the ring over nodes, all of a node's ranks then attend to keys of one residue of
    distances, so that none waits for another. ``inner`` is as for :func:`inner_size`.
    """
    inner = inner_size(cp_size, inner)
    x, y = divmod(cp_rank, inner)
    return y * (cp_size // inner) + x


def stripe(tensor: Tensor, cp_rank: int, cp_size: int, block_size: int, dim: int = 0) -> Tensor:
    """The part of a full-sequence tensor that lives on ``cp_rank``.

    Args:
        tensor: any dtype, ``seq_length`` long in dimension ``dim``.
        cp_rank, cp_size: position in, and size of, the context-parallel group.
        block_size: tokens in a block.
        dim: the sequence dimension.

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
    blocks = tensor.unflatten(dim, (seq_length // (block_size * cp_size), cp_size, block_size))
    return blocks.select(dim + 1, cp_rank).flatten(dim, dim + 1).contiguous()


def unstripe(parts: list[Tensor], block_size: int, dim: int = 0) -> Tensor:
    """The inverse of :func:`stripe`: the full sequence from every rank's part, in rank order.

    Args:
        parts: one tensor a rank, all of one shape.
        block_size: tokens in a block.
        dim: the sequence dimension.
    """
    if not parts:
        raise ConfigError("unstripe needs the part of every context-parallel rank, and got none")
    dim = dim % parts[0].dim()
    check_layout(parts[0].shape[dim] * len(parts), len(parts), block_size)
    blocks = [part.unflatten(dim, (-1, block_size)) for part in parts]
    return torch.stack(blocks, dim + 1).flatten(dim, dim + 2)


def token_positions(
    seq_length: int, cp_rank: int, cp_size: int, block_size: int, device=None
) -> Tensor:
    """Global positions of the tokens on ``cp_rank``: int64 ``[seq_length // cp_size]``, ascending."""
    check_layout(seq_length, cp_size, block_size)
    local = torch.arange(seq_length // cp_size, device=device)
    return positions_at(local, cp_rank, cp_size, block_size)


def locate(positions: Tensor, cp_size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Where tokens live: the rank, and the position within that rank's part, of global positions."""
    block = positions // block_size
    return block % cp_size, block // cp_size * block_size + positions % block_size


def positions_at(local: Tensor, cp_rank, cp_size: int, block_size: int) -> Tensor:
    """The inverse of :func:`locate`: global positions of the tokens at ``local`` in the part of
    ``cp_rank``, a number or a tensor of them."""
    return (local // block_size * cp_size + cp_rank) * block_size + local % block_size


def stripe_batch(batch: dict, cp_rank: int, cp_size: int, block_size: int) -> dict:
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
            batch[name] = stripe(value, cp_rank, cp_size, block_size, dim)
    return batch
