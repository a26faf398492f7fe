# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the kernels need of the objects that they are given.

The package defines these objects above the kernels (``pattern``, ``ring``, ``visibility``), and the kernels
import nothing from there. Sizes in the shapes:

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

from typing import Protocol

from torch import Tensor


class StripedLayout(Protocol):
    """The block-striped layout of a sequence over context-parallel ranks (``megatron_mtraining.layout``)."""

    @property
    def seq_length(self) -> int:
        """N."""

    @property
    def block_size(self) -> int:
        """B."""

    @property
    def world(self) -> int:
        """W."""

    @property
    def inner(self) -> int:
        """I: ranks whose keys are attended to in one round."""


class LocalRanges(Protocol):
    """Visible ranges as one rank's kernels read them. Blocks are numbered over all ranks."""

    @property
    def start(self) -> Tensor:
        """int32 ``[b, s]``: global position of the first key that each local query sees."""

    @property
    def start_f32(self) -> Tensor:
        """float32 ``[b, s]``: the same."""

    @property
    def kv_block_bounds(self) -> Tensor:
        """int32 ``[b, 2, nb]``, by local query block: the first key block that it attends to
        (first_kv_block), and the first from which on it needs no mask of keys (first_unmasked_kv_block)."""

    @property
    def q_block_bounds(self) -> Tensor:
        """int32 ``[b, 2, NB]``, by key block: the end of the query blocks that see it whole
        (end_unmasked_q_block), and the end of those that attend to it (end_q_block)."""


class VisibleRanges(Protocol):
    """Which keys queries see at all: those from a first one up to their own."""

    @property
    def start(self) -> Tensor:
        """int32 ``[b, N]``: global position of the first key that each query sees."""

    def on(self, rank: int, world: int, inner: int | None, block_size: int) -> LocalRanges:
        """The ranges as ``rank`` needs them."""


class Costs(Protocol):
    """Cost of slashes and columns within visible ranges."""

    @property
    def further(self) -> Tensor:
        """int32 ``[b, NB]``: later query blocks that attend to each key block, of any of its tokens."""

    @property
    def seen(self) -> Tensor:
        """float32 ``[b, NB]``, by block distance: visible query-key pairs, divided by ``B^2``
        and multiplied by ``factor``."""

    @property
    def factor(self) -> Tensor:
        """float32 ``[b]``: causal pairs of the sequence over visible ones."""


class Columns(StripedLayout, Protocol):
    """Columns, positions of keys, and the layout that says which rank has them."""

    @property
    def columns(self) -> Tensor:
        """int32 ``[b, h, C]``, in any order; N for no column."""


class PatternIndex(StripedLayout, Protocol):
    """The sparse pattern of one layer, in the form that the kernels read.

    With vertical-slash lists (``has_block_lists`` False) a head has one list of block distances for all query
    blocks. With block lists (True) each query block of a head has its own list of key blocks, in CSR form.
    """

    @property
    def has_block_lists(self) -> bool:
        """Which of the two kinds it is."""

    @property
    def outer(self) -> int:
        """O: rounds."""

    @property
    def local_blocks(self) -> int:
        """nb."""

    @property
    def member(self) -> Tensor:
        """uint8 ``[b, h, NB]``: whether a head attends to all keys at a block distance."""

    @property
    def round_list(self) -> Tensor:
        """int16 ``[b, h, NB]``, or ``[capacity]`` with block lists: quotients ``e`` of the block distances
        ``e * O + round``, sorted by round (with block lists by round, batch entry, head and query block)."""

    @property
    def round_ptr(self) -> Tensor:
        """int32 ``[b, h, NB + 1]``, or ``[O * b * h * nb + 1]`` with block lists: prefix counts of
        ``round_list``."""

    @property
    def rank_list(self) -> Tensor:
        """int16, the pattern by key rank, for the gradient of keys and values. ``[b, h, NB]`` quotients of
        the distances by ``2 W``, or ``[capacity]`` local query blocks with block lists."""

    @property
    def rank_ptr(self) -> Tensor:
        """int32: prefix counts of ``rank_list``."""

    @property
    def columns(self) -> Tensor:
        """int32 ``[b, h, C]``: positions of the columns, ascending; N past their count."""

    @property
    def column_ptr(self) -> Tensor:
        """int32 ``[b, h, NB + 1]``: how many columns lie before each block."""

    @property
    def visible(self) -> VisibleRanges | None:
        """Visible ranges, or None if queries see all keys up to their own."""

    @property
    def is_dense(self) -> bool:
        """Whether the host knows that every query sees and attends to all keys up to its own."""

    @property
    def list_strides(self) -> tuple[int, int]:
        """Entries from one head to the next in ``round_list`` and in ``rank_list``; 0 with block lists."""

    def round_start(self, round_index: int) -> int:
        """Where the prefix counts of a round begin in ``round_ptr`` (of a head, or of all with block
        lists)."""

    def block_mask(self, rank: int) -> Tensor:
        """bool ``[b, h, nb, NB]``: the key blocks that the query blocks of ``rank`` attend to."""

    def distances(self) -> Tensor:
        """``member`` as bool."""


