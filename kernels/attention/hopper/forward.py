# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Forward of one round on Hopper GPUs, in Gluon: the same sums as ``forward.py``.

A program holds one query block of one head. Two warps bring keys and values by the tensor memory
accelerator; two warpgroups hold 64 query rows each and walk the tiles: the diagonal block, the slash
blocks, then tiles of the gathered columns. While a warpgroup's values product of one tile and scores
product of the next are under way, it computes the exponentials of the scores that are there.
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
    warpgroup_mma_wait,
)

from ...common.launch import launch
from ...common.tiles import LN2, LOG2E
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
def _softmax(scores, bias, starts, m, l, scale, MASK: gl.constexpr):
    """Running (max, sum) in base 2, the tile's probabilities, and the factor on what came before."""
    if MASK == 3:  # in shared memory, the keys' positions
        position = bias.load(gl.SliceLayout(0, scores.type.layout))
        seen = position[None, :] >= starts[:, None]
        scores = gl.where(seen, scores * scale, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 1))
    elif MASK == 2:  # in shared memory, a number a key
        scores = scores * scale + bias.load(gl.SliceLayout(0, scores.type.layout))[None, :]
        m_new = gl.maximum(m, gl.max(scores, 1))
    elif MASK == 1:
        scores = scores * scale + bias
        m_new = gl.maximum(m, gl.max(scores, 1))
    else:
        m_new = gl.maximum(m, gl.max(scores, 1) * scale)
    # A row that has seen nothing but scores of -inf has a maximum to subtract only later.
    finite = gl.where(m_new == float("-inf"), 0.0, m_new)
    if MASK:
        p = gl.exp2(scores - finite[:, None])
    else:
        p = gl.exp2(scores * scale - finite[:, None])
    alpha = gl.exp2(m - finite)
    l = l * alpha + gl.sum(p, 1)
    return p, m_new, l, alpha


