# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dense attention where transformers has no pattern: queries that read a KV cache, and a prompt's tail."""

from __future__ import annotations

import torch
from torch import Tensor

from ..visibility import VisibleRanges

TAIL_ROWS = 256
"""Rows of a dense tail that are computed at a time."""
MASK_VALUES = 2**26
"""Values of a mask of scores that are in memory at a time, where heads differ by a softmax offset."""


def over_cache(module, query, key, value, attention_mask, scaling, dropout, more):
    """Attention to all keys of a cache, by transformers' ``sdpa``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return sdpa(
        module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, dropout=dropout,
        scaling=scaling, **more,
    )  # fmt: skip


def over_cache_with_offset(query, key, value, attention_mask, scaling, offset):
    """The same with softmax offsets, ``[h]``, which ``sdpa`` has not; no dropout. ``[b, q, h, d]``."""
    batch, heads, length, _ = query.shape
    repeats = heads // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    step = max(1, MASK_VALUES // (batch * heads * key.shape[2]))
    parts = []
    for first in range(0, length, step):
        rows = slice(first, first + step)
        sees = None if attention_mask is None else attention_mask[:, :, rows]
        parts.append(_sdpa(query[:, :, rows], key, value, sees, scaling, offset[:, None, None]))
    return torch.cat(parts, 2).transpose(1, 2)


def _sdpa(query, key, value, sees, scaling, offset=None):
    """torch's attention under a bool mask ``[b, 1, q, kv]``, None for all keys, with a softmax offset that
    broadcasts to ``[h, q, 1]``: the score of one more key, whose value is 0."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if offset is None:
        return sdpa(query, key, value, attn_mask=sees, scale=scaling)
    shape = (*query.shape[:3], key.shape[2])
    scores = query.new_zeros(shape)
    if sees is not None:
        scores = scores.masked_fill(~sees, float("-inf"))
    column = offset.to(query.dtype).expand(*shape[:3], 1)
    key, value = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (key, value))
    return sdpa(query, key, value, attn_mask=torch.cat((scores, column), -1), scale=scaling)


def with_dense_tail(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: VisibleRanges | None,
    scaling: float | None,
    count: int,
    offset: Tensor | None = None,
) -> Tensor:
    """``out``, ``[b, s, h, d]``, whose last ``count`` tokens attend to all keys. Of packed documents, those
    tokens of them that are in the last one attend to all of it; the others stay as they are.

    Args:
        query: ``[b, h, s, d]``; key, value ``[b, hk, s, d]``.
        offset: the heads' softmax offsets, ``[h]``.
    """
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    position = torch.arange(length, device=query.device)
    parts = [out[:, : max(0, length - count)]]
    for first in range(max(0, length - count), length, TAIL_ROWS):
        rows = query[:, :, first : first + TAIL_ROWS]
        number = rows.shape[2]
        own = position[first : first + number, None]  # [n, 1]
        sees = position <= own
        if documents is not None:
            starts = documents.start[:, first : first + number, None]
            sees = sees & (position >= starts)  # [b, n, s]
        # The heads of a group are rows of one head: no key or value is copied for them.
        sees = sees.expand(batch, number, length).repeat(1, heads // groups, 1)[:, None]
        of_rows = None
        if offset is not None:
            of_rows = offset.repeat_interleave(number).view(groups, -1, 1)
        tail = _sdpa(rows.reshape(batch, groups, -1, dim), key, value, sees, scaling, of_rows)
        tail = tail.reshape(batch, heads, number, dim).transpose(1, 2)
        if documents is not None:
            last = (own >= documents.start[:, None, -1:])[..., None]  # [b, n, 1, 1]
            tail = torch.where(last, tail, out[:, first : first + number])
        parts.append(tail)
    return torch.cat(parts, 1)
