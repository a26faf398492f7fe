# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sliding windows, attention sinks and linear attention of transformers' models against their own eager
attention."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.transformers import advance, configure, state_of, take_means
from tests.support.transformers_cases import DENSE, SPARSE, assert_same, small_model, with_pattern

SEQ, WINDOW = 320, 37
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
NET = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
KINDS = {
    "gpt-oss": (
        "gpt_oss", dict(layer_types=[SLIDING, FULL], num_local_experts=4, num_experts_per_tok=2),
    ),
    "Gemma 3": ("gemma3_text", dict(layer_types=[SLIDING, FULL], query_pre_attn_scalar=50)),
    "Gemma 3, head dim 256": ("gemma3_text", dict(layer_types=[FULL, SLIDING], head_dim=256)),
    "Qwen2": ("qwen2", dict(layer_types=[FULL, SLIDING], use_sliding_window=True)),
    "Mistral": ("mistral", {}),
    "Qwen3-Next": (
        "qwen3_next", dict(layer_types=[LINEAR, FULL], head_dim=256, **EXPERTS, **NET),
    ),
    "Qwen3.5": ("qwen3_5_text", dict(layer_types=[FULL, LINEAR], **NET)),
}  # fmt: skip


def model_of(kind: str, **changes):
    name, sizes = KINDS[kind]
    model = small_model(name, **{"sliding_window": WINDOW, **sizes, **changes})
    for parameter, weight in model.named_parameters():
        if "k_norm" in parameter:  # its queries and keys are normalized
            weight.data += 2.0
    return model


