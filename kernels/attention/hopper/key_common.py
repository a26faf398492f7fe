# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the kernels of the keys' gradients on Hopper GPUs share: 128 keys held by two warpgroups, and query
tiles that move past them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.tiles import LOG2E
from .common import descriptor, line_descriptor, load_tile

QROWS = gl.constexpr(64)


@gluon.jit
def key_buffers(
    q_desc, do_desc, k_desc, v_desc, lse_desc, ROWS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, DOCS: gl.constexpr,
):  # fmt: skip
    """Shared memory and barriers of a program: its keys, and the query tiles under way."""
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QROWS, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QROWS], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QROWS], lse_desc.layout)
    start_smem = delta_smem
    if DOCS:
        start_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QROWS], lse_desc.layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    tiles = (q_smem, do_smem, lse_smem, delta_smem, q_ready, do_ready, free, start_smem)
    return (k_smem, v_smem, kv_ready), tiles


@gluon.jit
def load_held(
    k_desc, v_desc, held, batch, head, start, ROWS: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    k_smem, v_smem, kv_ready = held
    mbarrier.expect(kv_ready, 4 * ROWS * D * 2)
    for i in gl.static_range(2):
        at = [batch, head, start + i * ROWS, 0]
        load_tile(k_desc, at, kv_ready, k_smem.index(i))
        load_tile(v_desc, at, kv_ready, v_smem.index(i))


@gluon.jit
def load_moving(
    n, descs, moving, batch, head, bh, at, D: gl.constexpr, STAGES: gl.constexpr,
    DOCS: gl.constexpr,
):  # fmt: skip
    """Tile n of queries, rows ``at`` on, with their log-sum-exp and delta, and the starts of their
    documents."""
    q_desc = descs[0]
    do_desc = descs[1]
    lse_desc = descs[2]
    delta_desc = descs[3]
    q_smem, do_smem, lse_smem, delta_smem, q_ready, do_ready, free, start_smem = moving
    slot = n % STAGES
    mbarrier.wait(free.index(slot), ((n // STAGES) & 1) ^ 1)
    ready = q_ready.index(slot)
    mbarrier.expect(ready, QROWS * D * 2 + QROWS * (8 if DOCS else 4))
    load_tile(q_desc, [batch, head, at, 0], ready, q_smem.index(slot))
    load_tile(lse_desc, [bh, at], ready, lse_smem.index(slot))
    if DOCS:
        load_tile(descs[4], [batch, at], ready, start_smem.index(slot))
    ready = do_ready.index(slot)
    mbarrier.expect(ready, QROWS * D * 2 + QROWS * 4)
    load_tile(do_desc, [batch, head, at, 0], ready, do_smem.index(slot))
    load_tile(delta_desc, [bh, at], ready, delta_smem.index(slot))


@gluon.jit
def key_step(
    n, before, more, dk, dv, p_operand, ds_operand, k, v, moving, scale, bias, position,
    s_layout: gl.constexpr, a_layout: gl.constexpr,
    ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Add query tile n, the next after tile ``before`` (-1: there is none); ``more``: whether tile n + 1
    is there. ``bias`` is added to the scores (MASK 1), or to the scores of a key each (MASK 2); or the keys'
    ``position`` must not be before the start of the query's document (MASK 3; 4 with MASK 1)."""
    q_smem, do_smem, lse_smem, delta_smem, q_ready, do_ready, free, start_smem = moving
    dtype: gl.constexpr = q_smem.dtype
    slot = n % STAGES
    phase = (n // STAGES) & 1
    q = q_smem.index(slot).reshape([QROWS, D])
    do = do_smem.index(slot).reshape([QROWS, D])
    zero = gl.zeros([ROWS, QROWS], gl.float32, s_layout)
    scores = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dk, dv, p_operand, ds_operand = warpgroup_mma_wait(1, deps=[dk, dv, p_operand, ds_operand])
    mbarrier.arrive(free.index((before + STAGES) % STAGES), pred=before >= 0)
    mbarrier.wait(do_ready.index(slot), phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    lse = lse_smem.index(slot).load(s_layout) * LOG2E
    scores = scores * scale - lse
    if MASK == 1 or MASK == 4:
        scores = scores + bias
    if MASK == 2:
        scores = scores + bias[:, None]
    if MASK > 2:
        starts = start_smem.index(slot).load(s_layout)
        scores = gl.where(position[:, None] >= starts, scores, float("-inf"))
    p = gl.exp2(scores)
    p_operand = gl.convert_layout(p.to(dtype), a_layout)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(slot).load(s_layout)
    ds_operand = gl.convert_layout((p * (dp - delta)).to(dtype), a_layout)
    dk = warpgroup_mma(ds_operand, q, warpgroup_mma_init(dk), is_async=True)
    mbarrier.wait(q_ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=more)
    return dk, dv, p_operand, ds_operand


@gluon.jit
def key_start(
    held, moving, HALF: gl.constexpr, o_layout: gl.constexpr, a_layout: gl.constexpr,
    ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Wait for the keys and the first query tile. Returns a warpgroup's keys and values; dk and dv; the
    operands of their products, which are under way from one step to the next."""
    k_smem, v_smem, kv_ready = held
    zero = gl.zeros([ROWS, D], gl.float32, o_layout)
    dk = warpgroup_mma_init(zero)
    dv = warpgroup_mma_init(zero)
    p_operand = gl.zeros([ROWS, QROWS], k_smem.dtype, a_layout)
    ds_operand = gl.zeros([ROWS, QROWS], k_smem.dtype, a_layout)
    mbarrier.wait(kv_ready, 0)
    k = k_smem.index(HALF).reshape([ROWS, D])
    v = v_smem.index(HALF).reshape([ROWS, D])
    mbarrier.wait(moving[4].index(0), 0)
    return k, v, dk, dv, p_operand, ds_operand


def moving_queries(query, grad_out, lse, delta):
    """Descriptors of what moves past the keys: query tiles, with their log-sum-exp and delta."""
    rows = [1, 1, QROWS.value, query.shape[3]]
    queries = [descriptor(t, rows) for t in (query, grad_out)]
    return queries, [line_descriptor(t, QROWS.value) for t in (lse, delta)]


def documents_of(index, rank):
    """``tiles.document_keys``, with a descriptor of the starts."""
    if index.documents is None:
        return None, None
    local = index.documents.on(rank, index.world, index.inner, index.block_size)
    return line_descriptor(local.start_f32[:, None], QROWS.value), local.q_block_bounds
