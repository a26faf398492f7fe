# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Operands and patterns that are measured, drawn at random."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...config import MTrainingConfig
from ...documents import Documents
from ...pattern import VerticalSlashIndex, build_index
from .cases import Case

SPREAD = 4.0
"""The heads' shares of far slashes go, in ratio, from this part of the mean to about as many times of it."""
STAND_OUT = 1000
"""Most keys with much of all queries' attention: columns that the pattern search finds."""


def lengths(case: Case) -> list[int]:
    """Of packed documents: the longest about 16 times the shortest, in a mixed order."""
    count = case.documents
    shares = 2.0 ** torch.linspace(0, 4, count, dtype=torch.float64)
    # In steps that go round all of them: neither ascending nor drawn.
    step = next(each for each in range(int(count * 0.618) or 1, count + 1) if _coprime(each, count))
    order = torch.arange(count) * step % count
    ends = (shares[order].cumsum(0) / shares.sum() * case.tokens).long()
    ends[-1] = case.tokens
    return ends.diff(prepend=torch.zeros(1, dtype=torch.long)).clamp(min=1).tolist()


def _coprime(first: int, second: int) -> bool:
    while second:
        first, second = second, first % second
    return first == 1


def documents_of(case: Case, device: torch.device) -> Documents | None:
    """None for a sequence that is not packed."""
    if case.documents == 1:
        return None
    return Documents.from_lengths(lengths(case), case.tokens, device)


def operands(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and a gradient of the output, ``[s, 1, h, d]``; the value is a view into a wider
    tensor, as Megatron's is. Some keys stand out."""
    heads, kv_heads, dim = case.shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(count: int, width: int) -> Tensor:
        return torch.randn(case.tokens, 1, count, width, device=device, dtype=dtype)

    query, key, value = drawn(heads, dim), drawn(kv_heads, dim), drawn(kv_heads, 2 * dim)[..., dim:]
    count = min(STAND_OUT, case.tokens // 64)
    at = torch.randperm(case.tokens, device=device)[:count]
    size = 0.8 * dim**0.5
    query[..., 0] += size
    key[at, :, :, 0] += size
    return query, key, value, torch.randn_like(query)


def vertical_slash_index(
    case: Case, config: MTrainingConfig, documents: Documents | None, device: torch.device
) -> VerticalSlashIndex:
    """A local window, far distances at random and columns at random, denser at the start of the sequence.

    Heads differ in their far distances. As in the default pattern search, the index has room for as many
    columns as the policy's cap.
    """
    heads, tokens = case.shape.num_heads, case.tokens
    blocks = -(-tokens // config.block_size)
    window = min(blocks, -(-config.window // config.block_size) + 1)
    longest = max(lengths(case)) if documents is not None else tokens
    room = min(tokens, config.policy.vertical_cap)  # type: ignore[union-attr]
    if documents is None:
        count = min(room, round(case.columns * case.density * tokens / 1.7))
    else:
        count = min(room, round(case.columns * case.density * tokens))
    far = case.density * (1 - case.columns) - window * config.block_size * 2 / longest
    share = 1.0 if case.density == 1 else min(1.0, max(0.0, far))
    shares = torch.full((heads,), share)
    if case.density < 1 and heads > 1:
        spread = torch.logspace(-1, 1, heads, base=SPREAD)
        shares = shares * spread / spread.mean()
        for _ in range(
            20 if shares.max() > 1 else 0
        ):  # what full heads cannot take goes to the others
            shares = (shares * (share / shares.mean())).clamp(max=1)
    distances = torch.rand(1, heads, blocks) < shares[torch.randperm(heads)][None, :, None]
    distances[..., :window] = True
    columns = torch.full((1, heads, room), tokens, dtype=torch.int64, device=device)
    if count:
        # The largest of log weight plus Gumbel noise: drawn without replacement.
        weight = -torch.log1p(torch.arange(tokens, device=device) / 1000)
        if documents is not None:
            weight = torch.zeros_like(weight)
        noise = -torch.log(
            -torch.log(torch.rand(heads, tokens, device=device).clamp(1e-7, 1 - 1e-7))
        )
        columns[0, :, :count] = (weight + noise).topk(count, -1).indices
    index = build_index(distances.to(device), columns, tokens, config.block_size, 1)
    return replace(index, documents=documents)
