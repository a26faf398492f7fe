# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gluon of all versions in ``backends.GLUON_VERSIONS`` (Triton 3.6 to 3.9) under one set of names."""

from __future__ import annotations

import typing

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@core.builtin
def _add_tile(tensor_desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory, asynchronously, as ``store_tile`` stores it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


add_tile = getattr(tma, "async_atomic_add", None) or _add_tile
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or (
    gl.shared_memory_descriptor._reinterpret
)
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# Types of aggregates' fields. A number that is 1 at the launch, and None, are constants to the compiler.
Scalar = gl.tensor | gl.constexpr
Pointer = gl.tensor | gl.constexpr
SharedMemory = gl.shared_memory_descriptor
Descriptor = tma.tensor_descriptor | gl.constexpr
Value = core.base_value  # in registers


def aggregate(cls):
    """``gluon.aggregate``: a class of annotated fields, whose values partitions and loops carry as one.

    Triton 3.6 and 3.7 neither write the constructor nor resolve annotations that are strings.
    """
    if hasattr(gluon, "aggregate"):
        return gluon.aggregate(cls)
    fields = typing.get_type_hints(cls)

    def init(self, *args, **kwargs):
        values = dict(zip(fields, args), **kwargs)
        if len(args) > len(fields) or values.keys() != fields.keys():
            raise TypeError(f"{cls.__name__} takes {list(fields)}, got {list(values)}")
        for name, value in values.items():
            if not isinstance(value, core.base_value):
                value = gl.constexpr(value)
            setattr(self, name, value)

    init.__triton_builtin__ = True  # not a function that the kernel's hash has to cover
    cls.__init__ = init
    cls.__annotations__ = fields
    return core._aggregate(cls)
