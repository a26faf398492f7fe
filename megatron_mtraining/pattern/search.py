# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pattern search: the pattern of one attention call, from its own queries and keys.

All ranks select the same, from numbers that are alike on all of them. Nothing is read back to the host but
the number of block-list entries of long sequences, where the policies do not bound it. What selects is each
policy's selector (:mod:`.selector`); where everything is kept, nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import DENSE, MTrainingConfig, Policy
from ..cp_group import CPGroup
from ..kernels.types import SampledRows
from ..labels import SEARCH, labelled
from ..layout import check_layout
from ..visibility import VisibleRanges
from .block_list_index import BlockListIndex, most_list_entries
from .constants import constant
from .sampled_rows import gather_sampled_rows, sampled_lse
from .search_graph import MAX_QUERY_BYTES, SearchGraphs, SearchKind
from .selector import UNCOUNTED_ENTRIES, SelectorCall, index_of, select, selector_of
from .selectors.price import PriceSelector
from .vertical_slash_index import VerticalSlashIndex, full_index


@labelled(SEARCH)
def search_pattern(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    softmax_scale: float,
    *,
    head_policies: Sequence[Policy] | None = None,
    price: Tensor | None = None,
    visible: VisibleRanges | None = None,
    gather_keys: Callable[[VerticalSlashIndex], Tensor] | None = None,
    softmax_offset: Tensor | None = None,
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
        visible: of the whole sequence, which keys a query sees; None if all up to its own.
        gather_keys: returns the keys of an index's columns, ``[b, h, C, d]``, of all ranks: attention needs
            them too, so they are sent just once. Not called by all selectors.
        softmax_offset: float ``[h]``, of the softmax of attention: it takes its share of a row's attention,
            which no key has and which is never lost. None for none.

    Returns:
        The same index on all ranks. Block lists (policies xattention, moba) differ: each rank has the lists
        of its own queries. Making them waits for the device once with long sequences, but not if all heads
        have moba.

    Raises:
        ConfigError: see :func:`check_search`.
    """
    query, key = query.detach(), key.detach()
    length, batch, num_heads, _ = query.shape
    seq_length = length * cp.world
    check_search(seq_length, config, cp.world)
    own = None if head_policies is None else tuple(head_policies)
    policies = _effective_policies(config, own, num_heads, seq_length)
    if all(policy == DENSE for policy in policies):
        index = full_index(
            batch, num_heads, seq_length, config.block_size, cp.world, cp.inner, query.device
        )
        return replace(index, visible=visible, is_dense=visible is None)
    prices = _prices(config, policies, price, query.device)
    is_plain = visible is None and softmax_offset is None
    graphs = SearchGraphs.of_stream(query, key, cp.world) if is_plain else None
    if graphs is not None:
        kind = SearchKind.of(query, key, config, cp, softmax_scale, own)
        graph = graphs.get(kind)
        if graph is not None:
            return graph(query, key, config, cp, prices)
    sample = _sample(query, config, cp, softmax_scale, visible)
    if graphs is not None and _is_captured(query, config, policies, cp.world):
        reads_query = any(selector_of(each).reads_query for each in policies)

        def search(
            sample: SampledRows, key: Tensor, prices: Tensor, cp: CPGroup, own: Tensor | None
        ):
            call = _call(sample, key, config, cp, prices)
            return index_of(select(query if own is None else own, key, call, policies), call)

        # For later searches of this kind.
        graphs.capture(kind, search, sample, key, cp, prices, query if reads_query else None)
    call = _call(sample, key, config, cp, prices, softmax_offset)
    call = call._replace(gather_keys=gather_keys)
    return index_of(select(query, key, call, policies), call)


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
        policy, price = config.policy, first.policy.price
        if policy.price is None or replace(config, policy=replace(policy, price=price)) != first:
            raise ValueError("configurations of a price series must differ in their price alone")
    query, key = query.detach(), key.detach()
    seq_length, heads = len(query) * cp.world, query.shape[2]
    check_search(seq_length, first, cp.world)
    own = tuple(each.policy for each in configs)
    policies = _effective_policies(first, own, len(own), seq_length)
    if DENSE in policies:
        return [search_pattern(query, key, config, cp, softmax_scale) for config in configs]
    prices = [constant((policy.price,) * heads, key.device) for policy in policies]
    call = _call(_sample(query, first, cp, softmax_scale), key, first, cp, prices[0])
    selector = PriceSelector([first.policy] * heads)
    candidates = selector.candidates(key, call)
    calls = [call._replace(prices=each) for each in prices]
    return [index_of(selector.select_from(candidates, each), each) for each in calls]


def _is_captured(
    query: Tensor, config: MTrainingConfig, policies: tuple[Policy, ...], world: int
) -> bool:
    """Whether a CUDA graph may hold the search of these queries."""
    selectors = {selector_of(each) for each in policies}
    if not all(each.is_captured(world) for each in selectors):
        return False
    if not any(each.reads_query for each in selectors):
        return True
    length, batch, heads, _ = query.shape
    local = -(-length // config.block_size)
    entries = most_list_entries((batch, heads, local, local * world))
    return query.nbytes <= MAX_QUERY_BYTES and entries <= UNCOUNTED_ENTRIES


def _sample(
    query: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    softmax_scale: float,
    visible: VisibleRanges | None = None,
) -> SampledRows:
    """Arguments as for :func:`search_pattern`."""
    seq_length = len(query) * cp.world
    num_blocks = -(-seq_length // config.block_size)
    window_blocks = min(num_blocks, config.window_blocks)
    return gather_sampled_rows(query, config, cp, window_blocks, softmax_scale, visible)


def _call(
    sample: SampledRows,
    key: Tensor,
    config: MTrainingConfig,
    cp: CPGroup,
    prices: Tensor,
    softmax_offset: Tensor | None = None,
) -> SelectorCall:
    lse, share = sampled_lse(sample, key, cp), None
    if softmax_offset is not None:
        offset = softmax_offset.detach().float()[:, None]
        lse = torch.logaddexp(lse, offset)
        share = torch.exp(offset - lse)
    return SelectorCall(sample, lse, cp, config, prices, offset_share=share)


def _prices(
    config: MTrainingConfig, policies: tuple[Policy, ...], price: Tensor | None, device
) -> Tensor:
    """The price of each head, float32 ``[h]``: its policy's, or with ``price`` that times the ratio of its
    policy's to the run's. 1 where a policy has none."""
    own = [1.0 if policy.price is None else policy.price for policy in policies]
    of_run = config.policy.price
    if price is None or not of_run:
        return constant(tuple(own), device)
    return price.float() * constant(tuple(each / of_run for each in own), device)


@lru_cache(maxsize=256)
def check_search(seq_length: int, config: MTrainingConfig, world: int) -> None:
    """Raise :class:`~megatron_mtraining.errors.ConfigError` if :func:`search_pattern` cannot search in
    sequences of ``seq_length`` tokens over ``world`` ranks: the length is not a multiple of ``block_size`` x
    ranks (on one rank, any length will do), or the settings do not fit it."""
    if world > 1:
        check_layout(seq_length, world, config.block_size)
    config.check_sizes(seq_length)


@lru_cache(maxsize=256)
def _effective_policies(
    config: MTrainingConfig, policies: tuple[Policy, ...] | None, num_heads: int, seq_length: int
) -> tuple[Policy, ...]:
    """The policies of the heads; one and the same for those that keep everything."""
    everything = config.window >= seq_length
    return tuple(
        DENSE if everything or each.keeps_all(seq_length, config.block_size) else each
        for each in policies or (config.policy,) * num_heads
    )
