# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the two kernels of the keys' and values' gradients share on Hopper GPUs.

A program keeps 128 keys, 64 for each of two computing warpgroups, with their gradients in registers. A warp
loads query tiles of 64 rows, which the warpgroups walk. Scores are computed transposed, keys in rows, so that
probabilities and their gradients are operands in place.

Of heads of 256 only one of the two gradients fits the registers: a launch makes those of the values, and a
second one those of the keys. That is one product of scores more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.tiles import LOG2E
from ...types import PatternOperand
from ..operands import BackwardInputs
from .compat import Descriptor, SharedMemory, Value, aggregate, load_tile
from .descriptors import descriptor, line_descriptor, sums_descriptor, tile_dim
from .masks import CAUSAL, CAUSAL_RANGE, PER_KEY, RANGE
from .pipeline import Barriers, allocate_barriers
from .query_sums import BLOCK_M, QuerySums, allocate_sums

BOTH = gl.constexpr(0)
"""Of a kernel's constant ``PART``: the gradients of keys and values, or one of them."""
VALUES = gl.constexpr(1)
KEYS = gl.constexpr(2)


def part_arguments(dim: int) -> list[dict[str, int]]:
    """Arguments of each launch of both kernels: what it makes, and how many tiles of queries and of grad_out
    are in shared memory. The gradient of values reads grad_out last, that of keys reads the queries last."""
    if dim <= 128:
        return [dict(PART=BOTH.value, STAGES=3, GRAD_OUT_STAGES=3)]
    return [
        dict(PART=VALUES.value, STAGES=2, GRAD_OUT_STAGES=2),
        dict(PART=KEYS.value, STAGES=2, GRAD_OUT_STAGES=1),
    ]


def query_arguments(inputs: BackwardInputs) -> dict[str, Any]:
    """Arguments of both kernels: descriptors of the query tiles, of their log-sum-exp and delta, and the
    factor of the scores."""
    width = BLOCK_M.value
    shape = [1, 1, width, tile_dim(inputs.query.shape[-1])]
    return dict(
        q_desc=descriptor(inputs.query, shape),
        grad_out_desc=descriptor(inputs.grad_out, shape),
        lse_desc=line_descriptor(inputs.lse, width),
        delta_desc=line_descriptor(inputs.delta, width),
        softmax_scale=inputs.softmax_scale,
    )


def key_descriptors(
    key: Tensor,
    value: Tensor,
    half: list[int],
    query_sums: Tensor | None,
    describe: Callable[..., TensorDescriptor] = descriptor,
) -> dict[str, TensorDescriptor | None]:
    """Arguments of both kernels: descriptors of halves of the keys, by ``describe``, and of halves of the
    queries' gradient, ``query_gradient.new_query_sums``, if there is one."""
    dim = tile_dim(key.shape[-1])
    # In rows of half the head dimension, as its halves are multiplied by different warpgroups.
    swizzle = None if query_sums is None else dim
    dq_desc = None
    if query_sums is not None:
        dq_desc = sums_descriptor(query_sums, dim)
    return dict(k_desc=describe(key, half, swizzle), v_desc=describe(value, half), dq_desc=dq_desc)


def range_arguments(index: PatternOperand, rank: int) -> dict[str, Any]:
    """Arguments of both kernels: the first keys that the query rows of ``rank`` see, and which query
    blocks see each key block."""
    if index.visible is None:
        return dict(starts_desc=None, q_block_bounds=None)
    local = index.visible.on(rank, index.world, index.inner, index.block_size)
    starts = line_descriptor(local.start_f32[:, None], BLOCK_M.value)
    return dict(starts_desc=starts, q_block_bounds=local.q_block_bounds)


@aggregate
class QueryDescriptors:
    """What query tiles are loaded from."""

    q: Descriptor
    grad_out: Descriptor
    lse: Descriptor
    delta: Descriptor
    starts: Descriptor  # None without visible ranges


@aggregate
class ResidentKeys:
    """The keys and values of a program: [2, 1, 1, HALF_N, D], a half for each computing warpgroup."""

    k: SharedMemory
    v: SharedMemory  # the keys again, if PART is VALUES
    full: SharedMemory  # an mbarrier, used once
    HALF_N: gl.constexpr
    D: gl.constexpr
    PART: gl.constexpr

    @gluon.jit
    def load(self, k_desc, v_desc, batch, head, start):
        """Load the keys and values from row ``start`` of a head on."""
        operands: gl.constexpr = 1 if self.PART == VALUES else 2
        mbarrier.expect(self.full, 2 * operands * self.HALF_N * self.D * 2)
        for half in gl.static_range(2):
            at = [batch, head, start + half * self.HALF_N, 0]
            load_tile(k_desc, at, self.full, self.k.index(half))
            if self.PART != VALUES:
                load_tile(v_desc, at, self.full, self.v.index(half))


