# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which query tiles attend to a key block on Hopper GPUs: the pattern index as the gradients of keys and
values read it, and the partitions that walk these tiles to load them or to add their sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.tiles import first_beyond
from .compat import Pointer, Scalar, aggregate
from .key_common import BLOCK_M, TileLoader
from .query_sums import QueryAdder


@aggregate
class Segment:
    """What a program has: a key block, and a segment of the query blocks that attend to it. It is read where
    it is needed, and takes no registers between."""

    programs: Pointer  # portable.segments.Segments.programs; None for all query blocks, by the launch's grid
    BLOCKS: gl.constexpr  # of a segment, beside those at the key block's own place

    @gluon.jit
    def kv_block(self):
        """The key block; below 0 if the program has nothing to do."""
        kv_block = gl.program_id(0)
        if self.programs is not None:
            kv_block = gl.load(self.programs + 4 * kv_block)
        return kv_block

    @gluon.jit
    def line(self):
        """Its head, of ``b * hk``."""
        line = gl.program_id(1)
        if self.programs is not None:
            line = gl.load(self.programs + 4 * gl.program_id(0) + 1)
        return line

    @gluon.jit
    def number(self):
        """Which of the key block's segments it is."""
        number = 0
        if self.programs is not None:
            number = gl.load(self.programs + 4 * gl.program_id(0) + 2)
        return number

    @gluon.jit
    def is_last(self):
        """Whether it is the key block's last segment, which makes the result. Read with segments."""
        return self.number() + 1 == gl.load(self.programs + 4 * gl.program_id(0) + 3)

    @gluon.jit
    def diagonal_blocks(self, GROUP: gl.constexpr):
        """How many query blocks come first that may be at the key block's own place: each head's. A later
        segment has one in their stead, of zeros: the warpgroups' first steps are made for such blocks."""
        blocks = GROUP
        if self.programs is not None:
            blocks = gl.where(self.number() == 0, GROUP, 1)
        return blocks


