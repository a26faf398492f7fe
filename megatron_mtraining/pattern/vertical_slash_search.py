# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The search for a vertical-slash pattern: columns, and slashes (block distances), of each head.

Heads of a layer may have policies of several kinds. Each kind selects for all heads at once, as if all had
its policies, and each head takes the selection of its own kind: mixed layers are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import FixedPolicy, MTrainingConfig, Policy, PricePolicy
from ..cp_group import CPGroup
from ..kernels.attention import gather_columns
from ..kernels.selection import column_masses
from .constants import constant
from .fixed_policy import select_fixed
from .price_policy import (
    Selection,
    price_candidates,
    recall_of,
    select_at_price,
    select_by_price,
)
from .sampled_rows import SampledRows, exposed_rows
from .vertical_slash_index import VerticalSlashIndex, build_index, index_of_diagonals

SELECTIONS = {FixedPolicy: select_fixed}
"""Selections by a budget, by kind of policy. ``benchmarks/lib/coverage.py`` adds a baseline."""


class SearchInput(NamedTuple):
    """What the search of one layer's pattern reads."""

    rows: SampledRows
    key: Tensor
    """``[s, b, hk, d]``, this rank's part."""
    lse: Tensor
    """float32 ``[b, h, R]``: log-sum-exp of the sampled rows' scores, over the keys of all ranks."""
    cp: CPGroup
    config: MTrainingConfig
    """Settings of the run; the policies of heads are given beside it."""
    sink: int
    """First columns that are always kept."""
    price: Tensor | None
    """float32 ``[]`` or ``[h]``, in place of the price of ``config``."""

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """seq_length, block_size, world, inner."""
        rows = self.rows
        return rows.seq_length, rows.block_size, rows.world, rows.inner

    @property
    def exposed(self) -> float | Tensor:
        """See :class:`.PatternIndex`."""
        return exposed_rows(self.rows, self.config)


def search_vertical_slash(
    given: SearchInput,
    policies: Sequence[Policy],
    gather_keys: Callable[[VerticalSlashIndex], Tensor] | None = None,
) -> VerticalSlashIndex:
    """The vertical-slash index of heads without policies of key blocks; the same on all ranks.

    Args:
        policies: of each head.
        gather_keys: see :func:`.search.search_pattern`.
    """
    kinds = {type(policy) for policy in policies}
    if len(kinds) == 1 and kinds <= SELECTIONS.keys():
        index, recall = _search_by_budget(given, policies, gather_keys)
        return replace(index, recall=recall, exposed=given.exposed)
    selection = select_vertical_slash(given, policies)
    return _index_of(selection, given)


def search_at_prices(
    given: SearchInput, policies: Sequence[PricePolicy]
) -> Iterator[VerticalSlashIndex]:
    """The index at the price of each of ``policies``, which differ in nothing else and hold for all heads:
    what :func:`search_vertical_slash` finds for each, with the candidates computed once."""
    heads = given.lse.shape[1]
    first, device = [policies[0]] * heads, given.key.device
    candidates = price_candidates(given.rows, given.key, given.lse, first, given.sink, given.cp)
    for policy in policies:
        prices = constant((policy.price,) * heads, device)
        found = select_at_price(given.rows, candidates, given.lse, first, given.sink, prices)
        yield _index_of(found, given)


def _index_of(found: Selection, given: SearchInput) -> VerticalSlashIndex:
    distances = found.distances.view(torch.bool)
    index = build_index(distances, found.columns, *given.layout, check_columns=False)
    return replace(index, recall=found.recall, exposed=given.exposed)


def select_vertical_slash(given: SearchInput, policies: Sequence[Policy]) -> Selection:
    """Distances and columns of each head by its own policy; nothing of heads with policies of key blocks."""
    selections = {}
    for kind in dict.fromkeys(type(policy) for policy in policies):
        if kind is PricePolicy:
            alike = _alike(policies, kind)
            prices = _prices(given, alike)
            selections[kind] = select_by_price(
                given.rows, given.key, given.lse, alike, given.sink, given.cp, prices
            )
        elif kind in SELECTIONS:
            index, recall = _search_by_budget(given, _alike(policies, kind), None)
            selections[kind] = Selection(index.member, index.columns, recall)
    if len(selections) == 1 and all(type(policy) in selections for policy in policies):
        return next(iter(selections.values()))
    return _merge(given, selections, policies)


def _search_by_budget(
    given: SearchInput, policies: Sequence[FixedPolicy], gather_keys
) -> tuple[VerticalSlashIndex, Tensor]:
    """The index of heads whose policies are all of one budget kind, and their recall."""
    rows, cp = given.rows, given.cp
    select = SELECTIONS[type(policies[0])]
    columns, diagonals, masses = select(rows, given.key, given.lse, policies, given.sink, cp)
    index = index_of_diagonals(rows.window_blocks, diagonals, columns, *given.layout)
    if gather_keys is not None and columns.shape[-1]:
        keys = gather_keys(index)
    else:
        keys = cp.all_reduce(gather_columns(given.key, None, index, cp.rank))[0]
    held = column_masses(rows, keys, index.columns, given.lse, index.member)
    return index, recall_of(rows, masses, index.member, index.columns, held)


def _alike(policies: Sequence[Policy], kind: type) -> list[Policy]:
    """The heads' policies; the first one of this kind for heads with another kind."""
    first = next(policy for policy in policies if type(policy) is kind)
    return [policy if type(policy) is kind else first for policy in policies]


def _prices(given: SearchInput, policies: list[PricePolicy]) -> Tensor:
    """The price of each head, float32 ``[h]``."""
    policy, device = given.config.policy, given.key.device
    of_run = policy.price if isinstance(policy, PricePolicy) else 0
    if given.price is None or of_run == 0:
        return constant(tuple(policy.price for policy in policies), device)
    return given.price * constant(tuple(policy.price / of_run for policy in policies), device)


def _merge(
    given: SearchInput, selections: dict[type, Selection], policies: Sequence[Policy]
) -> Selection:
    """For each head the selection of its own kind of policy; nothing for heads of other kinds."""
    rows, device = given.rows, given.key.device
    batch, heads = given.lse.shape[:2]
    num_blocks = -(-rows.seq_length // rows.block_size)
    width = max((each.columns.shape[-1] for each in selections.values()), default=0)
    merged = Selection(
        torch.zeros(batch, heads, num_blocks, dtype=torch.uint8, device=device),
        torch.full((batch, heads, width), rows.seq_length, dtype=torch.int32, device=device),
        torch.zeros(batch, heads, device=device),
    )
    for kind, selection in selections.items():
        spare = width - selection.columns.shape[-1]
        columns = torch.nn.functional.pad(selection.columns, (0, spare), value=rows.seq_length)
        own = constant(tuple(type(policy) is kind for policy in policies), device, torch.bool)
        new = Selection(selection.distances, columns, selection.recall)
        merged = Selection(
            *(torch.where(own.view(-1, *(1,) * (a.dim() - 2)), a, b) for a, b in zip(new, merged))
        )
    return merged