@aggregate
class QueryTiles:
    """Query tiles on their way from the loading warp to the computing warpgroups, STAGES at a time. Tiles are
    numbered over a program's whole life."""

    q: SharedMemory  # [STAGES, 1, 1, BLOCK_M, D]
    grad_out: SharedMemory  # [GRAD_OUT_STAGES, 1, 1, BLOCK_M, D]
    lse: SharedMemory  # float32 [STAGES, 1, BLOCK_M]
    delta: SharedMemory  # float32 [GRAD_OUT_STAGES, 1, BLOCK_M]
    q_full: Barriers  # queries, lse and starts have landed
    grad_out_full: Barriers  # grad_out and delta have landed
    empty: Barriers  # both warpgroups have released the tile
    grad_out_empty: Barriers  # and its grad_out, if AHEAD
    starts: SharedMemory  # float32 [STAGES, 1, BLOCK_M]: the first keys that rows see
    D: gl.constexpr
    STAGES: gl.constexpr
    RANGES: gl.constexpr
    AHEAD: gl.constexpr  # whether grad_out is released ahead of the queries, as there is one buffer

    @gluon.jit
    def load(self, n, descs, batch, head, batch_head, row):
        """Load tile n, from row ``row`` of a head on."""
        self.empty.wait_previous(n)
        slot = n % self.STAGES
        full = self.q_full.of(n)
        mbarrier.expect(full, BLOCK_M * self.D * 2 + BLOCK_M * (8 if self.RANGES else 4))
        load_tile(descs.q, [batch, head, row, 0], full, self.q.index(slot))
        load_tile(descs.lse, [batch_head, row], full, self.lse.index(slot))
        if self.RANGES:
            load_tile(descs.starts, [batch, row], full, self.starts.index(slot))
        if self.AHEAD:
            self.grad_out_empty.wait_previous(n)
        slot = n % self.grad_out_full.STAGES
        full = self.grad_out_full.of(n)
        mbarrier.expect(full, BLOCK_M * self.D * 2 + BLOCK_M * 4)
        load_tile(descs.grad_out, [batch, head, row, 0], full, self.grad_out.index(slot))
        load_tile(descs.delta, [batch_head, row], full, self.delta.index(slot))

    @gluon.jit
    def skip(self, n):
        """Release tile n unread. Its queries have landed."""
        if self.AHEAD:
            # Only now has the other warpgroup released the tile before.
            self.grad_out_full.wait(n)
            self.grad_out_empty.arrive(n)
        self.empty.arrive(n)


@aggregate
class TileLoader:
    """What the loading warp does with each query tile."""

    tiles: QueryTiles
    descs: QueryDescriptors

    @gluon.jit
    def visit(self, n, batch, head, batch_head, row):
        self.tiles.load(n, self.descs, batch, head, batch_head, row)


@aggregate
class SharedTiles:
    """Shared memory and barriers that the partitions of a program have in common."""

    resident: ResidentKeys
    queries: QueryTiles
    sums: QuerySums | gl.constexpr  # the queries' gradient, or None

    @gluon.jit
    def sums_of_half(self, HALF: gl.constexpr):
        """The queries' gradient as a computing warpgroup sees it, or None."""
        sums = self.sums
        if sums is not None:
            sums = sums.of_half(HALF)
        return sums


