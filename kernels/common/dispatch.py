# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which implementation takes given operands: the reference in PyTorch, or a kernel.

:func:`dispatch` makes the public function of a reference implementation and the kernel that replaces it::

    merge_lse = dispatch(reference.merge_lse, "lse")

Called with CPU tensors, ``merge_lse`` is ``reference.merge_lse``. Called with tensors on a GPU, it is
``merge_lse`` of the module ``lse`` beside ``reference``. The reference defines the operation: the public
function has its signature and docstring, and the kernel's function has the same parameters.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .triton_version import is_tested_triton

P = ParamSpec("P")
R = TypeVar("R")

GLUON_VERSIONS = ((3, 6), (3, 9))
"""First and last version of Triton for the Hopper kernels: Gluon still changes."""


def uses_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels take this tensor: one on a GPU, or any under Triton's interpreter. The
    environment is read at call time, since tests change it."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1"


def dispatch(reference: Callable[P, R], module: str) -> Callable[P, R]:
    """The public function of a reference implementation and its kernel. The device of the first operand that
    is a tensor decides between them.

    Args:
        reference: a function of a module of some package, which takes operands on CPU.
        module: name of a module of the same package. It has a function of the same name and parameters, for
            operands on a GPU. Imported when it is first called, so that CPU users need no Triton.
    """
    name = reference.__name__
    package = reference.__module__.rpartition(".")[0]
    kernels: ModuleType | None = None

    @functools.wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal kernels
        if not uses_triton(_first_tensor(*args, *kwargs.values())):
            return reference(*args, **kwargs)
        if kernels is None:
            kernels = importlib.import_module(f"{package}.{module}")
        return getattr(kernels, name)(*args, **kwargs)

    return op


def _first_tensor(*operands: object) -> Tensor:
    for operand in operands:
        if isinstance(operand, Tensor):
            return operand
    raise TypeError("no operand is a tensor")


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
        and is_tested_triton(
            GLUON_VERSIONS, "attention takes the portable kernels, which are slower"
        )
    )
