# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a policy's selector is, which policy has which, and how the selections of a layer's heads are joined.

Heads of a layer may have policies of several kinds. Each selector selects for all heads at once, as if all
had its policies, and each head takes the selection of its own kind: mixed layers are few.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..config import ConfigError, MTrainingConfig, Policy
from ..cp_group import CPGroup
from ..kernels.types import SampledRows
from .block_list_index import (
    MAX_LIST_ENTRIES,
    BlockListIndex,
    build_block_index,
    most_list_entries,
)
from .constants import constant
from .recall import held_out, recall_of_blocks, recall_of_slashes
from .sampled_rows import exposed_rows, held_rows
from .vertical_slash_index import VerticalSlashIndex, build_index

UNCOUNTED_ENTRIES = 2**21
"""Entries of a layer's block lists, 4 bytes each, that are allocated for the most that there can be: to count
them the host waits for the device, which takes as long as the search of a short sequence."""


class SelectorCall(NamedTuple):
    """What selectors read of one attention call beside queries and keys."""

    sample: SampledRows
    lse: Tensor
    """float32 ``[b, h, R]``: log-sum-exp of the sampled rows' scores, over the keys of all ranks, and of the
    softmax offset."""
    cp: CPGroup
    config: MTrainingConfig
    """Settings of the run. Its policy is not read: heads may have others."""
    prices: Tensor
    """float32 ``[h]``; any number for heads whose policy has no price."""
    gather_keys: Callable[[VerticalSlashIndex], Tensor] | None = None
    """See :func:`.search.search_pattern`. None where the index of a selector is not that of the call."""
    offset_share: Tensor | None = None
    """float32 ``[b, h, R]``: the share of the sampled rows' attention that the softmax offset takes; None
    without one. It is added to recall: selectors leave it out."""

    @property
    def sink(self) -> int:
        """First columns that are always kept."""
        return min(self.config.sink, self.sample.seq_length)

    @property
    def always(self) -> tuple[int, int]:
        """Blocks that a query block always keeps: how many before its own, and how many first ones."""
        return self.sample.window_blocks - 1, -(-self.config.sink // self.config.block_size)

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """seq_length, block_size, world, inner."""
        sample = self.sample
        return sample.seq_length, sample.block_size, sample.world, sample.inner


class Pattern(NamedTuple):
    """The keys of each head: columns and blocks by their distance, or in place of both ``blocks``."""

    distances: Tensor | None
    """uint8 ``[b, h, NB]``, by block distance: the slashes. None, as ``columns``, if all heads have
    ``blocks``."""
    columns: Tensor | None
    """int32 ``[b, h, C]``, positions in any order, each once; N for none."""
    blocks: Tensor | None = None
    """uint8 ``[b, h, nb, NB]``, by this rank's query block and global key block; None for none."""
    most_blocks: tuple[int, ...] | None = None
    """At most how many blocks a query block of each head has; None if that depends on the data: with long
    sequences the host then waits for the device, to count them."""
    made: VerticalSlashIndex | None = None
    """Distances and columns as an index, if the selector has made it."""


class Selected(NamedTuple):
    """What a selector returns."""

    pattern: Pattern
    metrics: dict[str, Tensor]
    """Numbers by name, float32 ``[b, h]``. ``recall``, the share of the held-out rows' attention that is
    kept, is added if the selector does not have it. The share of a softmax offset is no key's and not in it
    (:attr:`SelectorCall.offset_share`)."""


class Selector(ABC):
    """Selects the keys of all heads of a call.

    Args:
        policies: of each head, all of one kind (:meth:`kind`).
    """

    def __init__(self, policies: Sequence):
        self.policies = policies

    @abstractmethod
    def select(self, query: Tensor, key: Tensor, call: SelectorCall) -> Selected:
        """The pattern of each head: distances and columns, the same on all ranks, and the blocks of this
        rank's queries. All ranks call it.

        Args:
            query: ``[s, b, h, d]``, this rank's part, block-striped, without gradient.
            key: ``[s, b, hk, d]``, likewise.
        """

    @classmethod
    def kind(cls, policy: Policy) -> Hashable:
        """Heads with equal kinds share a selector. By default one takes all policies of its type."""
        return cls

    reads_query: ClassVar[bool] = True
    """Whether it reads ``query``. A CUDA graph that holds it has a copy of that then."""

    @classmethod
    def is_captured(cls, world: int) -> bool:
        """Whether a CUDA graph may hold it (:mod:`.search_graph`): it does not read ``call.gather_keys``, nor
        anything back to the host, and says ``most_blocks`` if it finds blocks."""
        return False


_SELECTORS: dict[type[Policy], type[Selector]] = {}

S = TypeVar("S", bound=type[Selector])


def selects_for(policy: type[Policy]) -> Callable[[S], S]:
    """Decorates the selector of a policy."""

    def register(selector: S) -> S:
        _SELECTORS[policy] = selector
        return selector

    return register


def selector_of(policy: Policy) -> type[Selector]:
    """The selector of a policy.

    Raises:
        ConfigError: none is registered.
    """
    if type(policy) not in _SELECTORS:
        raise ConfigError(
            f"policy {policy.name} has no selector: decorate one with selects_for, and import its module"
        )
    return _SELECTORS[type(policy)]


def select(query: Tensor, key: Tensor, call: SelectorCall, policies: Sequence[Policy]) -> Selected:
    """The pattern of each head by its own policy. Arguments as for :meth:`Selector.select`."""
    kinds = [selector_of(policy).kind(policy) for policy in policies]
    if len(set(kinds)) == 1:
        return _select_alike(query, key, call, policies)
    joined = None
    for kind in dict.fromkeys(kinds):
        own = tuple(each == kind for each in kinds)
        first = policies[own.index(True)]
        alike = [policy if its else first for policy, its in zip(policies, own)]
        found = _select_alike(query, key, call._replace(gather_keys=None), alike)
        joined = found if joined is None else _joined(joined, found, own, call.sample.seq_length)
    assert joined is not None
    return joined


def _select_alike(
    query: Tensor, key: Tensor, call: SelectorCall, policies: Sequence[Policy]
) -> Selected:
    found = selector_of(policies[0])(policies).select(query, key, call)
    if "recall" in found.metrics:
        return found
    sample, lse, cp, pattern = call.sample, call.lse, call.cp, found.pattern
    if pattern.blocks is None:
        recall = recall_of_slashes(sample, key, lse, *_slashes(pattern), call.sink, cp)
    else:
        held = held_rows(sample, call.config, cp)
        recall = recall_of_blocks(sample, key, lse, pattern.blocks, held, cp)
    return found._replace(metrics={**found.metrics, "recall": recall})


def _joined(old: Selected, new: Selected, own: tuple[bool, ...], seq_length: int) -> Selected:
    """``new`` in its ``own`` heads, and ``old`` in the others."""
    a, b = new.pattern, old.pattern
    (distances, columns), (old_distances, old_columns) = _slashes(a), _slashes(b)
    mask = constant(own, distances.device, torch.bool)

    def where(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.view(-1, *(1,) * (a.dim() - 2)), a, b)

    width = max(columns.shape[-1], old_columns.shape[-1])
    padded = (
        torch.nn.functional.pad(each, (0, width - each.shape[-1]), value=seq_length)
        for each in (columns, old_columns)
    )
    blocks = a.blocks if b.blocks is None else b.blocks
    if blocks is not None:
        none = torch.zeros_like(blocks)
        blocks = where(*(none if each.blocks is None else each.blocks for each in (a, b)))
    most = None
    if a.most_blocks is not None and b.most_blocks is not None:
        most = tuple(x if its else y for x, y, its in zip(a.most_blocks, b.most_blocks, own))
    unknown = torch.full_like(new.metrics["recall"], float("nan"))
    metrics = {
        name: where(new.metrics.get(name, unknown), old.metrics.get(name, unknown))
        for name in {**old.metrics, **new.metrics}
    }
    pattern = Pattern(where(distances, old_distances), where(*padded), blocks, most)
    return Selected(pattern, metrics)


def _slashes(pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Distances and columns, none written out."""
    if pattern.distances is not None and pattern.columns is not None:
        return pattern.distances, pattern.columns
    assert pattern.blocks is not None, "a pattern has slashes, or blocks"
    batch, heads, _, num_blocks = pattern.blocks.shape
    distances = pattern.blocks.new_zeros(batch, heads, num_blocks)
    return distances, torch.zeros(batch, heads, 0, dtype=torch.int32, device=distances.device)


def index_of(selected: Selected, call: SelectorCall) -> VerticalSlashIndex | BlockListIndex:
    """The pattern as the kernels read it, with its metrics."""
    pattern, layout = selected.pattern, call.layout
    distances = None if pattern.distances is None else pattern.distances.view(torch.bool)
    index: VerticalSlashIndex | BlockListIndex
    if pattern.made is not None:
        index = pattern.made
    elif pattern.blocks is None:
        assert distances is not None and pattern.columns is not None, (
            "a pattern has slashes, or blocks"
        )
        index = build_index(distances, pattern.columns, *layout, check_columns=False)
    else:
        index = build_block_index(
            pattern.blocks, distances, pattern.columns, *layout, rank=call.cp.rank, cp=call.cp,
            capacity=_capacity(pattern),
        )  # fmt: skip
    exposed = exposed_rows(call.sample, call.config)
    visible = call.sample.visible
    metrics = selected.metrics
    if call.offset_share is not None:
        share = held_out(call.sample, call.offset_share).mean(-1)
        metrics = {**metrics, "recall": (metrics["recall"] + share).clamp(max=1)}
    return replace(index, metrics=metrics, exposed=exposed, visible=visible)


def _capacity(pattern: Pattern) -> int | None:
    """How many entries the lists have at most; None to count them."""
    if pattern.blocks is None:
        return None
    if pattern.most_blocks is None:
        most = most_list_entries(pattern.blocks.shape)
        return most if most <= UNCOUNTED_ENTRIES else None
    batch, _, local, num_blocks = pattern.blocks.shape
    entries = sum(batch * local * min(num_blocks, most) for most in pattern.most_blocks)
    return entries if entries <= MAX_LIST_ENTRIES else None
