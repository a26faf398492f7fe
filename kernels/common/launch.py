# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernel launches that take little time on the host.

Triton inspects every argument of every launch to find the compiled kernel. With short sequences this takes
longer than the kernels run. A layer launches the same kernels with the same shapes in every step, so
:func:`launch` remembers the compiled kernel of each combination of shapes and calls it directly
(:mod:`.direct_call`).

This relies on how Triton calls a compiled kernel, which may change. Versions other than
:data:`LAUNCH_VERSIONS` take Triton's own launch; so does ``MTRAINING_TRITON_LAUNCH=1`` in the environment,
which is read once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ...switches import switch
from .direct_call import Call, direct_call
from .triton_version import is_tested_triton

LAUNCH_VERSIONS = ((3, 6), (3, 9))
"""First and last version of Triton whose compiled kernels are called directly."""

_MAX_CACHED = 4096
"""Launches that are remembered for a kernel. Sequences of ever new lengths would add ever more."""

_NUMBERS = (int, float)


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up. Triton's own takes microseconds, since it also works in kernels."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is ``n`` or more; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def current_stream(device: torch.device) -> int:
    """The current stream of a tensor's device, a GPU, as a number. PyTorch makes an object of it, which takes
    microseconds."""
    return driver.active.get_current_stream(device.index)


class Constants:
    """Arguments that are numbers and follow from shapes and settings: made once, and not looked at again in
    launches with the same object."""

    def __init__(self, **arguments: Any):
        self.arguments = arguments
        self.names, self.values = (*arguments,), (*arguments.values(),)


_NONE = Constants()


class ConstantsCache:
    """The :class:`Constants` of some launches, by what they follow from."""

    def __init__(self):
        self._found: dict[tuple, Constants] = {}

    def get(self, given: tuple, make: Callable[[], dict[str, Any]]) -> Constants:
        """Those that follow from ``given``; if they are new, of these arguments."""
        found = self._found.get(given)
        if found is None:
            if len(self._found) >= _MAX_CACHED:
                self._found.clear()
            found = self._found[given] = Constants(**make())
        return found


def launch(
    kernel: Any, grid: tuple[int, ...], constants: Constants = _NONE, /, **arguments: Any
) -> Any:
    """``kernel[grid](**arguments)``.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``.
        grid: one to three sizes.
        constants: more arguments.
        arguments: every parameter of the kernel, and options of the compiler (``num_warps``, ...), in any
            order. A parameter that is not ``constexpr`` is a number in all launches, or a tensor or tensor
            descriptor in all; or None, where a kernel does not read it.

    Returns:
        the compiled kernel.
    """
    if not isinstance(kernel, JITFunction) or not launches_directly():
        return kernel[grid](**arguments, **constants.arguments)
    launches = _LAUNCHES.get(id(kernel))  # a kernel's own hash takes a lock
    if launches is None:
        launches = _LAUNCHES[id(kernel)] = _Launches(kernel)
    names, given = (*arguments,), (*arguments.values(), *constants.values)
    order = launches.last
    if names != order.names or constants is not order.constants:
        order = launches.look_up(names, constants, given)
    values = order.arrange(given)
    passed = [*values[: launches.num_parameters]]
    active = driver.active
    device = active.get_current_device()
    # All that a kernel may be compiled for: dtypes, alignment, and the values of numbers and constants.
    seen: list[Any] = [device, order.numbers(values)]
    for place in order.objects:
        value = passed[place]
        if value is None:
            seen.append(None)
        elif isinstance(value, Tensor):
            address = value.data_ptr()
            seen.append((value.dtype,) if address & 15 else value.dtype)
            if value.is_cuda:  # else Triton's launcher asks the driver, and refuses it
                passed[place] = address
        elif isinstance(value, _NUMBERS):
            seen.append(value)
        else:
            seen.append(kind_of(value))
    key = (*seen,)
    found = order.found
    known = found.get(key)
    if known is not None:
        compiled, call = known
        sizes = (*grid, 1, 1)[:3]
        if _has_hooks():
            compiled[sizes](*values[: launches.num_parameters])
        else:
            call(sizes, active.get_current_stream(device), passed)
        return compiled
    compiled = kernel[grid](**arguments, **constants.arguments)
    if compiled is not None:
        if len(found) >= _MAX_CACHED:
            found.clear()
        found[key] = compiled, direct_call(compiled, passed)
    return compiled


