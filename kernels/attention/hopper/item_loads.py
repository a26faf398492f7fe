# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The loading warps of the forward and of the queries' gradient on Hopper GPUs.

Both are persistent kernels. A work item is one query block of one head; programs fetch items from a counter
in global memory, as heads differ much in work. One warp loads keys (and queries), one loads values, and two
warpgroups compute, each with half of the item's query rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import load_tile, thread_barrier


@gluon.jit
def _load_kv_tile(pipeline, n, is_slash, desc, column_desc, batch, head, row, GROUP: gl.constexpr):
    """Load tile n: from row ``row`` of the round's keys (values), or of the head's gathered columns."""
    full = pipeline.full.of(n)
    pipeline.wait_empty(n)
    mbarrier.expect(full, pipeline.ROWS * pipeline.D * 2)
    if is_slash:
        load_tile(
            desc, [batch, head // GROUP, row, 0], full, pipeline.buffers.index(pipeline.slot(n))
        )
    else:
        load_tile(
            column_desc, [batch, head, row, 0], full, pipeline.buffers.index(pipeline.slot(n))
        )


@gluon.jit
def load_keys(work_counter, tiles, q_desc, grad_out_desc, k_desc, column_k_desc, index):
    """A loading warp: fetches work items, and loads their queries, keys and the keys' masks."""
    channel = tiles.channel
    queries = tiles.queries
    keys = tiles.keys
    HALF_M: gl.constexpr = index.BLOCK // 2
    operands: gl.constexpr = 1 if grad_out_desc is None else 2
    n = 0  # tiles, and
    turn = 0  # items, that this program has had
    item = gl.atomic_add(work_counter, 1)
    start, item_keys = index.item_keys(item)
    channel.send(0, item, item_keys)
    while item < index.num_items:
        # The next item is fetched and sent ahead, so that no partition waits for it.
        next_item = gl.atomic_add(work_counter, 1)
        next_start, next_keys = index.item_keys(next_item)
        channel.send(turn + 1, next_item, next_keys)
        num_tiles = item_keys.num_tiles(index.BLOCK_N)
        batch_head = item // index.local_blocks
        batch = batch_head // index.HEADS
        head = batch_head % index.HEADS
        item_index = index.of_item(item)
        masked_end = 0
        if index.MARKS:
            masked_end = index.masked_end(item_keys)
        for j in range(num_tiles):
            row = index.tile_row(item, start, item_keys, j)
            mask = item_index.tile_mask(index, start, item_keys, j)
            is_masked = (j < index.first_tiles()) | (j >= item_keys.unmasked_tiles)
            if index.MARKS:
                tiles.masks.kv_block(n).store(item_index.to_mark(index, start, item_keys, j))
                thread_barrier()
                is_masked = (j < index.first_tiles()) | (j < masked_end)
            if is_masked:
                tiles.masks.tile(n).store(mask)
                thread_barrier()
            is_slash, _, _, _ = index.place(item_keys, j)
            _load_kv_tile(
                keys,
                n,
                is_slash,
                k_desc,
                column_k_desc,
                batch,
                head,
                row,
                index.GROUP,
            )
            if j == 0:
                full = queries.full.of(turn)
                queries.empty.wait_previous(turn)
                mbarrier.expect(full, operands * index.BLOCK * keys.D * 2)
                for half in gl.static_range(2):
                    at = [batch, head, index.q_block(item) * index.BLOCK + half * HALF_M, 0]
                    load_tile(q_desc, at, full, queries.q.index(half))
                    if grad_out_desc is not None:
                        load_tile(grad_out_desc, at, full, queries.grad_out.index(half))
            n += 1
        turn += 1
        item = next_item
        start = next_start
        item_keys = next_keys


@gluon.jit
def load_values(tiles, v_desc, column_v_desc, index):
    """The other loading warp: keys and values are released at different times."""
    n = 0
    turn = 0
    item, item_keys = tiles.channel.receive(0, 1)
    while item < index.num_items:
        batch_head = item // index.local_blocks
        batch = batch_head // index.HEADS
        head = batch_head % index.HEADS
        start = index.slash_start(item)
        for j in range(item_keys.num_tiles(index.BLOCK_N)):
            row = index.tile_row(item, start, item_keys, j)
            is_slash, _, _, _ = index.place(item_keys, j)
            _load_kv_tile(
                tiles.values,
                n,
                is_slash,
                v_desc,
                column_v_desc,
                batch,
                head,
                row,
                index.GROUP,
            )
            n += 1
        turn += 1
        item, item_keys = tiles.channel.receive(turn, 1)
