# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policies that choose lists of key blocks for each query block: what they ask for, and their recall."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import BlockListPolicy, MobaPolicy, MTrainingConfig
from ..cp_group import CPGroup
from ..layout import block_at, owner_of
from .block_choice import choose_block_lists
from .estimate import SampledRows


def choose_blocks(
    query: Tensor,
    key: Tensor,
    policy: BlockListPolicy,
    config: MTrainingConfig,
    near: int,
    cp: CPGroup,
    softmax_scale: float,
    documents=None,
) -> Tensor:
    """Key blocks of this rank's query blocks: uint8 ``[b, h, nb, NB]``, by one policy for all heads.

    Args:
        config: window, sink and block size; its own policy is not read.
        near: query and key blocks fewer apart than this are in the local window.
    """
    options = dict(source=policy.name)
    if isinstance(policy, MobaPolicy):
        options["top_k"] = policy.top_k
    else:
        options.update(stride=policy.stride, threshold=policy.threshold)
    return choose_block_lists(
        query, key, cp, softmax_scale, **options,
        block_size=config.block_size, window_blocks=near - 1,
        sink_blocks=-(-config.sink // config.block_size), documents=documents,
    )  # fmt: skip


def recall_of_blocks(
    sample: SampledRows, key: Tensor, lse: Tensor, blocks: Tensor, cp: CPGroup
) -> Tensor:
    """The share of held-out rows' attention in the key blocks that their own blocks see: float32 ``[b, h]``.

    Every rank scores the rows against its keys, one head at a time: one pass, which takes memory for rows x
    keys of a head.

    Args:
        key ``[s, b, hk, d]``: this rank's part.
        lse: the rows' log-sum-exp, float32 ``[b, h, R]``.
        blocks: uint8 ``[b, h, nb, NB]``, of this rank's query blocks.
    """
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
    position = (own[:, None] * size + torch.arange(size, device=key.device)).flatten()[: len(key)]
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