class Round(Protocol):
    """The keys of one inner group, to which a rank attends in one round of the ring."""

    @property
    def rank(self) -> int:
        """Rank of the queries."""

    @property
    def round_index(self) -> int:
        """0 to O - 1: how many inner groups the keys' group is before the queries'. The columns of head ``i``
        are attended to in round ``i * O // h``."""

    @property
    def outer(self) -> int:
        """O."""

    @property
    def first(self) -> bool:
        """Whether this is round 0, which has no accumulator."""

    @property
    def last(self) -> bool:
        """Whether this is round ``O - 1``, whose result is final."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks of the keys, in the order in which they are gathered."""

    @property
    def wrap(self) -> int:
        """1 if the keys' group comes after the queries' group in the layout, else 0. Numbering the blocks of
        a group in the order of the sequence, query block ``n`` attends to key blocks up to ``n - wrap``."""


class RingStep(Protocol):
    """The keys of one rank and the queries of one rank, as their gradient is computed."""

    @property
    def rank(self) -> int:
        """Rank of the queries."""

    @property
    def source(self) -> int:
        """Rank of the keys and values."""

    def block_distances(self, parity: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """How local key blocks ``c`` with ``c % 2 == parity`` meet local query blocks: (residue, apart, wrap)
        for those of the same ``% 2``, and for the others. Query block ``c + apart + 2 (e + wrap)`` is at
        block distance ``2 W e + residue``."""


class SampledRows(StripedLayout, Protocol):
    """Query rows of all ranks from which the pattern is estimated, and the layout of this rank's keys."""

    @property
    def query(self) -> Tensor:
        """``[R, b, h, d]``, contiguous, the same on all ranks."""

    @property
    def rows(self) -> Tensor:
        """int32 ``[R]``: global positions of the rows, ascending."""

    @property
    def rows_per_stratum(self) -> int:
        """Consecutive rows that are of one stratum (stretch) of the sequence."""

    @property
    def num_selection_rows(self) -> int:
        """The first rows of each stratum, which select the pattern; the others are held out."""

    @property
    def drop_max_stratum(self) -> bool:
        """Whether a column's mass leaves out the largest share that one stratum gives to it."""

    @property
    def stratified(self) -> bool:
        """Whether the rows are spread over the sequence. If not, they are its last."""

    @property
    def window_blocks(self) -> int:
        """Query and key blocks fewer apart than this are in the local window."""

    @property
    def rank(self) -> int:
        """Rank of the keys."""

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""

    @property
    def visible(self) -> VisibleRanges | None:
        """Visible ranges, or None if queries see all keys up to their own."""

    @property
    def starts(self) -> Tensor | None:
        """int32 ``[b, R]``: global position of the first key that each row sees; None without
        visible ranges."""

    @property
    def costs(self) -> Costs | None:
        """Costs of visible pairs; None without ranges, and where the rows are not spread."""