@gluon.jit
def allocate_tiles(
    q_desc,
    grad_out_desc,
    k_desc,
    v_desc,
    lse_desc,
    dq_desc,  # None without the queries' gradient
    HALF_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    GRAD_OUT_STAGES: gl.constexpr,
    RANGES: gl.constexpr,
    PART: gl.constexpr,
):
    """Shared memory and barriers of a program."""
    dtype: gl.constexpr = q_desc.dtype
    k = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF_N, D], k_desc.layout)
    v = k
    if PART != VALUES:
        v = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF_N, D], v_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    grad_out = gl.allocate_shared_memory(
        dtype, [GRAD_OUT_STAGES, 1, 1, BLOCK_M, D], grad_out_desc.layout
    )
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [GRAD_OUT_STAGES, 1, BLOCK_M], lse_desc.layout)
    starts = delta
    if RANGES:
        starts = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = allocate_barriers(STAGES)
    grad_out_full = allocate_barriers(GRAD_OUT_STAGES)
    empty = allocate_barriers(STAGES)
    grad_out_empty = empty
    AHEAD: gl.constexpr = GRAD_OUT_STAGES < STAGES
    if AHEAD:
        grad_out_empty = allocate_barriers(GRAD_OUT_STAGES)
    # A load arrives once, at a full barrier. Both computing warpgroups arrive at an empty one.
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.of(i), count=1)
        mbarrier.init(empty.of(i), count=2)
    for i in gl.static_range(GRAD_OUT_STAGES):
        mbarrier.init(grad_out_full.of(i), count=1)
        if AHEAD:
            mbarrier.init(grad_out_empty.of(i), count=2)
    queries = QueryTiles(
        q, grad_out, lse, delta, q_full, grad_out_full, empty, grad_out_empty, starts, D, STAGES, RANGES,
        AHEAD,
    )  # fmt: skip
    resident = ResidentKeys(k, v, kv_full, HALF_N, D, PART)
    sums = None
    if dq_desc is not None:
        sums = allocate_sums(resident, dq_desc)
    return SharedTiles(resident, queries, sums)


@aggregate
class Layouts:
    """Register layouts of a computing warpgroup."""

    scores: gl.constexpr  # [HALF_N, BLOCK_M]
    gradients: gl.constexpr  # [HALF_N, D]
    operand: gl.constexpr  # [HALF_N, BLOCK_M], of products into the gradients


@gluon.jit
def make_layouts(D: gl.constexpr):
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    gradients: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    return Layouts(scores, gradients, gl.DotOperandLayout(0, gradients, 2))


@aggregate
class KeyGradients:
    """Gradients of a warpgroup's keys, and what the products in flight into them read. None of what ``PART``
    leaves out."""

    dk: Value  # [HALF_N, D]
    dv: Value  # [HALF_N, D]
    p: Value  # [HALF_N, BLOCK_M]
    ds: Value  # [HALF_N, BLOCK_M]

    @gluon.jit
    def wait(self, in_flight: gl.constexpr):
        """Wait until no more than that many products are in flight."""
        dk = self.dk
        dv = self.dv
        p = self.p
        ds = self.ds
        if dk is None:
            dv, p = warpgroup_mma_wait(in_flight, deps=[dv, p])
        elif dv is None:
            dk, ds = warpgroup_mma_wait(in_flight, deps=[dk, ds])
        else:
            dk, dv, p, ds = warpgroup_mma_wait(in_flight, deps=[dk, dv, p, ds])
        return KeyGradients(dk, dv, p, ds)


@gluon.jit
def no_gradients(
    HALF_N: gl.constexpr, D: gl.constexpr, dtype: gl.constexpr, layouts, PART: gl.constexpr
):
    """Zero, to add query tiles to."""
    zero = gl.zeros([HALF_N, D], gl.float32, layouts.gradients)
    none = gl.zeros([HALF_N, BLOCK_M], dtype, layouts.operand)
    if PART == VALUES:
        gradients = KeyGradients(None, warpgroup_mma_init(zero), none, None)
    elif PART == KEYS:
        gradients = KeyGradients(warpgroup_mma_init(zero), None, None, none)
    else:
        gradients = KeyGradients(warpgroup_mma_init(zero), warpgroup_mma_init(zero), none, none)
    return gradients


@gluon.jit
def key_start(resident, tiles, layouts, HALF: gl.constexpr):
    """Wait for the keys and the first query tile. Returns a warpgroup's keys and values, and zero
    gradients."""
    gradients = no_gradients(resident.HALF_N, resident.D, resident.k.dtype, layouts, resident.PART)
    mbarrier.wait(resident.full, 0)
    k = resident.k.index(HALF).reshape([resident.HALF_N, resident.D])
    v = resident.v.index(HALF).reshape([resident.HALF_N, resident.D])
    tiles.q_full.wait(0)
    return k, v, gradients


