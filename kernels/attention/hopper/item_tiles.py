# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Shared memory of the forward and of the queries' gradient on Hopper GPUs: work items, and the tiles that
are loaded for them, on their way between the partitions of a program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import SharedMemory, aggregate, thread_barrier
from .pipeline import Barriers, TilePipeline, allocate_barriers
from .round_index import ItemKeys


@aggregate
class WorkChannel:
    """Work items on their way from the warp that fetches them to the other partitions, two deep."""

    slots: SharedMemory  # int32 [2 x what is sent, 1]
    full: SharedMemory  # mbarriers [2, 1]
    empty: SharedMemory  # mbarriers [2, 1]
    RANGES: gl.constexpr
    MARKS: gl.constexpr

    @gluon.jit
    def send(self, n, item, item_keys):
        """Send a program's n-th item."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        slot = n & 1
        mbarrier.wait(self.empty.index(slot), ((n >> 1) & 1) ^ 1)
        self.slots.index(slot).store(gl.full([1], item, gl.int32, layout))
        self.slots.index(2 + slot).store(gl.full([1], item_keys.slash_tiles, gl.int32, layout))
        self.slots.index(4 + slot).store(gl.full([1], item_keys.columns, gl.int32, layout))
        if self.RANGES:
            self.slots.index(6 + slot).store(
                gl.full([1], item_keys.unmasked_tiles, gl.int32, layout)
            )
            self.slots.index(8 + slot).store(gl.full([1], item_keys.first_column, gl.int32, layout))
        if self.MARKS:
            at: gl.constexpr = 10 if self.RANGES else 6
            self.slots.index(at + slot).store(
                gl.full([1], item_keys.first_unmasked, gl.int32, layout)
            )
        thread_barrier()
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def receive(self, n, WARPS: gl.constexpr):
        """Receive a program's n-th item, in a partition of that many warps."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        slot = n & 1
        mbarrier.wait(self.full.index(slot), (n >> 1) & 1)
        item = gl.sum(self.slots.index(slot).load(layout), 0)
        slash_tiles = gl.sum(self.slots.index(2 + slot).load(layout), 0)
        columns = gl.sum(self.slots.index(4 + slot).load(layout), 0)
        unmasked_tiles = slash_tiles
        first_column = 0
        if self.RANGES:
            unmasked_tiles = gl.sum(self.slots.index(6 + slot).load(layout), 0)
            first_column = gl.sum(self.slots.index(8 + slot).load(layout), 0)
        first_unmasked = 0
        if self.MARKS:
            at: gl.constexpr = 10 if self.RANGES else 6
            first_unmasked = gl.sum(self.slots.index(at + slot).load(layout), 0)
        thread_barrier()
        mbarrier.arrive(self.empty.index(slot), count=1)
        keys = ItemKeys(slash_tiles, columns, unmasked_tiles, first_column, first_unmasked)
        return item, keys


@gluon.jit
def allocate_channel(RANGES: gl.constexpr, MARKS: gl.constexpr):
    sent: gl.constexpr = (5 if RANGES else 3) + (1 if MARKS else 0)
    slots = gl.allocate_shared_memory(
        gl.int32, [2 * sent, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    return WorkChannel(slots, full, empty, RANGES, MARKS)


@aggregate
class QueryTiles:
    """The query rows of the work item that is computed: [2, 1, 1, BLOCK_M // 2, D], a half for each computing
    warpgroup."""

    q: SharedMemory
    grad_out: SharedMemory | gl.constexpr  # None in the forward
    full: Barriers  # of one stage, as there is one buffer: filled once an item
    empty: Barriers

    @gluon.jit
    def wait_full(self, turn):
        """Wait for the queries of the program's item ``turn``."""
        self.full.wait(turn)

    @gluon.jit
    def release(self, pred):
        self.empty.arrive(0, pred)


@aggregate
class KeyMasks:
    """``RoundIndex.tile_mask`` of the tiles that have one: the first of an item, columns, and tiles that the
    bounds of visible ranges cut."""

    buffers: SharedMemory  # float32 [2 * STAGES, BLOCK_N]
    kv_blocks: SharedMemory | gl.constexpr  # int32 [2 * STAGES, 1], of every tile, or None
    STAGES: gl.constexpr

    @gluon.jit
    def tile(self, n):
        """The mask of tile n. Its buffer is written again when the keys of tile ``n + 2 STAGES`` are loaded,
        after those of ``n + STAGES`` were released, and so after the scores of tile n were masked."""
        return self.buffers.index(n % (2 * self.STAGES))

    @gluon.jit
    def causal(self, n, rows, starts, first, RANGES: gl.constexpr, s_layout: gl.constexpr):
        """The mask of tile n of the query block itself: 0 or -inf, to add to scores ``[HALF_M, BLOCK_N]``.

        Args:
            rows, starts: of the queries and the first keys that they see, [HALF_M]; starts if RANGES.
            first: key of the tile, numbered as the rows.
        """
        key_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
        cols = first + gl.arange(0, s_layout.instr_shape[1], layout=key_layout)
        visible = rows[:, None] >= cols[None, :]
        if RANGES:
            position = self.tile(n).load(key_layout)
            visible = visible & (position[None, :] >= starts[:, None])
        return gl.where(visible, 0.0, float("-inf"))

    @gluon.jit
    def kv_block(self, n):
        """With marks, ``ItemIndex.to_mark`` of tile n: [1], in a buffer that lives as long as its mask."""
        return self.kv_blocks.index(n % (2 * self.STAGES))


@aggregate
class SharedTiles:
    """Shared memory and barriers that the partitions of a program have in common."""

    channel: WorkChannel
    queries: QueryTiles
    keys: TilePipeline
    values: TilePipeline
    masks: KeyMasks


@gluon.jit
def allocate_tiles(
    q_desc,
    grad_out_desc,  # None in the forward
    k_desc,
    v_desc,
    BLOCK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,  # of keys
    VALUE_STAGES: gl.constexpr,
    RANGES: gl.constexpr,
    MARKS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK // 2, D], q_desc.layout)
    grad_out = None
    if grad_out_desc is not None:
        grad_out = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK // 2, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [VALUE_STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    channel = allocate_channel(RANGES, MARKS)
    q_full = allocate_barriers(1)
    q_empty = allocate_barriers(1)
    k_full = allocate_barriers(STAGES)
    v_full = allocate_barriers(VALUE_STAGES)
    k_empty = allocate_barriers(STAGES)
    v_empty = allocate_barriers(VALUE_STAGES)
    # A load arrives once, at a full barrier. Both computing warpgroups arrive at an empty one.
    mbarrier.init(q_full.of(0), count=1)
    mbarrier.init(q_empty.of(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.of(i), count=1)
        mbarrier.init(k_empty.of(i), count=2)
    for i in gl.static_range(VALUE_STAGES):
        mbarrier.init(v_full.of(i), count=1)
        mbarrier.init(v_empty.of(i), count=2)
    mask_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    masks = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK_N], mask_layout)
    kv_blocks = None
    if MARKS:
        kv_blocks = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1], mask_layout)
    return SharedTiles(
        channel,
        QueryTiles(q, grad_out, q_full, q_empty),
        TilePipeline(k, k_full, k_empty, BLOCK_N, D),
        TilePipeline(v, v_full, v_empty, BLOCK_N, D),
        KeyMasks(masks, kv_blocks, STAGES),
    )
