# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tile sizes of the portable kernels, by architecture, and device functions that several kernels share.

``a`` and ``c`` in comments are local numbers of query and key blocks, ``bh = batch * HEADS + head``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import next_power_of_2

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """Tile size of a kernel. The forward and the query gradient hold ``block_m`` query rows and loop over
    ``block_n`` keys. The gradients of keys and columns hold ``block_n`` keys and loop over ``block_m``
    rows."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By (operation, head dim); heads of 96 and 192 take the tiles of the next power of two, to which their rows
# are padded. A tile is cut to the block size where it is larger.
# Tiles for 256 are not measured. On Hopper they hold 128 of 255 registers a thread of sums, and need at most
# 130 KB of 227 KB. The forward has one stage: with marks it stages a whole block of 128 keys and values in
# each of two loops, 256 KB in two stages whatever the tile. The small ones need at most 82 KB of 99 KB.
_HOPPER = {
    ("forward", 64): Tile(128, 64, 8, 3),
    # Three stages would be 2% faster, but need 288 KB: the loads of all loops over tiles are staged.
    ("forward", 128): Tile(128, 128, 8, 2),
    ("forward", 256): Tile(64, 32, 4, 1),
    ("query", 64): Tile(64, 64, 4, 3),
    ("query", 128): Tile(64, 64, 4, 2),
    ("query", 256): Tile(64, 32, 4, 2),
    ("key", 64): Tile(64, 64, 4, 2),
    ("key", 128): Tile(64, 128, 8, 2),
    ("key", 256): Tile(32, 64, 8, 2),
    ("column", 64): Tile(64, 64, 4, 3),
    ("column", 128): Tile(64, 64, 4, 2),
    ("column", 256): Tile(32, 32, 4, 2),
    # Not measured: sizes that compile without register spills.
    ("antidiagonal", 64): Tile(128, 128, 8, 3),
    ("antidiagonal", 128): Tile(128, 128, 8, 3),
    ("antidiagonal", 256): Tile(64, 64, 4, 2),
}
# 100 KB of shared memory and no wgmma (Ampere, Ada): smaller tiles, fewer stages.
_SMALL = {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(64, 64, 4, 2),
    ("forward", 256): Tile(32, 32, 4, 1),
    ("query", 64): Tile(64, 64, 4, 2),
    ("query", 128): Tile(64, 32, 4, 2),
    ("query", 256): Tile(32, 16, 4, 2),
    ("key", 64): Tile(64, 64, 4, 2),
    ("key", 128): Tile(32, 64, 4, 2),
    ("key", 256): Tile(16, 32, 4, 2),
    ("column", 64): Tile(64, 64, 4, 2),
    ("column", 128): Tile(32, 32, 4, 2),
    ("column", 256): Tile(16, 32, 4, 2),
    ("antidiagonal", 64): Tile(32, 128, 8, 2),
    ("antidiagonal", 128): Tile(32, 128, 8, 2),
    ("antidiagonal", 256): Tile(16, 64, 4, 2),
}


def tile_for(operation: str, head_dim: int, block_size: int, tensor: torch.Tensor) -> Tile:
    """The tile size of an operation on the tensor's device. float32 takes the small tiles, as do devices
    other than Hopper."""
    hopper = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == 9
    table = _HOPPER if hopper and tensor.dtype != torch.float32 else _SMALL
    tile = table[operation, next_power_of_2(head_dim)]
    return tile._replace(
        block_m=min(tile.block_m, block_size), block_n=min(tile.block_n, block_size)
    )


def precision_for(tensor: torch.Tensor) -> str:
    """Triton's ``input_precision``: float32 inputs are multiplied as float32, not as tf32."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