@gluon.jit
def _step(
    n, more, p, acc, m, l, scale, bias, starts, q, k_smem, v_smem, q_free, k_ready, v_ready, k_free, v_free,
    s_layout: gl.constexpr, p_layout: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Scores of tile n and the values product of tile n - 1, with tile n's exponentials between.
    ``more``: whether the item has another tile."""
    slot = n % STAGES
    before = (n - 1) % STAGES
    zero = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    k = k_smem.index(slot).reshape([BLOCK, D])
    v = v_smem.index(before).reshape([BLOCK, D])
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), ((n - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(slot))
    mbarrier.arrive(q_free, pred=more == 0)
    new, m, l, alpha = _softmax(scores, bias, starts, m, l, scale, MASK)
    new = new.to(p.dtype)
    # The next tile's keys are waited for here because ptxas moves the exponentials across anything but
    # a branch, and they must come before the wait for the values product.
    mbarrier.wait(k_ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=more)
    acc, p, new = warpgroup_mma_wait(0, deps=[acc, p, new])
    mbarrier.arrive(v_free.index(before))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(new, p_layout)
    return p, acc, m, l


@gluon.jit
def _attend(
    item_channel, barriers, smems, pointers, out_desc, strides, start_ptr,
    query_len, nb, items, scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, DIAGONAL: gl.constexpr, CARRY: gl.constexpr, COLUMNS: gl.constexpr,
    DOCS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows ``HALF`` of each item's query block."""
    item_smem, item_ready, item_free = item_channel
    q_ready, q_free, k_ready, v_ready, k_free, v_free = barriers
    q_smem, k_smem, v_smem, out_smem, biases = smems
    carry_ptr, out_ptr, lse_ptr = pointers
    c_ss, c_sb, c_sh, o_ss, o_sb, o_sh = strides
    ROWS: gl.constexpr = BLOCK // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    key_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    MASK: gl.constexpr = 3 if DOCS else 2
    scale = scale * LOG2E
    q = q_smem.index(HALF).reshape([ROWS, D])
    n = 0
    turn = 0
    item, slashes, num_columns, plain, _ = receive_item(
        0, item_smem, item_ready, item_free, 4, DOCS
    )
    while item < items:
        tiles = tiles_of(slashes, num_columns, BLOCK)
        bh = item // nb
        a = nb - 1 - item % nb
        batch = (bh // HEADS).to(gl.int64)
        head = (bh % HEADS).to(gl.int64)
        start = a * BLOCK + HALF * ROWS
        rows = start + gl.arange(0, ROWS, layout=row_layout)
        lse = lse_ptr + bh.to(gl.int64) * query_len + rows
        starts = 0.0
        if DOCS:
            starts = gl.load(start_ptr + batch * query_len + rows, mask=rows < query_len, other=0.0)
        if CARRY:
            out_at = start + gl.arange(0, ROWS, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            carried = carry_ptr + batch * c_sb + head * c_sh
            acc = gl.load(
                carried + out_at.to(gl.int64)[:, None] * c_ss + d[None, :],
                mask=(out_at < query_len)[:, None], other=0.0,
            )  # fmt: skip
            m = gl.load(lse, mask=rows < query_len, other=0.0) * LOG2E
            l = gl.full([ROWS], 1.0, gl.float32, row_layout)
        else:
            acc = gl.zeros([ROWS, D], gl.float32, o_layout)
            m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
            l = gl.zeros([ROWS], gl.float32, row_layout)

        # The first tile: there is no values product yet to run beside its exponentials.
        mbarrier.wait(k_ready.index(n % STAGES), (n // STAGES) & 1)
        mbarrier.wait(q_ready, turn & 1)
        k = k_smem.index(n % STAGES).reshape([BLOCK, D])
        zero = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
        scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if DIAGONAL:
            keys = a * BLOCK + gl.arange(0, BLOCK, layout=key_layout)
            seen = rows[:, None] >= keys[None, :]
            if DOCS:
                position = bias_at(biases, n, STAGES).load(key_layout)
                seen = seen & (position[None, :] >= starts[:, None])
            bias = gl.where(seen, 0.0, float("-inf"))
        else:
            bias = bias_at(biases, n, STAGES)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(n % STAGES))
        mbarrier.arrive(q_free, pred=tiles == 1)
        first: gl.constexpr = 1 if DIAGONAL else MASK
        new, m, l, alpha = _softmax(scores, bias, starts, m, l, scale, first)
        if CARRY:
            acc = acc * gl.convert_layout(alpha, out_rows)[:, None]
        p = gl.convert_layout(new.to(dtype), p_layout)
        mbarrier.wait(k_ready.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=tiles > 1)

        for j in range(1, plain):
            p, acc, m, l = _step(
                n + j, j + 1 < tiles, p, acc, m, l, scale, 0.0, starts, q, k_smem, v_smem,
                q_free, k_ready, v_ready, k_free, v_free,
                s_layout, p_layout, BLOCK, ROWS, D, STAGES, 0,
            )  # fmt: skip
        if COLUMNS or DOCS:
            for j in range(gl.maximum(plain, 1), tiles):
                p, acc, m, l = _step(
                    n + j, j + 1 < tiles, p, acc, m, l, scale, bias_at(biases, n + j, STAGES), starts,
                    q, k_smem, v_smem, q_free, k_ready, v_ready, k_free, v_free,
                    s_layout, p_layout, BLOCK, ROWS, D, STAGES, MASK,
                )  # fmt: skip
        n += tiles
        turn += 1
        final = (n - 1) % STAGES
        mbarrier.wait(v_ready.index(final), ((n - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(final).reshape([BLOCK, D]), acc, is_async=True)
        gl.store(lse, (m + gl.log2(l)) * LN2, mask=rows < query_len)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_free.index(final))
        # What has no weight yet is carried as 0, and is NaN only if it has none at the end.
        weight = l if LAST else gl.where(l == 0.0, 1.0, l)
        acc = acc * gl.convert_layout(1.0 / weight, out_rows)[:, None]
        if LAST:
            # The store of the item before has read the memory; it was given this item's time.
            tma.store_wait(0)
            thread_barrier()
            out_smem.index(HALF).reshape([ROWS, D]).store(acc.to(dtype))
            fence_async_shared()
            store_tile(out_desc, [bh // HEADS, bh % HEADS, start, 0], out_smem.index(HALF))
        else:
            out_at = start + gl.arange(0, ROWS, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            written = out_ptr + batch * o_sb + head * o_sh
            gl.store(
                written + out_at.to(gl.int64)[:, None] * o_ss + d[None, :], acc,
                mask=(out_at < query_len)[:, None],
            )  # fmt: skip
        item, slashes, num_columns, plain, _ = receive_item(
            turn, item_smem, item_ready, item_free, 4, DOCS
        )
    if LAST:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["residue", "wrap", "rank", "number"])
def _forward_kernel(
    counter, q_desc, k_desc, v_desc, kc_desc, vc_desc, out_desc, carry_ptr, out_ptr, lse_ptr,
    slash_ptr, slash_list, member, columns, column_ptr, start_ptr, reach_ptr,
    c_ss, c_sb, c_sh, o_ss, o_sb, o_sh,
    ptr_len, list_len, column_len, query_len, nb, items, scale, residue, wrap, chunk_rows, rank,
    world, number, outer,
    INNER: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, DIAGONAL: gl.constexpr, CARRY: gl.constexpr,
    COLUMNS: gl.constexpr, LISTS: gl.constexpr, DOCS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = BLOCK // 2
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], v_desc.layout)
    out_smem = q_smem
    if LAST:
        out_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], out_desc.layout)
    item_channel, barriers = item_barriers(STAGES, DOCS)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    biases = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK], line)
    smems = (q_smem, k_smem, v_smem, out_smem, biases)
    pointers = (carry_ptr, out_ptr, lse_ptr)
    strides = (c_ss, c_sb, c_sh, o_ss, o_sb, o_sh)
    gl.warp_specialize(
        [
            (_attend, (
                item_channel, barriers, smems, pointers, out_desc, strides, start_ptr,
                query_len, nb, items, scale,
                0, HEADS, BLOCK, D, STAGES, DIAGONAL, CARRY, COLUMNS, DOCS, LAST,
            )),
            (_attend, (
                item_channel, barriers, smems, pointers, out_desc, strides, start_ptr,
                query_len, nb, items, scale,
                1, HEADS, BLOCK, D, STAGES, DIAGONAL, CARRY, COLUMNS, DOCS, LAST,
            )),
            (load_keys, (
                counter, item_channel, barriers, (q_desc,), (q_smem,), (k_desc, kc_desc), k_smem,
                biases, slash_ptr, slash_list, column_ptr, columns, member,
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


def forward(query, key, value, columns, index, this, softmax_scale, carry, out, lse):
    """Launch the forward of one round; operands as in ``forward.py``."""
    length, batch, heads, dim = query.shape
    nb, block = index.local_blocks, index.block_size
    carried = out if carry is None else carry
    half, whole = [1, 1, block // 2, dim], [1, 1, block, dim]
    items = nb * batch * heads
    # Programs draw their items from a counter: heads differ much in work.
    counter = torch.zeros(1, dtype=torch.int32, device=query.device)
    launch(
        _forward_kernel, (programs(query, items),),
        counter,
        descriptor(query, half), gathered_descriptor(key, whole), gathered_descriptor(value, whole),
        *column_descriptors(key, value, columns, whole),
        descriptor(out if this.last else query, half), carried, out, lse,
        index.round_ptr, index.round_list, index.member, index.columns, index.column_ptr,
        *document_lines(index, this.rank),
        *carried.stride()[:3], *out.stride()[:3],
        index.column_ptr.shape[-1], index.list_strides[0], index.columns.shape[-1],
        length, nb, items, softmax_scale, index.round_start(this.round_index), this.wrap,
        chunk_rows(key), this.rank, index.world, this.round_index, index.outer,
        INNER=index.inner, HEADS=heads, GROUP=heads // key.shape[3], D=dim, BLOCK=block, STAGES=2,
        DIAGONAL=this.first, CARRY=not this.first, COLUMNS=columns is not None, LISTS=index.has_block_lists,
        DOCS=index.documents is not None, LAST=this.last, num_warps=4, maxnreg=168,
    )  # fmt: skip
