# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tensor descriptors: how the tensor memory accelerator (TMA) finds tiles of the operands."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.launch import launches_directly

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


def descriptor(
    tensor: Tensor, block_shape: list[int], swizzle: int | None = None
) -> TensorDescriptor:
    """A tensor ``[s, b, h, d]`` as ``[b, h, s, d]``, loaded in tiles of ``block_shape``. In shared memory
    each ``swizzle`` bytes of the rows of a tile follow each other: by default 128, or a whole row."""
    rows, batch, heads, dim = tensor.shape
    stride_m, stride_b, stride_h, _ = tensor.stride()
    return _describe(
        tensor, (batch, heads, rows, dim), (stride_b, stride_h, stride_m), block_shape, swizzle
    )


def descriptor_heads_first(
    tensor: Tensor, block_shape: list[int], swizzle: int | None = None
) -> TensorDescriptor:
    """A tensor ``[b, h, s, d]``, loaded in tiles of ``block_shape``; ``swizzle`` as of :func:`descriptor`."""
    return _describe(tensor, tuple(tensor.shape), tensor.stride()[:3], block_shape, swizzle)


def gathered_descriptor(tensor: Tensor, block_shape: list[int]) -> TensorDescriptor:
    """A tensor ``[I, s, b, hk, d]`` as ``[b, hk, rows, d]``, where the parts of the I ranks lie
    :func:`chunk_rows` apart. The rows between two parts are never loaded."""
    if len(tensor) == 1:
        return descriptor(tensor[0], block_shape)
    ranks, rows, batch, heads, dim = tensor.shape
    rows += (ranks - 1) * chunk_rows(tensor)
    _, stride_n, stride_b, stride_h, _ = tensor.stride()
    return _describe(tensor, (batch, heads, rows, dim), (stride_b, stride_h, stride_n), block_shape)


def chunk_rows(tensor: Tensor) -> int:
    """Rows from one rank's part of ``[I, s, b, hk, d]`` to the next rank's."""
    return tensor.stride(0) // tensor.stride(1)


def line_descriptor(tensor: Tensor, width: int) -> TensorDescriptor:
    """A contiguous float32 tensor ``[b, h, s]`` as ``[b * h, s]``, loaded ``width`` rows at a time."""
    batch, heads, length = tensor.shape
    return _describe(tensor, (batch * heads, length), (length,), (1, width))


def sums_descriptor(tensor: Tensor, dim: int) -> TensorDescriptor:
    """Sums of the queries' gradient, float32 ``[b * h, rows, 32]``, in tiles of ``dim`` rows."""
    return _describe(tensor, tuple(tensor.shape), tensor.stride()[:2], (1, dim, 32))


def _describe(
    tensor: Tensor, shape: tuple, strides: tuple, block_shape, swizzle: int | None = None
) -> TensorDescriptor:
    """The descriptor of a tensor whose last stride is 1.

    Triton checks each new descriptor, which takes longer than a short kernel runs. Most steps describe the
    same shapes at new addresses, so a descriptor is checked once and then copied. The copy relies on
    ``TensorDescriptor`` keeping all its state in ``__dict__``, as it does in the versions that were tested.
    Where kernels are launched by Triton's own launch (``launch.launches_directly``: other versions, or
    ``MTRAINING_TRITON_LAUNCH=1`` in the environment), Triton makes and checks each descriptor.
    """
    block_shape = tuple(block_shape)
    if not launches_directly():
        layout = _tile_layout(block_shape, tensor.dtype, swizzle)
        return TensorDescriptor(tensor, list(shape), [*strides, 1], list(block_shape), layout)
    copy = object.__new__(TensorDescriptor)
    copy.__dict__.update(_checked_state(shape, strides, block_shape, tensor.dtype, swizzle))
    copy.base = tensor
    return copy


@functools.lru_cache(maxsize=1024)
def _checked_state(
    shape: tuple, strides: tuple, block_shape: tuple, dtype: torch.dtype, swizzle: int | None
) -> dict:
    """The attributes of a descriptor that Triton has checked, with a placeholder for its tensor."""
    layout = _tile_layout(block_shape, dtype, swizzle)
    placeholder = _Placeholder(dtype)
    return vars(
        TensorDescriptor(placeholder, list(shape), [*strides, 1], list(block_shape), layout)
    )


class _Placeholder(NamedTuple):
    """What Triton's check of a descriptor reads of its tensor. ``backends.uses_hopper`` checks the alignment
    of each address."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def _tile_layout(
    block_shape: tuple, dtype: torch.dtype, swizzle: int | None
) -> gl.NVMMASharedLayout:
    if swizzle is not None:
        return gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, len(block_shape))
    if dtype == torch.float32 and len(block_shape) == 2:  # entries of a vector: nothing to swizzle
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), _DTYPES[dtype])
