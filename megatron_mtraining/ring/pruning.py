# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block pruning of the backward: blocks that hold next to none of any query's attention get no gradient.

The forward computes the same function, and marks the blocks that hold a share of some query's attention to
the keys up to them (:func:`..kernels.attention.forward`). After its last round the marks become a code for
each block, which is kept until the backward, packed. Block lists of the blocks with a code replace the
pattern there, and small terms of the gradient are left out. Without sampling, the codes depend on query and
key alone, up to the end of the query block: a block stays for all of its queries if one asks for it, so the
gradient of a query depends on later queries of its block. With packed documents the codes depend on the
lengths of all documents, later ones too (:func:`least_share`). Other later tokens change nothing here.

With sampling, a block below the threshold is kept with a probability in proportion to its share, and its
terms are divided by that probability (:mod:`..kernels.attention.sampling`): the gradient is then unbiased.
The draw is a hash of a seed and of the block's place. The forward draws the seed from torch's generator,
which checkpoints restore for a replay.

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
from ..kernels.attention.sampling import code_bits
from ..layout import block_at
from ..pattern import packed_density
from ..pattern.block_list_index import MAX_LIST_ENTRIES, BlockListIndex, pruned_index
from ..pattern.vertical_slash_index import PatternIndex


@dataclass(frozen=True)
class BackwardPruning:
    """Settings of the pruning.

    Attributes:
        threshold: a block is kept if some query gives it at least ``threshold`` times the attention that it
            would have if each query's attention were even over the mean number of visible keys, ``(N + 1) /
            2`` for one document. Positive.
        observe: called once a backward with the density of what is kept, float32 ``[b, h]``, and the share of
            attention in what is not, the mean over this rank's queries, float32 ``[b, h]``.
        sampling: draw blocks below the threshold, with weights, instead of leaving all of them out.

    The attention that counts is to the keys that the forward has come to, this block included.
    """

    threshold: float
    observe: Callable[[Tensor, Tensor], None] | None = None
    sampling: bool = False

    def seed(self, device: torch.device) -> Tensor | None:
        """A new seed of a draw, int64 ``[1]``, from torch's generator of the device; None without sampling.

        To be called in each forward, without gradients too: a checkpoint's first pass has none, and its
        replay must find later random numbers, such as dropout's, where the first pass found them. Ranks whose
        generators are in one state draw what a single process draws; if the states differ, the draws do, and
        the gradient is as unbiased.
        """
        if not self.sampling:
            return None
        return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def packed_shape(index: PatternIndex, sampling: bool) -> tuple[int, int, int, int]:
    """The shape of the packed codes (:func:`..kernels.attention.pack_codes`) of a rank's blocks."""
    batch, heads, num_blocks = index.member.shape
    return batch, heads, index.local_blocks, -(-num_blocks * code_bits(sampling) // 8)


class Marking:
    """The marks of the blocks of a forward.

    Args:
        index: the pattern.
        rank: whose queries these are.
        pruning: its settings.
        seed: what :meth:`BackwardPruning.seed` gave.
    """

    def __init__(
        self, index: PatternIndex, rank: int, pruning: BackwardPruning, seed: Tensor | None
    ):
        batch, heads, num_blocks = index.member.shape
        self._shape = batch, heads, index.local_blocks, num_blocks
        self._layout = rank, index.world, index.inner
        self._seed = seed
        least = least_share(index, pruning.threshold)
        self.marks = kernels.new_marks(self._shape, least, pruning.sampling)

    def packed(self) -> Tensor:
        """The codes, to be called after the last round."""
        return kernels.pack_codes(self.marks.marks(self._shape), self._seed, *self._layout)


class PrunedPattern:
    """The pattern of a backward.

    Args:
        index: the pattern of the forward.
        packed: the codes of its blocks (:class:`Marking`).
        rank: whose queries these are.
        pruning: its settings.
    """

    def __init__(self, index: PatternIndex, packed: Tensor, rank: int, pruning: BackwardPruning):
        self._full, self._rank, self._observe = index, rank, pruning.observe
        num_blocks = index.member.shape[-1]
        codes = kernels.unpack_codes(packed, num_blocks, pruning.sampling)
        capacity = most_entries(index, rank)
        self.index = pruned_index(index, codes, rank, capacity, pruning.sampling)
        # A byte a pair of blocks, which nothing else needs longer.
        self._codes = codes if self._observe is not None and index.documents is not None else None

    def new_attended(self, lse: Tensor) -> Tensor | None:
        """Memory for the share of attention that the gradient of queries sums; None if nobody asks."""
        return None if self._observe is None else torch.empty_like(lse, dtype=torch.float32)

    def tell(self, attended: Tensor | None) -> None:
        """Report, after the last round, what ``attended`` has found."""
        if self._observe is None or attended is None:
            return
        if self._codes is None:
            density = self.index.density()
        else:  # the lists' own takes a kernel for each head and round
            density = packed_density.pruned_density(self._full, self._codes, self._rank)
        # Rounding may leave a sum above 1.
        self._observe(density, (1 - attended.mean(-1)).clamp(min=0))


def least_share(index: PatternIndex, threshold: float) -> Tensor:
    """The share from which a block is kept: float32 ``[b]``, from the mean of all documents of a batch entry.
    It reads nothing on the host."""
    batch, device = index.member.shape[0], index.member.device
    even = threshold * index.block_size
    if index.documents is None:
        visible = (index.seq_length + 1) / 2
        return torch.full((batch,), even / visible, dtype=torch.float32, device=device)
    position = torch.arange(index.seq_length, device=device)
    return even / (position + 1 - index.documents.starts).float().mean(-1)


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
