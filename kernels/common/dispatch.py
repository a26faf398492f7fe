# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which of the kernels take given operands."""

from __future__ import annotations

import functools
import os
import warnings

import torch
from torch import Tensor

# Gluon, which the Hopper kernels are written in, still changes from version to version.
GLUON_VERSIONS = ((3, 6), (3, 9))


def uses_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels run on this tensor; read at call time, as tests switch it."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _gluon_is_known() -> bool:
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    low, high = GLUON_VERSIONS
    if low <= version <= high:
        return True
    warnings.warn(
        f"Triton {triton.__version__} is not one of those that the Hopper kernels were tried with "
        f"({low[0]}.{low[1]} to {high[0]}.{high[1]}): the portable kernels run instead, which are slower",
        stacklevel=2,
    )
    return False


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _can_be_described(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it: 16-byte aligned, rows at unit stride."""
    size = tensor.element_size()
    aligned = all(stride * size % 16 == 0 for stride in tensor.stride()[:-1])
    return aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0


def uses_hopper(index, *operands: Tensor) -> bool:
    """Whether the Hopper kernels take these ``[s, b, h, d]`` operands (keys also ``[I, s, b, hk, d]``).

    They need a Hopper GPU, 16-bit operands at 16-byte aligned strides, blocks of 128 and lengths that
    are multiples of 4. ``MTRAINING_PORTABLE_KERNELS=1`` in the environment keeps to the portable ones.
    """
    query = operands[0]
    return (
        query.is_cuda
        and query.element_size() == 2
        and index.block_size == 128
        and query.shape[0] % 4 == 0
        and _is_hopper(query.device)
        and os.environ.get("MTRAINING_PORTABLE_KERNELS", "0") != "1"
        and all(_can_be_described(operand) for operand in operands)
        and _gluon_is_known()
    )
