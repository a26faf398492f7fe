# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
import copy
import pickle

import pytest
import torch
from megatron.core.models.common.embeddings import (
    rotary_pos_embedding as rope_module,
)
from megatron.core.models.common.embeddings import (
    yarn_rotary_pos_embedding as yarn_module,
)

from megatron_mtraining import ConfigError
from megatron_mtraining.layout import stripe
from megatron_mtraining.megatron.rotary import CACHED, building, stripe_embedding

SEQUENCE, BLOCK = 768, 64


def make_rope(group=None):
    return rope_module.RotaryEmbedding(64, 1.0, use_cpu_initialization=True, cp_group=group)


def make_yarn(group=None):
    return yarn_module.YarnRotaryEmbedding(
        64,
        scaling_factor=4.0,
        original_max_position_embeddings=256,
        use_cpu_initialization=True,
        cp_group=group,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("make", [make_rope, make_yarn])
def test_each_rank_has_the_rows_of_its_tokens(make, size, group, cpu_device):
    whole = make(group(0, 1))(SEQUENCE)
    for rank in range(size):
        with building():
            embedding = make(group(rank, size))
        stripe_embedding(embedding, group(rank, size), BLOCK)
        ours = embedding(SEQUENCE)
        if make is make_yarn:
            assert ours[1] == whole[1]
            assert torch.equal(ours[0], stripe(whole[0], rank, size, BLOCK))
        else:
            assert torch.equal(ours, stripe(whole, rank, size, BLOCK))


def test_yarn_is_built_for_sizes_that_do_not_divide_its_length(group, cpu_device, monkeypatch):
    def zigzag(table, dim, cp_group):
        raise RuntimeError("256 positions cannot be cut into 2 x 3")

    monkeypatch.setattr(yarn_module, "get_pos_emb_on_this_cp_rank", zigzag)
    with pytest.raises(RuntimeError, match="cannot be cut"):
        make_yarn(group(0, 3))
    with building():
        make_yarn(group(0, 3))
    with pytest.raises(RuntimeError, match="cannot be cut"):
        make_yarn(group(0, 3))


def test_other_embeddings_are_untouched(group, cpu_device):
    ours, theirs = make_rope(), make_rope()
    stripe_embedding(ours, group(0, 2), BLOCK)
    assert type(theirs) is rope_module.RotaryEmbedding
    assert theirs(SEQUENCE).shape[0] == SEQUENCE
    assert ours(SEQUENCE).shape[0] == SEQUENCE // 2


def test_cache_is_small_and_returns_the_same_table(group, cpu_device):
    embedding = make_rope()
    stripe_embedding(embedding, group(0, 2), BLOCK)
    first = embedding(SEQUENCE)
    assert embedding(SEQUENCE) is first
    for blocks in range(2, 2 + 2 * CACHED, 2):
        embedding(blocks * BLOCK)
    assert len(embedding.mtraining_cache) == CACHED
    assert torch.equal(embedding(SEQUENCE), first)
    assert embedding(SEQUENCE, offset=64).shape == first.shape
    assert not torch.equal(embedding(SEQUENCE, offset=64), first)


def test_copies_and_pickles_are_striped_too(group, cpu_device):
    embedding = make_rope()
    stripe_embedding(embedding, group(1, 2), BLOCK)
    stripe_embedding(embedding, group(1, 2), BLOCK)
    twin = copy.deepcopy(embedding)
    embedding.mtraining_cp_group = None
    assert twin(SEQUENCE).shape[0] == SEQUENCE // 2
    again = pickle.loads(pickle.dumps(embedding))
    assert again(SEQUENCE).shape[0] == SEQUENCE


def test_refusals(group, cpu_device):
    embedding = make_rope()
    stripe_embedding(embedding, group(0, 2), BLOCK)
    with pytest.raises(ConfigError, match="packed"):
        embedding(SEQUENCE, packed_seq=True)
    with pytest.raises(ConfigError, match="multiple"):
        embedding(SEQUENCE + 1)
    other = rope_module.MultimodalRotaryEmbedding(64, 1.0)
    with pytest.raises(ConfigError, match="MultimodalRotaryEmbedding"):
        stripe_embedding(other, group(0, 2), BLOCK)
