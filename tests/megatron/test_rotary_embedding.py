# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rotary embeddings in the striped layout against Megatron's own tables."""

import copy
import pickle

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings import rotary_pos_embedding as rope_module
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn_module

from megatron_mtraining import ConfigError
from megatron_mtraining.layout import stripe, token_positions
from megatron_mtraining.megatron.rotary_embedding import (
    CACHED,
    building,
    stripe_embedding,
    wrap_yarn_cache,
)

SEQUENCE, BLOCK = 768, 64


def make_rope(group=None):
    return rope_module.RotaryEmbedding(64, 1.0, use_cpu_initialization=True, cp_group=group)


def make_llama(group=None):
    """--use-rope-scaling and --rotary-seq-len-interpolation-factor."""
    scaled = dict(seq_len_interpolation_factor=4, rope_scaling=True, rotary_base=500000)
    return rope_module.RotaryEmbedding(
        64, 1.0, use_cpu_initialization=True, cp_group=group, **scaled
    )


def make_yarn(group=None):
    return yarn_module.YarnRotaryEmbedding(
        64,
        scaling_factor=4.0,
        original_max_position_embeddings=256,
        use_cpu_initialization=True,
        cp_group=group,
    )


@pytest.mark.parametrize("make", [make_rope, make_yarn])
def test_tables_of_an_evaluation_are_for_training_too(make, group, cpu_device):
    """A fused kernel saves the table for its backward."""
    with building():
        embedding = make(group(0, 2))
    stripe_embedding(embedding, group(0, 2), BLOCK)
    with torch.inference_mode():
        embedding(SEQUENCE)
    table = embedding(SEQUENCE)
    assert not (table[0] if make is make_yarn else table).is_inference()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("make", [make_rope, make_llama, make_yarn])
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


QWEN = dict(rotary_base=1000000, scaling_factor=16.0, original_max_position_embeddings=32768)
LONG = 16 * 32768


def qwen_table(group, head_dim, size=1, rank=0, inner=None):
    """Qwen2.5's recipe for 524288 tokens: a rank's table, and the concentration."""
    with building():
        embedding = yarn_module.YarnRotaryEmbedding(head_dim, use_cpu_initialization=True, **QWEN)
    stripe_embedding(embedding, group(rank, size), 128, inner)
    return embedding(LONG)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_yarn_is_that_of_transformers(head_dim, group, cpu_device):
    qwen = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    config = qwen.Qwen2Config(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=LONG,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32768,
        },
    )
    theirs = qwen.Qwen2RotaryEmbedding(config)
    size, rank, inner = 32, 13, 8
    table, concentration = qwen_table(group, head_dim, size, rank, inner)
    positions = token_positions(LONG, rank, size, 128, inner=inner)
    assert concentration == pytest.approx(theirs.attention_scaling, rel=1e-7)
    angles = positions[:, None] * theirs.inv_freq.repeat(2)
    torch.testing.assert_close(table[:, 0, 0], angles, rtol=1e-6, atol=0)
    assert theirs.inv_freq[-1] < 1e6 ** (2 / head_dim - 1) / 15.9, "low frequencies are scaled"
    # What attention gets: rotated by Megatron with the concentration, as theirs with cos and sin.
    near = positions < 4096  # a float32's rounding of far angles, 524288 * 6e-8, would count
    values = torch.randn(int(near.sum()), 1, 1, head_dim, generator=torch.manual_seed(5))
    ours = rope_utils._apply_rotary_pos_emb_bshd(
        values, table[near], rotary_interleaved=False, mscale=concentration
    )
    cos, sin = theirs(values, positions[near][None])
    wanted, _ = qwen.apply_rotary_pos_emb(*2 * [values.permute(1, 2, 0, 3)], cos, sin)
    torch.testing.assert_close(ours, wanted.permute(2, 0, 1, 3), rtol=1e-3, atol=1e-3)


def test_what_yarn_s_own_cache_is_given_is_passed_on():
    """Megatron's main calls it with more than the versions before."""
    seen = []
    wrapped = wrap_yarn_cache(lambda *args, **kwargs: seen.append((args, kwargs)))
    wrapped("self", 64, 0, torch.float32, False, None, mscale=1.0)
    with building():
        wrapped("self", 64, 0, torch.float32)
    first = (("self", 64, 0, torch.float32, False, None), {"mscale": 1.0})
    assert seen == [first, (("self", 64, 0, torch.float32, True), {})]


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
    reference = copy.deepcopy(embedding)
    embedding.mtraining_cp_group = None
    assert reference(SEQUENCE).shape[0] == SEQUENCE // 2
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
