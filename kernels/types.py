# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the kernels are given beside tensors: the pattern, rounds and steps of the ring, sampled rows.

``pattern`` and ``ring`` make these objects. Sizes in the shapes:

======  =============================================================================================
``N``   tokens of the sequence, over all ranks
``B``   tokens of a block
``W``   context-parallel ranks: ``W = O x I``, ``I`` ranks of an inner group, ``O`` inner groups
``NB``  blocks of the sequence: ``ceil(N / B)``
``s``   tokens on a rank: ``N / W``
``nb``  blocks on a rank: ``NB / W``
``b``   batch size
``h``   query heads; ``hk``: key and value heads
``d``   head dimension
``C``   columns that a head may have
``R``   sampled query rows
======  =============================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..visibility import Costs, VisibleRanges


@dataclass(frozen=True)
class PatternOperand(ABC):
    """The sparse pattern of one layer, in the form that the kernels read.

    A head has one list of block distances for all query blocks (``pattern.vertical_slash_index``), or each of
    its query blocks has a list of its own (``pattern.block_list_index``). Both say what is in the lists.

    Attributes:
        has_block_lists: whether each query block has a list.
        member: uint8 ``[b, h, NB]``: whether a head attends to all keys at a block distance.
        round_list, round_ptr: the lists by round, for queries: int16 ``[b, h, NB]``, or ``[capacity]`` with
            block lists; and their int32 prefix counts.
        rank_list, rank_ptr: the same by rank of the keys, for the gradient of keys and values.
        columns: int32 ``[b, h, C]``: positions of the columns over all ranks, ascending; N past their count.
        column_ptr: int32 ``[b, h, NB + 1]``: how many columns lie before each block.
        seq_length, block_size, world, inner: N, B, W, I.
        visible: visible ranges, to which attention keeps as well: what the index has beside that is not
            attended to. None if queries see all keys up to their own.
        is_dense: whether the host knows that every query sees and attends to all keys up to its own.
    """

    has_block_lists: ClassVar[bool]

    member: Tensor
    round_list: Tensor
    round_ptr: Tensor
    rank_list: Tensor
    rank_ptr: Tensor
    columns: Tensor
    column_ptr: Tensor
    seq_length: int
    block_size: int
    world: int
    inner: int
    visible: VisibleRanges | None = None
    is_dense: bool = False

    @property
    @abstractmethod
    def list_strides(self) -> tuple[int, int]:
        """Entries from one head's part of round_list, and of rank_list, to the next head's; 0 with block
        lists."""

    @abstractmethod
    def round_start(self, round_index: int) -> int:
        """Where a round's prefix counts begin in ``round_ptr`` (of a head, or of all with block lists)."""

    @abstractmethod
    def block_mask(self, rank: int) -> Tensor:
        """The listed key blocks of a rank's query blocks, written out: bool ``[b, h, nb, NB]``."""

    @property
    def outer(self) -> int:
        """Rounds (O)."""
        return self.world // self.inner

    @property
    def local_blocks(self) -> int:
        """Blocks on each rank (nb)."""
        return self.member.shape[-1] // self.world

    def distances(self) -> Tensor:
        """``member`` as bool."""
        return self.member.bool()


class StripedColumns(NamedTuple):
    """Columns, and the striped layout that says which rank has them."""

    columns: Tensor
    """int32 ``[b, h, C]``, positions in any order; N for none."""
    seq_length: int
    block_size: int
    world: int
    inner: int


