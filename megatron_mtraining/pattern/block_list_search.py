# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The search for block lists: key blocks of each query block, for the heads whose policy selects these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config import BlockListPolicy, MobaPolicy, Policy
from ..layout import block_at, owner_of, positions_at
from .block_list_index import MAX_LIST_ENTRIES, BlockListIndex, build_block_index
from .constants import constant
from .key_block_selection import select_key_blocks
from .vertical_slash_search import SearchInput, select_vertical_slash


def search_block_lists(
    query: Tensor, given: SearchInput, policies: Sequence[Policy]
) -> BlockListIndex:
    """The block-sparse index of heads; some or all of them have policies of key blocks. Each rank has the
    lists of its own queries.

    Args:
        query: ``[s, b, h, d]``, this rank's part.
        policies: of each head.
    """
    rows, config, cp = given.rows, given.config, given.cp
    distances, columns, recall = select_vertical_slash(given, policies)
    batch, heads, num_blocks = distances.shape
    blocks = torch.zeros(
        batch, heads, num_blocks // cp.world, num_blocks, dtype=torch.uint8, device=query.device
    )
    always = rows.window_blocks - 1, -(-config.sink // config.block_size)
    for policy in dict.fromkeys(p for p in policies if isinstance(p, BlockListPolicy)):
        selected = select_key_blocks(
            query, given.key, policy, cp, rows.softmax_scale,
            block_size=config.block_size, window_blocks=always[0], sink_blocks=always[1],
            documents=rows.documents,
        )  # fmt: skip
        if all(each == policy for each in policies):
            recall, blocks = _recall(given, selected), selected
        else:
            own = constant(tuple(each == policy for each in policies), query.device, torch.bool)
            recall = torch.where(own, _recall(given, selected), recall)
            blocks = torch.where(own[:, None, None], selected, blocks)
    index = build_block_index(
        blocks, distances.bool(), columns, *given.layout, rank=cp.rank, cp=cp,
        capacity=_most_entries(policies, tuple(blocks.shape), sum(always)),
    )  # fmt: skip
    return replace(index, recall=recall, exposed=given.exposed)


def _most_entries(
    policies: Sequence[Policy], shape: tuple[int, int, int, int], always: int
) -> int | None:
    """How many entries the lists have at most, where the policies say so, so that nothing is read back to the
    host; else None.

    Args:
        shape: of the blocks, ``(b, h, nb, NB)``.
        always: key blocks that are kept in addition to a query block's own and those of the policy.
    """
    batch, _, local, num_blocks = shape
    entries = 0
    for policy in policies:
        if not isinstance(policy, MobaPolicy):
            return None
        # What the block before keeps of its own window, too, unless a block selects for itself.
        entries += batch * local * min(num_blocks, policy.top_k + always + 2 - policy.lookahead)
    return entries if entries <= MAX_LIST_ENTRIES else None


def _recall(given: SearchInput, blocks: Tensor) -> Tensor:
    """The share of held-out rows' attention in the key blocks that their own blocks attend to: float32 ``[b,
    h]``.

    Every rank scores the rows against its keys, one head at a time: one pass, which takes memory for rows x
    keys of a head.

    Args:
        blocks: uint8 ``[b, h, nb, NB]``, of this rank's query blocks.
    """
    sample, key, lse, cp = given.rows, given.key, given.lse, given.cp
    batch, heads, _, num_blocks = blocks.shape
    size, world = sample.block_size, sample.world
    held = torch.arange(len(sample.rows), device=key.device).view(-1, sample.rows_per_stratum)
    held = held[:, sample.num_selection_rows % sample.rows_per_stratum :].flatten()
    rows = sample.rows.long()[held]
    owner, local = owner_of(rows // size, world, sample.inner)
    seen = blocks.index_select(2, torch.where(owner == sample.rank, local, 0))
    seen = cp.all_reduce(seen * (owner == sample.rank)[:, None].to(torch.uint8))
    own = block_at(
        torch.arange(-(-len(key) // size), device=key.device), sample.rank, world, sample.inner
    )
    local_tokens = torch.arange(len(key), device=key.device)
    position = positions_at(local_tokens, sample.rank, world, size, sample.inner)
    future = (position > rows[:, None])[None]
    if sample.starts is not None:
        future = future | (position < sample.starts[:, held, None])
    missing = len(own) * size - len(key)
    query = sample.query[held].float()
    kept = torch.zeros(batch, heads, device=key.device)
    for b in range(batch):
        for h in range(heads):
            keys = key[:, b, h * key.shape[2] // heads].float()
            p = torch.exp(query[:, b, h] @ keys.T * sample.softmax_scale - lse[b, h, held, None])
            p = p.masked_fill_(future[b % len(future)], 0).nan_to_num_(nan=0.0).clamp_(max=1)
            p = torch.nn.functional.pad(p, (0, missing)).unflatten(-1, (-1, size)).sum(-1)
            kept[b, h] = (p * seen[b, h][:, own]).sum() / len(rows)
    return cp.all_reduce(kept)
