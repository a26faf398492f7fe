# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policy fixed: fixed numbers of columns and token diagonals per head, those with the most mass."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import FixedPolicy
from ...kernels.selection import attention_masses, column_masses, diagonal_masses
from ..constants import constant
from ..recall import column_keys, recall_of
from ..selector import Pattern, Selected, Selector, SelectorCall, selects_for
from ..vertical_slash_index import index_of_diagonals
from .candidates import SINK, in_order, top_columns, top_diagonals


@selects_for(FixedPolicy)
class FixedSelector(Selector):
    """The ``vertical`` columns and ``slash`` token diagonals with the most mass. Columns are judged by their
    mass outside of the window, diagonals by that outside of the columns."""

    reads_query = False

    @classmethod
    def is_captured(cls, world: int) -> bool:
        # Over ranks gather_keys is a collective of its own: all ranks must call it, or none.
        return world == 1

    def select(self, query: Tensor, key: Tensor, call: SelectorCall) -> Selected:
        columns, diagonals, masses = self.choose(key, call)
        index = index_of_diagonals(call.sample.window_blocks, diagonals, columns, *call.layout)
        if call.gather_keys is not None and columns.shape[-1]:
            keys = call.gather_keys(index)
        else:
            keys = column_keys(key, index.columns, call.sample, call.cp)
        distances, columns = index.member, index.columns
        held = column_masses(call.sample, keys, columns, call.lse, distances)
        recall = recall_of(call.sample, masses, distances, columns, held)
        return Selected(Pattern(distances, columns, made=index), {"recall": recall})

    def choose(self, key: Tensor, call: SelectorCall) -> tuple[Tensor, Tensor, Tensor]:
        """Columns, int32 ``[b, h, C]``, and token diagonals, ``[b, h, K]``, N for none; int32 ``[2, b, h,
        NB]``, the masses by block distance of ``kernels.selection.attention_masses``, over all ranks."""
        sample, sink = call.sample, call.sink
        values, masses = attention_masses(sample, key, call.lse, sink, divide_by_cost=False)
        masses = call.cp.all_reduce(masses)
        batch, seq_length = values.shape[0], sample.seq_length
        verticals = [min(max(policy.vertical, sink), seq_length) for policy in self.policies]
        slashes = [min(policy.slash, seq_length) for policy in self.policies]
        if max(verticals) > sink:
            offer, threshold = top_columns(values, max(verticals), sample, call.cp)
            columns = offer[1]
            if min(verticals) < max(verticals):
                value, position = in_order(offer)
                taken = _first(verticals, value)
                columns = torch.where(taken, position, seq_length).int()
                threshold = _threshold(taken, value, position)
            taken = values, threshold
        else:
            columns = torch.arange(sink, dtype=torch.int32, device=key.device)
            columns, taken = columns.expand(batch, len(self.policies), -1).contiguous(), None
        if not max(slashes):
            return columns, columns.new_empty(batch, len(self.policies), 0), masses
        mass = diagonal_masses(sample, key, call.lse, sink, taken)
        offer = top_diagonals(mass, max(slashes), seq_length, call.cp)
        diagonals = offer[1]
        if min(slashes) < max(slashes):
            value, position = in_order(offer)
            diagonals = torch.where(_first(slashes, value), position, seq_length).int()
        return columns, diagonals, masses


def _first(counts: list[int], value: Tensor) -> Tensor:
    """Which of the sorted values are among the first ``counts`` of each head, and above 0."""
    count = constant(tuple(counts), value.device, torch.int64)[:, None]
    return (torch.arange(value.shape[-1], device=value.device) < count) & (value > 0)


def _threshold(taken: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """The threshold of a selection of the first of sorted values: a value and a position."""
    last = (taken.sum(-1, keepdim=True) - 1).clamp(min=0)
    some = taken[..., 0]
    value, position = (each.gather(-1, last)[..., 0] for each in (value, position))
    # None are selected: no value reaches the largest one.
    return torch.stack((torch.where(some, value, SINK), torch.where(some, position, -1))).int()
