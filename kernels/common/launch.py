# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Launching a kernel that was launched before, with little of the host's time.

Triton looks at every argument in each launch to find the compiled kernel; with short sequences that takes
longer than the kernels run. A layer launches the same kernels in every step, so what was found is kept.
"""

from __future__ import annotations

from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_FOUND: dict[tuple, tuple] = {}
_MOST = 4096
"""Launches that are kept; sequences of ever new lengths would make ever more."""


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up. Triton's own takes microseconds, being made for device code too."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 from n on; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def launch(kernel, grid: tuple, *arguments, **constants):
    """``kernel[grid](*arguments, **constants)``.

    Args:
        arguments: the first parameters, in order: tensors, tensor descriptors, numbers; None, which is a
            constant, for what a kernel does not look at.
        constants: the others, which must be constants to the compiler, and its own options.
    """
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        return kernel[grid](*arguments, **constants)
    # What Triton compiles for: types, alignment, and some numbers; all of them here.
    key = (
        kernel, driver.active.get_current_device(), *constants.values(),
        *[
            (argument.dtype, argument.data_ptr() & 15 == 0) if isinstance(argument, Tensor)
            else argument if argument is None or isinstance(argument, (int, float))
            else (argument.base.dtype, *argument.block_shape)
            for argument in arguments
        ],
    )  # fmt: skip
    found = _FOUND.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        if compiled is not None:
            if len(_FOUND) >= _MOST:
                _FOUND.clear()
            names = [parameter.name for parameter in kernel.params[len(arguments) :]]
            _FOUND[key] = compiled, [constants[name] for name in names]
        return compiled
    compiled, rest = found
    compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
    return compiled
