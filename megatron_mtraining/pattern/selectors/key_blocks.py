# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Selectors of key blocks for each query block: what policies moba and xattention share.

A query block attends to the blocks that the queries of the block before it select, and so no token changes
what an earlier query attends to. As published (``lookahead``), its own queries select, and each query sees
what later queries of its block ask for.

Each rank scores its own query blocks. Nothing is sampled. Candidates are ordered by an integer that
does not depend on the number of ranks, ties going to the earlier block; nothing is read back to the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import BlockListPolicy, Policy
from ...cp_group import CPGroup
from ...kernels.attention.operands import unit_stride
from ...layout import block_at, owner_of
from ...visibility import VisibleRanges
from ..constants import made_once
from ..selector import Pattern, Selected, Selector, SelectorCall, selector_of

CHUNK = 2**26
"""Numbers that exist at once, about: pairs of a query row and a key block. Enough rows for all of a GPU at
512K tokens, where a row has 4096."""


class BlockCall(NamedTuple):
    """What scores of key blocks depend on beside queries and keys, which are whole blocks."""

    cp: CPGroup
    length: int
    """Tokens on this rank; those after are padding."""
    block_size: int
    always: tuple[int, int]
    """See :class:`..selector.SelectorCall`."""
    softmax_scale: float
    seen_from: Tensor | None
    """int32 ``[b, nb]``: the first block that a query of each block sees; None if all see the first."""
    hidden: Tensor | None
    """bool ``[b, 1, nb, NB]``: the blocks before that."""


class KeyBlockSelector(Selector):
    """Selects key blocks for each query block, by one policy."""

    def __init__(self, policies: Sequence[BlockListPolicy]):
        super().__init__(policies)
        self.policy = policies[0]

    @classmethod
    def kind(cls, policy: Policy) -> Hashable:
        return policy

    @abstractmethod
    def choose(self, query: Tensor, key: Tensor, call: BlockCall) -> Tensor:
        """The blocks that the queries of each block choose, with those that are always kept: uint8 ``[b, h,
        nb, NB]``."""

    def most_blocks(self, always: int) -> int | None:
        """At most how many blocks a query block gets, with ``always`` that are kept beside its own; None if
        that depends on the data."""
        return None

    def select(self, query: Tensor, key: Tensor, call: SelectorCall) -> Selected:
        sample, always = call.sample, call.always
        blocks = self.blocks(
            query, key, call.cp, sample.softmax_scale, sample.block_size, always, sample.visible
        )
        most = self.most_blocks(sum(always))
        pattern = Pattern(None, None, blocks, None if most is None else (most,) * query.shape[2])
        return Selected(pattern, {})

    def blocks(
        self,
        query: Tensor,
        key: Tensor,
        cp: CPGroup,
        softmax_scale: float,
        block_size: int,
        always: tuple[int, int],
        visible: VisibleRanges | None,
    ) -> Tensor:
        """:func:`select_key_blocks`; ``always`` are its ``window_blocks`` and ``sink_blocks``."""
        query, key = unit_stride(query.detach(), key.detach())
        length = query.shape[0]
        missing = -length % block_size
        if missing and cp.world > 1:
            raise ValueError(f"{length} tokens a rank are not a multiple of blocks of {block_size}")
        if missing:
            query, key = (
                torch.nn.functional.pad(t, (0, 0) * 3 + (0, missing)) for t in (query, key)
            )
        seen_from = hidden = None
        if visible is not None:
            seen_from, hidden = _seen_blocks(visible, cp.rank, cp.world, cp.inner, block_size)
        call = BlockCall(cp, length, block_size, always, softmax_scale, seen_from, hidden)
        blocks = self.choose(query, key, call)
        if not self.policy.lookahead:
            blocks = _of_previous_block(blocks, cp, *always)
        return blocks if hidden is None else blocks.masked_fill_(hidden, 0)


