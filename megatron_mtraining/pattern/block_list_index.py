# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The block-list index: which key blocks each query block sees, one list for each.

With blocks of ``B`` tokens, query ``i`` attends to key ``k`` exactly when

    k <= i   and   ( blk(k) in J(blk(i))   or   k in V and blk(i) - blk(k) not in D )

for a set ``J(i)`` of key blocks for every query block (i always in), and of each batch entry and query
head. ``D`` and ``V`` are the distances and columns of a vertical-slash head, whose ``J(i)`` are the blocks
at the distances D. So one index holds heads of both kinds; a head of the other kind has no V, and 0 alone
in D.

A rank holds the lists of its own query blocks alone: nobody else's are needed for what it computes. They are
sorted in two ways, by round for the queries and by rank for the keys' gradient, as the lists of
:mod:`.vertical_slash_index` are; here in compressed rows over all heads, so that heads may differ in length
at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..cp_group import CPGroup
from ..kernels.selection import block_list_offsets, block_lists, vertical_slash_lists
from ..layout import block_at, inner_size, positions_at
from . import visible_density
from .constants import made_once
from .vertical_slash_index import PatternIndex

MAX_LIST_ENTRIES = 2**29 - 1
"""Entries of a rank's lists: the kernels count tiles, up to 4 an entry, in 32 bits."""


