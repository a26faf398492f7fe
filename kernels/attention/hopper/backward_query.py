# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient of the queries of one round on Hopper GPUs, in Gluon: the same sums as
``portable/backward_query.py``, built like ``forward.py``.

Each of two warpgroups holds 64 query rows. The gradient product of one tile is in flight while the two
score products of the next run and its exponentials are computed.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.counters import work_counter
from ...common.launch import launch
from ...common.tiles import LOG2E
from ..operands import BackwardInputs, RoundKeys
from .compat import store_tile, thread_barrier
from .descriptors import descriptor, tile_dim
from .global_rows import GlobalRows, of_rows
from .item_arguments import (
    item_constants,
    item_tensors,
    key_descriptors,
    num_programs,
    stored_by_tma,
)
from .item_loads import load_keys, load_values
from .item_tiles import allocate_tiles
from .masks import CAUSAL, PER_KEY, RANGE, UNMASKED
from .round_index import RoundIndex


@gluon.jit
def _step(
    n, more, ds, acc, attended, lse, delta, mask, starts, q, grad_out, tiles, scale,
    ds_layout: gl.constexpr, MASK: gl.constexpr, FIRST_TILE: gl.constexpr, ATTENDED: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of tile n, and its gradient product, which is left in flight.

    Args:
        more: whether the item has another tile.
        ds: gradient of the scores of tile n - 1, [HALF_M, BLOCK_N], read by the product in flight.
        acc: [HALF_M, D].
        attended: sums of the probabilities, if ATTENDED, lse, delta: [HALF_M].
    """
    keys = tiles.keys
    values = tiles.values
    s_layout: gl.constexpr = lse.type.layout.parent
    k = keys.tile(keys.slot(n))  # [BLOCK_N, D]
    v = values.tile(values.slot(n))  # [BLOCK_N, D]
    HALF_M: gl.constexpr = q.shape[0]
    zero = gl.zeros([HALF_M, keys.ROWS], gl.float32, s_layout)
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    values.wait_full(n)
    if not FIRST_TILE:
        # Three accumulators and the gradient product's operand at once would not fit the registers.
        acc, ds = warpgroup_mma_wait(1, deps=[acc, ds])
        acc = warpgroup_mma_init(acc)
        keys.release(n + keys.full.STAGES - 1)  # tile n - 1
    dp = warpgroup_mma(grad_out, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if MASK == CAUSAL:
        p = gl.exp2(scores * scale + mask - lse[:, None])
    elif MASK == RANGE:
        position = mask.load(gl.SliceLayout(0, s_layout))  # [BLOCK_N]
        visible = position[None, :] >= starts[:, None]
        p = gl.exp2(gl.where(visible, scores * scale - lse[:, None], float("-inf")))
    elif MASK == PER_KEY:
        # From shared memory only now: the registers are full until here.
        bias = mask.load(gl.SliceLayout(0, s_layout))  # [BLOCK_N]
        p = gl.exp2(scores * scale + bias[None, :] - lse[:, None])
    else:
        p = gl.exp2(scores * scale - lse[:, None])
    if ATTENDED:
        attended += gl.sum(p, 1)
    # As in the forward, a branch keeps the exponentials before the wait that follows.
    keys.wait_full(n + 1, pred=more)
    dp, p = warpgroup_mma_wait(0, deps=[dp, p])
    values.release(n)
    tiles.queries.release(more == 0)
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(k.dtype), ds_layout)
    acc = warpgroup_mma(ds, k, acc, is_async=True)
    return ds, acc, attended


@gluon.jit
def _attend(
    tiles,
    # The gradient of the rounds before and of this one
    accumulator,
    grad_q,
    grad_q_desc,  # or None
    grad_q_buffers,  # [2, 1, 1, HALF_M, D], with grad_q_desc
    lse_ptr,  # [b, h, query_len]
    delta_ptr,  # [b, h, query_len]
    attended_ptr,  # [b, h, query_len], or None
    first_keys,  # [b, query_len]
    query_len,
    index,
    softmax_scale,
    HEAD_DIM: gl.constexpr,
    HALF: gl.constexpr,
    FIRST: gl.constexpr,
):
    """A computing warpgroup: half of the query rows of each work item."""
    keys = tiles.keys
    queries = tiles.queries
    BLOCK: gl.constexpr = index.BLOCK
    BLOCK_N: gl.constexpr = index.BLOCK_N
    D: gl.constexpr = keys.D
    HALF_M: gl.constexpr = BLOCK // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = queries.q.dtype
    MASK: gl.constexpr = RANGE if index.RANGES else PER_KEY
    ATTENDED: gl.constexpr = attended_ptr is not None
    scale = softmax_scale * LOG2E
    q = queries.q.index(HALF).reshape([HALF_M, D])
    grad_out = queries.grad_out.index(HALF).reshape([HALF_M, D])
    n = 0  # tiles, and
    turn = 0  # items, that this program has had
    item, item_keys = tiles.channel.receive(0, 4)
    while item < index.num_items:
        num_tiles = item_keys.num_tiles(BLOCK_N)
        batch_head = item // index.local_blocks
        q_block = index.q_block(item)
        start = q_block * BLOCK + HALF * HALF_M
        rows = start + gl.arange(0, HALF_M, layout=row_layout)  # [HALF_M]
        line = batch_head.to(gl.int64) * query_len + rows
        # A row past the end gets lse = inf, hence p = 0.
        lse = gl.load(lse_ptr + line, mask=rows < query_len, other=float("inf")) * LOG2E
        delta = gl.load(delta_ptr + line, mask=rows < query_len, other=0.0)
        attended = gl.zeros([HALF_M], gl.float32, row_layout)
        starts = 0.0
        if index.RANGES:
            line = (batch_head // index.HEADS).to(gl.int64) * query_len + rows
            starts = gl.load(first_keys + line, mask=rows < query_len, other=0.0)
        if FIRST:
            acc = warpgroup_mma_init(gl.zeros([HALF_M, D], gl.float32, o_layout))
        else:
            out_at = start + gl.arange(0, HALF_M, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            acc_ptr = accumulator.head_ptr(batch_head // index.HEADS, batch_head % index.HEADS)
            acc = gl.load(
                accumulator.tile(acc_ptr, out_at, d),
                mask=of_rows(out_at < query_len, d, HEAD_DIM),
                other=0.0,
            )  # [HALF_M, D]
            acc = warpgroup_mma_init(acc * (1.0 / softmax_scale))

        keys.wait_full(n)
        queries.wait_full(turn)
        # The first tile is not in the loop, so that the compiler finds the loop's operands in place.
        if FIRST:
            # The diagonal block.
            mask = tiles.masks.causal(n, rows, starts, q_block * BLOCK, index.RANGES, s_layout)
        FIRST_MASK: gl.constexpr = CAUSAL if FIRST else MASK
        ds, acc, attended = _step(
            n, num_tiles > 1, None, acc, attended, lse, delta, mask if FIRST else tiles.masks.tile(n), starts,
            q, grad_out, tiles, scale, ds_layout, FIRST_MASK, True, ATTENDED,
        )  # fmt: skip
        if FIRST:
            for j in gl.static_range(1, BLOCK // BLOCK_N):
                ds, acc, attended = _step(
                    n + j, j + 1 < num_tiles, ds, acc, attended, lse, delta,
                    tiles.masks.causal(
                        n + j, rows, starts, q_block * BLOCK + j * BLOCK_N, index.RANGES, s_layout
                    ),
                    starts, q, grad_out, tiles, scale, ds_layout, CAUSAL, False, ATTENDED,
                )  # fmt: skip
        for j in range(index.first_tiles(), item_keys.unmasked_tiles):
            ds, acc, attended = _step(
                n + j, j + 1 < num_tiles, ds, acc, attended, lse, delta, 0.0, starts, q, grad_out, tiles,
                scale, ds_layout, UNMASKED, False, ATTENDED,
            )  # fmt: skip
        if index.COLUMNS or index.RANGES:
            for j in range(gl.maximum(item_keys.unmasked_tiles, index.first_tiles()), num_tiles):
                ds, acc, attended = _step(
                    n + j, j + 1 < num_tiles, ds, acc, attended, lse, delta, tiles.masks.tile(n + j), starts,
                    q, grad_out, tiles, scale, ds_layout, MASK, False, ATTENDED,
                )  # fmt: skip
        n += num_tiles
        turn += 1
        if ATTENDED:
            line = attended_ptr + batch_head.to(gl.int64) * query_len + rows
            if not FIRST:
                attended += gl.load(line, mask=rows < query_len, other=0.0)
            gl.store(line, attended, mask=rows < query_len)
        acc, ds = warpgroup_mma_wait(0, deps=[acc, ds])
        keys.release(n - 1)
        acc = acc * softmax_scale
        if grad_q_desc is not None:
            # The previous item's store has read the buffer: it had this item's time.
            tma.store_wait(0)
            thread_barrier()
            grad_q_buffers.index(HALF).reshape([HALF_M, D]).store(acc.to(dtype))
            fence_async_shared()
            at = [batch_head // index.HEADS, batch_head % index.HEADS, start, 0]
            store_tile(grad_q_desc, at, grad_q_buffers.index(HALF))
        else:
            out_at = start + gl.arange(0, HALF_M, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            grad_q_ptr = grad_q.head_ptr(batch_head // index.HEADS, batch_head % index.HEADS)
            gl.store(
                grad_q.tile(grad_q_ptr, out_at, d),
                acc,
                mask=of_rows(out_at < query_len, d, HEAD_DIM),
            )
        item, item_keys = tiles.channel.receive(turn, 4)
    if grad_q_desc is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["round_start", "wrap", "rank", "round_index", "num_items"])
def _query_kernel(
    work_counter,
    # Operands
    q_desc, grad_out_desc, k_desc, v_desc, column_k_desc, column_v_desc,
    # The gradient by TMA (grad_q_desc may be None) or by pointers, on top of the rounds before
    grad_q_desc, accumulator_ptr, grad_q_ptr,
    lse_ptr, delta_ptr, attended_ptr,
    # Which keys each query block attends to: see RoundIndex
    block_ptr, block_list, member, columns, column_ptr, first_keys, kv_block_bounds,
    # Strides of the accumulator and of the gradient
    stride_am, stride_ab, stride_ah,
    stride_dqm, stride_dqb, stride_dqh,
    ptr_len, list_len, column_len, query_len, local_blocks, num_items, softmax_scale,
    round_start, wrap, chunk_rows, rank, world, round_index, outer,
    INNER: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    D: gl.constexpr, BLOCK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, FIRST: gl.constexpr,
    COLUMNS: gl.constexpr, LISTS: gl.constexpr, RANGES: gl.constexpr,
):  # fmt: skip
    index = RoundIndex(
        block_ptr=block_ptr, block_list=block_list, column_ptr=column_ptr, columns=columns, member=member,
        kv_block_bounds=kv_block_bounds, marks=None, ptr_len=ptr_len, list_len=list_len,
        column_len=column_len, local_blocks=local_blocks, num_items=num_items, round_start=round_start,
        wrap=wrap, chunk_rows=chunk_rows, rank=rank, world=world, round_index=round_index, outer=outer,
        INNER=INNER, HEADS=HEADS, GROUP=GROUP, BLOCK=BLOCK, BLOCK_N=BLOCK_N, COLUMNS=COLUMNS, LISTS=LISTS,
        RANGES=RANGES, FIRST=FIRST, MARKS=False,
    )  # fmt: skip
    tiles = allocate_tiles(
        q_desc, grad_out_desc, k_desc, v_desc, BLOCK, BLOCK_N, D, STAGES, VALUE_STAGES, RANGES, False,
    )  # fmt: skip
    grad_q_buffers = tiles.queries.q  # not written
    if grad_q_desc is not None:
        grad_q_buffers = gl.allocate_shared_memory(
            q_desc.dtype, [2, 1, 1, BLOCK // 2, D], grad_q_desc.layout
        )
    accumulator = GlobalRows(accumulator_ptr, stride_am, stride_ab, stride_ah)
    grad_q = GlobalRows(grad_q_ptr, stride_dqm, stride_dqb, stride_dqh)
    gl.warp_specialize(
        [
            (_attend, (
                tiles, accumulator, grad_q, grad_q_desc, grad_q_buffers, lse_ptr, delta_ptr,
                attended_ptr, first_keys, query_len, index, softmax_scale, HEAD_DIM, 0, FIRST,
            )),
            (_attend, (
                tiles, accumulator, grad_q, grad_q_desc, grad_q_buffers, lse_ptr, delta_ptr,
                attended_ptr, first_keys, query_len, index, softmax_scale, HEAD_DIM, 1, FIRST,
            )),
            (load_keys, (work_counter, tiles, q_desc, grad_out_desc, k_desc, column_k_desc, index)),
            (load_values, (tiles, v_desc, column_v_desc, index)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


def backward_query(
    inputs: BackwardInputs,
    keys: RoundKeys,
    grad_query: Tensor,
    accumulator: Tensor | None,
    head_range: range,
) -> None:
    """:func:`...attention.backward_query` into ``grad_query``, which may be the accumulator."""
    query, index = inputs.query, inputs.index
    half = [1, 1, index.block_size // 2, tile_dim(query.shape[3])]
    acc_in = grad_query if accumulator is None else accumulator
    first, end = index.local_blocks * head_range.start, index.local_blocks * head_range.stop
    constants = item_constants(
        query, keys, index, end, inputs.softmax_scale, {"a": acc_in, "dq": grad_query},
        # Values are read early in a tile, keys to its end. Two of each fit with heads of up to 128.
        VALUE_STAGES=2 if query.shape[3] <= 128 else 1,
    )  # fmt: skip
    launch(
        _query_kernel,
        (num_programs(query, end - first),),
        constants,
        work_counter=work_counter(first, query.device),
        q_desc=descriptor(query, half),
        grad_out_desc=descriptor(inputs.grad_out, half),
        **key_descriptors(keys, index),
        grad_q_desc=descriptor(grad_query, half) if stored_by_tma(grad_query, keys) else None,
        accumulator_ptr=acc_in,
        grad_q_ptr=grad_query,
        lse_ptr=inputs.lse,
        delta_ptr=inputs.delta,
        attended_ptr=inputs.attended,
        **item_tensors(keys, index),
    )
