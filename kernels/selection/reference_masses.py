# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plain PyTorch twins of ``masses.py`` and ``candidates.py``.

Scores are float64: their sums are of other lengths on other numbers of ranks, and the choice must not differ.
"""

from __future__ import annotations

import torch

from ..common.fixed_point import fixed_point_one, float_bits
from .reference import _positions, unseen


def _probabilities(sample, keys, position, lse):
    """Probabilities of all rows, float64 ``[b, h, R, k]``, 0 for keys after the row; ``keys``
    ``[b, h, k, d]``, ``position`` ``[k]`` or ``[b, h, k]``."""
    query = sample.query.permute(1, 2, 0, 3).double() * sample.softmax_scale
    p = query @ keys.double().transpose(-1, -2)
    p.sub_(lse[..., None].double())
    p.masked_fill_(unseen(sample, position), float("-inf"))
    return p.exp_().nan_to_num_(nan=0.0).clamp_(max=1)


def _fit(sample, p):
    """Of rows ``[b, h, R, k]`` those that choose, by stratum ``[b, h, strata, rows, k]``, and the others."""
    strata = p.unflatten(2, (-1, sample.rows_per_stratum))
    return strata[:, :, :, : sample.num_selection_rows], strata[
        :, :, :, sample.num_selection_rows :
    ]


def _rows(sample):
    rows = sample.rows.long().unflatten(0, (-1, sample.rows_per_stratum))
    return rows[:, : sample.num_selection_rows], rows[:, sample.num_selection_rows :]


def _total(sample, strata):
    """Mass by key, of strata ``[b, h, strata, k]``."""
    total = strata.sum(2)
    return (total - strata.amax(2)).clamp_(min=0) if sample.drop_max_stratum else total


def _add(out, distance, mass, one):
    """Add masses ``[b, h, ..., k]`` to integers ``[b, h, NB]`` at distances that broadcast to their shape."""
    num_blocks = out.shape[-1]
    there = (distance >= 0) & (distance < num_blocks)
    addend = torch.where(there, (mass * one + 0.5).int(), 0)
    to = distance.clamp(0, num_blocks - 1).expand(mass.shape)
    out.scatter_add_(-1, to.flatten(2), addend.flatten(2))


def row_masses(sample, key, lse, sink, per_cost):
    """See :func:`kernels.row_masses`."""
    length, batch, kv_heads, _ = key.shape
    heads, block = sample.query.shape[2], sample.block_size
    position = _positions(length, sample.rank, sample.world, sample.inner, block, key.device)
    num_blocks = -(-sample.seq_length // block)
    keys = key.permute(1, 2, 0, 3).repeat_interleave(heads // kv_heads, 1)
    fit, held = _fit(sample, _probabilities(sample, keys, position, lse))
    rows, held_rows = _rows(sample)
    far = rows[..., None] // block - position // block >= sample.window_blocks
    total = _total(sample, torch.where(far, fit, 0.0).sum(3))
    if per_cost:
        seen = num_blocks - position // block - sample.window_blocks
        if sample.costs is not None:
            seen = (sample.costs.further[:, position // block] + 1 - sample.window_blocks)[:, None]
        total = torch.where(seen > 0, total / seen.clamp(min=1), 0.0)
    values = torch.where(position < sink, 2**31 - 1, total.float().contiguous().view(torch.int32))

    one = fixed_point_one(len(sample.rows))
    masses = torch.zeros(2, batch, heads, num_blocks, dtype=torch.int32, device=key.device)
    # A row's mass in a key block: what crosses to the distance before, and to the one after.
    blocks = -(-length // block)
    fit, held, at = (
        torch.nn.functional.pad(t, (0, blocks * block - length)).unflatten(-1, (blocks, block))
        for t in (fit, held, position)
    )
    further = (rows[..., None, None] % block - at % block).double() / block
    after = (fit * further.clamp(min=0)).sum(-1)
    before = (fit * (-further).clamp(min=0)).sum(-1)
    apart = rows[..., None] // block - at[:, 0] // block
    _add(masses[0], apart - 1, before, one)
    _add(masses[0], apart, fit.sum(-1) - before - after, one)
    _add(masses[0], apart + 1, after, one)
    if sample.num_selection_rows == sample.rows_per_stratum:
        held, held_rows = fit, rows
    _add(masses[1], held_rows[..., None] // block - at[:, 0] // block, held.sum(-1), one)
    return values, masses


def candidate_slashes(sample, keys, positions, values, least, lse, num_blocks):
    """See :func:`kernels.candidate_slashes`."""
    positions = torch.where(values >= float_bits(least), positions, sample.seq_length)
    # Few are taken: those first, and no more than the head with the most has.
    none = positions >= sample.seq_length
    most = int((~none).sum(-1).max())
    order = none.to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    positions = positions.gather(-1, order)
    keys = keys.gather(2, order[..., None].expand(-1, -1, -1, keys.shape[-1]))
    fit, _ = _fit(sample, _probabilities(sample, keys, positions, lse))
    apart = _rows(sample)[0][..., None] - positions[:, :, None, None]
    fit = torch.where(positions[:, :, None, None] < sample.seq_length, fit, 0.0)
    block, one = sample.block_size, fixed_point_one(len(sample.rows))
    far = (apart % block).double() / block
    masses = torch.zeros(*positions.shape[:2], num_blocks, dtype=torch.int32, device=keys.device)
    _add(masses, apart // block, fit * (1 - far), one)
    _add(masses, apart // block + 1, fit * far, one)
    return masses


def price_slashes(total, inside, price, usual_price, near, unit, one, spread, costs=None):
    """See :func:`kernels.price_slashes`."""
    num_blocks = total.shape[-1]
    distance = torch.arange(num_blocks, device=total.device)
    seen = num_blocks - distance if spread else num_blocks
    if costs is not None:
        seen = costs.seen[:, None]
    value = (total - inside).clamp(min=0).float() / one / (unit * seen)
    kept = (distance < near) | (value >= price[:, None])
    usual = (distance < near) | (value >= usual_price)
    outside = (~usual).cumsum(-1, dtype=torch.int32)
    return kept.to(torch.uint8), usual.to(torch.uint8), outside, value


def _beyond(sample, p, positions, slashes):
    """Probabilities at distances that are no slash."""
    apart = sample.rows.long()[:, None] // sample.block_size
    apart = apart - positions[:, :, None] // sample.block_size
    apart = apart.clamp(0, slashes.shape[-1] - 1).flatten(2)
    return p.masked_fill(slashes.gather(-1, apart).view(p.shape) != 0, 0)


def _held(sample, p, positions, member):
    fit, held = _fit(sample, _beyond(sample, p, positions, member))
    return (held if held.shape[3] else fit).sum((2, 3)).float()


def held_columns(sample, keys, positions, lse, member):
    """See :func:`kernels.held_columns`."""
    return _held(sample, _probabilities(sample, keys, positions, lse), positions, member)


def price_columns(sample, keys, positions, lse, member, usual, outside, price, sink, unit):
    """See :func:`kernels.price_columns`."""
    block, num_blocks = sample.block_size, member.shape[-1]
    p = _probabilities(sample, keys, positions, lse)
    strata = _fit(sample, _beyond(sample, p, positions, usual))[0].sum(3)
    held = _held(sample, p, positions, member)
    there = positions < sample.seq_length
    before = (num_blocks - 1 - positions // block).clamp(min=0).long()
    if sample.costs is not None:
        at = (positions // block).clamp(max=num_blocks - 1).long().flatten(1)
        before = sample.costs.further.gather(1, at).view(positions.shape).long()
    total, adds = _total(sample, strata), outside.gather(-1, before)
    if not sample.stratified:
        adds = torch.full_like(adds, num_blocks)
    adds = adds.clamp(min=1)
    if sample.costs is not None:
        adds = adds * sample.costs.factor[:, None, None]
    value = torch.where(there, total / (unit * adds), 0.0).float()
    kept = there & (((total > 0) & (value >= price[:, None])) | (positions < sink))
    return torch.where(kept, positions, sample.seq_length), value, held


def recall_of(masses, member, columns, held, seq_length, one, rows):
    """See :func:`kernels.recall_of`."""
    of_slashes = (masses * member).sum(-1, dtype=torch.float32) / one
    return (of_slashes + torch.where(columns < seq_length, held, 0.0).sum(-1)) / rows
