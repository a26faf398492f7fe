# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Forward of one round on Hopper GPUs, in Gluon: the same sums as ``portable/forward.py``.

Two warps load keys and values by TMA. Two warpgroups hold 64 query rows each and walk the tiles of a work
item (:mod:`.item_loads`). While a warpgroup's product with the values of one tile and its scores product
of the next are in flight, it computes the exponentials of the scores that are there. With marks, it marks the
previous tile before them, while it would wait for the first scores.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.counters import work_counter
from ...common.launch import launch
from ...common.tiles import LN2, LOG2E
from ..launch_args import mark_tensors
from ..operands import ForwardInputs
from .compat import Pointer, Scalar, Value, aggregate, store_tile, thread_barrier
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
from .round_index import CONTINUED, RoundIndex, add_marks


@gluon.jit
def _softmax(scores, mask, starts, m, l, scale, MASK: gl.constexpr):
    """Online softmax in base 2.

    Returns:
        the tile's probabilities, the running maximum m and sum l, the factor alpha for what was summed
        before, and the sum of the tile.
    """
    if MASK == RANGE:
        position = mask.load(gl.SliceLayout(0, scores.type.layout))  # [BLOCK_N]
        visible = position[None, :] >= starts[:, None]
        scores = gl.where(visible, scores * scale, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 1))
    elif MASK == PER_KEY:
        scores = scores * scale + mask.load(gl.SliceLayout(0, scores.type.layout))[None, :]
        m_new = gl.maximum(m, gl.max(scores, 1))
    elif MASK == CAUSAL:
        scores = scores * scale + mask
        m_new = gl.maximum(m, gl.max(scores, 1))
    else:
        m_new = gl.maximum(m, gl.max(scores, 1) * scale)
    # A row with no score but -inf so far has no maximum to subtract yet.
    finite = gl.where(m_new == float("-inf"), 0.0, m_new)
    if MASK == UNMASKED:
        p = gl.exp2(scores * scale - finite[:, None])
    else:
        p = gl.exp2(scores - finite[:, None])
    alpha = gl.exp2(m - finite)
    tile_sum = gl.sum(p, 1)
    l = l * alpha + tile_sum
    return p, m_new, l, alpha, tile_sum


@aggregate
class RowMarks:
    """Where a warpgroup marks the key blocks of a work item."""

    words: Pointer  # BlockMarks.words
    row: Scalar  # offset of the query block's marks
    least: Value  # [HALF_M]: the least share; infinite for rows past the end

    @gluon.jit
    def add(self, tile_sum, l, kv_block):
        """Add the marks of one tile. Each warp adds those of its rows: nothing waits for another warp.

        Args:
            tile_sum: of the tile, and those before it in its key block, in each row, [HALF_M].
            l: of all tiles up to it, [HALF_M].
            kv_block: ``ItemIndex.to_mark`` of the tile, in shared memory, [1].

        Returns:
            what counts to the sum of the next tile, [HALF_M]: the sum, if the key block goes on there.
        """
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        number = gl.sum(kv_block.load(layout), 0)
        least = self.least * l
        rows: gl.constexpr = tile_sum.shape[0] // 4  # of a warp
        above = gl.where(tile_sum < least, 0, 1)
        mark = gl.max(gl.reshape(above, [4, rows]), 1)
        byte = gl.full([4], self.row + number, gl.int64, mark.type.layout)
        add_marks(self.words, byte, mark, number >= 0)
        return gl.where(number == CONTINUED, tile_sum, 0.0)