@aggregate
class RankIndex:
    """Which query blocks of this rank attend to each key block of one rank: a pattern index on the device.

    Of slashes, query blocks meet a key block c at local blocks ``c + apart + 2 (e + wrap)``, e being the
    quotients that a head's list has for a residue of distances, apart 0 or 1: see
    ``RingStep.block_distances``. Of block lists, each key block has its own list of query blocks.
    """

    block_ptr: Pointer  # prefix counts of the lists
    block_list: Pointer
    ptr_len: Scalar
    list_len: Scalar
    # launch_args.block_distances: by c % 2 and apart, where a residue's prefix counts start, and wrap. With
    # block lists residue_00 is where those of the keys' rank start.
    residue_00: Scalar
    wrap_00: Scalar
    residue_01: Scalar
    wrap_01: Scalar
    residue_10: Scalar
    wrap_10: Scalar
    residue_11: Scalar
    wrap_11: Scalar
    local_blocks: Scalar
    begin: Scalar  # the first query block that counts, read if CHUNKS
    LISTS: gl.constexpr
    RANGES: gl.constexpr
    CHUNKS: gl.constexpr
    LISTS_PER_BLOCK: gl.constexpr  # 1 of block lists, 2 of slashes: one for each apart

    @gluon.jit
    def head_ptr(self, batch_head):
        """Prefix counts of a head."""
        if self.LISTS:
            head_len = self.local_blocks
        else:
            head_len = self.ptr_len
        return self.block_ptr + batch_head.to(gl.int64) * head_len

    @gluon.jit
    def head_list(self, batch_head):
        """The list of a head."""
        return self.block_list + batch_head.to(gl.int64) * self.list_len

    @gluon.jit
    def block_distances(self, head_ptr, head_list, apart: gl.constexpr, kv_block, end_q_block):
        """The part of a head's list that has the query blocks which attend to ``kv_block``, from ``low`` to
        ``high``, and the query block of the quotient 0. From ``end_q_block`` on, visible ranges hide it, or
        it is for another chunk."""
        skipped = 0
        if self.LISTS:
            first = 0
            start = self.residue_00 + kv_block
            count = 1
        else:
            odd = (kv_block & 1) == 1
            if apart == 0:
                start = gl.where(odd, self.residue_10, self.residue_00)
                wrap = gl.where(odd, self.wrap_10, self.wrap_00)
            else:
                start = gl.where(odd, self.residue_11, self.residue_01)
                wrap = gl.where(odd, self.wrap_11, self.wrap_01)
            first = kv_block + apart + 2 * wrap
            # Query blocks first, first + 2, and so on, before the end.
            end = end_q_block if self.RANGES or self.CHUNKS else self.local_blocks
            count = gl.maximum(end + 1 - first, 0) // 2
            if self.CHUNKS:
                skipped = gl.minimum(gl.maximum(self.begin + 1 - first, 0) // 2, count)
        low = gl.load(head_ptr + start + skipped)
        high = gl.load(head_ptr + start + count)
        if (self.RANGES or self.CHUNKS) and self.LISTS:
            high = first_beyond(head_list, low, high, end_q_block - 1)
        if self.CHUNKS and self.LISTS:
            low = first_beyond(head_list, low, high, self.begin - 1)
        return low, high, first


@gluon.jit
def _walk(
    visitor, index, segment, end_q_block,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """Visit the query tiles of a segment of a key block, in order."""
    kv_block = segment.kv_block()
    line = segment.line()
    batch = line // (HEADS // GROUP)
    kv_head = line % (HEADS // GROUP)
    n = 0
    if DIAGONAL:
        # The diagonal block of every head first, then all that needs no mask.
        diagonal = kv_block
        if segment.BLOCKS > 0:
            diagonal = gl.where(segment.number() == 0, kv_block, index.local_blocks)
        for g in range(segment.diagonal_blocks(GROUP)):
            head = kv_head * GROUP + g
            batch_head = batch * HEADS + head
            for i in gl.static_range(BLOCK // BLOCK_M):
                row = diagonal * BLOCK + i * BLOCK_M
                visitor.visit(n, batch, head, batch_head, row)
                n += 1
    begin = (
        segment.number() * segment.BLOCKS
    )  # of the segment, in what is left of the group's lists
    for g in range(GROUP):
        head = kv_head * GROUP + g
        batch_head = batch * HEADS + head
        head_list = index.head_list(batch_head)
        head_ptr = index.head_ptr(batch_head)
        for apart in gl.static_range(index.LISTS_PER_BLOCK):
            low, high, first = index.block_distances(
                head_ptr, head_list, apart, kv_block, end_q_block
            )
            if DIAGONAL and apart == 0:
                low += 1
            if segment.BLOCKS > 0:
                count = high - low
                high = low + gl.minimum(gl.maximum(begin + segment.BLOCKS, 0), count)
                low += gl.minimum(gl.maximum(begin, 0), count)
                begin -= count
            # From low on, and not by j alone: of a number that only bounds of inner loops read, here begin,
            # Triton 3.6 and 3.7 keep the first value for all heads (triton-lang/triton#9036).
            for j in range(high - low):
                quotient = gl.load(head_list + low + j).to(gl.int32)
                row = (first + index.LISTS_PER_BLOCK * quotient) * BLOCK
                for i in gl.static_range(BLOCK // BLOCK_M):
                    visitor.visit(n, batch, head, batch_head, row + i * BLOCK_M)
                    n += 1
    if n == 0:
        # No query sees this block, or none of the segment: a tile of zeros past the end.
        visitor.visit(0, batch, kv_head * GROUP, batch * HEADS, index.local_blocks * BLOCK)


@gluon.jit
def load_queries(
    descs, k_desc, v_desc, shared, index, segment, end_q_block,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    line = segment.line()
    batch = line // (HEADS // GROUP)
    kv_head = line % (HEADS // GROUP)
    shared.resident.load(k_desc, v_desc, batch, kv_head, segment.kv_block() * BLOCK)
    loader = TileLoader(shared.queries, descs)
    _walk(loader, index, segment, end_q_block, HEADS, GROUP, BLOCK, DIAGONAL)


@gluon.jit
def add_sums(
    dq_desc, shared, index, segment, end_q_block, HALF: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr,
):  # fmt: skip
    """A warp that adds to the queries' gradient."""
    adder = QueryAdder(shared.sums_of_half(HALF), dq_desc)
    _walk(adder, index, segment, end_q_block, HEADS, GROUP, BLOCK, DIAGONAL)
