# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block pruning of the backward: blocks that hold next to none of any query's attention get no gradient.

The forward stays as it is. Before the gradients of a round are computed, one pass over its keys finds, from
the final log-sum-exp, the largest share of a query's attention that each block of the pattern holds, and
block lists of those above a threshold replace the pattern. So the model computes the same function, nothing
of later tokens is used, and small terms of the gradient are left out. Without sampling, which blocks are kept
depends on query, key and log-sum-exp alone: a replay under activation recomputation finds the same.

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
from ..layout import block_at
from ..pattern import packed_density
from ..pattern.block_list_index import MOST, BlockListIndex, pruned_index
from ..pattern.vertical_slash_index import PatternIndex
from .schedule import Round


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


class PrunedPattern:
    """The pattern of a backward, pruned one round after the other.

    Args:
        query: ``[s, b, h, d]``.
        lse: ``[b, h, s]``, of all rounds.
        index: the pattern of the forward.
        rank: whose queries these are.
        softmax_scale: factor of the scores.
        pruning: its settings.
        seed: what :meth:`BackwardPruning.seed` gave in the forward.
    """

    def __init__(
        self,
        query: Tensor,
        lse: Tensor,
        index: PatternIndex,
        rank: int,
        softmax_scale: float,
        pruning: BackwardPruning,
        seed: Tensor | None,
    ):
        self._query, self._lse, self._full = query, lse, index
        self._rank, self._scale, self._pruning, self._seed = rank, softmax_scale, pruning, seed
        batch, heads, num_blocks = index.member.shape
        kept = (batch, heads, index.local_blocks, num_blocks)
        self._kept = torch.zeros(kept, dtype=torch.uint8, device=query.device)
        self._dropped = torch.zeros_like(lse, dtype=torch.float32)
        self._least_share = least_share(index, pruning.threshold)
        self._rounds = 0
        self._pruned: BlockListIndex | None = None

    def through(self, round_: Round, key: Tensor) -> BlockListIndex:
        """The pattern of the rounds up to this one, whose keys are ``key`` (``[I, s, b, hk, d]``)."""
        if round_.round_index == self._rounds:
            kernels.prune_blocks(
                self._query,
                key,
                lse=self._lse,
                index=self._full,
                round_=round_,
                softmax_scale=self._scale,
                least_share=self._least_share,
                seed=self._seed,
                kept=self._kept,
                dropped=self._dropped,
            )
            capacity = most_entries(self._full, self._rank)
            weighted = self._seed is not None
            self._pruned = pruned_index(self._full, self._kept, self._rank, capacity, weighted)
            self._rounds += 1
        return self.pruned

    @property
    def pruned(self) -> BlockListIndex:
        """The pattern of the rounds so far."""
        assert self._pruned is not None, "a round has been pruned"
        return self._pruned

    def tell(self) -> None:
        """Report, after the last round."""
        if self._pruning.observe is None:
            return
        if self._full.documents is None:
            density = self.pruned.density()
        else:  # the lists' own waits for the device
            density = packed_density.pruned_density(self._full, self._kept, self._rank)
        self._pruning.observe(density, self._dropped.mean(-1))


def least_share(index: PatternIndex, threshold: float) -> Tensor:
    """The share from which a block is kept: float32 ``[b]``. It reads nothing on the host."""
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
    """Raise :class:`~..errors.ConfigError` if the lists of a pruned backward could be too long on some rank:
    on every rank, as one that went on would wait for the others.

    Args:
        query: ``[s, b, h, d]``.
    """
    length, batch, heads, _ = query.shape
    blocks = -(-length // block_size)
    entries = batch * heads * _most_causal_blocks(blocks, world, inner)
    if entries > MOST:
        raise ConfigError(
            f"--mtraining-backward-threshold needs lists of up to {entries} blocks on a rank, more than "
            f"{MOST}, for {heads} heads and {length} tokens on each of {world} ranks: use more tensor- or "
            "context-parallel ranks, or leave it out"
        )