def kind_of(descriptor: Any) -> tuple:
    """What a kernel is compiled for, of a tensor descriptor, as far as its launches differ in it."""
    kind = vars(descriptor).get("kind")
    return kind or (descriptor.base.dtype, *descriptor.block_shape)


def _has_hooks() -> bool:
    """Whether somebody is told of each launch, such as Triton's profiler: by chains of functions, mostly
    empty, unless somebody has replaced them."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


@functools.cache
def launches_directly() -> bool:
    """Whether compiled kernels are remembered and called directly."""
    if switch("MTRAINING_TRITON_LAUNCH") == "1":
        return False
    return is_tested_triton(LAUNCH_VERSIONS, "launches take more time on the host")


class _Order(NamedTuple):
    """An order of keywords, in which launches of a kernel come."""

    names: tuple[str, ...]
    constants: Constants
    arrange: Callable[[tuple], tuple]
    """Reorders values to the order of the kernel's parameters, with options after them."""
    numbers: Callable[[tuple], tuple]
    """Picks numbers, constants and options from reordered values, but for ``constants``."""
    objects: tuple[int, ...]
    """The places of all others: of operands that were no numbers in the first launch."""
    found: dict[tuple, tuple[Any, Call]]
    """Compiled kernels of launches with the same options, and how they are called, by what the compiler sees
    of other arguments."""


class _Launches:
    """What is remembered of a kernel's launches.

    Attributes:
        kernel: the kernel. It is held here so that no other object gets its ``id``.
        names: of its parameters.
        num_operands: parameters before the first ``constexpr``. The compiler sees the values of constants; of
            operands it sees the type, and more.
        last: the order of the last launch. One object, since the backward launches in another thread.
    """

    def __init__(self, kernel: JITFunction):
        constants = [parameter.is_constexpr for parameter in kernel.params]
        self.kernel = kernel
        self.names = tuple(parameter.name for parameter in kernel.params)
        self.num_parameters = len(constants)
        self.num_operands = constants.index(True) if True in constants else len(constants)
        if not all(constants[self.num_operands :]):
            raise TypeError(f"{kernel.__name__}: constexpr parameters must come after all others")
        self.last = _Order((), _NONE, tuple, tuple, (), {})
        self._orders: dict[tuple[Constants, tuple[str, ...]], _Order] = {}
        self._found: dict[tuple, dict[tuple, tuple[Any, Call]]] = {}

    def look_up(self, names: tuple[str, ...], constants: Constants, given: tuple) -> _Order:
        """The order of these names, remembered as the last; ``given`` are the values of a launch."""
        order = self._orders.get((constants, names))
        if order is None:
            if len(self._orders) >= _MAX_CACHED:
                self._orders.clear()
            order = self._orders[constants, names] = self._order(names, constants, given)
        self.last = order
        return order

    def _order(self, names: tuple[str, ...], constants: Constants, given: tuple) -> _Order:
        ordered = (*names, *constants.names)
        missing = [name for name in self.names if name not in ordered]
        if missing:
            raise TypeError(f"{self.kernel.__name__} is missing arguments: {', '.join(missing)}")
        options = tuple(sorted(set(ordered) - set(self.names)))
        places = [ordered.index(name) for name in (*self.names, *options)]
        objects = [
            place
            for place, at in enumerate(places[: self.num_operands])
            if at < len(names) and not isinstance(given[at], _NUMBERS)
        ]
        numbers = [
            place for place, at in enumerate(places) if at < len(names) and place not in objects
        ]
        # By kinds of arguments, too: orders may differ in which operands are None.
        found = self._found.setdefault((options, *objects), {}) if constants is _NONE else {}
        arrange, pick = _picker(places), _picker(numbers)
        return _Order(names, constants, arrange, pick, tuple(objects), found)


def _picker(places: list[int]) -> Callable[[tuple], tuple]:
    """A function that picks the values at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


_LAUNCHES: dict[int, _Launches] = {}
