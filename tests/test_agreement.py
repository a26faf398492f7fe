# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ranks that were given other settings or shapes than others: one error, on every rank, that names both."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.agreement import check_agreement
from megatron_mtraining.attention import attend
from megatron_mtraining.attention_call import AttentionCall
from megatron_mtraining.config import Policy
from megatron_mtraining.cp_group import RankGroup, cp_group_of
from megatron_mtraining.megatron import ranks
from megatron_mtraining.visibility import VisibleRanges
from tests.support.ranks import run_ranks

SETTINGS = dict(block_size=64, window=64, sample_strata=8)
TOKENS, HEADS, KV_HEADS, DIM = 256, 4, 2, 64
DIFFERENT = {
    # what rank 1 is given, and what the error names
    "price": (dict(price=3.0), "--mtraining-price is 0.25 on rank 0, 3.0 on rank 1"),
    "policy": (dict(vertical=20, slash=4), "--mtraining-policy is 'price' on rank 0, 'fixed' on rank 1"),
    "block size": (dict(block_size=128), "--mtraining-block-size is 64 on rank 0, 128 on rank 1"),
    "cap": (dict(vertical_cap=64), "--mtraining-vertical-cap is 4096 on rank 0, 64 on rank 1"),
    "dtype": (torch.float64, "dtype of the query is 'torch.float32' on rank 0, 'torch.float64' on rank 1"),
    "length": (128, "shape of the query is (256, 1, 4, 64) on rank 0, (128, 1, 4, 64) on rank 1"),
    "odd length": (200, "shape of the query is (256, 1, 4, 64) on rank 0, (200, 1, 4, 64) on rank 1"),
    "inner": ("inner", "the number of ranks in an inner group is 2 on rank 0, 1 on rank 1"),
    "documents": ("documents", "documents is 'none' on rank 0, 'packed"),
    "other documents": ("other documents", "documents is 'packed (SHA-256 of their starts"),
    "price of a call": ("price of a call", "price is [0.25] on rank 0, [3.0] on rank 1"),
    "no price of a call": ("no price", "the shape of the price is (1,) on rank 0, None on rank 1"),
    "own policy": ("own policy", "the policy is OwnPolicy(step=2) on rank 0, OwnPolicy(step=3) on rank 1"),
    "documents of a batch": ("batch", "the shape of the documents is (1, 512) on rank 0, (2, 512) on rank 1"),
}  # fmt: skip


@dataclass(frozen=True)
class OwnPolicy(Policy):
    name = "own"
    step: int = 2


def attend_differently(rank, world, case):
    changed = DIFFERENT[case][0] if rank else None
    options = {**SETTINGS, **(changed if isinstance(changed, dict) else {})}
    tokens = changed if isinstance(changed, int) else TOKENS
    dtype = changed if isinstance(changed, torch.dtype) else torch.float32
    query = torch.randn(tokens, 1, HEADS, DIM, dtype=dtype)
    key, value = torch.randn(2, tokens, 1, KV_HEADS, DIM, dtype=dtype)
    more = dict(cp_inner=1) if changed == "inner" else {}
    if changed == "documents":
        more = dict(documents=VisibleRanges.from_lengths([100, 2 * TOKENS - 100], 2 * TOKENS))
    if case == "other documents":
        lengths = [100 + rank, 2 * TOKENS - 100 - rank]
        more = dict(documents=VisibleRanges.from_lengths(lengths, 2 * TOKENS))
    if case == "price of a call":
        more = dict(price=torch.tensor([3.0 if rank else 0.25]))
    if case == "no price of a call" and rank == 0:
        more = dict(price=torch.tensor([0.25]))
    if case == "documents of a batch":
        more = dict(
            documents=VisibleRanges.from_lengths([[100, 2 * TOKENS - 100]] * (1 + rank), 2 * TOKENS)
        )
    config = MTrainingConfig.from_options(**options)
    if case == "own policy":
        config = config.with_policy(OwnPolicy(2 + rank))
    try:
        attend(query, key, value, config=config, cp_group=dist.group.WORLD, **more)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", DIFFERENT)
