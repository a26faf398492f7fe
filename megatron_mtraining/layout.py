# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block striping: which tokens live on which context-parallel rank.

``W = O x I`` ranks make ``O`` inner groups of ``I`` ranks: rank ``x * I + y`` has inner rank ``y`` in inner
group ``x`` (:func:`inner_size`). The sequence is cut into blocks of ``B`` tokens. Consecutive blocks live
on consecutive inner groups; the blocks of one group, ``j`` with ``j % O == x``, go to its ranks in snake
(boustrophedon) order: inner ranks 0 to I - 1, then I - 1 to 0, and so on. So local block ``a`` of every rank
is one of the W blocks from ``a * W`` on. With O = I = 2::

    block        0  1  2  3 | 4  5  6  7 | 8  9 10 11
    inner group  0  1  0  1 | 0  1  0  1 | 0  1  0  1
    inner rank   0  0  1  1 | 1  1  0  0 | 0  0  1  1

Causal attention to a key block depends on its distance in blocks. Between two inner groups these distances
have one residue modulo O, and all ranks of a group have about as many query blocks that see a given number of
key blocks: so every rank has the same work in every round of the ring. Without reversing odd rows, inner rank
I - 1 would always be later than rank 0 and have more work, by O(1 / blocks per rank).

Pure index arithmetic over tensors: nothing here knows of process groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ConfigError, check_whole
from .tensors import check_dense, check_values

GATHERED = 8
"""Default limit of the size of an inner group."""
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of positions."""


def check_rank(cp_rank: int, cp_size: int) -> None:
    """Raise :class:`ConfigError` unless there is such a rank: another would get tokens of no rank's."""
    check_whole(cp_rank=cp_rank, cp_size=cp_size)
    if not 0 <= cp_rank < cp_size:
        raise ConfigError(f"cp_rank is {cp_rank}: there are {cp_size} ranks, from 0")


def check_layout(seq_length: int, cp_size: int, block_size: int) -> None:
    """Raise :class:`ConfigError` unless ``seq_length`` is a multiple of ``block_size * cp_size``."""
    check_whole(seq_length=seq_length, cp_size=cp_size, block_size=block_size)
    if min(cp_size, block_size, seq_length) < 1 or seq_length % (block_size * cp_size):
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
    check_whole(cp_size=cp_size, **({} if inner is None else {"inner": inner}))
    if cp_size < 1:
        raise ConfigError(f"there are {cp_size} context-parallel ranks: use 1 or more")
    if inner is None:
        return max(size for size in range(1, GATHERED + 1) if cp_size % size == 0)
    if inner < 1 or cp_size % inner:
        raise ConfigError(
            f"{cp_size} context-parallel ranks cannot be cut into inner groups of {inner}: use a divisor"
        )
    return inner


