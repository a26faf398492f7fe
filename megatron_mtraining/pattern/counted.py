# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Choosing a pattern by numbers: so many columns and diagonals a head, or as few as hold a share of its
attention.

What is chosen is ordered as integers, ties by position, so that all ranks choose the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cp_group import CPGroup
from ..kernels.selection import diagonal_masses, merge_topk, select_topk
from .estimate import SampledRows

SINK = 2**31 - 1
"""What stands for the mass of a sink."""


def best_columns(
    values: Tensor, count: int, sample: SampledRows, cp: CPGroup
) -> tuple[Tensor, Tensor]:
    """The ``count`` columns with the largest values over all ranks: int32 ``[2, b, h, count]``, values and
    positions (0 and N where none is left); and the cut they were taken at
    (see ``kernels.selection.select_topk``).

    Each rank offers its best; the best of all are the same on every rank.

    Args:
        values: int32 ``[b, h, s]``, of this rank's columns.
    """
    count = min(count, sample.seq_length)
    offer, cut = select_topk(
        values, min(count, values.shape[-1]), sample.seq_length,
        cp.rank, cp.world, cp.inner, sample.block_size,
    )  # fmt: skip
    if cp.world > 1:
        offer, cut = merge_topk(cp.all_gather(offer), count, sample.seq_length)
    return offer, cut


def best_diagonals(mass: Tensor, count: int, seq_length: int, cp: CPGroup) -> Tensor:
    """The ``count`` token diagonals with the most mass over all ranks: int32 ``[2, b, h, count]``, masses and
    distances (0 and N where none is left).

    Each rank sums a stretch of the distances over all ranks, and offers its best.
    """
    mass = cp.reduce_scatter(mass)
    length = mass.shape[-1]
    # With blocks as long as a stretch, positions in the layout of one node are distances.
    offer, _ = select_topk(
        mass, min(count, length), seq_length, cp.rank, cp.world, cp.world, length
    )
    if cp.world > 1:
        offer, _ = merge_topk(cp.all_gather(offer), min(count, seq_length), seq_length)
    return offer


def _in_order(offer: Tensor) -> tuple[Tensor, Tensor]:
    """Values and positions, the largest value first, ties to the lower position."""
    value, position = offer.long()
    order = ((value << 32) - position).argsort(-1, descending=True)
    return value.gather(-1, order), position.gather(-1, order)


def _first(counts: list[int], value: Tensor) -> Tensor:
    """Which of values in order are the first ``counts`` of each head, and above 0."""
    count = torch.tensor(counts, device=value.device)[:, None]
    return _up_to(count, value)


def _up_to(count: Tensor, value: Tensor) -> Tensor:
    return (torch.arange(value.shape[-1], device=value.device) < count) & (value > 0)


def _cut(taken: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """The cut that the first of what is in order were taken at."""
    last = (taken.sum(-1, keepdim=True) - 1).clamp(min=0)
    some = taken[..., 0]
    value, position = (each.gather(-1, last)[..., 0] for each in (value, position))
    return torch.stack((torch.where(some, value, 0), torch.where(some, position, -1))).int()


def choose_fixed(
    sample: SampledRows, key, lse, values, policies, sink: int, cp: CPGroup
) -> tuple[Tensor, Tensor]:
    """Columns and token diagonals as many as ``vertical`` and ``slash`` say: int32 ``[b, h, C]`` and ``[b, h,
    K]``; N for none. Diagonals have mass outside of the columns, and columns outside of the window.

    Args:
        values: int32 ``[b, h, s]``: columns' masses, as ``kernels.selection.attention_masses`` returns them.
    """
    batch, seq_length = values.shape[0], sample.seq_length
    verticals = [min(max(policy.vertical, sink), seq_length) for policy in policies]
    slashes = [min(policy.slash, seq_length) for policy in policies]
    if max(verticals) > sink:
        offer, cut = best_columns(values, max(verticals), sample, cp)
        columns = offer[1]
        if min(verticals) < max(verticals):
            value, position = _in_order(offer)
            taken = _first(verticals, value)
            columns = torch.where(taken, position, seq_length).int()
            cut = _cut(taken, value, position)
        taken = values, cut
    else:
        columns = torch.arange(sink, dtype=torch.int32, device=key.device)
        columns, taken = columns.expand(batch, len(policies), -1).contiguous(), None
    if not max(slashes):
        return columns, columns.new_empty(batch, len(policies), 0)
    mass = diagonal_masses(sample, key, lse, sink, taken)
    offer = best_diagonals(mass, max(slashes), seq_length, cp)
    diagonals = offer[1]
    if min(slashes) < max(slashes):
        value, position = _in_order(offer)
        diagonals = torch.where(_first(slashes, value), position, seq_length).int()
    return columns, diagonals


def choose_coverage(
    sample: SampledRows, key, lse, values, policies, sink: int, cp: CPGroup
) -> tuple[Tensor, Tensor]:
    """As few columns as hold the share ``coverage`` of attention beyond the window and sinks, and as few
    token diagonals, each by themselves, within caps: as :func:`choose_fixed` gives them.
    """
    device, seq_length = key.device, sample.seq_length
    share = torch.tensor([each.coverage for each in policies], device=device, dtype=torch.float64)

    def taken(offer, whole, kind, least):
        value, position = _in_order(offer)
        weight = _weight(value.int()) if kind == "vertical" else value.double()
        count = (weight.cumsum(-1) < (share * whole)[..., None]).sum(-1, keepdim=True) + 1
        caps = [max(least, getattr(each, f"{kind}_cap")) for each in policies]
        count = count.clamp(min=least).minimum(torch.tensor(caps, device=device)[:, None])
        return torch.where(_up_to(count, value), position, seq_length).int()

    whole = cp.all_reduce(_weight(values).sum(-1))
    offer, _ = best_columns(values, max(each.vertical_cap for each in policies), sample, cp)
    columns = taken(offer, whole, "vertical", sink)
    mass = diagonal_masses(sample, key, lse, sink, None)
    whole = cp.all_reduce(mass.sum(-1, dtype=torch.float64))
    most = max(max(each.slash_cap for each in policies), 1)
    return columns, taken(best_diagonals(mass, most, seq_length, cp), whole, "slash", 0)


def _weight(bits: Tensor) -> Tensor:
    """Masses of columns from their bits, 0 for sinks, which come before all others whatever they hold."""
    sinks = bits == SINK
    return torch.where(sinks, 0, bits).view(torch.float32).double()
