# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The queries' gradient in the kernels of the keys' gradients, on Hopper GPUs: the one-pass backward.

The two computing warpgroups exchange the gradients of a tile's scores through shared memory. Each then
multiplies those of all 128 keys by one half of the keys' head dimension. A warp for each half adds the
product to global memory, float32, by the tensor memory accelerator. These additions have no fixed order.

The product of a tile is computed in the step of the next tile, so that neither warpgroup waits for the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .compat import Descriptor, SharedMemory, add_tile, aggregate, reinterpret, thread_barrier
from .pipeline import Barriers, allocate_barriers

BLOCK_M = gl.constexpr(64)
"""Rows of a query tile."""


@gluon.jit
def new_zero(n):
    """0, which LLVM takes for a new number at each call. Addresses that depend on it are neither computed
    before a loop nor shared with code far away, where they would take registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _to_rows(dq, D: gl.constexpr):
    """A sum, [BLOCK_M, D / 2], as [D, 32], in such an order that each thread stores 16 bytes at a time, at
    addresses that differ by constants: registers are full. No value moves to another thread."""
    registers: gl.constexpr = (
        [[0, 1], [0, 2], [16, 0], [32, 0], [64, 0]]
        if D == 128
        else [[0, 1], [0, 2], [16, 0], [32, 0]]
    )
    layout: gl.constexpr = gl.DistributedLinearLayout(
        registers,
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        [[4, 0], [8, 0]],
        [],
        [D, 32],
    )
    # Bits of rows: 5-4, 3, 2-1, 0; of columns: from 3 on, 2-1, 0.
    parts = dq.reshape([4, 2, 4, 2, D // 16, 4, 2]).permute((4, 0, 2, 3, 5, 1, 6))
    return gl.convert_layout(parts.reshape([D, 32]), layout, assert_trivial=True)


@aggregate
class QuerySums:
    """The queries' gradient in a program, as one computing warpgroup and its adding warp see it. The
    warpgroup stores the ``ds`` of its half of the keys, and computes the sums of the same half of the head
    dimension."""

    k: SharedMemory  # [2, 1, 1, HALF_N, D]
    v: SharedMemory
    ds: SharedMemory  # [4, HALF_N, BLOCK_M]: of tile n and half of the keys i, at 2 * (n % 2) + i
    keys: SharedMemory  # [4, HALF_N, D / 2]: of half of the keys i and of the head dimension j, at 2 * i + j
    sums: SharedMemory  # float32 [2, 1, D, 32], by half of the head dimension, in the order of _to_rows
    ds_full: Barriers  # both warpgroups have stored ds
    ds_empty: Barriers  # both have multiplied it
    sums_full: (
        SharedMemory  # mbarriers [2, 1], by half of the head dimension: a sum is in shared memory
    )
    sums_empty: SharedMemory  # and has been read
    HALF_N: gl.constexpr
    D: gl.constexpr
    HALF: gl.constexpr

    @gluon.jit
    def of_half(self, HALF: gl.constexpr):
        """What another warpgroup sees."""
        return QuerySums(
            self.k, self.v, self.ds, self.keys, self.sums, self.ds_full, self.ds_empty, self.sums_full,
            self.sums_empty, self.HALF_N, self.D, HALF,
        )  # fmt: skip

    @gluon.jit
    def put_ds(self, n, ds):
        """Store the gradients of tile n's scores, [HALF_N, BLOCK_M]."""
        self.ds_empty.wait_previous(n)
        self.ds.index(2 * (n % 2) + self.HALF + new_zero(n)).store(ds)
        fence_async_shared()
        thread_barrier()
        self.ds_full.arrive(n)

    @gluon.jit
    def product(self, n):
        """Start tile n's product, [BLOCK_M, D / 2]."""
        HALF_D: gl.constexpr = self.D // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_D, 16])
        self.ds_full.wait(n)
        slot = 2 * (n % 2)
        half = self.HALF + new_zero(n)
        zero = gl.zeros([BLOCK_M, HALF_D], gl.float32, layout)
        ds = self.ds.index(slot).permute((1, 0))
        dq = warpgroup_mma(ds, self.keys.index(half), zero, use_acc=False, is_async=True)
        ds = self.ds.index(slot + 1).permute((1, 0))
        return warpgroup_mma(ds, self.keys.index(2 + half), dq, is_async=True)

    @gluon.jit
    def resident(self, n):
        """The warpgroup's keys and values, [HALF_N, D] each."""
        half = self.HALF + new_zero(n)
        k = self.k.index(half).reshape([self.HALF_N, self.D])
        return k, self.v.index(half).reshape([self.HALF_N, self.D])

    @gluon.jit
    def put_sum(self, n, dq):
        """Hand tile n's product, which is complete, to the adding warp."""
        self.ds_empty.arrive(n)
        mbarrier.wait(self.sums_empty.index(self.HALF), (n & 1) ^ 1)
        self.sums.index(self.HALF + new_zero(n)).reshape([self.D, 32]).store(_to_rows(dq, self.D))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(self.sums_full.index(self.HALF), count=1)

    @gluon.jit
    def finish(self, n):
        """Compute tile n's product and hand it on."""
        self.put_sum(n, warpgroup_mma_wait(0, deps=[self.product(n)]))


@aggregate
class QueryAdder:
    """What an adding warp does with each query tile."""

    half: QuerySums
    desc: Descriptor  # of the queries' gradient

    @gluon.jit
    def visit(self, n, batch, head, batch_head, row):
        """Add the sum of tile n, which starts at row ``row`` of a head."""
        half = self.half
        mbarrier.wait(half.sums_full.index(half.HALF), n & 1)
        half_tile = row // (BLOCK_M // 2) + half.HALF
        add_tile(
            self.desc,
            [batch_head, half_tile * half.D, 0],
            half.sums.index(half.HALF),
        )
        tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(half.sums_empty.index(half.HALF), count=1)


@gluon.jit
def allocate_sums(resident, dq_desc):
    """Shared memory and barriers of the queries' gradient."""
    HALF_N: gl.constexpr = resident.HALF_N
    D: gl.constexpr = resident.D
    HALF_D: gl.constexpr = D // 2
    dtype: gl.constexpr = resident.k.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_M, 16, 2)
    # The keys are loaded in such a layout that each half of the head dimension is a tile.
    keys_layout: gl.constexpr = gl.NVMMASharedLayout(2 * HALF_D, 16, 2)
    ds = gl.allocate_shared_memory(dtype, [4, HALF_N, BLOCK_M], ds_layout)
    keys = reinterpret(resident.k, dtype, [4, HALF_N, HALF_D], keys_layout)
    sums = gl.allocate_shared_memory(gl.float32, [2, 1, D, 32], dq_desc.layout)
    ds_full = allocate_barriers(2)
    ds_empty = allocate_barriers(2)
    sums_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ds_full.of(i), count=2)
        mbarrier.init(ds_empty.of(i), count=2)
        mbarrier.init(sums_full.index(i), count=1)
        mbarrier.init(sums_empty.index(i), count=1)
    return QuerySums(
        resident.k, resident.v, ds, keys, sums, ds_full, ds_empty, sums_full, sums_empty, HALF_N, D, 0
    )  # fmt: skip
