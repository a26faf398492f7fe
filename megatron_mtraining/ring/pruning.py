# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block pruning of the backward: blocks that hold next to none of any query's attention get no gradient.

The forward computes the same function, and marks the blocks that hold a share of some query's attention to
the keys up to them (:func:`..kernels.attention.forward`). After its last round the marks are packed, and kept
until the backward. Block lists of the blocks with a mark replace the pattern there, and small terms of the
gradient are left out. The marks depend on query and key alone, up to the end of the query block: a block
stays for all of its queries if one asks for it, so the gradient of a query depends on later queries of its
block. With packed documents the marks depend on the lengths of all, later ones too
(:func:`least_share`). Other later tokens change nothing here.

Published relatives: SUS backprop (arXiv 2505.15080) drops single weights and samples them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import attention as kernels
from ..layout import block_at
from ..pattern import visible_density
from ..pattern.block_list_index import MAX_LIST_ENTRIES, BlockListIndex, pruned_index
from ..pattern.vertical_slash_index import PatternIndex


@dataclass(frozen=True)
class BackwardPruning:
    """Settings of the pruning.

    Attributes:
        threshold: a block is kept if some query gives it at least ``threshold`` times the attention that it
            would have if each query's attention were even over the mean number of visible keys, ``(N + 1) /
            2`` in causal attention. Positive.
        observe: called once a backward with the density of what is kept, float32 ``[b, h]``, and the share of
            attention in what is not, the mean over this rank's queries, float32 ``[b, h]``. Padding is no
            query: with some it is their sum, over the mean number of queries of ranks.

    The attention that counts is to the keys that the forward has come to, this block included.
    """

    threshold: float
    observe: Callable[[Tensor, Tensor], None] | None = None


def packed_shape(index: PatternIndex) -> tuple[int, int, int, int]:
    """The shape of the packed marks (:func:`..kernels.attention.pack_marks`) of a rank's blocks."""
    batch, heads, num_blocks = index.member.shape
    return batch, heads, index.local_blocks, -(-num_blocks // 8)


class Marking:
    """The marks of the blocks of a forward.

    Args:
        index: the pattern.
        pruning: its settings.
    """

    def __init__(self, index: PatternIndex, pruning: BackwardPruning):
        batch, heads, num_blocks = index.member.shape
        self._shape = batch, heads, index.local_blocks, num_blocks
        self.marks = kernels.new_marks(self._shape, least_share(index, pruning.threshold))

    def packed(self) -> Tensor:
        """The marks as they are kept, to be called after the last round."""
        return kernels.pack_marks(self.marks.marks(self._shape))


class PrunedPattern:
    """The pattern of a backward.

    Args:
        index: the pattern of the forward.
        packed: the marks of its blocks (:class:`Marking`).
        rank: whose queries these are.
        pruning: its settings.
    """

    def __init__(self, index: PatternIndex, packed: Tensor, rank: int, pruning: BackwardPruning):
        self._full, self._rank, self._observe = index, rank, pruning.observe
        num_blocks = index.member.shape[-1]
        kept = kernels.unpack_marks(packed, num_blocks)
        self.index = pruned_index(index, kept, rank, most_entries(index, rank))
        # A byte a pair of blocks, which nothing else needs longer.
        self._kept = kept if self._observe is not None and index.visible is not None else None

    def new_attended(self, lse: Tensor) -> Tensor | None:
        """Memory for the share of attention that the gradient of queries sums; None if nobody asks."""
        return None if self._observe is None else torch.empty_like(lse, dtype=torch.float32)

    def tell(self, attended: Tensor | None) -> None:
        """Report, after the last round, what ``attended`` has found."""
        if self._observe is None or attended is None:
            return
        if self._kept is None:
            density = self.index.density()
        else:  # the lists' own takes a kernel for each head and round
            density = visible_density.pruned_density(self._full, self._kept, self._rank)
        # Rounding may leave a sum above 1.
        left_out = (1 - attended.mean(-1)).clamp(min=0)
        visible = self._full.visible
        if visible is not None and visible.rows is not None:  # padding loses nothing
            left_out = left_out * (visible.seq_length / len(visible.rows))
        self._observe(density, left_out)


def least_share(index: PatternIndex, threshold: float) -> Tensor:
    """The share from which a block is kept: float32 ``[b]``, from the mean of visible keys of a batch entry.
    It reads nothing on the host."""
    batch, device = index.member.shape[0], index.member.device
    even = threshold * index.block_size
    if index.visible is None:
        visible = (index.seq_length + 1) / 2
        return torch.full((batch,), even / visible, dtype=torch.float32, device=device)
    position, start = torch.arange(index.seq_length, device=device), index.visible.start
    if (rows := index.visible.rows) is not None:  # without padding
        position, start = rows, start[:, rows]
    return even / (position + 1 - start).float().mean(-1)


def most_entries(index: PatternIndex, rank: int) -> int:
    """Entries that the lists of a pruned pattern can have at most, known without reading the device."""
    if isinstance(index, BlockListIndex):
        return index.round_list.numel()
    batch, heads, _ = index.member.shape
    return batch * heads * _causal_blocks(index.local_blocks, rank, index.world, index.inner)


@lru_cache(maxsize=64)
def _causal_blocks(local_blocks: int, rank: int, world: int, inner: int) -> int:
    return sum(block_at(local, rank, world, inner) + 1 for local in range(local_blocks))


@lru_cache(maxsize=64)
def _most_causal_blocks(local_blocks: int, world: int, inner: int) -> int:
    return max(_causal_blocks(local_blocks, rank, world, inner) for rank in range(world))


def check_size(query: Tensor, block_size: int, world: int, inner: int) -> None:
    """:func:`check_entries` for a query ``[s, b, h, d]``."""
    length, batch, heads, _ = query.shape
    check_entries(heads, batch, length, block_size, world, inner)


def check_entries(
    heads: int, batch: int, length: int, block_size: int, world: int, inner: int
) -> None:
    """Raise :class:`~..errors.ConfigError` if the lists of a pruned backward could be too long on some rank:
    on every rank, as one that went on would wait for the others.

    Args:
        heads, length: of a rank: its heads, and its tokens of a sequence.
        batch: sequences of a micro-batch.
        world, inner: context-parallel ranks, and ranks of an inner group.
    """
    blocks = -(-length // block_size)
    entries = batch * heads * _most_causal_blocks(blocks, world, inner)
    if entries > MAX_LIST_ENTRIES:
        raise ConfigError(
            f"--mtraining-backward-threshold needs lists of up to {entries} blocks on a rank, more than "
            f"{MAX_LIST_ENTRIES}, for {heads} heads and {length} tokens on each of {world} ranks: use more "
            "tensor- or context-parallel ranks, or leave it out"
        )