@gluon.jit
def key_step(
    n, previous, more, gradients, k, v, tiles, scale, mask, position, layouts, sums, MASK: gl.constexpr,
    BEFORE: gl.constexpr = True,
):  # fmt: skip
    """Add query tile n to the gradients.

    Args:
        previous: the tile before, whose products are in flight; -1 if there is none.
        more: whether there is a tile n + 1.
        mask: [HALF_N, BLOCK_M] if CAUSAL, [HALF_N] if PER_KEY.
        position: of the keys, [HALF_N], if RANGE.
        sums: the warpgroup's ``query_sums.QuerySums``, or None: without the queries' gradient.
        BEFORE: whether there is a tile n - 1, whose sum is due. Read with sums.
    """
    dtype: gl.constexpr = tiles.q.dtype
    slot = n % tiles.STAGES
    grad_out_slot = n % tiles.grad_out_full.STAGES
    phase = tiles.grad_out_full.phase(n)  # computed before the products
    q = tiles.q.index(slot).reshape([BLOCK_M, tiles.D])
    grad_out = tiles.grad_out.index(grad_out_slot).reshape([BLOCK_M, tiles.D])
    dv = gradients.dv
    dk = gradients.dk
    HALF_N: gl.constexpr = k.shape[0]
    zero = gl.zeros([HALF_N, BLOCK_M], gl.float32, layouts.scores)
    if sums is not None:
        k, v = sums.resident(n)
    scores = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    gradients = gradients.wait(1)
    tiles.empty.arrive(previous + tiles.STAGES, pred=previous >= 0)
    mbarrier.wait(tiles.grad_out_full.of(n), phase)
    if dk is None:
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        dp = warpgroup_mma(v, grad_out.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
    lse = tiles.lse.index(slot).load(layouts.scores) * LOG2E  # [1, BLOCK_M]
    scores = scores * scale - lse
    if MASK == CAUSAL or MASK == CAUSAL_RANGE:
        scores = scores + mask
    if MASK == PER_KEY:
        scores = scores + mask[:, None]
    if MASK == RANGE or MASK == CAUSAL_RANGE:
        starts = tiles.starts.index(slot).load(layouts.scores)  # [1, BLOCK_M]
        scores = gl.where(position[:, None] >= starts, scores, float("-inf"))
    p = gl.exp2(scores)
    p_operand = None
    ds_operand = None
    if dv is not None:
        p_operand = gl.convert_layout(p.to(dtype), layouts.operand)
        dv = warpgroup_mma(p_operand, grad_out, gradients.dv, is_async=True)
    if dk is not None:
        dp = warpgroup_mma_wait(0 if dv is None else 1, deps=[dp])
        delta = tiles.delta.index(grad_out_slot).load(layouts.scores)  # [1, BLOCK_M]
    if tiles.AHEAD:
        tiles.grad_out_empty.arrive(n)
    if sums is None and dk is not None:
        ds_operand = gl.convert_layout((p * (dp - delta)).to(dtype), layouts.operand)
        dk = warpgroup_mma(ds_operand, q, warpgroup_mma_init(gradients.dk), is_async=True)
    elif sums is not None:
        ds = (p * (dp - delta)).to(dtype)
        sums.put_ds(n, ds)
        ds_operand = gl.convert_layout(ds, layouts.operand)
        if BEFORE:
            # Only now: the registers are full until here.
            dq = sums.product(n - 1)
        dk = warpgroup_mma(ds_operand, q, warpgroup_mma_init(gradients.dk), is_async=True)
        # All at once: with a product in flight behind the sum the registers would not do.
        if BEFORE:
            dq, dv, dk, p_operand, ds_operand = warpgroup_mma_wait(
                0, deps=[dq, dv, dk, p_operand, ds_operand]
            )
            sums.put_sum(n - 1, dq)
        else:
            dv, dk, p_operand, ds_operand = warpgroup_mma_wait(
                0, deps=[dv, dk, p_operand, ds_operand]
            )
    tiles.q_full.wait(n + 1, pred=more)
    return KeyGradients(dk, dv, p_operand, ds_operand)


@gluon.jit
def put_aside(ptr, total, mask, first, ACCUMULATE: gl.constexpr):
    """Add a sum to what is there, or store it if it is the first. No other program writes there."""
    # Decided here, not by the caller: with a condition that is false at compile time Triton 3.6 fails.
    if ACCUMULATE:
        gl.atomic_add(ptr, total, mask=mask, sem="relaxed")
    elif first:
        gl.store(ptr, total, mask=mask)
    else:
        gl.atomic_add(ptr, total, mask=mask, sem="relaxed")
