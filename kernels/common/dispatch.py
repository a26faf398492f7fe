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

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


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
