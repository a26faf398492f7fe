# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which keys a work item attends to in a round, and their masks and marks: the pattern index as the forward
and the queries' gradient read it on Hopper GPUs.

A work item is one query block of one head. Its tiles, of BLOCK_N keys, are the key blocks of its slashes,
the diagonal block first, and then its gathered columns; if the forward marks blocks, in the order of
``portable/forward.py``. A key block is one tile, or ``SPLIT = BLOCK // BLOCK_N`` of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.tiles import block_at, list_start, owner_of, seen_from
from .compat import Pointer, Scalar, aggregate

CONTINUED = gl.constexpr(-2)
"""With marks, in place of a tile's key block: its scores decide together with those of the next tile."""


@aggregate
class ItemKeys:
    """The keys of a work item in a round: tiles of the key blocks of its slashes, and gathered columns."""

    slash_tiles: Scalar
    columns: Scalar
    unmasked_tiles: Scalar  # of the slash tiles, the first ones, which all rows see whole
    first_column: Scalar  # in its head's list
    first_unmasked: Scalar  # with marks: which of the key blocks without a mask comes first

    @gluon.jit
    def num_tiles(self, BLOCK_N: gl.constexpr):
        """Tiles of keys; a fully masked one if there are no keys."""
        return gl.maximum(self.slash_tiles + (self.columns + BLOCK_N - 1) // BLOCK_N, 1)

    @gluon.jit
    def end_of_masked(self, BLOCK_N: gl.constexpr, OWN: gl.constexpr):
        """With marks, tiles without a mask come last, from this one on."""
        masked_slashes = self.slash_tiles - gl.maximum(self.unmasked_tiles, OWN)
        return OWN + (self.columns + BLOCK_N - 1) // BLOCK_N + masked_slashes

    @gluon.jit
    def place(
        self,
        j,
        BLOCK_N: gl.constexpr,
        SPLIT: gl.constexpr,
        FIRST: gl.constexpr,
        MARKS: gl.constexpr,
    ):
        """Where the keys of tile j are.

        Slashes and then columns; the order with marks is that of ``portable/forward.py``.

        Args:
            FIRST: 1 in the first round, where the query block itself is the first of the list, else 0.

        Returns:
            whether it is of a key block; then which of the list, and which of the block's tiles; else
            which tile of columns.
        """
        is_slash = j < self.slash_tiles
        slash_tile = j
        column_tile = j - self.slash_tiles
        entry = slash_tile // SPLIT
        if MARKS:
            own: gl.constexpr = FIRST * SPLIT  # tiles of the query block itself
            column_tile = j - own
            masked = column_tile - (self.columns + BLOCK_N - 1) // BLOCK_N
            unmasked_tiles = gl.maximum(self.unmasked_tiles, own)
            unmasked = masked - (self.slash_tiles - unmasked_tiles)
            later = FIRST + unmasked // SPLIT - (self.first_unmasked > FIRST).to(gl.int32)
            entry = gl.where(unmasked // SPLIT == 0, self.first_unmasked, later)
            entry = gl.where(unmasked < 0, (unmasked_tiles + masked) // SPLIT, entry)
            entry = gl.where(j < own, 0, entry)
            is_slash = ((masked >= 0) | (j < own)) & (self.slash_tiles > 0)
            slash_tile = gl.where(j < own, j, masked)
        return is_slash, entry, slash_tile % SPLIT, column_tile


@aggregate
class RoundIndex:
    """Which keys each query block attends to in one round: a pattern index on the device.

    Key blocks are listed by their distances: a list holds the quotients of the distances by ``outer``.
    """

    block_ptr: Pointer  # prefix counts of the lists
    block_list: Pointer
    column_ptr: Pointer  # [b * h, ptr_len]: prefix counts of columns, by block
    columns: Pointer  # [b * h, column_len]: positions, ascending
    member: Pointer  # [b * h, ptr_len - 1]: whether a block distance is among the head's slashes
    kv_block_bounds: Pointer  # [b, 2, local_blocks]: LocalRanges.kv_block_bounds
    marks: Pointer  # BlockMarks.words, or None
    ptr_len: Scalar
    list_len: Scalar
    column_len: Scalar
    local_blocks: Scalar  # query blocks of this rank
    num_items: Scalar
    round_start: Scalar  # where the round's prefix counts start in block_ptr
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
    BLOCK_N: gl.constexpr
    COLUMNS: gl.constexpr
    LISTS: gl.constexpr
    RANGES: gl.constexpr
    FIRST: gl.constexpr
    MARKS: gl.constexpr

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
        return gl.load(self._block_start_ptr(batch_head.to(gl.int64), q_block))

    @gluon.jit
    def _block_start_ptr(self, batch_head, q_block):
        return self.block_ptr + list_start(
            batch_head, q_block, self.ptr_len, self.local_blocks, self.round_start, self.LISTS
        )

    @gluon.jit
    def item_keys(self, item):
        """Where the item's key blocks start in its list, and its ItemKeys; none from ``num_items`` on."""
        if self.RANGES:
            item = gl.minimum(item, self.num_items - 1)
        batch_head = item // self.local_blocks
        q_block = self.q_block(item)
        inside = item < self.num_items
        start_ptr = self._block_start_ptr(batch_head.to(gl.int64), q_block)
        start = gl.load(start_ptr, mask=inside, other=0)
        # The last of the blocks of the round's ranks that this query block may see.
        last = block_at(q_block, self.rank % self.INNER, self.INNER, self.INNER) - self.wrap
        end_ptr = start_ptr + 1 if self.LISTS else start_ptr + last + 1
        slash_tiles = gl.load(end_ptr, mask=inside, other=0) - start
        unmasked_tiles = slash_tiles
        first_column = 0
        first_block = 0
        if self.RANGES:
            blocks = self.kv_block_bounds
            blocks += (batch_head // self.HEADS).to(gl.int64) * 2 * self.local_blocks + q_block
            entries = self.block_list + batch_head.to(gl.int64) * self.list_len
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
            if self.RANGES:
                first_column = gl.where(columns > 0, gl.load(column_ptr + first_block), 0)
                columns -= first_column
        first_unmasked = 0
        if self.MARKS:
            # The first block that the query block may attend to is listed last, if at all.
            own: gl.constexpr = 1 if self.FIRST else 0
            entries = self.block_list + batch_head.to(gl.int64) * self.list_len + start
            several = unmasked_tiles > own
            quotient = gl.load(entries + unmasked_tiles - 1, mask=several, other=0).to(gl.int32)
            kv_block = block_at(q_block, self.rank, self.world, self.INNER)
            kv_block -= self.round_index + quotient * self.outer
            first = several & (kv_block == first_block)
            first_unmasked = gl.where(first, unmasked_tiles - 1, own)
        split: gl.constexpr = self.BLOCK // self.BLOCK_N
        keys = ItemKeys(
            slash_tiles * split, columns, unmasked_tiles * split, first_column, first_unmasked
        )
        return start, keys

    @gluon.jit
    def place(self, item_keys, j):
        """``ItemKeys.place`` of a tile."""
        return item_keys.place(
            j, self.BLOCK_N, self.BLOCK // self.BLOCK_N, 1 if self.FIRST else 0, self.MARKS
        )

    @gluon.jit
    def first_tiles(self):
        """Tiles that come first and have a mask: those of the query block itself; one in later rounds."""
        return self.BLOCK // self.BLOCK_N if self.FIRST else 1

    @gluon.jit
    def masked_end(self, item_keys):
        """With marks, tiles without a mask come last, from this one on."""
        return item_keys.end_of_masked(
            self.BLOCK_N, self.BLOCK // self.BLOCK_N if self.FIRST else 0
        )

    @gluon.jit
    def tile_row(self, item, start, item_keys, j):
        """First row of the item's tile j: in the keys if ``j < slash_tiles``, else in the gathered columns.

        The keys of the round's ranks lie ``chunk_rows`` apart; see ``layout`` for the order of their blocks.
        """
        batch_head = (item // self.local_blocks).to(gl.int64)
        is_slash, entry, block_tile, column_tile = self.place(item_keys, j)
        entry_ptr = self.block_list + batch_head * self.list_len + start + entry
        distance = gl.load(entry_ptr, mask=is_slash, other=0).to(gl.int32)
        # An item without keys has one tile, past the end of everything: zeros.
        column = gl.where(
            item_keys.columns == 0,
            1 << 30,
            column_tile * self.BLOCK_N + item_keys.first_column,
        )
        q_block = block_at(self.q_block(item), self.rank % self.INNER, self.INNER, self.INNER)
        chunk, kv_block = owner_of(q_block - self.wrap - distance, self.INNER, self.INNER)
        row = chunk * self.chunk_rows + kv_block * self.BLOCK + block_tile * self.BLOCK_N
        return gl.where(is_slash, row, column)

    @gluon.jit
    def of_item(self, item):
        block = block_at(self.q_block(item), self.rank, self.world, self.INNER)
        batch_head = (item // self.local_blocks).to(gl.int64)
        mark_row = 0
        if self.MARKS:
            line = batch_head * self.local_blocks + self.q_block(item)
            mark_row = line * (self.ptr_len - 1)
        return ItemIndex(
            block,
            self.columns + batch_head * self.column_len,
            self.member + batch_head * (self.ptr_len - 1),
            self.block_list + batch_head * self.list_len,
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
    block_list: Pointer
    mark_row: Scalar  # offset of its marks, read with marks

    @gluon.jit
    def kv_block(self, index, start, is_slash, entry):
        """The key block of the sequence that an entry of the item's list is."""
        quotient = gl.load(self.block_list + start + entry, mask=is_slash, other=0).to(gl.int32)
        return self.block - index.round_index - quotient * index.outer

    @gluon.jit
    def to_mark(self, index, start, item_keys, j):
        """Mark tile j if it is of a block that is always kept. Returns the key block, at its last tile, if
        its scores decide, CONTINUED at the tiles before, else -1; as a tensor [1]."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        SPLIT: gl.constexpr = index.BLOCK // index.BLOCK_N
        is_slash, entry, block_tile, _ = index.place(item_keys, j)
        kv_block = self.kv_block(index, start, is_slash, entry)
        near = self.block - kv_block <= 1
        mark = gl.where(near, 1, 0)
        byte = gl.full([1], self.mark_row + kv_block, gl.int64, layout)
        add_marks(index.marks, byte, gl.full([1], mark, gl.int32, layout), is_slash)
        decides = gl.where(block_tile == SPLIT - 1, kv_block, CONTINUED)
        return gl.full([1], gl.where(is_slash & (near == 0), decides, -1), gl.int32, layout)

    @gluon.jit
    def tile_mask(self, index, start, item_keys, j):
        """What masks the keys of the item's tile j, [BLOCK_N]: 0 or -inf, to add to their scores. Of visible
        ranges their positions, to compare with the first keys that rows see; -1 for a masked key.

        A column is masked where a slash covers it already (``tiles.column_tile``).
        """
        BLOCK: gl.constexpr = index.BLOCK
        BLOCK_N: gl.constexpr = index.BLOCK_N
        layout: gl.constexpr = gl.BlockedLayout([BLOCK_N // 32], [32], [1], [0])
        keys = gl.arange(0, BLOCK_N, layout=layout)
        columns = self.columns
        is_slash, list_entry, block_tile, column_tile = index.place(item_keys, j)
        if index.RANGES:
            entry = self.block_list + start + list_entry
            quotient = gl.load(entry, mask=is_slash, other=0).to(gl.int32)
            column_mask = gl.full([BLOCK_N], -1, gl.int32, layout)
            columns += item_keys.first_column
        else:
            column_mask = gl.full([BLOCK_N], float("-inf"), gl.float32, layout)
        if index.COLUMNS:
            entry = column_tile * BLOCK_N + keys
            inside = (is_slash == 0) & (entry < item_keys.columns)
            position = gl.load(columns + entry, mask=inside, other=0)
            covered = gl.load(self.member + self.block - position // BLOCK, mask=inside, other=1)
            unmasked = position if index.RANGES else 0.0
            column_mask = gl.where(inside & (covered == 0), unmasked, column_mask)
        slash_mask = 0.0
        if index.RANGES:
            slash_mask = (self.block - index.round_index - quotient * index.outer) * BLOCK + keys
            slash_mask += block_tile * BLOCK_N
        return gl.where(is_slash, slash_mask, column_mask).to(gl.float32)