def select_key_blocks(
    query: Tensor,
    key: Tensor,
    policy: BlockListPolicy,
    cp: CPGroup,
    softmax_scale: float,
    *,
    block_size: int = 128,
    window_blocks: int = 1,
    sink_blocks: int = 1,
    visible: VisibleRanges | None = None,
) -> Tensor:
    """The key blocks that this rank's query blocks attend to, by one policy for all heads.

    Args:
        query: ``[s, b, h, d]``, this rank's part, block-striped; detached here. On one rank the last block
            may be partial.
        key: ``[s, b, hk, d]``, likewise.
        window_blocks, sink_blocks: how many blocks before a query's own, and how many first ones, are always
            kept, as is its own.
        visible: visible ranges; blocks that no query of a query block sees are not kept. A block
            of which they see a part is scored as a whole.

    Returns:
        uint8 ``[b, h, nb, NB]``, by local query block and global key block: ``blocks`` of
        :func:`~.block_list_index.build_block_index`.

    Raises:
        ValueError: the policy does not fit the block size, or blocks are partial over several ranks.
    """
    selector = selector_of(policy)([policy])
    assert isinstance(selector, KeyBlockSelector)
    always = window_blocks, sink_blocks
    return selector.blocks(query, key, cp, softmax_scale, block_size, always, visible)


def _of_previous_block(blocks: Tensor, cp: CPGroup, window_blocks: int, sink_blocks: int) -> Tensor:
    """The selection of the query block before each of this rank's, with the blocks that are always kept.
    Over several ranks a collective, as the block before is another rank's.

    Args:
        blocks: uint8 ``[b, h, nb, NB]``, by the query block that selected.
    """
    count, layout = blocks.shape[2], (cp.rank, cp.world, cp.inner)
    kept = _always_kept(count, window_blocks, sink_blocks, *layout, blocks.device)
    previous = kept.expand_as(blocks).clone()
    if cp.world == 1:
        previous[:, :, 1:].bitwise_or_(blocks[:, :, :-1])
        return previous
    sent, sends = _neighbours(1, count, *layout, blocks.device)
    arriving, receives = _neighbours(-1, count, *layout, blocks.device)
    rows = cp.all_to_all(blocks.permute(2, 0, 1, 3).index_select(0, sent), sends, receives)
    previous[:, :, arriving] |= rows.permute(1, 2, 0, 3)
    return previous


def _seen_blocks(
    visible: VisibleRanges, rank: int, world: int, inner: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """``seen_from`` and ``hidden`` of :class:`BlockCall`, made once for all layers."""

    def make() -> tuple[Tensor, Tensor]:
        first = visible.on(rank, world, inner, block_size).kv_block_bounds[:, 0].contiguous()
        every = torch.arange(first.shape[1] * world, device=first.device)
        return first, every < first[:, None, :, None]

    return visible.once(("seen blocks", rank, world, inner, block_size), make)


@made_once
def _always_kept(
    count: int, window_blocks: int, sink_blocks: int, rank: int, world: int, inner: int, device
) -> Tensor:
    """The blocks that each of a rank's ``count`` query blocks always keeps: uint8 ``[nb, NB]``."""
    block = torch.arange(count * world, device=device)
    own = block_at(block[:count], rank, world, inner)[:, None]
    kept = (block <= own) & ((block >= own - window_blocks) | (block < sink_blocks))
    return kept.to(torch.uint8)


@lru_cache(maxsize=64)
def _neighbours(
    step: int, count: int, rank: int, world: int, inner: int, device
) -> tuple[Tensor, list[int]]:
    """A rank's local blocks whose next (``step`` 1) or previous (-1) block exists, int64, by the rank that
    has it, in the order of the earlier block of each pair; and how many each rank has."""
    with torch.inference_mode(False):
        local = torch.arange(count)
        block = block_at(local, rank, world, inner) + step
        local, block = (each[(block >= 0) & (block < count * world)] for each in (local, block))
        owner, theirs = owner_of(block, world, inner)
        order = (owner * count + (local if step == 1 else theirs)).argsort()
        return local[order].to(device), owner.bincount(minlength=world).tolist()


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts one after the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def chunks(count: int, numbers: int) -> list[tuple[int, int]]:
    """(first, how many) of chunks of ``count`` items that each take ``numbers`` numbers, about
    :data:`CHUNK` in all."""
    step = max(1, CHUNK // numbers)
    return [(first, min(step, count - first)) for first in range(0, count, step)]
