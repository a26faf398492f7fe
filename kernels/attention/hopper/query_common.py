# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the forward and the queries' gradient share on Hopper GPUs.

Both are persistent kernels. A work item is one query block of one head; programs fetch items from a counter
in global memory, as heads differ much in work. One warp loads keys (and queries), one loads values, and two
warpgroups compute, each with half of the item's query rows. The tiles of an item are the key blocks of its
slashes, the diagonal block first, and then its gathered columns; if the forward marks blocks, in the order of
``portable/forward.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common.tiles import block_at, list_start, owner_of, seen_from
from ...types import PatternIndex, Round
from ..portable.sampling import LISTED
from .compat import (
    Pointer,
    Scalar,
    SharedMemory,
    aggregate,
    load_tile,
    thread_barrier,
)
from .descriptors import (
    chunk_rows,
    descriptor_heads_first,
    gathered_descriptor,
)
from .pipeline import Barriers, TilePipeline, allocate_barriers


@functools.cache
def _multiprocessors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(tensor, num_items: int) -> int:
    """Programs to start for that many work items: at most one a multiprocessor."""
    return min(_multiprocessors(tensor.device) if tensor.is_cuda else 132, num_items)


def key_descriptors(
    key: Tensor, value: Tensor, column_kv: Tensor | None, block: int
) -> dict[str, Any]:
    """Arguments of both kernels: descriptors of a round's keys and values; operands as in
    ``portable/forward.py``."""
    block_shape = [1, 1, block, key.shape[-1]]
    keys, values = (gathered_descriptor(tensor, block_shape) for tensor in (key, value))
    column_keys, column_values = keys, values  # not read
    if column_kv is not None:
        column_keys, column_values = (
            descriptor_heads_first(tensor, block_shape) for tensor in column_kv.unbind()
        )
    return dict(k_desc=keys, v_desc=values, column_k_desc=column_keys, column_v_desc=column_values)


def index_tensors(index: PatternIndex, rank: int) -> dict[str, Tensor | None]:
    """Arguments of both kernels: the tensors of the index, and of packed documents."""
    starts, kv_block_bounds = None, None
    if index.documents is not None:
        local = index.documents.on(rank, index.world, index.inner, index.block_size)
        starts, kv_block_bounds = local.start_f32, local.kv_block_bounds
    return dict(
        slash_ptr=index.round_ptr,
        slash_list=index.round_list,
        member=index.member,
        columns=index.columns,
        column_ptr=index.column_ptr,
        document_starts=starts,
        kv_block_bounds=kv_block_bounds,
    )


def round_numbers(
    index: PatternIndex,
    round_: Round,
    key: Tensor,
    query_len: int,
    num_items: int,
    softmax_scale: float,
) -> dict[str, Any]:
    """Arguments of both kernels: sizes, where the round is in the index, and the layout of its keys."""
    return dict(
        ptr_len=index.column_ptr.shape[-1],
        list_len=index.list_strides[0],
        column_len=index.columns.shape[-1],
        query_len=query_len,
        local_blocks=index.local_blocks,
        num_items=num_items,
        softmax_scale=softmax_scale,
        round_start=index.round_start(round_.round_index),
        wrap=round_.wrap,
        chunk_rows=chunk_rows(key),
        rank=round_.rank,
        world=index.world,
        round_index=round_.round_index,
        outer=index.outer,
    )


def constants(index: PatternIndex, round_: Round, key: Tensor, has_columns: bool) -> dict[str, Any]:
    """Arguments of both kernels that are constants to the compiler, and its options."""
    heads = index.columns.shape[1]
    return dict(
        INNER=index.inner,
        HEADS=heads,
        GROUP=heads // key.shape[3],
        D=key.shape[-1],
        BLOCK=index.block_size,
        STAGES=2,
        FIRST=round_.first,
        LAST=round_.last,
        COLUMNS=has_columns,
        LISTS=index.has_block_lists,
        PACKED=index.documents is not None,
        num_warps=4,
        maxnreg=168,
    )


