# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Calls of compiled kernels without the Python of Triton's launcher.

In each launch Triton's launcher looks for memory that a kernel may want beside its arguments, and encodes
each tensor descriptor for the GPU anew. The kernels here want no such memory, and equal descriptors are one
object (``descriptors.py``), which keeps its encoding. So :func:`direct_call` calls what the launcher itself
calls in the end, a function in C.

How that is called differs between versions of Triton. Where a launcher is not as known here, it is called
itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

Call = Callable[[tuple[int, ...], int, list], None]
"""Launches a kernel: the grid, three sizes; the stream; and the values of all parameters, which may be
changed."""


class _Launcher(NamedTuple):
    """What Triton's launcher of a kernel calls, and with what."""

    function: Callable[..., None]
    before: tuple
    """After the grid, the stream and the kernel: options of the launch, and the kernel's metadata and hooks,
    of which there are none."""
    flat: bool
    """Whether the kernel's arguments follow one by one, as with Triton 3.6, or as a tuple."""
    encode: Callable[..., list]
    """Makes the arguments of a descriptor, given that and what the compiler says of it."""


def direct_call(compiled: Any, arguments: list) -> Call:
    """A function that launches a compiled kernel, without hooks. All launches have descriptors where
    ``arguments`` have them."""
    launch, kernel, metadata = compiled.run, compiled.function, compiled.packed_metadata
    places = [place for place, each in enumerate(arguments) if hasattr(each, "block_shape")]
    encoded_as = getattr(getattr(compiled, "metadata", None), "tensordesc_meta", None) or []
    launcher = _launcher(launch, metadata)
    if launcher is None or len(encoded_as) != len(places):

        def call_triton(grid: tuple[int, ...], stream: int, values: list) -> None:
            launch(*grid, stream, kernel, metadata, None, None, None, *values)

        return call_triton
    function, before, flat, encode = launcher
    # From the last on: one descriptor is several arguments.
    descriptors = [*zip(places, encoded_as, map(repr, encoded_as), strict=True)][::-1]

    def call(grid: tuple[int, ...], stream: int, values: list) -> None:
        for place, meta, name in descriptors:
            known = values[place].__dict__
            encoding = known.get(name)
            if encoding is None:
                encoding = known[name] = encode(values[place], meta)
            values[place : place + 1] = encoding
        if flat:
            function(*grid, stream, kernel, *before, *values)
        else:
            function(*grid, stream, kernel, *before, (*values,))

    return call


def _launcher(launch: Any, metadata: Any) -> _Launcher | None:
    """What a launcher calls; None if it is not as in Triton 3.6 to 3.9 for NVIDIA GPUs, or does more."""
    module = type(launch).__module__
    if module != "triton.backends.nvidia.driver" or type(launch).__name__ != "CudaLauncher":
        return None
    if launch.global_scratch_size or launch.profile_scratch_size:
        return None
    if getattr(launch, "gsan_enabled", False):
        return None
    function, inner = launch.launch, getattr(launch.launch, "__code__", None)
    if inner is not None:  # around the function in C, where there are descriptors
        if "launcher" not in inner.co_freevars:
            return None
        function = function.__closure__[inner.co_freevars.index("launcher")].cell_contents
    encode = _encoder(importlib.import_module(module))
    if encode is None or hasattr(function, "__code__"):
        return None
    options, none = (launch.launch_cooperative_grid, launch.launch_pdl), (None, None)
    if hasattr(launch, "arg_annotations"):
        kinds = launch.arg_annotations, launch.kernel_signature
        return _Launcher(function, (*options, metadata, None, *none, *none, *kinds), False, encode)
    return _Launcher(function, (*options, *none, metadata, None, *none), True, encode)


def _encoder(module: Any) -> Callable[..., list] | None:
    """Triton's function that makes the arguments of a descriptor."""
    make = getattr(module, "make_tensordesc_arg", None)
    count = getattr(getattr(make, "__code__", None), "co_argcount", 0)
    if make is None or count not in (2, 3):
        return None
    return make if count == 2 else lambda descriptor, meta: make(descriptor, meta, None)