def test_attend_names_what_differs_on_every_rank(case):
    messages = run_ranks(2, attend_differently, case)
    assert messages[0] == messages[1]
    assert messages[0] is not None and DIFFERENT[case][1] in messages[0]


LATER = {
    # what rank 1 is given after calls alike, and what the error names
    "length of before": (dict(tokens=128), "the shape of the query is (256, 1, 4, 64) on rank 0, (128, 1, 4"),
    "new length": (dict(tokens=384), "the shape of the query is (256, 1, 4, 64) on rank 0, (384, 1, 4"),
    "price of before": (dict(price=3.0), "--mtraining-price is 0.25 on rank 0, 3.0 on rank 1"),
    "documents": (dict(first=101), "documents is 'packed (SHA-256 of their starts"),
    "price of a call": (dict(call_price=2.0), "price is [1.0] on rank 0, [2.0] on rank 1"),
    "replay": (dict(replay=True), "saved is 'none' on rank 0, 'given' on rank 1"),
}  # fmt: skip


def part_later(rank, world, case):
    def call(tokens=TOKENS, price=0.25, first=100, call_price=1.0, replay=False):
        query = torch.randn(tokens, 1, HEADS, DIM)
        key, value = torch.randn(2, tokens, 1, KV_HEADS, DIM)
        documents = VisibleRanges.from_lengths([first, 2 * tokens - first], 2 * tokens)
        given = dict(
            config=MTrainingConfig.from_options(**SETTINGS, price=price),
            cp_group=dist.group.WORLD, documents=documents, price=torch.tensor([call_price]),
        )  # fmt: skip
        return attend(query, key, value, **given, saved=earlier if replay else None)

    earlier = call()
    for again in (dict(tokens=128), dict(price=3.0)):
        call(**again)
    try:
        call(**(LATER[case][0] if rank else {}))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", LATER)
def test_ranks_that_part_later_are_told_apart(case):
    messages = run_ranks(2, part_later, case)
    assert messages[0] == messages[1]
    assert messages[0] is not None and LATER[case][1] in messages[0]


def compare_alike(rank, world, on_gpus):
    """How many collectives compare settings, over calls of two lengths."""
    compared = []
    gather = RankGroup.gather_objects

    def counted(self, value):
        compared.append(value)
        return gather(self, value)

    RankGroup.gather_objects = counted
    config = MTrainingConfig.from_options(**SETTINGS)
    for tokens in (256, 256, 128, 256, 128):
        shape = torch.Size((tokens, 1, HEADS, DIM))
        each = SimpleNamespace(shape=shape, dtype=torch.float32, is_cuda=on_gpus)
        cp = cp_group_of(dist.group.WORLD)
        AttentionCall(each, each, each, config, 0.1, *[None] * 5).compare_with_ranks(cp)
    return len(compared)


@pytest.mark.parametrize(("on_gpus", "times"), [(False, 5), (True, 2)])
def test_how_often_ranks_that_agree_compare(on_gpus, times):
    """On GPUs once a kind: it waits for them."""
    assert run_ranks(2, compare_alike, on_gpus) == [times] * 2


def disagree(rank, world):
    given = {f"setting {i}": rank // 2 if i < 6 else 0 for i in range(9)}
    try:
        check_agreement(RankGroup(dist.group.WORLD), given, "the ranks")
    except ConfigError as error:
        return str(error)


def test_many_differences_are_counted():
    (message, *others) = run_ranks(4, disagree)
    assert others == [message] * 3
    assert "setting 0 is 0 on ranks 0-1, 1 on ranks 2-3" in message
    assert "and 2 more" in message and "setting 7" not in message


def test_what_ranks_of_a_run_compare(monkeypatch):
    """Options that have a value, and a policy whose settings no option has."""
    config = MTrainingConfig.from_options(**SETTINGS)
    monkeypatch.setattr(ranks, "settings", lambda _: config.with_policy(OwnPolicy(3)))
    monkeypatch.setattr(ranks, "training_arguments", lambda: None)
    given = ranks.given_to_rank(SimpleNamespace(num_layers=2))
    assert given["the policy"] == OwnPolicy(3) and given["--mtraining-block-size"] == 64
    assert given["--num-layers"] == "2" and None not in given.values()