@dataclass(frozen=True)
class BlockListIndex(PatternIndex):
    """One rank's part of a step's pattern of one layer, on the device of the queries. ``member``,
    ``columns`` and ``column_ptr`` are identical on all context-parallel ranks.

    Attributes, in addition to :class:`~.vertical_slash_index.PatternIndex`:
        round_list: int16 ``[capacity]``: by (round o, batch entry, head, own query block a), ascending, the
            quotients ``e`` of the distances ``e * O + o`` at which a sees key blocks.
        round_ptr: int32 ``[O * b * h * nb + 1]``: how many entries come before each such list.
        rank_list: int16 ``[capacity]``: by (rank s, batch entry, head, key block c of rank s), ascending, the
            own query blocks a that see c, as local numbers. Undefined past the count, as is round_list.
        rank_ptr: int32 ``[W * b * h * nb + 1]``: how many entries come before each such list.
        rank: whose query blocks these are.

    It takes 4 bytes for each pair of an own query block and a key block, and per head 9 a block of the
    sequence, 4 a block and round of this rank, 4 a column: 303 KB at 512K tokens over 4 ranks in one round
    where query blocks see 64 blocks each.
    """

    rank: int = field(kw_only=True)

    has_block_lists: ClassVar[bool] = True

    @property
    def list_strides(self) -> tuple[int, int]:
        """Entries from one head's part of round_list, and of rank_list, to the next head's: none, since the
        prefix counts are over all heads."""
        return 0, 0

    def round_start(self, round_index: int) -> int:
        """Where a round's prefix counts begin in ``round_ptr``."""
        batch, heads, _ = self.member.shape
        return round_index * batch * heads * self.local_blocks

    def block_mask(self, rank: int) -> Tensor:
        """The lists of ``rank``'s query blocks, written out: bool ``[b, h, nb, W * nb]``.

        Raises:
            ValueError: the index is another rank's.
        """
        if rank != self.rank:
            raise ValueError(f"these are the lists of rank {self.rank}, not of rank {rank}")
        device, nb = self.member.device, self.local_blocks
        batch, heads, num_blocks = self.member.shape
        entry = torch.arange(len(self.round_list), dtype=self.round_ptr.dtype, device=device)
        # Which list an entry is in; padding entries go to a dummy head, dropped below.
        number = torch.searchsorted(self.round_ptr, entry, right=True) - 1
        there = entry < self.round_ptr[-1]
        a = number % nb
        rounds, head = number // (batch * heads * nb), number // nb % (batch * heads)
        quotient = self.round_list.long()
        block = block_at(a, rank, self.world, self.inner) - quotient * self.outer - rounds
        block, head = torch.where(there, block, 0), torch.where(there, head, batch * heads)
        mask = torch.zeros(batch * heads + 1, nb, num_blocks, dtype=torch.bool, device=device)
        mask[head, a, block] = True
        return mask[:-1].unflatten(0, (batch, heads))

    def work(self) -> Tensor:
        """Attended pairs of this rank's queries, float64 ``[b, h, rank, round]``, exact; on the index's
        device.

        What :meth:`.vertical_slash_index.VerticalSlashIndex.work` gives for this rank, and 0 for the
        others: the sum over ranks is the work of all ranks.
        """
        if self.visible is not None:
            return visible_density.work(self, [self.rank])
        block, outer, nb = self.block_size, self.outer, self.local_blocks
        batch, heads, num_blocks = self.member.shape
        counts = self.round_ptr.diff().double().view(outer, batch, heads, nb)
        pairs = counts.sum(-1).permute(1, 2, 0) * block * block
        pairs[..., 0] -= nb * block * (block - 1) / 2
        local = torch.arange(nb, device=counts.device)
        own = block_at(local, self.rank, self.world, self.inner)
        columns = self._columns_seen()[..., own].sum(-1) * block
        head = torch.arange(heads, device=counts.device)
        pairs[:, head, head * outer // heads] += columns
        # Queries of the last block are fewer when N is not a multiple of B (one rank only).
        missing = num_blocks * block - self.seq_length
        if missing:
            pairs[..., 0] -= missing * self._keys_of_last_query(counts[0, ..., -1])
        work = pairs.new_zeros(batch, heads, self.world, outer)
        work[:, :, self.rank] = pairs
        return work

    def density(self) -> Tensor:
        """Share of the causal pairs of this rank's queries that is attended: float32 ``[b, h]``, on the
        index's device. The mean over ranks is the density of the whole, but for the last digits: ranks
        have not quite the same number of causal pairs. Where queries do not see all keys, ranks may have very
        different numbers of pairs: it is a share of the mean number then, whose mean is exact."""
        pairs = self.work().sum((-1, -2))
        if self.visible is not None:
            every = self.visible.pairs(self.block_size).sum(-1, keepdim=True)
            return (pairs * self.world / every).float()
        return (pairs / (self._positions().double() + 1).sum()).float()

    def token_mask(self, batch: int, head: int) -> Tensor:
        """The pattern of one head and of this rank's queries written out: bool ``[N / W, N]`` (query, key).
        For small N only."""
        block = self.block_size
        rows, keys = self._positions(), torch.arange(self.seq_length, device=self.member.device)
        local = torch.arange(len(rows), device=rows.device) // block
        mask = self.block_mask(self.rank)[batch, head][local[:, None], keys[None] // block]
        columns = self.columns[batch, head, : int(self.column_ptr[batch, head, -1])].long()
        apart = rows[:, None] // block - columns[None] // block
        mask[:, columns] |= ~self.distances()[batch, head][apart.clamp(min=0)]
        if self.visible is not None:
            mask &= keys >= self.visible.start[batch, rows, None]
        return mask & (rows[:, None] >= keys[None])

    def _positions(self) -> Tensor:
        """Global positions of this rank's queries."""
        local = torch.arange(self.seq_length // self.world, device=self.member.device)
        return positions_at(local, self.rank, self.world, self.block_size, self.inner)


def build_block_index(
    blocks: Tensor,
    distances: Tensor | None,
    columns: Tensor | None,
    seq_length: int,
    block_size: int,
    world: int,
    inner: int | None = None,
    rank: int = 0,
    capacity: int | None = None,
    cp: CPGroup | None = None,
) -> BlockListIndex:
    """Put this rank's selected blocks, and all ranks' selected distances and columns, into the coordinates of
    the ring. A query block sees what ``blocks`` or ``distances`` has, itself, and nothing later.

    Args:
        blocks: bool or uint8 ``[b, h, nb, NB]``, by own query block in local order and global key block:
            what each query block sees beside ``distances``. All false for a vertical-slash head.
        distances: bool ``[b, h, NB]``, D by block distance, NB = ceil(N / B); all false for a head of block
            lists. Distance 0 is added. None, as ``columns``, if all heads have block lists.
        columns: int ``[b, h, C]``, V as global token positions, in any order, each once; entries of N or
            more stand for no column. For heads with no more in ``blocks`` than in ``distances``: a column
            in a block that is also in a list would be attended to twice.
        seq_length, block_size, world: N, B and the number of context-parallel ranks W.
        inner: I, how many ranks' keys are attended to in one round; None for the default for ``world`` ranks.
        rank: whose query blocks these are.
        capacity: number of entries to allocate, the pairs of a query block and a key block over all heads;
            nothing is read on the host then. None to count them first, which waits for the device once and
            takes no more memory than there are entries.
        cp: the ranks, which then all refuse lists that are too long on one of them; None to look at this
            rank alone. With ``cp`` and without ``capacity`` this call is a collective.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is too much for lists, on some rank of ``cp``.
        RuntimeError: there are more entries than ``capacity``, or columns for a head with other blocks than
            ``distances``. On a GPU this is found by the device, which stops: nothing wrong is computed.
    """
    inner = inner_size(world, inner)
    batch, heads, _, num_blocks = blocks.shape
    if distances is not None:
        batch, heads, num_blocks = distances.shape
    if num_blocks != -(-seq_length // block_size) or num_blocks % world:
        raise ValueError(
            f"distances for {num_blocks} blocks, but {seq_length} tokens make "
            f"{-(-seq_length // block_size)} blocks of {block_size}, to be divided by {world} ranks"
        )
    expected = (batch, heads, num_blocks // world, num_blocks)
    if tuple(blocks.shape) != expected:
        raise ValueError(f"blocks are {tuple(blocks.shape)}, but the distances go with {expected}")
    if blocks.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"blocks are {blocks.dtype}: they must be bool or uint8")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of {world} ranks")
    layout = seq_length, block_size, world, inner
    if distances is None or columns is None:
        member, columns, column_ptr = _no_slashes(batch, heads, *layout, blocks.device)
    else:
        member, *_, columns, column_ptr = vertical_slash_lists(distances, None, 0, columns, *layout)
    operands = (blocks, member, world, inner, rank)
    round_ptr, rank_ptr, beside = block_list_offsets(*operands)
    if columns.shape[-1]:
        both = ((beside > 0) & (column_ptr[..., -1:] > 0)).any()
        torch._assert_async(~both, "a head has columns, and blocks at other distances than its own")
    if capacity is None:
        # One that went on would wait for the others.
        most = round_ptr[-1:] if cp is None else cp.all_reduce(round_ptr[-1:].clone(), "max")
        capacity, most = torch.cat((round_ptr[-1:], most)).tolist()
    else:
        if capacity < most_list_entries(blocks.shape):
            enough = round_ptr[-1] <= capacity
            torch._assert_async(enough, f"blocks have more than {capacity} entries")
        most = capacity
    if most > MAX_LIST_ENTRIES:
        raise ValueError(
            f"lists of {most} entries on a rank: more than {MAX_LIST_ENTRIES}, use more ranks"
        )
    round_ptr, rank_ptr = round_ptr.int(), rank_ptr.int()
    round_list, rank_list = block_lists(*operands, round_ptr, rank_ptr, capacity)
    return BlockListIndex(
        member=member,
        round_list=round_list,
        round_ptr=round_ptr,
        rank_list=rank_list,
        rank_ptr=rank_ptr,
        columns=columns,
        column_ptr=column_ptr,
        seq_length=seq_length,
        block_size=block_size,
        world=world,
        inner=inner,
        rank=rank,
    )


def most_list_entries(shape: Sequence[int]) -> int:
    """At least as many as a rank's lists can have, of query blocks that see all before them.

    Args:
        shape: ``[b, h, nb, NB]``, of ``blocks``.
    """
    batch, heads, local, num_blocks = shape
    # A rank's local block a is one of the W from a * W on.
    return batch * heads * num_blocks * (local + 1) // 2


@made_once
def _no_slashes(
    batch: int, heads: int, seq_length: int, block_size: int, world: int, inner: int, device
) -> tuple[Tensor, Tensor, Tensor]:
    """``member``, ``columns`` and ``column_ptr`` of an index whose heads all have block lists."""
    num_blocks = -(-seq_length // block_size)
    distances = torch.zeros(batch, heads, num_blocks, dtype=torch.bool, device=device)
    columns = torch.zeros(batch, heads, 0, dtype=torch.int32, device=device)
    member, *_, columns, column_ptr = vertical_slash_lists(
        distances, None, 0, columns, seq_length, block_size, world, inner
    )
    return member, columns, column_ptr


def pruned_index(index: PatternIndex, kept: Tensor, rank: int, capacity: int) -> BlockListIndex:
    """A pattern with fewer blocks, for the same columns: each is attended to as a column wherever it was.

    Args:
        index: the pattern.
        kept: uint8 ``[b, h, nb, NB]``, by own query block in local order and global key block: which blocks
            of the pattern stay. Each query block's own is among them.
        rank: whose query blocks these are.
        capacity: number of entries to allocate, not fewer than are kept; nothing is read on the host.
    """
    # Lists come from ``kept`` alone; ``member`` only says where columns are attended to in a block.
    operands = (kept, torch.zeros_like(index.member), index.world, index.inner, rank)
    round_ptr, rank_ptr = (counts.int() for counts in block_list_offsets(*operands)[:2])
    round_list, rank_list = block_lists(*operands, round_ptr, rank_ptr, capacity)
    return BlockListIndex(
        member=index.member,
        round_list=round_list,
        round_ptr=round_ptr,
        rank_list=rank_list,
        rank_ptr=rank_ptr,
        columns=index.columns,
        column_ptr=index.column_ptr,
        seq_length=index.seq_length,
        block_size=index.block_size,
        world=index.world,
        inner=index.inner,
        visible=index.visible,
        rank=rank,
    )
