# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient of the queries of one round on Hopper GPUs, in Gluon: the same sums as
``backward_query.py``, built like ``hopper_forward.py``.

Each of two warpgroups holds 64 query rows. The gradient product of one tile is under way while the two
score products of the next run and its exponentials are computed.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.launch import launch
from ...common.tiles import LOG2E
from .common import (
    bias_at,
    chunk_rows,
    column_descriptors,
    descriptor,
    document_lines,
    gathered_descriptor,
    item_barriers,
    load_keys,
    load_values,
    programs,
    receive_item,
    store_tile,
    thread_barrier,
    tiles_of,
)


@gluon.jit
def _step(
    n, more, ds, acc, lse, delta, scale, bias, starts, q, do, k_smem, v_smem,
    q_free, k_ready, v_ready, k_free, v_free,
    s_layout: gl.constexpr, a_layout: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """Add tile n. ``bias`` is added to the scores (MASK 1), or lies in shared
    memory, a number a key (MASK 2). ``more``: whether the item has another tile."""
    slot = n % STAGES
    k = k_smem.index(slot).reshape([BLOCK, D])
    v = v_smem.index(slot).reshape([BLOCK, D])
    zero = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(slot), (n // STAGES) & 1)
    if not FIRST:
        # Three accumulators and the gradient product's operand at once would not fit the registers.
        acc, ds = warpgroup_mma_wait(1, deps=[acc, ds])
        acc = warpgroup_mma_init(acc)
        mbarrier.arrive(k_free.index((n + STAGES - 1) % STAGES), count=1)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if MASK == 1:
        p = gl.exp2(scores * scale + bias - lse[:, None])
    elif MASK == 3:  # the keys' positions
        position = bias.load(gl.SliceLayout(0, s_layout))
        seen = position[None, :] >= starts[:, None]
        p = gl.exp2(gl.where(seen, scores * scale - lse[:, None], float("-inf")))
    elif MASK == 2:
        # From shared memory only now: the registers are full until here.
        mask = bias.load(gl.SliceLayout(0, s_layout))
        p = gl.exp2(scores * scale + mask[None, :] - lse[:, None])
    else:
        p = gl.exp2(scores * scale - lse[:, None])
    # See hopper_forward: a branch keeps the exponentials before the wait that follows.
    mbarrier.wait(k_ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=more)
    dp, p = warpgroup_mma_wait(0, deps=[dp, p])
    mbarrier.arrive(v_free.index(slot))
    mbarrier.arrive(q_free, pred=more == 0)
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(k_smem.dtype), a_layout)
    acc = warpgroup_mma(ds, k, acc, is_async=True)
    return ds, acc


@gluon.jit
def _attend(
    item_channel, barriers, smems, pointers, dq_desc, strides, start_ptr,
    query_len, nb, items, softmax_scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, DIAGONAL: gl.constexpr, CARRY: gl.constexpr, COLUMNS: gl.constexpr,
    DOCS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows ``HALF`` of each item's query block."""
    item_smem, item_ready, item_free = item_channel
    q_ready, q_free, k_ready, v_ready, k_free, v_free = barriers
    q_smem, do_smem, k_smem, v_smem, dq_smem, biases = smems
    carry_ptr, dq_ptr, lse_ptr, delta_ptr = pointers
    c_ss, c_sb, c_sh, dq_ss, dq_sb, dq_sh = strides
    ROWS: gl.constexpr = BLOCK // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    key_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    MASK: gl.constexpr = 3 if DOCS else 2
    scale = softmax_scale * LOG2E
    q = q_smem.index(HALF).reshape([ROWS, D])
    do = do_smem.index(HALF).reshape([ROWS, D])
    n = 0
    turn = 0
    item, slashes, num_columns, plain, _ = receive_item(
        0, item_smem, item_ready, item_free, 4, DOCS
    )
    while item < items:
        tiles = tiles_of(slashes, num_columns, BLOCK)
        bh = item // nb
        a = nb - 1 - item % nb
        start = a * BLOCK + HALF * ROWS
        rows = start + gl.arange(0, ROWS, layout=row_layout)
        line = bh.to(gl.int64) * query_len + rows
        # A row past the end gets lse = inf, hence p = 0.
        lse = gl.load(lse_ptr + line, mask=rows < query_len, other=float("inf")) * LOG2E
        delta = gl.load(delta_ptr + line, mask=rows < query_len, other=0.0)
        starts = 0.0
        if DOCS:
            line = (bh // HEADS).to(gl.int64) * query_len + rows
            starts = gl.load(start_ptr + line, mask=rows < query_len, other=0.0)
        if CARRY:
            out_at = start + gl.arange(0, ROWS, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            carried = (
                carry_ptr + (bh // HEADS).to(gl.int64) * c_sb + (bh % HEADS).to(gl.int64) * c_sh
            )
            acc = gl.load(
                carried + out_at.to(gl.int64)[:, None] * c_ss + d[None, :],
                mask=(out_at < query_len)[:, None], other=0.0,
            )  # fmt: skip
            acc = warpgroup_mma_init(acc * (1.0 / softmax_scale))
        else:
            acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, o_layout))

        mbarrier.wait(k_ready.index(n % STAGES), (n // STAGES) & 1)
        mbarrier.wait(q_ready, turn & 1)
        # The first tile is not in the loop, so that the compiler finds the loop's operands in place.
        if DIAGONAL:
            keys = a * BLOCK + gl.arange(0, BLOCK, layout=key_layout)
            seen = rows[:, None] >= keys[None, :]
            if DOCS:
                position = bias_at(biases, n, STAGES).load(key_layout)
                seen = seen & (position[None, :] >= starts[:, None])
            bias = gl.where(seen, 0.0, float("-inf"))
            ds, acc = _step(
                n, tiles > 1, None, acc, lse, delta, scale, bias, starts, q, do, k_smem, v_smem,
                q_free, k_ready, v_ready, k_free, v_free,
                s_layout, a_layout, BLOCK, ROWS, D, STAGES, 1, True,
            )  # fmt: skip
        else:
            ds, acc = _step(
                n, tiles > 1, None, acc, lse, delta, scale, bias_at(biases, n, STAGES), starts, q, do,
                k_smem, v_smem,
                q_free, k_ready, v_ready, k_free, v_free,
                s_layout, a_layout, BLOCK, ROWS, D, STAGES, MASK, True,
            )  # fmt: skip
        for j in range(1, plain):
            ds, acc = _step(
                n + j, j + 1 < tiles, ds, acc, lse, delta, scale, 0.0, starts, q, do, k_smem, v_smem,
                q_free, k_ready, v_ready, k_free, v_free,
                s_layout, a_layout, BLOCK, ROWS, D, STAGES, 0, False,
            )  # fmt: skip
        if COLUMNS or DOCS:
            for j in range(gl.maximum(plain, 1), tiles):
                ds, acc = _step(
                    n + j, j + 1 < tiles, ds, acc, lse, delta, scale, bias_at(biases, n + j, STAGES),
                    starts, q, do, k_smem, v_smem, q_free, k_ready, v_ready, k_free, v_free,
                    s_layout, a_layout, BLOCK, ROWS, D, STAGES, MASK, False,
                )  # fmt: skip
        n += tiles
        turn += 1
        acc, ds = warpgroup_mma_wait(0, deps=[acc, ds])
        mbarrier.arrive(k_free.index((n - 1) % STAGES))
        acc = acc * softmax_scale
        if LAST:
            # The store of the item before has read the memory; it was given this item's time.
            tma.store_wait(0)
            thread_barrier()
            dq_smem.index(HALF).reshape([ROWS, D]).store(acc.to(dtype))
            fence_async_shared()
            store_tile(dq_desc, [bh // HEADS, bh % HEADS, start, 0], dq_smem.index(HALF))
        else:
            out_at = start + gl.arange(0, ROWS, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            written = (
                dq_ptr + (bh // HEADS).to(gl.int64) * dq_sb + (bh % HEADS).to(gl.int64) * dq_sh
            )
            gl.store(
                written + out_at.to(gl.int64)[:, None] * dq_ss + d[None, :], acc,
                mask=(out_at < query_len)[:, None],
            )  # fmt: skip
        item, slashes, num_columns, plain, _ = receive_item(
            turn, item_smem, item_ready, item_free, 4, DOCS
        )
    if LAST:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["residue", "wrap", "rank", "number", "items"])
def _query_kernel(
    counter, q_desc, do_desc, k_desc, v_desc, kc_desc, vc_desc, dq_desc,
    carry_ptr, dq_ptr, lse_ptr, delta_ptr,
    slash_ptr, slash_list, member, columns, column_ptr, start_ptr, reach_ptr,
    c_ss, c_sb, c_sh, dq_ss, dq_sb, dq_sh,
    ptr_len, list_len, column_len, query_len, nb, items, softmax_scale,
    residue, wrap, chunk_rows, rank,
    world, number, outer,
    INNER: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, DIAGONAL: gl.constexpr, CARRY: gl.constexpr,
    COLUMNS: gl.constexpr, LISTS: gl.constexpr, DOCS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = BLOCK // 2
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], v_desc.layout)
    dq_smem = q_smem
    if LAST:
        dq_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], dq_desc.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    biases = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK], line)
    item_channel, barriers = item_barriers(STAGES, DOCS)
    smems = (q_smem, do_smem, k_smem, v_smem, dq_smem, biases)
    pointers = (carry_ptr, dq_ptr, lse_ptr, delta_ptr)
    strides = (c_ss, c_sb, c_sh, dq_ss, dq_sb, dq_sh)
    gl.warp_specialize(
        [
            (_attend, (
                item_channel, barriers, smems, pointers, dq_desc, strides, start_ptr,
                query_len, nb, items, softmax_scale,
                0, HEADS, BLOCK, D, STAGES, DIAGONAL, CARRY, COLUMNS, DOCS, LAST,
            )),
            (_attend, (
                item_channel, barriers, smems, pointers, dq_desc, strides, start_ptr,
                query_len, nb, items, softmax_scale,
                1, HEADS, BLOCK, D, STAGES, DIAGONAL, CARRY, COLUMNS, DOCS, LAST,
            )),
            (load_keys, (
                counter, item_channel, barriers, (q_desc, do_desc), (q_smem, do_smem),
                (k_desc, kc_desc), k_smem, biases,
                slash_ptr, slash_list, column_ptr, columns, member,
                reach_ptr, ptr_len, list_len, column_len, nb, items, residue, wrap, chunk_rows, rank, world,
                number, outer,
                INNER, HEADS, GROUP, COLUMNS, LISTS, DOCS, BLOCK, D, STAGES,
            )),
            (load_values, (
                item_channel, barriers, (v_desc, vc_desc), v_smem, slash_ptr, slash_list,
                ptr_len, list_len, nb, items, residue, wrap, rank, chunk_rows,
                INNER, HEADS, GROUP, LISTS, DOCS, BLOCK, D, STAGES,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


def backward_query(
    query, key, value, columns, grad_out, lse, delta, index, this, softmax_scale, carry, grad_query,
    line_range,
):  # fmt: skip
    """Launch the queries' gradient of one round; operands as in ``backward_query.py``."""
    length, _, heads, dim = query.shape
    nb, block = index.local_blocks, index.block_size
    carried = grad_query if carry is None else carry
    half, whole = [1, 1, block // 2, dim], [1, 1, block, dim]
    # Programs draw their items from a counter: heads differ much in work.
    first, items = nb * line_range.start, nb * line_range.stop
    counter = torch.full((1,), first, dtype=torch.int32, device=query.device)
    launch(
        _query_kernel, (programs(query, items - first),),
        counter,
        descriptor(query, half), descriptor(grad_out, half),
        gathered_descriptor(key, whole), gathered_descriptor(value, whole),
        *column_descriptors(key, value, columns, whole),
        descriptor(grad_query if this.last else query, half), carried, grad_query, lse, delta,
        index.round_ptr, index.round_list, index.member, index.columns, index.column_ptr,
        *document_lines(index, this.rank),
        *carried.stride()[:3], *grad_query.stride()[:3],
        index.column_ptr.shape[-1], index.list_strides[0], index.columns.shape[-1],
        length, nb, items, softmax_scale, index.round_start(this.round_index), this.wrap,
        chunk_rows(key), this.rank, index.world, this.round_index, index.outer,
        INNER=index.inner, HEADS=heads, GROUP=heads // key.shape[3], D=dim, BLOCK=block, STAGES=2,
        DIAGONAL=this.first, CARRY=not this.first, COLUMNS=columns is not None, LISTS=index.has_block_lists,
        DOCS=index.documents is not None, LAST=this.last, num_warps=4, maxnreg=168,
    )  # fmt: skip
