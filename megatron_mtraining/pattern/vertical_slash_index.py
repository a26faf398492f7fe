# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The vertical-slash index: which keys each query head sees, in the coordinates the kernels use.

With blocks of ``B`` tokens, query ``i`` attends to key ``k`` exactly when

    k <= i   and   ( blk(i) - blk(k) in D   or   k in V )

for a set ``D`` of block distances (0 always in) and a set ``V`` of token columns, per batch entry and
query head. Nothing of the size of blocks x blocks is built.

In the block-striped layout (:mod:`..layout`) over ``W = O x I`` ranks, query block ``i`` meets in round
``o`` the key blocks ``j`` with ``(i - j) % O == o``, on I ranks. So one list of D is sorted by (residue
of O, quotient), and prefix counts give each query block its keys without a search. The keys' gradient is
computed a rank's keys at a time. The queries of another rank, in every second of its blocks, are at
distances of one residue of 2 W from a key block: for it another list is sorted by (residue of 2 W,
quotient). Columns are gathered from all ranks and attended in one round of each head: query block ``i`` sees
the first ``column_ptr[i]`` of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.selection import vertical_slash_density, vertical_slash_lists
from ..kernels.types import PatternOperand
from ..layout import block_at, inner_size, owner_of
from . import visible_density


@dataclass(frozen=True)
class PatternIndex(PatternOperand):
    """A pattern as the kernels and the ring take it, and what it amounts to: a :class:`VerticalSlashIndex` or
    a :class:`~.block_list_index.BlockListIndex`.

    Attributes, in addition to :class:`~..kernels.types.PatternOperand`:
        metrics: float32 ``[b, h]``, by name: what was measured as the pattern was selected.
        exposed: the share of the held-out rows that could have lost attention
            (:func:`.sampled_rows.exposed_rows`), a number or float32 ``[b]``: what the recall weighs. The
            others have recall 1 with any pattern.
    """

    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    exposed: float | Tensor = 1.0

    @abstractmethod
    def work(self) -> Tensor:
        """Attended pairs of the queries whose lists these are: float64 ``[b, h, rank, round]``, exact."""

    @abstractmethod
    def density(self) -> Tensor:
        """Share of their visible pairs that is attended: float32 ``[b, h]``."""

    @abstractmethod
    def token_mask(self, batch: int, head: int) -> Tensor:
        """Their pattern in one head, written out: bool (query, key). For small N only."""

    @property
    def recall(self) -> Tensor | None:
        """The share of the held-out rows' attention that is kept; None if it was not measured."""
        return self.metrics.get("recall")

    @property
    def nbytes(self) -> int:
        """Bytes the index holds on the device, those of metrics not counted."""
        tensors = [
            value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "exposed"
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _columns_seen(self) -> Tensor:
        """Columns that each query block attends to as columns: float64 ``[b, h, W * nb]``.

        A column in block ``j`` is seen by the blocks ``i > j`` with ``i - j`` not in D: counted by
        distance, as the product of two polynomials.
        """
        counts = self.column_ptr.diff(dim=-1).double()
        outside = (~self.distances()).double()
        length = 2 * counts.shape[-1]
        product = torch.fft.rfft(counts, length) * torch.fft.rfft(outside, length)
        return torch.fft.irfft(product, length)[..., : counts.shape[-1]].round()

    def _keys_of_last_query(self, blocks: Tensor) -> Tensor:
        """Keys that a query past the end would see, averaged over the queries of the last block, which sees
        ``blocks`` (``[b, h]``) blocks: ``[b, h]``."""
        block, num_blocks = self.block_size, self.member.shape[-1]
        last_block_tokens = self.seq_length - (num_blocks - 1) * block
        return (
            (blocks - 1) * block
            + self._columns_seen()[..., -1]
            + (block + last_block_tokens + 1) / 2
        )


@dataclass(frozen=True)
class VerticalSlashIndex(PatternIndex):
    """A step's pattern of one layer. Every tensor is on the device of the queries, and identical on
    all context-parallel ranks.

    Attributes, in addition to :class:`PatternIndex`:
        round_list: int16 ``[b, h, NB]``: quotients ``e`` of D's distances ``e * O + o``, sorted by (o, e);
            0 past the count.
        round_ptr: int32 ``[b, h, NB + 1]``: how many of D come before ``(o, e)``, at ``o * NB / O + e``.
        rank_list, rank_ptr: the same with 2 W in place of O, and ``ceil(NB / 2W)`` of ``NB / O``.

    A head takes 17 bytes a block of the sequence and 4 a column: 74 KB at 512K tokens with 1000 columns.
    """

    has_block_lists: ClassVar[bool] = False

    @property
    def list_strides(self) -> tuple[int, int]:
        """Entries from one head's part of round_list, and of rank_list, to the next head's."""
        return self.round_list.shape[-1], self.rank_list.shape[-1]

    def round_start(self, round_index: int) -> int:
        """Where a round's prefix counts begin in a head's ``round_ptr``."""
        return round_index * self.local_blocks * self.inner

    def block_mask(self, rank: int) -> Tensor:
        """The slashes of a rank's query blocks, written out: bool ``[b, h, nb, W * nb]``."""
        device = self.member.device
        local = torch.arange(self.local_blocks, device=device)
        block = block_at(local, rank, self.world, self.inner)
        apart = block[:, None] - torch.arange(self.member.shape[-1], device=device)
        return self.distances()[:, :, apart.clamp(min=0)] & (apart >= 0)

    def work(self) -> Tensor:
        """Attended pairs, float64 ``[b, h, rank, round]``, exact; on the index's device.

        In round ``o``, queries take the keys ``o`` blocks before them, modulo the number of rounds O, and the
        columns, of all ranks, of the heads h with ``h * O // H == o``.
        """
        if self.visible is not None:
            return visible_density.work(self, range(self.world))
        block, outer = self.block_size, self.outer
        num_blocks, heads = self.member.shape[-1], self.member.shape[1]
        # slash[o, i]: key blocks that query block i sees in round o.
        member = self.member.double().unflatten(-1, (-1, outer)).transpose(-1, -2)
        slash = member.new_zeros(*member.shape[:-1], num_blocks)
        upto = member.cumsum(-1)
        i = torch.arange(num_blocks, device=member.device)
        for o in range(outer):
            quotient = (i - o).div(outer, rounding_mode="floor")
            seen = upto[:, :, o].index_select(-1, quotient.clamp(min=0))
            slash[:, :, o] = torch.where(quotient >= 0, seen, 0.0)
        pairs = slash * block * block
        pairs[:, :, 0] -= block * (block - 1) / 2
        columns = self._columns_seen() * block
        for head in range(heads):
            pairs[:, head, head * outer // heads] += columns[:, head]
        # Queries of the global last block are fewer when N is not a multiple of B (one rank only).
        missing = num_blocks * block - self.seq_length
        if missing:
            pairs[:, :, 0, -1] -= missing * self._keys_of_last_query(self.member.double().sum(-1))
        rank, _ = owner_of(i, self.world, self.inner)
        work = pairs.new_zeros(*pairs.shape[:-1], self.world).index_add_(-1, rank, pairs)
        return work.transpose(-1, -2)

    def density(self) -> Tensor:
        """Share of the visible pairs that is attended: float32 ``[b, h]``, on the index's
        device.

        The sum of :meth:`work`, in one launch whatever the number of ranks.
        """
        if self.visible is not None:
            return visible_density.density(self)
        return vertical_slash_density(
            self.member, self.column_ptr, self.seq_length, self.block_size
        )

    def token_mask(self, batch: int, head: int) -> Tensor:
        """The pattern of one head written out: bool ``[N, N]`` (query, key). For small N only."""
        distances = self.distances()[batch, head]
        position = torch.arange(self.seq_length, device=distances.device)
        block = position // self.block_size
        mask = distances[(block[:, None] - block[None, :]).clamp(min=0)]
        count = int(self.column_ptr[batch, head, -1])
        mask[:, self.columns[batch, head, :count].long()] = True
        if self.visible is not None:
            mask = mask & (position >= self.visible.start[batch, :, None])
        return mask & (position[:, None] >= position[None, :])


def build_index(
    distances: Tensor,
    columns: Tensor,
    seq_length: int,
    block_size: int,
    world: int,
    inner: int | None = None,
    *,
    check_columns: bool = True,
) -> VerticalSlashIndex:
    """Put selected distances and columns into the coordinates of the ring; reads nothing on the host.

    Args:
        distances: bool ``[b, h, NB]``, D by block distance, NB = ceil(N / B). Distance 0 is added.
        columns: int ``[b, h, C]``, V as global token positions, in any order, each once; entries
            of N or more stand for no column.
        seq_length, block_size, world: N, B and the number of context-parallel ranks W.
        inner: I, how many ranks' keys are attended to in one round; None for the default for ``world`` ranks.
        check_columns: False for columns that are known to be positions, each once, as the search's are.

    Raises:
        ValueError: distances for another number of blocks.
        RuntimeError: a column twice, or before the first token; on a GPU by an assertion of the device.
    """
    if check_columns:
        ordered = columns.sort(dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < seq_length)
        torch._assert_async(
            ~(twice.any() | (columns < 0).any()), "columns: give positions of 0 or more, each once"
        )
    inner = inner_size(world, inner)
    num_blocks = -(-seq_length // block_size)
    if distances.shape[-1] != num_blocks or num_blocks % world:
        raise ValueError(
            f"distances for {distances.shape[-1]} blocks, but {seq_length} tokens make {num_blocks} "
            f"blocks of {block_size}, to be divided by {world} ranks"
        )
    return VerticalSlashIndex(
        *vertical_slash_lists(distances, None, 0, columns, seq_length, block_size, world, inner),
        seq_length=seq_length,
        block_size=block_size,
        world=world,
        inner=inner,
    )


def index_of_diagonals(
    window_blocks: int,
    diagonals: Tensor,
    columns: Tensor,
    seq_length: int,
    block_size: int,
    world: int,
    inner: int,
) -> VerticalSlashIndex:
    """:func:`build_index` of the ``window_blocks`` first block distances, and of those that token diagonals
    cross: two, unless the diagonal is a multiple of the block size.

    Args:
        diagonals: int ``[b, h, K]``, token distances; values of N or more are padding.
    """
    return VerticalSlashIndex(
        *vertical_slash_lists(
            None, diagonals, window_blocks, columns, seq_length, block_size, world, inner
        ),
        seq_length=seq_length,
        block_size=block_size,
        world=world,
        inner=inner,
    )


def full_index(
    batch: int, heads: int, seq_length: int, block_size: int, world: int, inner: int, device
) -> VerticalSlashIndex:
    """The index that keeps every pair: dense causal attention."""
    num_blocks = -(-seq_length // block_size)
    distances = torch.ones(batch, heads, num_blocks, dtype=torch.bool, device=device)
    columns = torch.zeros(batch, heads, 0, dtype=torch.int64, device=device)
    index = build_index(
        distances, columns, seq_length, block_size, world, inner, check_columns=False
    )
    return replace(index, is_dense=True)