@dataclass(frozen=True)
class Round:
    """The keys of an inner group, to which one rank attends in one round.

    Attributes:
        rank: rank of the queries.
        round_index: o, 0 to O - 1: how many inner groups the keys' group is before the queries'. The
            columns of head i of h are attended to in round ``i * O // h``.
        inner, outer: I and O.
    """

    rank: int
    round_index: int
    inner: int
    outer: int

    @property
    def world(self) -> int:
        """W."""
        return self.inner * self.outer

    @property
    def first(self) -> bool:
        """Whether there is no accumulator yet."""
        return self.round_index == 0

    @property
    def last(self) -> bool:
        """Whether no round follows."""
        return self.round_index == self.outer - 1

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks whose keys these are, in the order they are gathered in."""
        group = (self.rank // self.inner - self.round_index) % self.outer
        return tuple(group * self.inner + y for y in range(self.inner))

    @property
    def wrap(self) -> int:
        """1 if the keys' inner group comes after the queries' in the layout, else 0.

        With the blocks of a group numbered in the order of the sequence, query block n sees the key blocks
        up to ``n - wrap``, which is ``o`` blocks of the sequence before it.
        """
        return int(self.round_index > self.rank // self.inner)


@dataclass(frozen=True)
class RingStep:
    """The queries of one rank and the keys of one rank, as their dKV is computed.

    Attributes:
        rank, source: rank of the queries, and of the keys.
        inner, outer: I and O.
    """

    rank: int
    source: int
    inner: int
    outer: int

    def block_distances(self, parity: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """How local key blocks ``c`` with ``c % 2 == parity`` meet local query blocks: those with the same
        ``% 2``, and the others.

        Returns:
            For each a (residue, apart, wrap): key block ``c`` meets query block ``c + apart + 2 (e + wrap)``
            at block distance ``e * 2W + residue``.
        """

        def place(rank: int, reversed_row: int) -> int:  # of its block within a row of I blocks
            y = rank % self.inner
            return self.inner - 1 - y if reversed_row else y

        world = self.inner * self.outer
        groups = self.rank // self.inner - self.source // self.inner

        def block_distance(apart: int) -> tuple[int, int, int]:
            query_place = place(self.rank, parity ^ apart)
            least = apart * self.inner + query_place - place(self.source, parity)
            least = least * self.outer + groups
            return least % (2 * world), apart, int(least < 0)

        return block_distance(0), block_distance(1)


class BackwardPath(Enum):
    """How the gradients are computed; the values are those of ``MTRAINING_BACKWARD``."""

    TWO_KERNELS = "two_kernels"
    """The queries' gradient apart from that of keys and values: equal bits in each run."""
    ONE_PASS = "one_pass"  # noqa: S105
    """All in one pass over the keys: five matrix products in place of seven. The queries' gradient is added
    up in no fixed order, so that results differ in their last bits from run to run, and takes ``4 h s d``
    bytes more."""


@dataclass(frozen=True)
class SampledRows:
    """Query rows of all ranks, and what it takes to score them against this rank's keys.

    Attributes:
        query: ``[R, b, h, d]`` in the queries' dtype, contiguous, the same on all ranks.
        rows: int32 ``[R]``, global positions of the rows, ascending.
        rows_per_stratum: consecutive rows that belong to one stratum (stretch) of the sequence.
        num_selection_rows: the first rows of each stratum, which select the pattern; the others are held out
            and measure its recall.
        drop_max_stratum: leave the stratum with the largest mass out of each column's sum, so that a column
            must have mass in two strata to be selected.
        stratified: the rows are spread over the sequence; False for its last rows.
        window_blocks: query and key blocks fewer than this apart are in the local window.
        seq_length: N.
        visible: visible ranges of keys; None if rows see all up to their own.
        starts: int32 ``[b, R]``: the first keys that the rows see; None without ``visible``.
        costs: what slashes and columns add of visible pairs; None without, and where rows are the last.
        rank, world, inner, block_size: the striped layout of the keys.
        softmax_scale: factor of the scores.
    """

    query: Tensor
    rows: Tensor
    rows_per_stratum: int
    num_selection_rows: int
    drop_max_stratum: bool
    stratified: bool
    window_blocks: int
    seq_length: int
    rank: int
    world: int
    inner: int
    block_size: int
    softmax_scale: float
    visible: VisibleRanges | None = None
    starts: Tensor | None = None
    costs: Costs | None = None
