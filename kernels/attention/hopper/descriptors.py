# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tensor descriptors: how the tensor memory accelerator (TMA) finds tiles of the operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.launch import kind_of, launches_directly, next_power_of_2

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


def tile_dim(head_dim: int) -> int:
    """Elements of a tile's rows: the head dimension, or the next power of two. Tiles are loaded with zeros
    past the head dimension, and stored without what is there."""
    return next_power_of_2(head_dim)


def descriptor(
    tensor: Tensor, block_shape: Sequence[int], swizzle: int | None = None
) -> TensorDescriptor:
    """A tensor ``[s, b, h, d]`` as ``[b, h, s, d]``, loaded in tiles of ``block_shape``. In shared memory
    each ``swizzle`` bytes of the rows of a tile follow each other: by default 128, or a whole row."""
    return _describe(tensor, _heads_first, block_shape, swizzle)


def descriptor_heads_first(
    tensor: Tensor, block_shape: Sequence[int], swizzle: int | None = None
) -> TensorDescriptor:
    """A tensor ``[b, h, s, d]``, loaded in tiles of ``block_shape``; ``swizzle`` as of :func:`descriptor`."""
    return _describe(tensor, _as_it_is, block_shape, swizzle)


def gathered_descriptor(tensor: Tensor, block_shape: Sequence[int]) -> TensorDescriptor:
    """A tensor ``[I, s, b, hk, d]`` as ``[b, hk, rows, d]``, where the parts of the I ranks lie
    :func:`chunk_rows` apart. The rows between two parts are never loaded."""
    return _describe(tensor, _gathered, block_shape)


def chunk_rows(tensor: Tensor) -> int:
    """Rows from one rank's part of ``[I, s, b, hk, d]`` to the next rank's."""
    return tensor.stride(0) // tensor.stride(1)


def line_descriptor(tensor: Tensor, width: int) -> TensorDescriptor:
    """A contiguous float32 tensor ``[b, h, s]`` as ``[b * h, s]``, loaded ``width`` rows at a time."""
    return _describe(tensor, _lines, (1, width))


def sums_descriptor(tensor: Tensor, dim: int) -> TensorDescriptor:
    """Sums of the queries' gradient, float32 ``[b * h, rows, 32]``, in tiles of ``dim`` rows."""
    return _describe(tensor, _as_it_is, (1, dim, 32))


_View = Callable[[tuple, tuple], tuple[tuple, tuple]]
"""From a tensor's shape and strides to those of a descriptor."""
_Given = tuple[_View, tuple, tuple, tuple, torch.dtype, int | None]
"""All of a descriptor but its tensor's address: the view of a shape and strides, tile, dtype and swizzle."""


def _as_it_is(shape: tuple, strides: tuple) -> tuple[tuple, tuple]:
    return shape, strides


def _heads_first(shape: tuple, strides: tuple) -> tuple[tuple, tuple]:
    (rows, batch, heads, dim), (stride_m, stride_b, stride_h, stride_d) = shape, strides
    return (batch, heads, rows, dim), (stride_b, stride_h, stride_m, stride_d)


def _gathered(shape: tuple, strides: tuple) -> tuple[tuple, tuple]:
    (ranks, rows, *rest), (stride_rank, stride_n, *_) = shape, strides
    if ranks > 1:
        rows += (ranks - 1) * (stride_rank // stride_n)
    return _heads_first((rows, *rest), strides[1:])


def _lines(shape: tuple, strides: tuple) -> tuple[tuple, tuple]:
    batch, heads, length = shape
    return (batch * heads, length), (length, 1)


def _describe(
    tensor: Tensor, view: _View, block_shape: Sequence[int], swizzle: int | None = None
) -> TensorDescriptor:
    """The descriptor of a view of a tensor whose last stride is 1. It does not hold the tensor's memory: the
    caller does, until the kernel is launched.

    Triton checks each new descriptor, and encodes it in each launch, which takes longer than a short kernel
    runs. Most steps describe the same shapes, at addresses that come again. So equal descriptors of one
    address are one object, which also keeps its encoding (``direct_call.py``), and at new addresses they are
    copies of one that was checked. The copy relies on ``TensorDescriptor`` keeping all its state in
    ``__dict__``, as it does in the versions that were tested. Where kernels are launched by Triton's own
    launch (``launch.launches_directly``: other versions, or ``MTRAINING_TRITON_LAUNCH=1`` in the
    environment), Triton makes and checks each descriptor.
    """
    given = view, tensor.shape, tensor.stride(), tuple(block_shape), tensor.dtype, swizzle
    if not launches_directly():
        return _checked(tensor, given)
    return _at(tensor.data_ptr(), given)


@functools.lru_cache(maxsize=4096)
def _at(address: int, given: _Given) -> TensorDescriptor:
    """The descriptor of what is at an address. Those of all layers of a model fit the cache."""
    copy = object.__new__(TensorDescriptor)
    copy.__dict__.update(_checked_state(given))
    copy.base = _Memory(given[4], address)
    vars(copy)["kind"] = kind_of(copy)
    return copy


@functools.lru_cache(maxsize=1024)
def _checked_state(given: _Given) -> dict:
    """The attributes of a descriptor that Triton has checked, but for its address."""
    *_, dtype, _ = given
    return vars(_checked(_Memory(dtype, 0), given))


def _checked(base: Tensor | _Memory, given: _Given) -> TensorDescriptor:
    """A descriptor that Triton checks."""
    view, shape, strides, block_shape, dtype, swizzle = given
    layout = _tile_layout(block_shape, dtype, swizzle)
    viewed, strides = view(shape, strides)
    return TensorDescriptor(base, list(viewed), list(strides), list(block_shape), layout)


class _Memory(NamedTuple):
    """What Triton reads of a descriptor's tensor. ``backends.uses_hopper`` checks the alignment of each
    address."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _tile_layout(
    block_shape: tuple, dtype: torch.dtype, swizzle: int | None
) -> gl.NVMMASharedLayout:
    if swizzle is not None:
        return gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, len(block_shape))
    if dtype == torch.float32 and len(block_shape) == 2:  # entries of a vector: nothing to swizzle
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), _DTYPES[dtype])
