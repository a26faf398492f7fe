# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing a step's pattern: which policy decides for which heads.

All ranks choose the same from numbers that they have alike; nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config import (
    DENSE,
    BlockListPolicy,
    CoveragePolicy,
    FixedPolicy,
    Policy,
    PricePolicy,
)
from ..cp_group import CPGroup
from ..documents import Documents
from ..kernels.attention import gather_columns
from ..kernels.selection import attention_masses, column_masses
from ..layout import check_layout
from .block_index import BlockListIndex, build_block_index
from .blocks import choose_blocks, recall_of_blocks
from .counted import choose_coverage, choose_fixed
from .estimate import SampledRows, draw_sample, sample_lse
from .index import VerticalSlashIndex, build_index, full_index, index_of_choice
from .price import Chosen, choose_by_price, recall_of


def choose_index(
    query: Tensor,
    key: Tensor,
    config,
    cp: CPGroup,
    softmax_scale: float,
    *,
    head_policies: Sequence[Policy] | None = None,
    price: Tensor | None = None,
    documents: Documents | None = None,
    gather: Callable[[VerticalSlashIndex], Tensor] | None = None,
) -> VerticalSlashIndex | BlockListIndex:
    """The pattern of one attention call, from its own queries and keys.

    Block distances of the local window, and the first columns, always hold. What else is kept
    is up to the policy (:mod:`.price`, :mod:`.counted`). A token diagonal crosses two block distances unless
    it is a multiple of the block size; both are taken.

    Args:
        query ``[s, b, h, d]``, key ``[s, b, hk, d]``: this rank's parts, block-striped; detached here.
        head_policies: the policy of each of the ``h`` heads; None for ``config.policy`` in all. Caps of more
            than the sequence has are cut to it.
        price: float32 ``[]``, or ``[h]``, in place of the price of ``config``; heads with another price of
            their own keep its ratio to that.
        documents: packed ones, of the whole sequence; None for one document.
        gather: gives the keys of an index's columns, ``[b, h, C, d]``, of all ranks: attention needs them
            too, so they need travel just once. Not called by all policies.

    Returns:
        The same index on all ranks, but for lists of blocks (policies xattention and moba), of which each
        rank has those of its own queries; making them waits for the device once.

    Raises:
        ConfigError: the sequence is not a multiple of ``block_size`` x ranks (on one rank, any
            length will do), or the budgets do not fit it.
    """
    query, key = query.detach(), key.detach()
    length, batch, num_heads, _ = query.shape
    block, world = config.block_size, cp.world
    seq_length = length * world
    check_choice(seq_length, config, world)
    policies = _effective_policies(
        config, head_policies or (config.policy,) * num_heads, seq_length
    )
    if all(policy == DENSE for policy in policies):
        index = full_index(batch, num_heads, seq_length, block, world, cp.inner, query.device)
        return replace(index, documents=documents)
    num_blocks = -(-seq_length // block)
    # From the first query of a block, the window's farthest key is a block further than from its last.
    near = min(num_blocks, -(-config.window // block) + 1)
    sample = draw_sample(query, config, cp, near, softmax_scale, documents)
    lse = sample_lse(sample, key, cp)
    kinds = dict.fromkeys(type(policy) for policy in policies)
    layout = (seq_length, block, world, cp.inner)
    sink = min(config.sink, seq_length)
    if len(kinds) == 1 and kinds.keys() <= {CoveragePolicy, FixedPolicy}:
        columns, diagonals, masses = _count(sample, key, lse, policies, sink, cp)
        index = index_of_choice(near, diagonals, columns, *layout)
        keys = gather(index) if gather and columns.shape[-1] else None
        recall = _recall(sample, key, lse, masses, index, keys, cp)
        return replace(index, recall=recall, documents=documents)
    chosen = {}
    for kind in kinds:
        # Heads of other policies are chosen for too, and then not taken: mixed layers are few.
        if issubclass(kind, BlockListPolicy):
            continue
        alike = _alike(policies, kind)
        if kind is PricePolicy:
            prices = _prices(config, alike, price, key.device)
            chosen[kind] = choose_by_price(sample, key, lse, alike, sink, cp, prices)
        else:
            columns, diagonals, masses = _count(sample, key, lse, alike, sink, cp)
            found = index_of_choice(near, diagonals, columns, *layout)
            recall = _recall(sample, key, lse, masses, found, None, cp)
            chosen[kind] = Chosen(found.member, columns, recall)
    if not any(issubclass(kind, BlockListPolicy) for kind in kinds):
        distances, columns, recall = _merge(chosen, policies, seq_length)
        index = build_index(distances.view(torch.bool), columns, *layout)
        return replace(index, recall=recall, documents=documents)
    return _with_blocks(query, key, config, sample, lse, policies, near, chosen, layout, cp)


def _effective_policies(config, policies: Sequence[Policy], seq_length: int) -> list[Policy]:
    """The policies of the heads; of those that keep everything, the same."""
    if config.window >= seq_length:
        return [DENSE] * len(policies)
    return [DENSE if p.keeps_all(seq_length, config.block_size) else p for p in policies]


def _with_blocks(
    query, key, config, sample: SampledRows, lse, policies, near, chosen, layout, cp: CPGroup
):
    """The index of heads some of which, or all, have lists of key blocks."""
    batch, num_heads = query.shape[1:3]
    seq_length, num_blocks = sample.seq_length, -(-sample.seq_length // sample.block_size)
    device = key.device
    none = Chosen(
        torch.zeros(batch, num_heads, num_blocks, dtype=torch.uint8, device=device),
        torch.empty(batch, num_heads, 0, dtype=torch.int32, device=device),
        torch.zeros(batch, num_heads, device=device),
    )
    distances, columns, recall = _merge({**chosen, None: none}, policies, seq_length)
    blocks = torch.zeros(
        batch, num_heads, num_blocks // cp.world, num_blocks, dtype=torch.uint8, device=device
    )
    for policy in dict.fromkeys(each for each in policies if isinstance(each, BlockListPolicy)):
        own = torch.tensor([each == policy for each in policies], device=device)
        found = choose_blocks(
            query, key, policy, config, near, cp, sample.softmax_scale, sample.documents
        )
        kept = recall_of_blocks(sample, key, lse, found, cp)
        blocks = torch.where(own[:, None, None], found, blocks)
        recall = torch.where(own, kept, recall)
    index = build_block_index(blocks, distances.bool(), columns, *layout, rank=cp.rank)
    return replace(index, recall=recall, documents=sample.documents)


def check_choice(seq_length: int, config, world: int) -> None:
    """Raise :class:`ConfigError` if :func:`choose_index` cannot choose for so many tokens over so many
    ranks."""
    if world > 1:
        check_layout(seq_length, world, config.block_size)
    config.check_sizes(seq_length)


def _alike(policies: list[Policy], kind: type) -> list[Policy]:
    """The heads' policies; the first one of this kind for heads with another kind."""
    first = next(policy for policy in policies if isinstance(policy, kind))
    return [policy if isinstance(policy, kind) else first for policy in policies]


def _prices(config, policies: list[PricePolicy], price: Tensor | None, device) -> Tensor:
    """The price of each head, float32 ``[h]``."""
    own = config.policy.price if isinstance(config.policy, PricePolicy) else 0
    if price is None or own == 0:
        return _constant(tuple(policy.price for policy in policies), device)
    return price * _constant(tuple(policy.price / own for policy in policies), device)


_CONSTANTS: dict[tuple, Tensor] = {}


def _constant(numbers: tuple[float, ...], device) -> Tensor:
    """A vector on the device: the same in every layer and step, so made once."""
    at = (numbers, device)
    if at not in _CONSTANTS:
        with torch.inference_mode(False):
            _CONSTANTS[at] = torch.tensor(numbers, dtype=torch.float32, device=device)
    return _CONSTANTS[at]


def _count(
    sample: SampledRows, key, lse, policies, sink: int, cp: CPGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns, token diagonals, and masses by block distance, of a policy that counts."""
    coverage = isinstance(policies[0], CoveragePolicy)
    if coverage:
        # As published, the last rows' share is of all attention, the window's too.
        near = sample.window_blocks if sample.stratified else 0
        sample = replace(sample, window_blocks=near, drop_max_stratum=False)
    values, masses = attention_masses(sample, key, lse, sink, divide_by_cost=False)
    choose = choose_coverage if coverage else choose_fixed
    return *choose(sample, key, lse, values, policies, sink, cp), cp.all_reduce(masses)


def _recall(
    sample: SampledRows, key, lse, masses, index, keys: Tensor | None, cp: CPGroup
) -> Tensor:
    """The share of attention kept by what was chosen by numbers: float32 ``[b, h]``. ``keys`` are of the
    index's columns; None to gather them."""
    columns = index.columns
    if keys is None:
        keys = cp.all_reduce(gather_columns(key, None, index, cp.rank))[0]
    held = column_masses(sample, keys, columns, lse, index.member)
    return recall_of(sample, masses, index.member, columns, held)


def _merge(chosen: dict[type | None, Chosen], policies, seq_length: int) -> Chosen:
    """Of each head, what its own policy has chosen."""
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    width = max(each.columns.shape[-1] for each in chosen.values())
    merged = None
    for kind, each in chosen.items():
        spare = width - each.columns.shape[-1]
        columns = torch.nn.functional.pad(each.columns, (0, spare), value=seq_length)
        own = torch.tensor(
            [type(p) is kind or (kind is None and type(p) not in chosen) for p in policies],
            device=columns.device,
        )
        each = Chosen(each.distances, columns, each.recall)
        if merged is None:
            merged = each
        else:
            merged = Chosen(
                *(
                    torch.where(own.view(-1, *(1,) * (new.dim() - 2)), new, old)
                    for new, old in zip(each, merged)
                )
            )
    return merged
