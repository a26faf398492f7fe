# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block striping: every token exactly once, and back."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import ConfigError
from megatron_mtraining.layout import locate, stripe, stripe_batch, token_positions, unstripe

WORLDS = [1, 2, 3, 4, 6]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_round_trip(world, dim):
    shape = [3, 5, 7]
    shape[dim] = 64 * world * 3
    tensor = torch.randn(shape)
    parts = [stripe(tensor, rank, world, 64, dim) for rank in range(world)]
    assert all(part.is_contiguous() and part.shape[dim] == 64 * 3 for part in parts)
    assert torch.equal(unstripe(parts, 64, dim), tensor)


@pytest.mark.parametrize("world", WORLDS)
def test_block_b_lives_on_rank_b_mod_world(world):
    for rank in range(world):
        positions = token_positions(128 * world * 2, rank, world, 128)
        assert ((positions // 128) % world == rank).all()
        assert (positions.diff() > 0).all()
        owner, local = locate(positions, world, 128)
        assert (owner == rank).all()
        assert torch.equal(local, torch.arange(len(positions)))


def test_batch_keeps_none_and_slices_the_mask_by_query():
    seq = 256
    batch = {
        "tokens": torch.arange(seq)[None],
        "labels": torch.arange(1, seq + 1)[None],
        "loss_mask": torch.rand(1, seq),
        "position_ids": torch.arange(seq)[None],
        "attention_mask": torch.ones(1, 1, seq, seq).triu(1).bool(),
        "cu_seqlens": None,
    }
    full = dict(batch)
    got = stripe_batch(batch, 1, 2, 64)
    positions = token_positions(seq, 1, 2, 64)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(got[name], full[name][:, positions])
    assert torch.equal(got["attention_mask"], full["attention_mask"][:, :, positions])
    assert got["cu_seqlens"] is None


@pytest.mark.parametrize(("length", "world"), [(100, 1), (192, 2), (0, 2)])
def test_a_length_that_does_not_divide_is_refused(length, world):
    with pytest.raises(ConfigError, match=f"{length} tokens.*{64 * world}"):
        stripe(torch.zeros(length), 0, world, 64)