@pytest.fixture
def batch():
    torch.manual_seed(torch.seed())
    tokens = torch.randint(1, 97, (2, SEQ))
    return dict(input_ids=tokens, labels=tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_eager_attention(kind, batch):
    model = model_of(kind)
    ours = with_pattern(model, DENSE)
    assert_same(model, ours, **batch)
    density = take_means(ours).density.mean(-1)
    types = getattr(model.config, "layer_types", None) or [SLIDING] * 2
    assert density.isnan().tolist() == [each != FULL for each in types]


@pytest.mark.parametrize("kind", ["gpt-oss", "Mistral"])
def test_padding_and_packing(kind, batch):
    model = model_of(kind)
    mask = torch.ones(2, SEQ, dtype=torch.long)
    mask[0, :70], mask[1, 200:] = 0, 0
    padded = {**batch, "attention_mask": mask, "labels": batch["labels"].where(mask == 1, -100)}
    # Losses of shifted labels: the first token of a padded entry is the label of a pad's query.
    padded["labels"][0, 70] = -100
    assert_same(model, with_pattern(model, DENSE), **padded)
    # One by one, as the eager attention of gpt-oss does not look at position ids.
    ids = torch.cat((torch.arange(120), torch.arange(SEQ - 120)))[None]
    tokens = batch["input_ids"][:1]
    with torch.no_grad():
        alone = [model(part, use_cache=False).logits for part in tokens.split((120, SEQ - 120), 1)]
        found = with_pattern(model, DENSE)(tokens, position_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-3, atol=1e-4)


def test_numbers_of_packed_sequences_are_for_attention_alone(batch):
    """Other layers would take them for factors."""
    model = with_pattern(model_of("Qwen3-Next"), DENSE)
    ones = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        first = model(**batch, attention_mask=ones, use_cache=False).logits
        twos = model(**batch, attention_mask=2 * ones, use_cache=False).logits
    torch.testing.assert_close(first, twos)
    ones[:, 100:] = 2
    restarts = dict(position_ids=torch.arange(SEQ)[None] % 150)
    both = "cu_seq_lens_q and seq_idx"
    for packed in (dict(attention_mask=ones), restarts):
        with pytest.raises(
            ConfigError, match=f"linear attention know by {both} alone: give {both}"
        ):
            model(**batch, **packed, use_cache=False)
    # Without its packages, transformers refuses these in a layer of linear attention, which is second here.
    model = with_pattern(model_of("Qwen3.5"), DENSE)
    ends = torch.tensor([0, 100, SEQ, 2 * SEQ], dtype=torch.int32)
    with pytest.raises(ConfigError, match=f"know by {both} alone: give seq_idx, too"):
        model(**batch, cu_seq_lens_q=ends, use_cache=False)
    model = with_pattern(model_of("Mistral"), DENSE).eval()
    with pytest.raises(ConfigError, match="there is a KV cache, as in generate"):
        model.generate(batch["input_ids"], attention_mask=ones, max_new_tokens=2)
    with pytest.raises(ConfigError, match="attention_mask is a dict"):
        model(batch["input_ids"], attention_mask={"full_attention": None})


def test_window_layers_are_exact_whatever_the_pattern(batch):
    model = model_of("Mistral")
    assert_same(model, with_pattern(model, SPARSE), **batch)


@pytest.mark.parametrize("kind", ["gpt-oss", "Gemma 3", "Mistral", "Qwen3-Next"])
@pytest.mark.parametrize("dense_tail", [0, 100])
def test_answers_are_those_of_eager_attention(kind, dense_tail, batch):
    model = model_of(kind).eval()
    ours = copy.deepcopy(model)
    configure(ours, DENSE, dense_tail=dense_tail)
    given = dict(
        attention_mask=torch.ones(2, SEQ, dtype=torch.long), max_new_tokens=5, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    expected = model.generate(batch["input_ids"], **given)
    found = ours.generate(batch["input_ids"], **given)
    assert found.sequences.equal(expected.sequences)
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-4
    )
    tokens = batch["input_ids"]
    with torch.no_grad():  # a prompt that goes on
        first = [each(tokens[:, :200], use_cache=True) for each in (model, ours)]
        rest = [
            each(tokens[:, 200:], past_key_values=one.past_key_values).logits
            for each, one in zip((model, ours), first)
        ]
    torch.testing.assert_close(rest[1], rest[0], rtol=1e-3, atol=1e-4)


def test_masks_that_layers_are_not_told_of_are_refused(batch):
    tokens = batch["input_ids"]
    length = tokens.shape[1]
    packed = torch.cat((torch.arange(50), torch.arange(length - 50))).expand_as(tokens)
    for window in (None, WINDOW + 1):
        ours = with_pattern(model_of("Qwen2"), DENSE)
        ours.model.layers[1].self_attn.sliding_window = window
        for position_ids in (None, packed):
            with pytest.raises(ConfigError, match="layer 1 has .*but its model's mask is another"):
                ours(tokens, position_ids=position_ids, use_cache=False)
    ours = with_pattern(model_of("Qwen2"), DENSE)
    ours.model.layers[0].self_attn.sliding_window = WINDOW
    with pytest.raises(ConfigError, match=f"layer 0 has sliding_window {WINDOW}, but"):
        ours(tokens, use_cache=False)
    with pytest.raises(ConfigError, match=f"layer 0 has sliding_window {WINDOW}, but"):
        ours(tokens, position_ids=packed, use_cache=True)
    with pytest.raises(ConfigError, match="layers of type chunked_attention"):
        configure(model_of("Qwen2", layer_types=[FULL, "chunked_attention"]), DENSE)


def test_a_window_that_no_layer_takes_leaves_the_prices_to_the_target(batch):
    """As in Moshi, and in folders of Llamas that were made of Mistrals."""
    config = MTrainingConfig.from_options(target_recall=0.6, block_size=64, window=64)
    found = []
    for window in (None, WINDOW):
        ours = with_pattern(small_model("llama", sliding_window=window), config)
        ours(**batch, use_cache=False)
        advance(ours)
        found.append(torch.tensor(state_of(ours).steering.state()))
    assert found[0].ne(0.25).any() and found[1].equal(found[0])
