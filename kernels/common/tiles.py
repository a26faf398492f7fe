# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tile sizes of the kernels, one table per architecture, and what all of them share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """Rows of the operand that a program keeps, rows of the one it walks, warps, pipeline stages."""

    keep: int
    walk: int
    warps: int
    stages: int


# By (operation, head dim); a tile is cut to the block size where it is larger.
_HOPPER = {
    ("forward", 64): Tile(128, 64, 8, 3),
    ("forward", 128): Tile(128, 128, 8, 3),
    ("query", 64): Tile(64, 64, 4, 3),
    ("query", 128): Tile(64, 64, 4, 2),
    ("key", 64): Tile(64, 64, 4, 2),
    ("key", 128): Tile(128, 64, 8, 2),
    ("column", 64): Tile(64, 64, 4, 3),
    ("column", 128): Tile(64, 64, 4, 2),
    # Not measured: what compiles without spilling.
    ("strided", 64): Tile(128, 128, 8, 3),
    ("strided", 128): Tile(128, 128, 8, 3),
}
# 100 KB of shared memory and no wgmma (Ampere, Ada): smaller tiles, fewer stages.
_SMALL = {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(64, 64, 4, 2),
    ("query", 64): Tile(64, 64, 4, 2),
    ("query", 128): Tile(64, 32, 4, 2),
    ("key", 64): Tile(64, 64, 4, 2),
    ("key", 128): Tile(64, 32, 4, 2),
    ("column", 64): Tile(64, 64, 4, 2),
    ("column", 128): Tile(32, 32, 4, 2),
    ("strided", 64): Tile(32, 128, 8, 2),
    ("strided", 128): Tile(32, 128, 8, 2),
}


def tile_for(operation: str, head_dim: int, block_size: int, tensor: torch.Tensor) -> Tile:
    """The tile of an operation on the tensor's device. float32 inputs take the small tiles, as do
    devices other than Hopper."""
    hopper = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == 9
    table = _HOPPER if hopper and tensor.dtype != torch.float32 else _SMALL
    tile = table[operation, head_dim]
    return tile._replace(keep=min(tile.keep, block_size), walk=min(tile.walk, block_size))


def precision_for(tensor: torch.Tensor) -> str:
    """Triton's ``input_precision``: float32 inputs are multiplied as float32, not as tf32."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


def document_rows(index, rank: int) -> tuple:
    """Of packed documents, what kernels that hold queries take: where the documents of a rank's rows start,
    and ``LocalDocuments.kv_block_bounds``. None, which compiles to nothing, if there are none."""
    if index.documents is None:
        return None, None
    local = index.documents.on(rank, index.world, index.inner, index.block_size)
    return local.start, local.kv_block_bounds


def document_keys(index, rank: int) -> tuple:
    """What kernels that hold keys take: where the documents of the rows of ``rank`` start, and
    ``LocalDocuments.q_block_bounds``."""
    if index.documents is None:
        return None, None
    local = index.documents.on(rank, index.world, index.inner, index.block_size)
    return local.start, local.q_block_bounds


@triton.jit
def block_at(local_block, rank, world, inner):
    """See ``layout.block_at``."""
    y = rank % inner
    number = local_block * inner + y + (local_block & 1) * (inner - 1 - 2 * y)
    return number * (world // inner) + rank // inner


@triton.jit
def owner_of(block, world, inner):
    """See ``layout.owner_of``."""
    outer = world // inner
    number = block // outer
    local_block = number // inner
    u = number % inner
    return block % outer * inner + u + (local_block & 1) * (inner - 1 - 2 * u), local_block


@triton.jit
def list_start(bh, a, ptr_len, nb, residue, LISTS: tl.constexpr):
    """Which of the prefix counts says where query block ``a`` finds the first of a round's key blocks;
    ``residue`` is the index's ``round_start``. They are of its own list, up to the next count, or of its
    head's, up to the count of the last block in reach. Entries are quotients of distances."""
    if LISTS:
        start = bh * nb + a + residue
    else:
        start = bh * ptr_len + residue
    return start


@triton.jit
def first_beyond(entries, low, high, most):
    """Where, from ``low`` to ``high``, the first of ascending entries is that is more than ``most``;
    ``high`` if none is."""
    while low < high:
        middle = (low + high) // 2
        beyond = tl.load(entries + middle).to(tl.int32) > most
        high = tl.where(beyond, middle, high)
        low = tl.where(beyond, low, middle + 1)
    return low


@triton.jit
def seen_from(
    first_block, slash_ptr, slash_list, low, high, last, node, outer, LISTS: tl.constexpr
):  # fmt: skip
    """Up to where in a query block's part of a round's list, from ``low`` to ``high``, the key blocks are not
    before ``first_block`` of the sequence. The list is of the blocks of ``node``, nearest first; ``last`` is
    the last in reach."""
    most = last - (first_block - node + outer - 1) // outer
    if LISTS:
        end = first_beyond(slash_list, low, high, most)
    else:
        end = tl.maximum(tl.load(slash_ptr + tl.maximum(most + 1, 0)), low)
    return end


@triton.jit
def blocks_before(block, rank, world, inner):
    """How many of a rank's blocks come before ``block`` of the sequence."""
    stripe = block // world
    return stripe + (block_at(stripe, rank, world, inner) < block).to(tl.int32)


@triton.jit
def load_rows(base, start, stride, rows, limit, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows ``start + rows`` of a matrix with ``D`` columns, zeros from row ``limit`` on. The offset of
    ``start`` is taken in 64 bits."""
    pointers = base + start.to(tl.int64) * stride
    pointers = pointers + rows[:, None] * stride + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(start + rows)[:, None] < limit, other=0.0)


@triton.jit
def load_line(base, start, offsets, limit, other: tl.constexpr, EVEN: tl.constexpr):
    """Entries ``start + offsets`` of a vector, ``other`` from ``limit`` on."""
    if EVEN:
        return tl.load(base + start + offsets)
    return tl.load(base + start + offsets, mask=start + offsets < limit, other=other)


@triton.jit
def store_rows(base, start, stride, rows, limit, values, D: tl.constexpr, EVEN: tl.constexpr):
    """The counterpart of ``load_rows``, in the dtype of the target."""
    pointers = base + start.to(tl.int64) * stride
    pointers = pointers + rows[:, None] * stride + tl.arange(0, D)[None, :]
    values = values.to(base.dtype.element_ty)
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(start + rows)[:, None] < limit)


@triton.jit
def gather_rows(base, entries, D: tl.constexpr):
    """The rows ``entries`` of a contiguous matrix."""
    return tl.load(base + entries[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def column_tile(columns, member, first, end, block, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Columns ``first .. first + WIDTH`` of the list, for query block ``block`` of all ranks'.

    ``end`` is how many lie in earlier blocks. Returns their entries in the list, and which of them count
    here: the list's own, at a distance that no slash covers already.
    """
    entry = first + tl.arange(0, WIDTH)
    listed = entry < end
    position = tl.load(columns + entry, mask=listed, other=0)
    distance = block - position // BLOCK
    covered = tl.load(member + distance, mask=listed, other=1)
    # Missing entries repeat the first: any other token's numbers could be NaN, which 0 does not hide.
    return tl.where(listed, entry, first), listed & (covered == 0)
