# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the Hopper kernels share: tensor descriptors, and the walk over items of the kernels that hold
queries (forward and their gradient)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common.tiles import block_at, list_start, owner_of, seen_from

# Later versions of Triton call these otherwise.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def descriptor(tensor, block_shape):
    """A tensor ``[s, b, h, d]`` as ``[b, h, s, d]``, to be moved in tiles of ``block_shape``."""
    rows, batch, heads, dim = tensor.shape
    of_row, of_batch, of_head, _ = tensor.stride()
    return _describe(tensor, (batch, heads, rows, dim), (of_batch, of_head, of_row), block_shape)


def descriptor_heads_first(tensor, block_shape):
    """A tensor ``[b, h, s, d]``, to be moved in tiles of ``block_shape``."""
    return _describe(tensor, tuple(tensor.shape), tensor.stride()[:3], block_shape)


def _describe(tensor, shape, strides, block_shape):
    """Of a tensor whose last stride is 1. Only the memory's address is new in most steps: the rest was made,
    and checked by Triton, when it was first described."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_description(shape, strides, tuple(block_shape), tensor.dtype))
    made.base = tensor
    return made


@functools.lru_cache(maxsize=1024)
def _description(shape, strides, block_shape, dtype) -> dict:
    layout = _tile_layout(block_shape, dtype)
    nowhere = _Nowhere(dtype)
    return vars(TensorDescriptor(nowhere, list(shape), [*strides, 1], list(block_shape), layout))


class _Nowhere(NamedTuple):
    """What Triton looks at of a tensor to check a descriptor. Whether the address is aligned is checked
    before: see ``dispatch.uses_hopper``."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def _tile_layout(block_shape, dtype):
    if dtype == torch.float32:  # a stretch of a line: nothing to swizzle
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), _TYPES[dtype])


@functools.cache
def _multiprocessors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(tensor, items: int) -> int:
    """How many programs to start for so many items: each takes items in turn until there are none."""
    return min(_multiprocessors(tensor.device) if tensor.is_cuda else 132, items)


def gathered_descriptor(tensor, block_shape):
    """A tensor ``[I, s, b, hk, d]`` as ``[b, hk, rows, d]``, where entries of I lie :func:`chunk_rows`
    apart: what is between two of them is never asked for."""
    if len(tensor) == 1:
        return descriptor(tensor[0], block_shape)
    count, rows, batch, heads, dim = tensor.shape
    rows += (count - 1) * chunk_rows(tensor)
    _, of_row, of_batch, of_head, _ = tensor.stride()
    return _describe(tensor, (batch, heads, rows, dim), (of_batch, of_head, of_row), block_shape)


def chunk_rows(tensor) -> int:
    """How many rows the entries of ``[I, s, b, hk, d]`` lie apart."""
    return tensor.stride(0) // tensor.stride(1)


def column_descriptors(key, value, columns, block_shape):
    """Of the gathered columns' keys and values; if there are none, any that fit."""
    if columns is None:
        return [descriptor(tensor[0], block_shape) for tensor in (key, value)]
    return [descriptor_heads_first(tensor, block_shape) for tensor in columns]


def line_descriptor(tensor, width):
    """A float32 tensor ``[b, h, s]``, contiguous, to be moved in stretches of ``width`` rows."""
    batch, heads, length = tensor.shape
    return _describe(tensor, (batch * heads, length), (length,), (1, width))


def document_lines(index, rank: int) -> tuple:
    """``tiles.document_rows``, with starts as float32."""
    if index.documents is None:
        return None, None
    local = index.documents.on(rank, index.world, index.inner, index.block_size)
    return local.start_f32, local.kv_block_bounds