@triton.jit
def block_at(local_block, rank, world, inner):
    """See ``layout.block_at``."""
    y = rank % inner
    in_group = local_block * inner + y + (local_block & 1) * (inner - 1 - 2 * y)
    return in_group * (world // inner) + rank // inner


@triton.jit
def owner_of(block, world, inner):
    """See ``layout.owner_of``."""
    outer = world // inner
    in_group = block // outer
    local_block = in_group // inner
    u = in_group % inner
    return block % outer * inner + u + (local_block & 1) * (inner - 1 - 2 * u), local_block


@triton.jit
def list_start(bh, a, ptr_len, local_blocks, round_start, LISTS: tl.constexpr):
    """Offset, in the index's ``round_ptr``, of the prefix count where the list of query block ``a`` begins;
    ``round_start`` is the index's. A block list ends at the next count. A head's list, which all query blocks
    share, ends for ``a`` at the count of the last key block that it may attend to. Entries are quotients of
    block distances."""
    if LISTS:
        start = bh * local_blocks + a + round_start
    else:
        start = bh * ptr_len + round_start
    return start


@triton.jit
def first_beyond(entries, low, high, most):
    """The first position from ``low`` to ``high`` whose entry is more than ``most`` (``high`` if none is).
    Entries are ascending."""
    while low < high:
        middle = (low + high) // 2
        beyond = tl.load(entries + middle).to(tl.int32) > most
        high = tl.where(beyond, middle, high)
        low = tl.where(beyond, low, middle + 1)
    return low


@triton.jit
def seen_from(
    first_block, block_ptr, block_list, low, high, last, group, outer, LISTS: tl.constexpr
):
    """Where, in a query block's list of a round (``low`` to ``high``), the key blocks from ``first_block`` of
    the sequence on end. The list is of blocks of the inner group ``group``, nearest first; ``last`` is the
    last of the group's blocks that the query block may attend to."""
    most = last - (first_block - group + outer - 1) // outer
    if LISTS:
        end = first_beyond(block_list, low, high, most)
    else:
        end = tl.maximum(tl.load(block_ptr + tl.maximum(most + 1, 0)), low)
    return end


@triton.jit
def blocks_before(block, rank, world, inner):
    """How many of a rank's blocks come before ``block`` of the sequence."""
    stripe = block // world
    return stripe + (block_at(stripe, rank, world, inner) < block).to(tl.int32)


@triton.jit
def row_dims(D: tl.constexpr):
    """Offsets of a row's D elements. Tiles have sizes of powers of two: of another D, of elements up to the
    next. These are loaded as zeros and not stored (:func:`of_rows`), so that they add nothing to products."""
    return tl.arange(0, 64 if D <= 64 else 128 if D <= 128 else 256)


@triton.jit
def of_rows(mask, D: tl.constexpr):
    """A mask of rows, [n, 1], as a mask of their elements: the same if D is a power of two."""
    if D & (D - 1):
        mask = mask & (row_dims(D) < D)[None, :]
    return mask


@triton.jit
def load_row(base, D: tl.constexpr):
    """One row, [row_dims]."""
    if D & (D - 1):
        return tl.load(base + row_dims(D), mask=row_dims(D) < D, other=0.0)
    return tl.load(base + row_dims(D))


@triton.jit
def load_rows(base, start, stride, offs, limit, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows ``start + offs`` of a matrix, [len(offs), D] (:func:`row_dims`); 0 from row ``limit`` on. The
    offset of ``start`` is computed in 64 bits."""
    pointers = base + start.to(tl.int64) * stride
    pointers = pointers + offs[:, None] * stride + row_dims(D)[None, :]
    if not EVEN:
        mask = of_rows((start + offs)[:, None] < limit, D)
        return tl.load(pointers, mask=mask, other=0.0)
    if D & (D - 1):
        return tl.load(pointers, mask=(row_dims(D) < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_line(base, start, offs, limit, other: tl.constexpr, EVEN: tl.constexpr):
    """Entries ``start + offs`` of a vector, ``other`` from ``limit`` on."""
    if EVEN:
        return tl.load(base + start + offs)
    return tl.load(base + start + offs, mask=start + offs < limit, other=other)


@triton.jit
def store_rows(base, start, stride, offs, limit, values, D: tl.constexpr, EVEN: tl.constexpr):
    """The counterpart of ``load_rows``, in the dtype of the target."""
    pointers = base + start.to(tl.int64) * stride
    pointers = pointers + offs[:, None] * stride + row_dims(D)[None, :]
    values = values.to(base.dtype.element_ty)
    if not EVEN:
        tl.store(pointers, values, mask=of_rows((start + offs)[:, None] < limit, D))
    elif D & (D - 1):
        tl.store(pointers, values, mask=(row_dims(D) < D)[None, :])
    else:
        tl.store(pointers, values)


@triton.jit
def gather_rows(base, rows, D: tl.constexpr):
    """The rows ``rows`` of a contiguous matrix, [len(rows), D]."""
    pointers = base + rows[:, None] * D + row_dims(D)[None, :]
    if D & (D - 1):
        return tl.load(pointers, mask=(row_dims(D) < D)[None, :], other=0.0)
    return tl.load(pointers)