def block_at(local_block, cp_rank, cp_size: int, inner: int | None = None):
    """The global block that is a rank's local block; of numbers or of tensors. Arithmetic for the pattern
    and the kernels: that there are such blocks and ranks is not checked."""
    inner = inner_size(cp_size, inner)
    x, y = cp_rank // inner, cp_rank % inner
    reversed_row = local_block % 2
    return (local_block * inner + y + reversed_row * (inner - 1 - 2 * y)) * (cp_size // inner) + x


def owner_of(block, cp_size: int, inner: int | None = None):
    """The inverse of :func:`block_at`: the rank that a global block lives on, and its local block there. Not
    checked either."""
    inner = inner_size(cp_size, inner)
    outer = cp_size // inner
    of_group = block // outer
    local, u = of_group // inner, of_group % inner
    y = u + local % 2 * (inner - 1 - 2 * u)
    return block % outer * inner + y, local


def _checked_dim(tensor: Tensor, dim: int) -> int:
    """The dimension, counted from 0; one that the tensor does not have is no other's."""
    check_dense("the tensor to stripe", tensor)
    check_whole(dim=dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError(f"dim is {dim}: the tensor has {tensor.dim()} dimensions, from 0")
    return dim % tensor.dim()


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
        inner: ranks of an inner group, as for :func:`inner_size`.

    Returns:
        A contiguous tensor, ``seq_length // cp_size`` long in ``dim`` (the tensor itself at size 1).

    Raises:
        ConfigError: the length is not a multiple of ``block_size * cp_size``, there is no such rank or
            dimension, or it is no dense tensor.
    """
    dim = _checked_dim(tensor, dim)
    seq_length = tensor.shape[dim]
    check_layout(seq_length, cp_size, block_size)
    check_rank(cp_rank, cp_size)
    inner = inner_size(cp_size, inner)
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
        inner: ranks of an inner group, as for :func:`inner_size`.

    Raises:
        ConfigError: these are no parts that :func:`stripe` makes.
    """
    if not isinstance(parts, list | tuple):
        raise ConfigError(
            f"parts of ranks are a {type(parts).__name__}: give a list of tensors, one for each rank"
        )
    if not parts:
        raise ConfigError("unstripe needs the part of every context-parallel rank, and got none")
    for rank, part in enumerate(parts):
        check_dense(f"the part of rank {rank}", part)
    dim, cp_size = _checked_dim(parts[0], dim), len(parts)
    alike = {(each.shape, each.dtype, each.device) for each in parts}
    if len(alike) > 1:
        shown = ", ".join(sorted(f"{list(shape)} {dtype} on {at}" for shape, dtype, at in alike))
        raise ConfigError(
            f"parts of ranks are of one shape and dtype and on one device, but these are {shown}"
        )
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
    check_rank(cp_rank, cp_size)
    local = torch.arange(seq_length // cp_size, device=device)
    return positions_at(local, cp_rank, cp_size, block_size, inner)


def locate(
    positions: Tensor,
    cp_size: int,
    block_size: int,
    inner: int | None = None,
    seq_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Where tokens live: the rank, and the position within that rank's part, of global positions.

    Args:
        positions: whole numbers from 0, any shape. They are looked at, which waits for a GPU.
        cp_size: size of the context-parallel group.
        block_size: tokens in a block.
        inner: ranks of an inner group, as for :func:`inner_size`.
        seq_length: tokens of the sequence; None does not look for positions past its end.

    Returns:
        Both int64, of the shape of ``positions``.

    Raises:
        ConfigError: there are no such positions, or there is no such layout.
    """
    check_whole(cp_size=cp_size, block_size=block_size)
    check_layout(block_size * cp_size if seq_length is None else seq_length, cp_size, block_size)
    positions = _checked_positions("positions", positions, seq_length)
    return located(positions, cp_size, block_size, inner)


def located(
    positions: Tensor, cp_size: int, block_size: int, inner: int | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`locate` for the pattern and the kernels: nothing is checked, so that nothing waits for a GPU."""
    rank, local = owner_of(positions // block_size, cp_size, inner)
    return rank, local * block_size + positions % block_size


def positions_at(
    local: Tensor, cp_rank, cp_size: int, block_size: int, inner: int | None = None
) -> Tensor:
    """The inverse of :func:`located`, not checked either: global positions of the tokens at ``local`` in the
    part of ``cp_rank``, a number or a tensor of them. :func:`token_positions` has all positions of a part."""
    block = block_at(local // block_size, cp_rank, cp_size, inner)
    return block * block_size + local % block_size


def _checked_positions(name: str, positions: Tensor, end: int | None) -> Tensor:
    """int64. Raises :class:`ConfigError` unless they are whole numbers from 0 and below ``end``."""
    check_values(**{name: positions})
    if positions.dtype not in WHOLE:
        raise ConfigError(f"{name} are of {positions.dtype}: give whole numbers, int64 for example")
    positions = positions.long()
    wrong = positions < 0
    if end is not None:
        wrong |= positions >= end
    if bool(wrong.any()):
        first = int(positions[wrong].flatten()[0])
        limit = "" if end is None else f", and less than the {end} tokens of the sequence"
        raise ConfigError(f"{name} have {first}: give numbers of 0 or more{limit}")
    return positions