@gluon.jit
def query_item(
    item, items, nb, slash_ptr, slash_list, column_ptr, reach_ptr, ptr_len, list_len, residue, wrap, rank,
    world, number, outer,
    INNER: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr, LISTS: gl.constexpr,
    DOCS: gl.constexpr,
):  # fmt: skip
    """What is to be done as ``item`` of heads x blocks; nothing from ``items`` on.

    The last query blocks have the most keys: they come first, so that all programs end together.

    Returns:
        where the item's slashes start in their list, their number, that of its columns, how many of the
        slashes need no mask of documents, and the first column.
    """
    if DOCS:
        item = gl.minimum(item, items - 1)
    bh = item // nb
    a = nb - 1 - item % nb
    inside = item < items
    slash_ptr += list_start(bh.to(gl.int64), a, ptr_len, nb, residue, LISTS)
    low = gl.load(slash_ptr, mask=inside, other=0)
    # Among the blocks of the round's ranks, the last that this query block may see.
    last = block_at(a, rank % INNER, INNER, INNER) - wrap
    end = slash_ptr + 1 if LISTS else slash_ptr + last + 1
    slashes = gl.load(end, mask=inside, other=0) - low
    plain = slashes
    first_column = 0
    if DOCS:
        reach_ptr += (bh // HEADS).to(gl.int64) * 2 * nb + a
        entries = slash_list + bh.to(gl.int64) * list_len
        first_block = gl.load(reach_ptr)
        node = rank // INNER - number + wrap * outer
        high = low + slashes
        plain = seen_from(
            gl.load(reach_ptr + nb), slash_ptr, entries, low, high, last, node, outer, LISTS
        ) - low  # fmt: skip
        slashes = (
            seen_from(first_block, slash_ptr, entries, low, high, last, node, outer, LISTS) - low
        )
    columns = 0
    if COLUMNS:
        column_ptr += bh.to(gl.int64) * ptr_len
        # Each head has its columns in one of the rounds, so that rounds are alike.
        turn = bh % HEADS * outer // HEADS == number
        columns = gl.load(column_ptr + block_at(a, rank, world, INNER), mask=inside & turn, other=0)
        if DOCS:
            first_column = gl.where(columns > 0, gl.load(column_ptr + first_block), 0)
            columns -= first_column
    return low, slashes, columns, plain, first_column


@gluon.jit
def tiles_of(slashes, columns, BLOCK: gl.constexpr):
    """Tiles of an item; one of which nothing counts if it has no key at all."""
    return gl.maximum(slashes + (columns + BLOCK - 1) // BLOCK, 1)


@gluon.jit
def send_item(
    turn, smem, ready, free, item, slashes, columns, plain, first_column, DOCS: gl.constexpr
):  # fmt: skip
    """Hand an item to the computing warpgroups, two items deep."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn & 1
    mbarrier.wait(free.index(slot), ((turn >> 1) & 1) ^ 1)
    smem.index(slot).store(gl.full([1], item, gl.int32, one))
    smem.index(2 + slot).store(gl.full([1], slashes, gl.int32, one))
    smem.index(4 + slot).store(gl.full([1], columns, gl.int32, one))
    if DOCS:
        smem.index(6 + slot).store(gl.full([1], plain, gl.int32, one))
        smem.index(8 + slot).store(gl.full([1], first_column, gl.int32, one))
    thread_barrier()
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def receive_item(turn, smem, ready, free, WARPS: gl.constexpr, DOCS: gl.constexpr):
    """The counterpart of ``send_item``, in a partition of so many warps."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot = turn & 1
    mbarrier.wait(ready.index(slot), (turn >> 1) & 1)
    item = gl.sum(smem.index(slot).load(one), 0)
    slashes = gl.sum(smem.index(2 + slot).load(one), 0)
    columns = gl.sum(smem.index(4 + slot).load(one), 0)
    plain = slashes
    first_column = 0
    if DOCS:
        plain = gl.sum(smem.index(6 + slot).load(one), 0)
        first_column = gl.sum(smem.index(8 + slot).load(one), 0)
    thread_barrier()
    mbarrier.arrive(free.index(slot), count=1)
    return item, slashes, columns, plain, first_column


@gluon.jit
def item_barriers(STAGES: gl.constexpr, DOCS: gl.constexpr):
    """Shared memory and barriers of a program that draws items: (items and their two barriers), (ready and
    free of queries, keys and values)."""
    items = gl.allocate_shared_memory(
        gl.int32, [10 if DOCS else 6, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(item_ready.index(i), count=1)
        mbarrier.init(item_free.index(i), count=3)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    barriers = (q_ready, q_free, k_ready, v_ready, k_free, v_free)
    return (items, item_ready, item_free), barriers


@gluon.jit
def _tile_at(
    j, item, low, slashes, columns, first_column, slash_list, list_len, nb, rank, wrap, chunk_rows,
    INNER: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """First row of an item's tile j: in the keys while j < ``slashes``, then in the gathered columns.

    Keys of the round's ranks lie ``chunk_rows`` apart; see ``layout`` for what lies where."""
    entry = slash_list + (item // nb).to(gl.int64) * list_len + low + j
    distance = gl.load(entry, mask=j < slashes, other=0).to(gl.int32)
    # Past the end of everything if the query block has no key: zeros.
    column = gl.where(columns == 0, 1 << 30, (j - slashes) * BLOCK + first_column)
    block = block_at(nb - 1 - item % nb, rank % INNER, INNER, INNER) - wrap - distance
    chunk, c = owner_of(block, INNER, INNER)
    return gl.where(j < slashes, chunk * chunk_rows + c * BLOCK, column)


@gluon.jit
def _bring_tile(
    n, is_slash, descs, smem, ready, free, batch, head, at,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tile n of all, rows ``at`` on of the keys (values), or of the head's gathered columns, once its
    place is free."""
    slot = n % STAGES
    bar = ready.index(slot)
    mbarrier.wait(free.index(slot), ((n // STAGES) & 1) ^ 1)
    mbarrier.expect(bar, BLOCK * D * 2)
    if is_slash:
        load_tile(descs[0], [batch, head // GROUP, at, 0], bar, smem.index(slot))
    else:
        load_tile(descs[1], [batch, head, at, 0], bar, smem.index(slot))


@gluon.jit
def _tile_bias(
    j, slashes, columns, listed, member, block, COLUMNS: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """What is added to the scores of the keys of an item's tile j: 0, or -inf for a column that does not
    count here (see ``tiles.column_tile``); all -inf for the tile of an item without any key."""
    line: gl.constexpr = gl.BlockedLayout([BLOCK // 32], [32], [1], [0])
    bias = gl.full([BLOCK], float("-inf"), gl.float32, line)
    if COLUMNS:
        entry = (j - slashes) * BLOCK + gl.arange(0, BLOCK, layout=line)
        there = (j >= slashes) & (entry < columns)
        position = gl.load(listed + entry, mask=there, other=0)
        covered = gl.load(member + block - position // BLOCK, mask=there, other=1)
        bias = gl.where(there & (covered == 0), 0.0, bias)
    return gl.where(j < slashes, 0.0, bias)


@gluon.jit
def _tile_positions(
    j, low, slashes, columns, first_column, slash_entries, listed, member, block, number, outer,
    COLUMNS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """In place of ``_tile_bias`` where documents are packed: positions of the keys of an item's tile j, as
    float32, to be compared with the starts of the rows' documents; -1 for what does not count."""
    line: gl.constexpr = gl.BlockedLayout([BLOCK // 32], [32], [1], [0])
    keys = gl.arange(0, BLOCK, layout=line)
    quotient = gl.load(slash_entries + low + j, mask=j < slashes, other=0).to(gl.int32)
    found = gl.full([BLOCK], -1, gl.int32, line)
    if COLUMNS:
        entry = (j - slashes) * BLOCK + keys
        there = (j >= slashes) & (entry < columns)
        position = gl.load(listed + first_column + entry, mask=there, other=0)
        covered = gl.load(member + block - position // BLOCK, mask=there, other=1)
        found = gl.where(there & (covered == 0), position, found)
    at = (block - number - quotient * outer) * BLOCK + keys
    return gl.where(j < slashes, at, found).to(gl.float32)


@gluon.jit
def bias_at(biases, n, STAGES: gl.constexpr):
    """Where the bias of tile n is in shared memory. Its place is written again when the keys of tile ``n + 2
    STAGES`` come, which is after those of ``n + STAGES`` are used, and so after the scores of tile n."""
    return biases.index(n % (2 * STAGES))


@gluon.jit
def load_keys(
    counter, item_channel, barriers, query_descs, query_smems, k_descs, k_smem, biases,
    slash_ptr, slash_list, column_ptr, listed, member, reach_ptr, ptr_len, list_len, column_len, nb, items,
    residue, wrap, chunk_rows, rank, world, number, outer, INNER: gl.constexpr, HEADS: gl.constexpr,
    GROUP: gl.constexpr, COLUMNS: gl.constexpr, LISTS: gl.constexpr, DOCS: gl.constexpr,
    BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A loading warp: draws items, and brings their queries and keys, and what is added to the scores of an
    item's first tile and of columns.

    ``k_descs`` are of the keys and of the gathered columns, ``query_descs`` what is held of a query
    block.
    """
    item_smem, item_ready, item_free = item_channel
    q_ready, q_free, k_ready, v_ready, k_free, v_free = barriers
    half: gl.constexpr = BLOCK // 2
    held: gl.constexpr = len(query_descs)
    n = 0
    turn = 0
    item = gl.atomic_add(counter, 1)
    low, slashes, columns, plain, first_column = query_item(
        item, items, nb, slash_ptr, slash_list, column_ptr, reach_ptr, ptr_len, list_len, residue, wrap, rank,
        world, number, outer, INNER, HEADS, COLUMNS, LISTS, DOCS,
    )  # fmt: skip
    send_item(
        0, item_smem, item_ready, item_free, item, slashes, columns, plain, first_column, DOCS
    )
    while item < items:
        # The item after this one is drawn and sent ahead, so that nobody waits for it.
        following = gl.atomic_add(counter, 1)
        low_then, slashes_then, columns_then, plain_then, first_then = query_item(
            following, items, nb, slash_ptr, slash_list, column_ptr, reach_ptr, ptr_len, list_len, residue,
            wrap, rank, world, number, outer, INNER, HEADS, COLUMNS, LISTS, DOCS,
        )  # fmt: skip
        send_item(
            turn + 1, item_smem, item_ready, item_free, following, slashes_then, columns_then, plain_then,
            first_then, DOCS,
        )  # fmt: skip
        tiles = tiles_of(slashes, columns, BLOCK)
        bh = item // nb
        batch = bh // HEADS
        head = bh % HEADS
        block = block_at(nb - 1 - item % nb, rank, world, INNER)
        listed_here = listed + bh.to(gl.int64) * column_len
        member_here = member + bh.to(gl.int64) * (ptr_len - 1)
        for j in range(tiles):
            at = _tile_at(
                j, item, low, slashes, columns, first_column, slash_list, list_len, nb, rank, wrap,
                chunk_rows, INNER, BLOCK,
            )  # fmt: skip
            if DOCS:
                bias = _tile_positions(
                    j, low, slashes, columns, first_column, slash_list + bh.to(gl.int64) * list_len,
                    listed_here, member_here, block, number, outer, COLUMNS, BLOCK,
                )  # fmt: skip
            else:
                bias = _tile_bias(
                    j, slashes, columns, listed_here, member_here, block, COLUMNS, BLOCK
                )  # fmt: skip
            if (j == 0) | (j >= plain):
                bias_at(biases, n, STAGES).store(bias)
                thread_barrier()
            _bring_tile(
                n, j < slashes, k_descs, k_smem, k_ready, k_free, batch, head, at,
                GROUP, BLOCK, D, STAGES,
            )  # fmt: skip
            if j == 0:
                mbarrier.wait(q_free, (turn & 1) ^ 1)
                mbarrier.expect(q_ready, held * BLOCK * D * 2)
                for i in gl.static_range(2):
                    rows = [batch, head, (nb - 1 - item % nb) * BLOCK + i * half, 0]
                    for x in gl.static_range(held):
                        load_tile(query_descs[x], rows, q_ready, query_smems[x].index(i))
            n += 1
        turn += 1
        item = following
        low = low_then
        slashes = slashes_then
        columns = columns_then
        plain = plain_then
        first_column = first_then


@gluon.jit
def load_values(
    item_channel, barriers, v_descs, v_smem, slash_ptr, slash_list, ptr_len, list_len, nb, items,
    residue, wrap, rank, chunk_rows,
    INNER: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, LISTS: gl.constexpr,
    DOCS: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Another, for the values: keys and values are free at different times."""
    item_smem, item_ready, item_free = item_channel
    q_ready, q_free, k_ready, v_ready, k_free, v_free = barriers
    n = 0
    turn = 0
    item, slashes, columns, plain, first_column = receive_item(
        0, item_smem, item_ready, item_free, 1, DOCS
    )
    while item < items:
        bh = item // nb
        batch = bh // HEADS
        head = bh % HEADS
        a = nb - 1 - item % nb
        low = gl.load(slash_ptr + list_start(bh.to(gl.int64), a, ptr_len, nb, residue, LISTS))
        for j in range(tiles_of(slashes, columns, BLOCK)):
            at = _tile_at(
                j, item, low, slashes, columns, first_column, slash_list, list_len, nb, rank, wrap,
                chunk_rows, INNER, BLOCK,
            )  # fmt: skip
            _bring_tile(
                n, j < slashes, v_descs, v_smem, v_ready, v_free, batch, head, at,
                GROUP, BLOCK, D, STAGES,
            )  # fmt: skip
            n += 1
        turn += 1
        item, slashes, columns, plain, first_column = receive_item(
            turn, item_smem, item_ready, item_free, 1, DOCS
        )