@gluon.jit
def _step(
    n, more, p, acc, m, l, tile_sum, mask, starts, q, tiles, scale, marks,
    MASK: gl.constexpr, MARKS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Scores of tile n and the values product of tile n - 1, with tile n's exponentials between.

    Args:
        more: whether the item has another tile.
        p: probabilities of tile n - 1, [HALF_M, BLOCK_N].
        acc: [HALF_M, D].
        m, l: [HALF_M].
        tile_sum: of tile n - 1, [HALF_M], and marks: RowMarks; if MARKS.
        SPLIT: tiles of a key block.
    """
    keys = tiles.keys
    values = tiles.values
    s_layout: gl.constexpr = m.type.layout.parent
    HALF_M: gl.constexpr = q.shape[0]
    slot = keys.slot(n)
    previous = values.slot(n - 1)
    zero = gl.zeros([HALF_M, keys.ROWS], gl.float32, s_layout)
    k = keys.tile(slot)  # [BLOCK_N, D]
    v = values.tile(previous)  # [BLOCK_N, D]
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    values.wait_full(n - 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if MARKS:
        # Both products are in flight, and there is nothing else to do.
        before = marks.add(tile_sum, l, tiles.masks.kv_block(n - 1))
    scores = warpgroup_mma_wait(1, deps=[scores])
    keys.release(n)
    tiles.queries.release(more == 0)
    p_new, m, l, alpha, new_sum = _softmax(scores, mask, starts, m, l, scale, MASK)
    p_new = p_new.to(p.dtype)
    if MARKS:
        tile_sum = new_sum
        if SPLIT > 1:
            tile_sum += before * alpha
    # The next tile's keys are waited for here because ptxas moves the exponentials across anything but
    # a branch, and they must come before the wait for the values product.
    keys.wait_full(n + 1, pred=more)
    acc, p, p_new = warpgroup_mma_wait(0, deps=[acc, p, p_new])
    values.release(n - 1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(p_new, p.type.layout)
    return p, acc, m, l, tile_sum


@gluon.jit
def _attend(
    tiles,
    # Out of the rounds before and of this one
    accumulator,
    out,
    out_desc,  # or None
    out_buffers,  # [2, 1, 1, HALF_M, D], with out_desc
    lse_ptr,  # [b, h, query_len]
    first_keys,  # [b, query_len]
    least_share_ptr,  # [b], read with marks
    query_len,
    index,
    softmax_scale,
    HEAD_DIM: gl.constexpr,
    HALF: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
):
    """A computing warpgroup: half of the query rows of each work item."""
    keys = tiles.keys
    values = tiles.values
    queries = tiles.queries
    BLOCK: gl.constexpr = index.BLOCK
    BLOCK_N: gl.constexpr = index.BLOCK_N
    SPLIT: gl.constexpr = BLOCK // BLOCK_N
    D: gl.constexpr = keys.D
    HALF_M: gl.constexpr = BLOCK // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = queries.q.dtype
    MASK: gl.constexpr = RANGE if index.RANGES else PER_KEY
    MARKS: gl.constexpr = index.MARKS
    scale = softmax_scale * LOG2E
    q = queries.q.index(HALF).reshape([HALF_M, D])
    n = 0  # tiles, and
    turn = 0  # items, that this program has had
    item, item_keys = tiles.channel.receive(0, 4)
    while item < index.num_items:
        num_tiles = item_keys.num_tiles(BLOCK_N)
        batch_head = item // index.local_blocks
        q_block = index.q_block(item)
        batch = (batch_head // index.HEADS).to(gl.int64)
        head = (batch_head % index.HEADS).to(gl.int64)
        start = q_block * BLOCK + HALF * HALF_M
        rows = start + gl.arange(0, HALF_M, layout=row_layout)  # [HALF_M]
        lse = lse_ptr + batch_head.to(gl.int64) * query_len + rows
        starts = 0.0
        if index.RANGES:
            # [HALF_M]
            starts = gl.load(
                first_keys + batch * query_len + rows, mask=rows < query_len, other=0.0
            )
        if FIRST:
            acc = gl.zeros([HALF_M, D], gl.float32, o_layout)
            m = gl.full([HALF_M], float("-inf"), gl.float32, row_layout)
            l = gl.zeros([HALF_M], gl.float32, row_layout)
        else:
            out_at = start + gl.arange(0, HALF_M, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            acc_ptr = accumulator.head_ptr(batch, head)
            acc = gl.load(
                accumulator.tile(acc_ptr, out_at, d),
                mask=of_rows(out_at < query_len, d, HEAD_DIM),
                other=0.0,
            )  # [HALF_M, D]
            m = gl.load(lse, mask=rows < query_len, other=0.0) * LOG2E
            l = gl.full([HALF_M], 1.0, gl.float32, row_layout)

        # The first tile: there is no values product yet to run beside its exponentials.
        keys.wait_full(n)
        queries.wait_full(turn)
        zero = gl.zeros([HALF_M, BLOCK_N], gl.float32, s_layout)
        scores = warpgroup_mma(
            q, keys.tile(keys.slot(n)).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if FIRST:
            # The diagonal block.
            mask = tiles.masks.causal(n, rows, starts, q_block * BLOCK, index.RANGES, s_layout)
        else:
            mask = tiles.masks.tile(n)
        scores = warpgroup_mma_wait(0, deps=[scores])
        keys.release(n)
        queries.release(num_tiles == 1)
        FIRST_MASK: gl.constexpr = CAUSAL if FIRST else MASK
        p, m, l, alpha, tile_sum = _softmax(scores, mask, starts, m, l, scale, FIRST_MASK)
        marks = None
        if MARKS:
            least = gl.load(least_share_ptr + batch)
            least = gl.where(rows < query_len, least, float("inf"))  # [HALF_M]
            line = batch_head.to(gl.int64) * index.local_blocks + q_block
            marks = RowMarks(index.marks, line * (index.ptr_len - 1), least)
        if not FIRST:
            acc = acc * gl.convert_layout(alpha, out_rows)[:, None]
        p = gl.convert_layout(p.to(dtype), p_layout)
        keys.wait_full(n + 1, pred=num_tiles > 1)

        if FIRST:
            for j in gl.static_range(1, SPLIT):
                p, acc, m, l, tile_sum = _step(
                    n + j, j + 1 < num_tiles, p, acc, m, l, tile_sum,
                    tiles.masks.causal(
                        n + j, rows, starts, q_block * BLOCK + j * BLOCK_N, index.RANGES, s_layout
                    ),
                    starts, q, tiles, scale, marks, CAUSAL, MARKS, SPLIT,
                )  # fmt: skip
        first_unmasked = index.first_tiles()
        end_unmasked = item_keys.unmasked_tiles
        if MARKS:
            # Tiles with a mask come first.
            first_unmasked = gl.maximum(index.masked_end(item_keys), index.first_tiles())
            end_unmasked = num_tiles
            for j in range(index.first_tiles(), first_unmasked):
                p, acc, m, l, tile_sum = _step(
                    n + j, j + 1 < num_tiles, p, acc, m, l, tile_sum, tiles.masks.tile(n + j), starts,
                    q, tiles, scale, marks, MASK, True, SPLIT,
                )  # fmt: skip
        for j in range(first_unmasked, end_unmasked):
            p, acc, m, l, tile_sum = _step(
                n + j, j + 1 < num_tiles, p, acc, m, l, tile_sum, 0.0, starts, q, tiles, scale, marks,
                UNMASKED, MARKS, SPLIT,
            )  # fmt: skip
        if (index.COLUMNS or index.RANGES) and not MARKS:
            for j in range(gl.maximum(item_keys.unmasked_tiles, index.first_tiles()), num_tiles):
                p, acc, m, l, tile_sum = _step(
                    n + j, j + 1 < num_tiles, p, acc, m, l, tile_sum, tiles.masks.tile(n + j), starts,
                    q, tiles, scale, marks, MASK, False, SPLIT,
                )  # fmt: skip
        n += num_tiles
        turn += 1
        if MARKS:
            marks.add(tile_sum, l, tiles.masks.kv_block(n - 1))
        values.wait_full(n - 1)
        acc = warpgroup_mma(p, values.tile(values.slot(n - 1)), acc, is_async=True)
        gl.store(lse, (m + gl.log2(l)) * LN2, mask=rows < query_len)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        values.release(n - 1)
        # A row without any weight so far is stored as 0, and is NaN only if it has none at the end.
        weight = l if LAST else gl.where(l == 0.0, 1.0, l)
        acc = acc * gl.convert_layout(1.0 / weight, out_rows)[:, None]
        if out_desc is not None:
            # The previous item's store has read the buffer: it had this item's time.
            tma.store_wait(0)
            thread_barrier()
            out_buffers.index(HALF).reshape([HALF_M, D]).store(acc.to(dtype))
            fence_async_shared()
            at = [batch_head // index.HEADS, batch_head % index.HEADS, start, 0]
            store_tile(out_desc, at, out_buffers.index(HALF))
        else:
            out_at = start + gl.arange(0, HALF_M, layout=out_rows)
            d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            out_ptr = out.head_ptr(batch, head)
            gl.store(
                out.tile(out_ptr, out_at, d), acc, mask=of_rows(out_at < query_len, d, HEAD_DIM)
            )
        item, item_keys = tiles.channel.receive(turn, 4)
    if out_desc is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["round_start", "wrap", "rank", "round_index"])
def _forward_kernel(
    work_counter,
    # Operands
    q_desc, k_desc, v_desc, column_k_desc, column_v_desc,
    # Results: out by TMA (out_desc may be None) or by pointers, on top of the rounds before
    out_desc, accumulator_ptr, out_ptr, lse_ptr,
    # Which keys each query block attends to: see RoundIndex
    block_ptr, block_list, member, columns, column_ptr, first_keys, kv_block_bounds,
    # The marks of blocks (BlockMarks), or None
    words, least_share_ptr,
    # Strides of the accumulator and of out
    stride_am, stride_ab, stride_ah,
    stride_om, stride_ob, stride_oh,
    ptr_len, list_len, column_len, query_len, local_blocks, num_items, softmax_scale,
    round_start, wrap, chunk_rows, rank, world, round_index, outer,
    INNER: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    D: gl.constexpr, BLOCK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    COLUMNS: gl.constexpr, LISTS: gl.constexpr, RANGES: gl.constexpr,
    MARKS: gl.constexpr,
):  # fmt: skip
    index = RoundIndex(
        block_ptr=block_ptr, block_list=block_list, column_ptr=column_ptr, columns=columns, member=member,
        kv_block_bounds=kv_block_bounds, marks=words, ptr_len=ptr_len, list_len=list_len,
        column_len=column_len, local_blocks=local_blocks, num_items=num_items, round_start=round_start,
        wrap=wrap, chunk_rows=chunk_rows, rank=rank, world=world, round_index=round_index, outer=outer,
        INNER=INNER, HEADS=HEADS, GROUP=GROUP, BLOCK=BLOCK, BLOCK_N=BLOCK_N, COLUMNS=COLUMNS, LISTS=LISTS,
        RANGES=RANGES, FIRST=FIRST, MARKS=MARKS,
    )  # fmt: skip
    tiles = allocate_tiles(
        q_desc, None, k_desc, v_desc, BLOCK, BLOCK_N, D, STAGES, STAGES, RANGES, MARKS
    )
    out_buffers = tiles.queries.q  # not written
    if out_desc is not None:
        out_buffers = gl.allocate_shared_memory(
            q_desc.dtype, [2, 1, 1, BLOCK // 2, D], out_desc.layout
        )
    accumulator = GlobalRows(accumulator_ptr, stride_am, stride_ab, stride_ah)
    out = GlobalRows(out_ptr, stride_om, stride_ob, stride_oh)
    gl.warp_specialize(
        [
            (_attend, (
                tiles, accumulator, out, out_desc, out_buffers, lse_ptr, first_keys,
                least_share_ptr, query_len, index, softmax_scale, HEAD_DIM, 0, FIRST, LAST,
            )),
            (_attend, (
                tiles, accumulator, out, out_desc, out_buffers, lse_ptr, first_keys,
                least_share_ptr, query_len, index, softmax_scale, HEAD_DIM, 1, FIRST, LAST,
            )),
            (load_keys, (work_counter, tiles, q_desc, None, k_desc, column_k_desc, index)),
            (load_values, (tiles, v_desc, column_v_desc, index)),
        ],
        [4, 1, 1],
        [232, 40, 40] if MARKS else [240, 24, 24],
    )  # fmt: skip


def forward(inputs: ForwardInputs, out: Tensor) -> None:
    """:func:`...attention.forward` into ``out``, which may be the accumulator."""
    query, keys, index, accumulator = inputs.query, inputs.keys, inputs.index, inputs.accumulator
    _, batch, heads, dim = query.shape
    half = [1, 1, index.block_size // 2, tile_dim(dim)]
    acc_in = out if accumulator is None else accumulator
    num_items = index.local_blocks * batch * heads
    constants = item_constants(
        query, keys, index, num_items, inputs.softmax_scale, {"a": acc_in, "o": out},
        LAST=keys.round.last, MARKS=inputs.marks is not None,
    )  # fmt: skip
    launch(
        _forward_kernel,
        (num_programs(query, num_items),),
        constants,
        work_counter=work_counter(0, query.device),
        q_desc=descriptor(query, half),
        **key_descriptors(keys, index),
        out_desc=descriptor(out, half) if stored_by_tma(out, keys) else None,
        accumulator_ptr=acc_in,
        out_ptr=out,
        lse_ptr=inputs.lse,
        **mark_tensors(inputs.marks),
        **item_tensors(keys, index),
    )
