# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which outputs a later token can change, by policy: what docs/how-it-works.md declares, and no more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.layout import stripe
from tests.support.attention_cases import random_operands
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_inputs")

BLOCK, SEQ, SYMBOLS = 64, 512, 4
STRATA = dict(sample_strata=16, sample_rows=2)
CAUSAL = [
    dict(price=0.0),
    dict(policy="fixed", vertical=0, slash=0, sink=0),
    dict(policy="xattention", block_threshold=0.3),
    dict(policy="xattention", block_threshold=0.6, block_stride=8, window=0, sink=70),
    dict(policy="moba", block_top_k=1),
    dict(policy="moba", block_top_k=3, window=0, sink=0),
]
"""No later token changes an output."""
IN_BLOCK = [
    dict(policy="xattention", block_threshold=0.3, block_lookahead=True),
    dict(policy="moba", block_top_k=1, block_lookahead=True),
]
"""Later tokens of the query's block change its output."""
ANYWHERE = [
    dict(price=1.0, **STRATA),
    dict(price=1.0, estimator="last", sample_rows=16),
    dict(policy="fixed", vertical=1, slash=0, sink=0, **STRATA),
]
"""Later tokens of the sequence change its output."""


def settings(options: dict) -> MTrainingConfig:
    return MTrainingConfig.from_options(**{"block_size": BLOCK, "window": BLOCK, **options})


def telling(symbol: int, first: int, by_block: bool) -> list[torch.Tensor]:
    """Operands of which the queries from ``first`` on alone depend on the symbol: each asks for the keys of
    the symbol, a block or one key, whose value names it."""
    key, value, query = (torch.zeros(SEQ, 1, 1, BLOCK) for _ in range(3))
    for each in range(SYMBOLS):
        at = slice((1 + each) * BLOCK, (2 + each) * BLOCK) if by_block else 70 + 20 * each
        key[at, 0, 0, each] = value[at, 0, 0, each] = 1.0
    query[first:, 0, 0, symbol] = 200.0
    return [query, key, value]


def told(options: dict, first: int, by_block: bool) -> torch.Tensor:
    """Which outputs before ``first`` depend on the symbol: bool ``[first]``."""
    outs = torch.stack(
        [
            attend(*telling(symbol, first, by_block), config=settings(options)).out[:first]
            for symbol in range(SYMBOLS)
        ]
    )
    return (outs != outs[:1]).flatten(2).any(-1).any(0)


@pytest.mark.parametrize("options", CAUSAL, ids=str)
@pytest.mark.parametrize("by_block", [True, False])
def test_nothing_is_told(options, by_block):
    assert not told(options, SEQ - BLOCK + 10, by_block).any()


@pytest.mark.parametrize("options", IN_BLOCK, ids=str)
def test_what_looks_ahead_is_told_of_its_block(options):
    first = SEQ - BLOCK + 10
    places = told(options, first, by_block=True).nonzero().flatten()
    assert places.tolist() == list(range(SEQ - BLOCK, first))


@pytest.mark.parametrize("options", ANYWHERE, ids=str)
def test_what_selects_from_the_sequence_is_told_of_all_of_it(options):
    first = SEQ - 2 * BLOCK
    assert told(options, first, by_block=False)[: first - BLOCK].any()


def outputs(options: dict, operands, rank: int = 0, world: int = 1, inner: int | None = None):
    group = dist.group.WORLD if world > 1 else None
    parts = [stripe(each, rank, world, BLOCK, inner=inner) for each in operands]
    return attend(*parts, config=settings(options), cp_group=group, cp_inner=inner).out


def run_later(rank: int, world: int, cases, inner: int):
    return [outputs(options, each, rank, world, inner) for options, *both in cases for each in both]


@pytest.mark.parametrize(("world", "inner"), [(1, 1), (2, 2), (4, 2)])
def test_other_later_tokens_change_no_bit(world, inner):
    """Whatever they are: large ones are no reason to round earlier ones coarser."""
    cases = []
    cuts = torch.randint(1, SEQ, (len(CAUSAL),)).tolist()
    for options, cut in zip(CAUSAL, cuts):
        operands = random_operands(SEQ, 1, 2, 1, 64, torch.float32, "cpu")[:3]
        scale = (1.0, 1e12)[cut % 2]
        other = [torch.cat((t[:cut], scale * torch.randn_like(t[cut:]))) for t in operands]
        cases.append((options, operands, other))
    if world == 1:
        found = [run_later(0, 1, cases, inner)]
    else:
        found = run_ranks(world, run_later, cases, inner)
    place = torch.arange(SEQ)
    for rank, outs in enumerate(found):
        own = stripe(place, rank, world, BLOCK, inner=inner)
        for cut, before, after in zip(cuts, outs[::2], outs[1::2]):
            assert torch.equal(before[own < cut], after[own < cut])
