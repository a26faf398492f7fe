# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pattern search: the pattern of one attention call, from its own queries and keys.

All ranks select the same, from numbers that are alike on all of them. Nothing is read back to the host but
the number of block-list entries, where the policies do not bound it. What the result is decides who searches:

- everything is kept: :func:`.vertical_slash_index.full_index`;
- no head has a policy of key blocks: :mod:`.vertical_slash_search`;
- some have: :mod:`.block_list_search`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from ..config import DENSE, BlockListPolicy, MTrainingConfig, Policy, PricePolicy
from ..cp_group import CPGroup
from ..documents import Documents
from ..layout import check_layout
from .block_list_index import BlockListIndex
from .block_list_search import search_block_lists
from .sampled_rows import SampledRows, gather_sampled_rows, sampled_lse
from .search_graph import SearchGraphs, SearchKind
from .vertical_slash_index import VerticalSlashIndex, full_index
from .vertical_slash_search import SearchInput, search_at_prices, search_vertical_slash


def search_pattern(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    softmax_scale: float,
    *,
    head_policies: Sequence[Policy] | None = None,
    price: Tensor | None = None,
    documents: Documents | None = None,
    gather_keys: Callable[[VerticalSlashIndex], Tensor] | None = None,
) -> VerticalSlashIndex | BlockListIndex:
    """The pattern of one attention call, from its own queries and keys.

    The block distances of the local window and the sink columns are always selected. The policy selects
    the others. A token diagonal crosses two block distances unless it is a multiple of the block size; both
    are selected.

    Args:
        query: ``[s, b, h, d]``, this rank's part, block-striped; detached here.
        key: ``[s, b, hk, d]``, likewise.
        head_policies: the policy of each of the ``h`` heads; None for ``config.policy`` in all. Caps of more
            than the sequence has are cut to it.
        price: float32 ``[]``, or ``[h]``, in place of the price of ``config``; heads with another price of
            their own keep its ratio to that.
        documents: packed documents of the whole sequence; None for one document.
        gather_keys: returns the keys of an index's columns, ``[b, h, C, d]``, of all ranks: attention needs
            them too, so they are sent just once. Not called by all policies.

    Returns:
        The same index on all ranks. Block lists (policies xattention, moba) differ: each rank has the lists
        of its own queries. Making them waits for the device once, but not if all heads have moba.

    Raises:
        ConfigError: see :func:`check_search`.
    """
    query, key = query.detach(), key.detach()
    length, batch, num_heads, _ = query.shape
    seq_length = length * cp.world
    check_search(seq_length, config, cp.world)
    graphs, kind = None, None
    if documents is None:
        graphs = SearchGraphs.of_stream(query, key, cp.world)
    if graphs is not None:
        kind = SearchKind.of(query, key, config, cp, softmax_scale, head_policies, price)
        graph = graphs.get(kind)
        if graph is not None:
            return graph(query, key, config, cp, price)
    policies = _effective_policies(
        config, head_policies or (config.policy,) * num_heads, seq_length
    )
    if all(policy == DENSE for policy in policies):
        index = full_index(
            batch, num_heads, seq_length, config.block_size, cp.world, cp.inner, query.device
        )
        return replace(index, documents=documents, is_dense=documents is None)
    rows = _sampled_rows(query, config, cp, softmax_scale, documents)
    if any(isinstance(policy, BlockListPolicy) for policy in policies):
        given = _search_input(rows, key, config, cp, price)
        return replace(search_block_lists(query, given, policies), documents=documents)
    # Over several ranks, gather_keys is a collective of its own: all ranks must call it, or none.
    if kind is not None and (cp.world == 1 or _all_have_prices(policies)):

        def search(rows: SampledRows, key: Tensor, price: Tensor | None, cp: CPGroup):
            return search_vertical_slash(_search_input(rows, key, config, cp, price), policies)

        graphs.capture(kind, search, rows, key, cp, price)  # for later searches of this kind
    given = _search_input(rows, key, config, cp, price)
    index = search_vertical_slash(given, policies, gather_keys)
    return index if documents is None else replace(index, documents=documents)


def search_price_series(
    query: Tensor,
    key: Tensor,
    configs: Sequence[MTrainingConfig],
    cp: CPGroup,
    softmax_scale: float,
) -> list[VerticalSlashIndex]:
    """What :func:`search_pattern` returns for each of ``configs``, which differ in their price alone.
    Sampling and candidates, most of a search, are shared.

    Args:
        query, key: as for :func:`search_pattern`.
        configs: all with policy price.

    Raises:
        ValueError: the configurations differ in more.
        ConfigError: see :func:`check_search`.
    """
    first = configs[0]
    for config in configs:
        same = isinstance(config.policy, PricePolicy) and isinstance(first.policy, PricePolicy)
        if (
            not same
            or replace(config, policy=replace(config.policy, price=first.policy.price)) != first
        ):
            raise ValueError("configurations of a price series must differ in their price alone")
    query, key = query.detach(), key.detach()
    seq_length = len(query) * cp.world
    check_search(seq_length, first, cp.world)
    policies = _effective_policies(first, [config.policy for config in configs], seq_length)
    if DENSE in policies:
        return [search_pattern(query, key, config, cp, softmax_scale) for config in configs]
    given = _search_input(_sampled_rows(query, first, cp, softmax_scale), key, first, cp)
    return list(search_at_prices(given, policies))


def _sampled_rows(
    query: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    softmax_scale: float,
    documents: Documents | None = None,
) -> SampledRows:
    """Arguments as for :func:`search_pattern`."""
    # From the first query of a block, the window's farthest key is a block further than from its last.
    seq_length = len(query) * cp.world
    num_blocks = -(-seq_length // config.block_size)
    window_blocks = min(num_blocks, -(-config.window // config.block_size) + 1)
    return gather_sampled_rows(query, config, cp, window_blocks, softmax_scale, documents)


def _search_input(
    rows: SampledRows,
    key: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    price: Tensor | None = None,
) -> SearchInput:
    """Arguments as for :func:`search_pattern`."""
    lse = sampled_lse(rows, key, cp)
    return SearchInput(rows, key, lse, cp, config, min(config.sink, rows.seq_length), price)


def _all_have_prices(policies: Sequence[Policy]) -> bool:
    return all(isinstance(policy, PricePolicy) for policy in policies)


@lru_cache(maxsize=256)
def check_search(seq_length: int, config: MTrainingConfig, world: int) -> None:
    """Raise :class:`~megatron_mtraining.errors.ConfigError` if :func:`search_pattern` cannot search in
    sequences of ``seq_length`` tokens over ``world`` ranks: the length is not a multiple of ``block_size`` x
    ranks (on one rank, any length will do), or the settings do not fit it."""
    if world > 1:
        check_layout(seq_length, world, config.block_size)
    config.check_sizes(seq_length)


def _effective_policies(
    config: MTrainingConfig, policies: Sequence[Policy], seq_length: int
) -> list[Policy]:
    """The policies of the heads; one and the same for those that keep everything."""
    if config.window >= seq_length:
        return [DENSE] * len(policies)
    return [DENSE if p.keeps_all(seq_length, config.block_size) else p for p in policies]