@aggregate
class ItemKeys:
    """The keys of a work item in a round: key blocks of its slashes, a tile each, and gathered columns."""

    slash_tiles: Scalar
    columns: Scalar
    unmasked_tiles: Scalar  # of the slash tiles, the first ones, which need no mask of documents
    first_column: Scalar  # in its head's list
    first_unmasked: Scalar  # with marks: which of the slash tiles without a mask comes first

    @gluon.jit
    def num_tiles(self, BLOCK_N: gl.constexpr):
        """Tiles of keys; a fully masked one if there are no keys."""
        return gl.maximum(self.slash_tiles + (self.columns + BLOCK_N - 1) // BLOCK_N, 1)

    @gluon.jit
    def end_of_masked(self, BLOCK_N: gl.constexpr, FIRST: gl.constexpr):
        """With marks, tiles without a mask come last, from this one on."""
        masked_slashes = self.slash_tiles - gl.maximum(self.unmasked_tiles, FIRST)
        return FIRST + (self.columns + BLOCK_N - 1) // BLOCK_N + masked_slashes

    @gluon.jit
    def place(self, j, BLOCK_N: gl.constexpr, FIRST: gl.constexpr, MARKS: gl.constexpr):
        """What tile j is: whether it is a key block, then which of the list, else which tile of columns.

        Slashes and then columns; the order with marks is that of ``portable/forward.py``.

        Args:
            FIRST: 1 in the first round, where the query block itself is the first of the list, else 0.
        """
        is_slash = j < self.slash_tiles
        entry = j
        column_tile = j - self.slash_tiles
        if MARKS:
            column_tile = j - FIRST
            masked = column_tile - (self.columns + BLOCK_N - 1) // BLOCK_N
            unmasked_tiles = gl.maximum(self.unmasked_tiles, FIRST)
            unmasked = masked - (self.slash_tiles - unmasked_tiles)
            later = FIRST + unmasked - (self.first_unmasked > FIRST).to(gl.int32)
            entry = gl.where(unmasked == 0, self.first_unmasked, later)
            entry = gl.where(unmasked < 0, unmasked_tiles + masked, entry)
            entry = gl.where(j < FIRST, 0, entry)
            is_slash = ((masked >= 0) | (j < FIRST)) & (self.slash_tiles > 0)
        return is_slash, entry, column_tile


@aggregate
class RoundIndex:
    """Which keys each query block attends to in one round: a pattern index on the device.

    Key blocks are listed by their distances: a list holds the quotients of the distances by ``outer``.
    """

    slash_ptr: Pointer  # prefix counts of the lists
    slash_list: Pointer
    column_ptr: Pointer  # [b * h, ptr_len]: prefix counts of columns, by block
    columns: Pointer  # [b * h, column_len]: positions, ascending
    member: Pointer  # [b * h, ptr_len - 1]: whether a block distance is among the head's slashes
    kv_block_bounds: Pointer  # [b, 2, local_blocks]: LocalDocuments.kv_block_bounds
    weights: Pointer  # [b * h, local_blocks, ptr_len - 1]: PatternIndex.weights, or None
    marks: Pointer  # BlockMarks.words, or None
    ptr_len: Scalar
    list_len: Scalar
    column_len: Scalar
    local_blocks: Scalar  # query blocks of this rank
    num_items: Scalar
    round_start: Scalar  # where the round's prefix counts start in slash_ptr
    wrap: Scalar  # Round.wrap
    chunk_rows: Scalar
    rank: Scalar
    world: Scalar
    round_index: Scalar
    outer: Scalar
    INNER: gl.constexpr
    HEADS: gl.constexpr
    GROUP: gl.constexpr
    BLOCK: gl.constexpr
    COLUMNS: gl.constexpr
    LISTS: gl.constexpr
    PACKED: gl.constexpr
    WEIGHTED: gl.constexpr
    FIRST: gl.constexpr
    MARKS: gl.constexpr
    SAMPLING: gl.constexpr

    @gluon.jit
    def q_block(self, item):
        """The local query block of a work item: the last blocks have the most keys, and come first, so that
        all programs end together."""
        return self.local_blocks - 1 - item % self.local_blocks

    @gluon.jit
    def slash_start(self, item):
        """Where the item's key blocks start in its list."""
        q_block = self.q_block(item)
        batch_head = item // self.local_blocks
        return gl.load(self._slash_start_ptr(batch_head.to(gl.int64), q_block))

    @gluon.jit
    def _slash_start_ptr(self, batch_head, q_block):
        return self.slash_ptr + list_start(
            batch_head, q_block, self.ptr_len, self.local_blocks, self.round_start, self.LISTS
        )

    @gluon.jit
    def item_keys(self, item):
        """Where the item's key blocks start in its list, and its ItemKeys; none from ``num_items`` on."""
        if self.PACKED:
            item = gl.minimum(item, self.num_items - 1)
        batch_head = item // self.local_blocks
        q_block = self.q_block(item)
        inside = item < self.num_items
        start_ptr = self._slash_start_ptr(batch_head.to(gl.int64), q_block)
        start = gl.load(start_ptr, mask=inside, other=0)
        # The last of the blocks of the round's ranks that this query block may see.
        last = block_at(q_block, self.rank % self.INNER, self.INNER, self.INNER) - self.wrap
        end_ptr = start_ptr + 1 if self.LISTS else start_ptr + last + 1
        slash_tiles = gl.load(end_ptr, mask=inside, other=0) - start
        unmasked_tiles = slash_tiles
        first_column = 0
        first_block = 0
        if self.PACKED:
            blocks = self.kv_block_bounds
            blocks += (batch_head // self.HEADS).to(gl.int64) * 2 * self.local_blocks + q_block
            entries = self.slash_list + batch_head.to(gl.int64) * self.list_len
            first_block = gl.load(blocks)
            group = self.rank // self.INNER - self.round_index + self.wrap * self.outer
            end = start + slash_tiles
            # Key blocks are listed nearest first: up to those blocks of the sequence.
            unmasked_end = seen_from(
                gl.load(blocks + self.local_blocks),
                start_ptr,
                entries,
                start,
                end,
                last,
                group,
                self.outer,
                self.LISTS,
            )
            unmasked_tiles = unmasked_end - start
            end = seen_from(
                first_block, start_ptr, entries, start, end, last, group, self.outer, self.LISTS
            )
            slash_tiles = end - start
        columns = 0
        if self.COLUMNS:
            column_ptr = self.column_ptr + batch_head.to(gl.int64) * self.ptr_len
            # A head attends to its columns in one of the rounds, so that rounds are alike.
            this_round = batch_head % self.HEADS * self.outer // self.HEADS == self.round_index
            columns = gl.load(
                column_ptr + block_at(q_block, self.rank, self.world, self.INNER),
                mask=inside & this_round,
                other=0,
            )
            if self.PACKED:
                first_column = gl.where(columns > 0, gl.load(column_ptr + first_block), 0)
                columns -= first_column
        first_unmasked = 0
        if self.MARKS:
            # The first block that the query block may attend to is listed last, if at all.
            own: gl.constexpr = 1 if self.FIRST else 0
            entries = self.slash_list + batch_head.to(gl.int64) * self.list_len + start
            several = unmasked_tiles > own
            quotient = gl.load(entries + unmasked_tiles - 1, mask=several, other=0).to(gl.int32)
            kv_block = block_at(q_block, self.rank, self.world, self.INNER)
            kv_block -= self.round_index + quotient * self.outer
            first = several & (kv_block == first_block)
            first_unmasked = gl.where(first, unmasked_tiles - 1, own)
        keys = ItemKeys(slash_tiles, columns, unmasked_tiles, first_column, first_unmasked)
        return start, keys

    @gluon.jit
    def place(self, item_keys, j):
        """``ItemKeys.place`` of a tile."""
        return item_keys.place(j, self.BLOCK, 1 if self.FIRST else 0, self.MARKS)

    @gluon.jit
    def masked_end(self, item_keys):
        """With marks, tiles without a mask come last, from this one on."""
        return item_keys.end_of_masked(self.BLOCK, 1 if self.FIRST else 0)

    @gluon.jit
    def tile_row(self, item, start, item_keys, j):
        """First row of the item's tile j: in the keys if ``j < slash_tiles``, else in the gathered columns.

        The keys of the round's ranks lie ``chunk_rows`` apart; see ``layout`` for the order of their blocks.
        """
        batch_head = (item // self.local_blocks).to(gl.int64)
        is_slash, entry, column_tile = self.place(item_keys, j)
        entry_ptr = self.slash_list + batch_head * self.list_len + start + entry
        distance = gl.load(entry_ptr, mask=is_slash, other=0).to(gl.int32)
        # An item without keys has one tile, past the end of everything: zeros.
        column = gl.where(
            item_keys.columns == 0,
            1 << 30,
            column_tile * self.BLOCK + item_keys.first_column,
        )
        q_block = block_at(self.q_block(item), self.rank % self.INNER, self.INNER, self.INNER)
        chunk, kv_block = owner_of(q_block - self.wrap - distance, self.INNER, self.INNER)
        row = chunk * self.chunk_rows + kv_block * self.BLOCK
        return gl.where(is_slash, row, column)

    @gluon.jit
    def of_item(self, item):
        block = block_at(self.q_block(item), self.rank, self.world, self.INNER)
        batch_head = (item // self.local_blocks).to(gl.int64)
        weights = self.weights
        if self.WEIGHTED:
            line = batch_head * self.local_blocks + self.q_block(item)
            weights += line * (self.ptr_len - 1)
        mark_row = 0
        if self.MARKS:
            line = batch_head * self.local_blocks + self.q_block(item)
            mark_row = line * (self.ptr_len - 1)
        return ItemIndex(
            block,
            self.columns + batch_head * self.column_len,
            self.member + batch_head * (self.ptr_len - 1),
            self.slash_list + batch_head * self.list_len,
            weights,
            mark_row,
        )


@gluon.jit
def add_marks(words, byte, mark, pred):
    """Or marks, int32, to bytes of ``BlockMarks.words``; tensors of one shape."""
    pointers = words + (byte >> 2)
    mark_at = mark << ((byte.to(gl.int32) & 3) * 8)
    gl.atomic_or(pointers, mark_at, mask=(mark > 0) & pred, sem="relaxed")


@aggregate
class ItemIndex:
    """What the masks of a work item's tiles are computed from."""

    block: Scalar  # its query block, of all ranks'
    columns: Pointer  # of its head
    member: Pointer
    slash_list: Pointer
    weights: Pointer  # of its query block
    mark_row: Scalar  # offset of its marks, read with marks

    @gluon.jit
    def kv_block(self, index, start, is_slash, entry):
        """The key block of the sequence that an entry of the item's list is."""
        quotient = gl.load(self.slash_list + start + entry, mask=is_slash, other=0).to(gl.int32)
        return self.block - index.round_index - quotient * index.outer

    @gluon.jit
    def to_mark(self, index, start, item_keys, j):
        """Mark tile j as far as it needs no scores: as one of the pattern if blocks are drawn, and a block
        that is always kept. Returns the key block if its scores decide, else -1; as a tensor [1]."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        LARGEST: gl.constexpr = 2 * LISTED - 1 if index.SAMPLING else 1
        is_slash, entry, _ = index.place(item_keys, j)
        kv_block = self.kv_block(index, start, is_slash, entry)
        near = self.block - kv_block <= 1
        mark = gl.where(near, LARGEST, LISTED if index.SAMPLING else 0)
        byte = gl.full([1], self.mark_row + kv_block, gl.int64, layout)
        add_marks(index.marks, byte, gl.full([1], mark, gl.int32, layout), is_slash)
        return gl.full([1], gl.where(is_slash & (near == 0), kv_block, -1), gl.int32, layout)

    @gluon.jit
    def log2_weight(self, index, start, item_keys, j):
        """log2 of the weight of the item's tile j; 0 of columns."""
        is_slash = j < item_keys.slash_tiles
        kv_block = self.kv_block(index, start, is_slash, j)
        return gl.load(self.weights + kv_block, mask=is_slash, other=1).to(gl.float32) - 1

    @gluon.jit
    def tile_mask(self, index, start, item_keys, j):
        """What masks the keys of the item's tile j, [BLOCK]: 0 or -inf, to add to their scores. Of packed
        documents their positions, to compare with the starts of the rows' documents; -1 for a masked key.

        A column is masked where a slash covers it already (``tiles.column_tile``).
        """
        BLOCK: gl.constexpr = index.BLOCK
        layout: gl.constexpr = gl.BlockedLayout([BLOCK // 32], [32], [1], [0])
        keys = gl.arange(0, BLOCK, layout=layout)
        columns = self.columns
        is_slash, list_entry, column_tile = index.place(item_keys, j)
        if index.PACKED:
            entry = self.slash_list + start + list_entry
            quotient = gl.load(entry, mask=is_slash, other=0).to(gl.int32)
            column_mask = gl.full([BLOCK], -1, gl.int32, layout)
            columns += item_keys.first_column
        else:
            column_mask = gl.full([BLOCK], float("-inf"), gl.float32, layout)
        if index.COLUMNS:
            entry = column_tile * BLOCK + keys
            inside = (is_slash == 0) & (entry < item_keys.columns)
            position = gl.load(columns + entry, mask=inside, other=0)
            covered = gl.load(self.member + self.block - position // BLOCK, mask=inside, other=1)
            unmasked = position if index.PACKED else 0.0
            column_mask = gl.where(inside & (covered == 0), unmasked, column_mask)
        slash_mask = 0.0
        if index.PACKED:
            slash_mask = (self.block - index.round_index - quotient * index.outer) * BLOCK + keys
        return gl.where(is_slash, slash_mask, column_mask).to(gl.float32)


@aggregate
class WorkChannel:
    """Work items on their way from the warp that fetches them to the other partitions, two deep."""

    slots: SharedMemory  # int32 [2 x what is sent, 1]
    full: SharedMemory  # mbarriers [2, 1]
    empty: SharedMemory  # mbarriers [2, 1]
    PACKED: gl.constexpr
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
        if self.PACKED:
            self.slots.index(6 + slot).store(
                gl.full([1], item_keys.unmasked_tiles, gl.int32, layout)
            )
            self.slots.index(8 + slot).store(gl.full([1], item_keys.first_column, gl.int32, layout))
        if self.MARKS:
            at: gl.constexpr = 10 if self.PACKED else 6
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
        if self.PACKED:
            unmasked_tiles = gl.sum(self.slots.index(6 + slot).load(layout), 0)
            first_column = gl.sum(self.slots.index(8 + slot).load(layout), 0)
        first_unmasked = 0
        if self.MARKS:
            at: gl.constexpr = 10 if self.PACKED else 6
            first_unmasked = gl.sum(self.slots.index(at + slot).load(layout), 0)
        thread_barrier()
        mbarrier.arrive(self.empty.index(slot), count=1)
        keys = ItemKeys(slash_tiles, columns, unmasked_tiles, first_column, first_unmasked)
        return item, keys


@gluon.jit
def allocate_channel(PACKED: gl.constexpr, MARKS: gl.constexpr):
    sent: gl.constexpr = (5 if PACKED else 3) + (1 if MARKS else 0)
    slots = gl.allocate_shared_memory(
        gl.int32, [2 * sent, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    return WorkChannel(slots, full, empty, PACKED, MARKS)


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
    bounds of documents cut."""

    buffers: SharedMemory  # float32 [2 * STAGES, BLOCK_N]
    log2_weights: SharedMemory | gl.constexpr  # float32 [2 * STAGES, 1], of every tile, or None
    kv_blocks: SharedMemory | gl.constexpr  # int32 [2 * STAGES, 1], of every tile, or None
    WEIGHTED: gl.constexpr
    STAGES: gl.constexpr

    @gluon.jit
    def tile(self, n):
        """The mask of tile n. Its buffer is written again when the keys of tile ``n + 2 STAGES`` are loaded,
        after those of ``n + STAGES`` were released, and so after the scores of tile n were masked."""
        return self.buffers.index(n % (2 * self.STAGES))

    @gluon.jit
    def log2_weight(self, n):
        """log2 of the weight of tile n, [1], in a buffer that lives as long as its mask."""
        return self.log2_weights.index(n % (2 * self.STAGES))

    @gluon.jit
    def kv_block(self, n):
        """With marks, the key block whose mark the scores of tile n decide, or -1: [1], in a buffer that
        lives as long as its mask."""
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
    D: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    WEIGHTED: gl.constexpr,
    MARKS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK // 2, D], q_desc.layout)
    grad_out = None
    if grad_out_desc is not None:
        grad_out = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK // 2, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], v_desc.layout)
    channel = allocate_channel(PACKED, MARKS)
    q_full = allocate_barriers(1)
    q_empty = allocate_barriers(1)
    k_full = allocate_barriers(STAGES)
    v_full = allocate_barriers(STAGES)
    k_empty = allocate_barriers(STAGES)
    v_empty = allocate_barriers(STAGES)
    # A load arrives once, at a full barrier. Both computing warpgroups arrive at an empty one.
    mbarrier.init(q_full.of(0), count=1)
    mbarrier.init(q_empty.of(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.of(i), count=1)
        mbarrier.init(v_full.of(i), count=1)
        mbarrier.init(k_empty.of(i), count=2)
        mbarrier.init(v_empty.of(i), count=2)
    mask_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    masks = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK], mask_layout)
    log2_weights = None
    if WEIGHTED:
        log2_weights = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], mask_layout)
    kv_blocks = None
    if MARKS:
        kv_blocks = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1], mask_layout)
    return SharedTiles(
        channel,
        QueryTiles(q, grad_out, q_full, q_empty),
        TilePipeline(k, k_full, k_empty, BLOCK, D),
        TilePipeline(v, v_full, v_empty, BLOCK, D),
        KeyMasks(masks, log2_weights, kv_blocks, WEIGHTED, STAGES),
    )


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
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
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
        num_tiles = item_keys.num_tiles(index.BLOCK)
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
            if index.WEIGHTED:
                log2_weight = item_index.log2_weight(index, start, item_keys, j)
                tiles.masks.log2_weight(n).store(gl.full([1], log2_weight, gl.float32, one))
                thread_barrier()
            is_masked = (j == 0) | (j >= item_keys.unmasked_tiles)
            if index.MARKS:
                tiles.masks.kv_block(n).store(item_index.to_mark(index, start, item_keys, j))
                thread_barrier()
                is_masked = (j == 0) | (j < masked_end)
            if is_masked:
                tiles.masks.tile(n).store(mask)
                thread_barrier()
            is_slash, _, _ = index.place(item_keys, j)
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
        for j in range(item_keys.num_tiles(index.BLOCK)):
            row = index.tile_row(item, start, item_keys, j)
            is_slash, _, _ = index.place(item_keys, j)
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


@aggregate
class GlobalRows:
    """A tensor [s, b, h, d] in global memory, d at unit stride."""

    ptr: Pointer
    stride_m: Scalar
    stride_b: Scalar
    stride_h: Scalar

    @gluon.jit
    def head_ptr(self, batch, head):
        return self.ptr + batch.to(gl.int64) * self.stride_b + head.to(gl.int64) * self.stride_h

    @gluon.jit
    def tile(self, head_ptr, rows, d):
        """Pointers to rows of a head: [rows, d]."""
        return head_ptr + rows.to(gl.int64)[:, None] * self.stride_m + d[None, :]
