# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The way from Megatron's layout of tokens to the striped one, and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import ConfigError
from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.layout import token_positions
from megatron_mtraining.relayout import relayout, striped_owner, zigzag, zigzag_owner
from tests.support.ranks import run_ranks

BLOCK, HIDDEN = 8, 3
SEQUENCES = [[96], [24, 0, 48, 24], [24, 24]]
"""Lengths of packed sequences. The last ones are no whole blocks on 4 ranks, and are padded."""


def in_zigzag(tensor, lengths, rank, size):
    """Sequence by sequence, by :func:`zigzag`."""
    return torch.cat([zigzag(each, rank, size, 0) for each in tensor.split(lengths)])


@pytest.mark.parametrize("lengths", SEQUENCES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_has_one_place(lengths, size):
    rank, at = zigzag_owner(lengths, size)
    tokens = torch.arange(sum(lengths))
    for each in range(size):
        own = in_zigzag(tokens, lengths, each, size)
        assert torch.equal(rank[own], torch.full_like(own, each))
        assert torch.equal(at[own], torch.arange(len(own)))


def there_and_back(rank, size):
    """Each rank's hidden states in the striped layout, back again, and the gradient."""
    results = []
    for lengths in SEQUENCES:
        total = sum(lengths)
        multiple = BLOCK * size
        padded = -(-total // multiple) * multiple
        source = zigzag_owner(lengths, size)
        target = tuple(each[:total] for each in striped_owner(padded, size, BLOCK))
        plan = relayout(
            source, target, (total // size, padded // size), RankGroup(dist.group.WORLD)
        )
        whole = torch.arange(total * HIDDEN, dtype=torch.float64).view(total, 1, HIDDEN)
        own = in_zigzag(whole, lengths, rank, size).requires_grad_()
        striped = plan.there(own)
        expected = torch.cat((whole, whole.new_zeros(padded - total, 1, HIDDEN)))
        assert torch.equal(striped, expected[token_positions(padded, rank, size, BLOCK)])
        back = plan.back(striped * 2)
        assert torch.equal(back, own * 2)
        weight = in_zigzag(whole.sin(), lengths, rank, size)
        (grad,) = torch.autograd.grad((back * weight).sum(), own)
        assert torch.equal(grad, 2 * weight)
        results.append(len(plan.place) < plan.length)
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_hidden_states_go_there_and_back(size):
    padded = [any(each) for each in zip(*run_ranks(size, there_and_back))]
    assert padded == [False, False, size == 4]


def test_sequences_that_cannot_be_cut_are_named():
    with pytest.raises(ConfigError, match="sequence 1 has 10 tokens.*multiples of 2 x 2"):
        zigzag_owner([8, 10], 2)
