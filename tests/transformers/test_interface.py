# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``attn_implementation="mtraining"``: against transformers' own attention, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import ConfigError
from megatron_mtraining.transformers import (
    advance,
    checkpointing,
    configure,
    state_of,
    take_backward_means,
    take_means,
)
from megatron_mtraining.transformers.interface import is_in_use
from tests.support.transformers_cases import (
    DENSE,
    HEADS,
    SEQ,
    SPARSE,
    assert_same,
    loss_and_gradients,
    small_model,
    with_pattern,
)

pytest.importorskip("transformers")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("kind", FAMILIES)
def test_dense_settings_are_transformers_attention(kind, tokens):
    model = small_model(kind)
    assert_same(model, with_pattern(model, DENSE), input_ids=tokens, labels=tokens)


def test_a_sparse_pattern_is_attended_to(tokens):
    """The same as eager attention under the pattern's own mask."""
    model = small_model()
    ours = with_pattern(model, SPARSE)
    seen = {}
    original = checkpointing.attend

    def spy(*args, **kwargs):
        result = original(*args, **kwargs)
        seen[len(seen)] = result.index
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "attend", spy)
        found = ours(tokens[:1], use_cache=False).logits
    assert 0.05 < take_means(ours).density.mean() < 0.9

    masks = {
        layer: torch.stack([index.token_mask(0, head) for head in range(HEADS)])[None]
        for layer, index in seen.items()
    }
    hidden = model.model.embed_tokens(tokens[:1])
    positions = torch.arange(SEQ)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    for number, layer in enumerate(model.model.layers):
        mask = torch.zeros(masks[number].shape).masked_fill(~masks[number], float("-inf"))
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    expected = model.lm_head(model.model.norm(hidden))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_generation_decodes_densely(tokens):
    """Greedy tokens are those of sdpa if the prompt is attended to in full."""
    model = small_model().eval()
    ours = with_pattern(model, DENSE)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, :40] = 0
    expected, found = (
        each.generate(
            tokens[:, :300], attention_mask=mask, max_new_tokens=8, do_sample=False
        )
        for each in (model, ours)
    )  # fmt: skip
    assert found.equal(expected)
    for window in (None, 200):
        ours = with_pattern(small_model("mistral", sliding_window=window).eval(), DENSE)
        with pytest.raises(ConfigError, match="leave cache_implementation out"):
            ours.generate(tokens[:, :300], max_new_tokens=2, cache_implementation="static")


def test_decoding_attends_to_all_of_the_cache(tokens):
    """After a sparse prefill, the next token's logits are those of dense attention over the same cache."""
    model = small_model().eval()
    ours = with_pattern(model, SPARSE)
    with torch.no_grad():
        cache = ours(tokens[:1, :-1], use_cache=True).past_key_values
        found = ours(tokens[:1, -1:], past_key_values=copy.deepcopy(cache)).logits
        expected = model(tokens[:1, -1:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert take_means(ours, training=False).density.mean() < 0.9


def with_tail(model, config, count):
    ours = copy.deepcopy(model)
    configure(ours, config, dense_tail=count)
    return ours


@pytest.mark.parametrize("packed", [False, True])
def test_the_last_tokens_of_a_prompt_attend_to_all(packed, tokens):
    model = small_model().eval()
    batch = dict(input_ids=tokens[:1], use_cache=False)
    if packed:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (200, SEQ - 200)])[None]
    tail = 40
    with torch.no_grad():
        dense = model(**batch).logits
        plain, found, whole = (
            with_tail(model, SPARSE, count)(**batch).logits for count in (0, tail, SEQ + 1)
        )
    last = slice(200 if packed else 0, None)  # the tail is of the last sequence
    torch.testing.assert_close(whole[:, last], dense[:, last], rtol=1e-3, atol=1e-3)
    assert packed == whole[:, :200].equal(plain[:, :200])
    errors = [(each - dense)[:, -tail:].norm() for each in (plain, found)]
    assert errors[1] < errors[0]  # what remains is of keys and values that the pattern has made


def test_the_tail_of_one_layer_is_exact(tokens):
    """With one layer, keys and values are those of the dense model, and so is the tail."""
    model = small_model(num_hidden_layers=1).eval()
    mask = torch.ones(2, SEQ, dtype=torch.long)
    mask[0, :40] = 0
    batch = dict(input_ids=tokens, attention_mask=mask, use_cache=False)
    with torch.no_grad():
        dense, found = model(**batch).logits, with_tail(model, SPARSE, 40)(**batch).logits
        plain = with_tail(model, SPARSE, 0)(**batch).logits
    # Of more layers, later patterns are selected from other queries.
    assert found[:, :-40].equal(plain[:, :-40])
    torch.testing.assert_close(found[:, -40:], dense[:, -40:], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found[:, 200:-40], dense[:, 200:-40], rtol=1e-3, atol=1e-4)


def test_training_has_no_dense_tail(tokens):
    model = small_model()
    found, plain = (with_tail(model, SPARSE, count)(tokens).logits for count in (40, 0))
    assert found.equal(plain)
    for count in (-1, 0.5, True):
        with pytest.raises(ConfigError, match="dense_tail is"):
            configure(copy.deepcopy(model), SPARSE, dense_tail=count)


def test_a_prompt_can_continue(tokens):
    """A second part of a prompt attends to all of the first."""
    model = small_model().eval()
    ours = with_pattern(model, DENSE)
    with torch.no_grad():
        whole = model(tokens[:1]).logits
        cache = ours(tokens[:1, :300], use_cache=True).past_key_values
        rest = ours(tokens[:1, 300:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 300:], rtol=1e-3, atol=1e-3)


def test_long_parts_of_a_prompt_after_a_cache_count_as_dense(tokens):
    """As generate(prefill_chunk_size=...) makes them: only the first part has a pattern."""
    ours = with_pattern(small_model().eval(), SPARSE)
    with torch.no_grad():
        cache = ours(tokens[:1, :300], use_cache=True).past_key_values
        first = take_means(ours, training=False)
        cache = ours(tokens[1:, :300], past_key_values=cache).past_key_values
        dense = take_means(ours, training=False)
        ours(tokens[:1, 500:], past_key_values=cache)  # as many as an answer has
    assert (first.density < 1).any() and (first.recall < 1).any()
    assert (dense.density == 1).all() and (dense.recall == 1).all()
    assert take_means(ours, training=False).density.isnan().all()


def test_training_with_a_prefix_in_the_cache_is_refused(tokens):
    from transformers import DynamicCache

    ours = with_pattern(small_model(), SPARSE)
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.randn(2, 2, 8, 64), torch.randn(2, 2, 8, 64), layer)
    with pytest.raises(ConfigError, match="a KV cache of 8 tokens by 512 in training .* LoRA"):
        ours(tokens, past_key_values=copy.deepcopy(cache))
    assert ours.eval()(tokens, past_key_values=cache).logits.isfinite().all()


def test_assisted_decoding_is_refused(tokens):
    """Its first forward has proposed tokens beside the prompt, which would change the prompt's pattern."""
    ours = with_pattern(small_model().eval(), SPARSE)
    given = dict(max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(tokens[:1]))
    for more in (dict(prompt_lookup_num_tokens=5), dict(assistant_model=small_model().eval())):
        with pytest.raises(ConfigError, match="assisted decoding"):
            ours.generate(tokens[:1], **given, **more)
    ours.set_attn_implementation("sdpa")
    assert ours.generate(tokens[:1], **given, prompt_lookup_num_tokens=5).shape[1] > SEQ


def test_layers_around_attention_can_be_compiled(tokens):
    batch = dict(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
    batch["attention_mask"][0, :70] = 0
    ours = with_pattern(small_model(), SPARSE)
    expected = loss_and_gradients(ours, **batch)
    ours.zero_grad()
    loss = torch.compile(ours, backend="eager")(**batch, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, expected[0].loss)
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, expected[1][name], msg=name)


def test_layers_that_share_keys(tokens):
    pytest.importorskip("transformers.models.gemma4")
    kinds = ["sliding_attention", "full_attention"] * 2
    model = small_model(
        "gemma4_text", num_hidden_layers=4, layer_types=kinds, sliding_window=48, global_head_dim=64,
        num_kv_shared_layers=2, vocab_size_per_layer_input=97, hidden_size_per_layer_input=16,
    )  # fmt: skip
    ours = with_pattern(model, DENSE)
    with torch.no_grad():
        found, expected = (each(tokens, use_cache=False).logits for each in (ours, model))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_language_model_that_is_a_part(tokens):
    """The whole model's own implementation is another, and says nothing of the part's."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[8, 12, 12])
    text = dict(sizes, vocab_size=97, num_hidden_layers=1, rope_parameters=rope)
    vision = dict(depth=1, hidden_size=64, num_heads=2, intermediate_size=64, out_hidden_size=256)
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    given = dict(max_new_tokens=3, do_sample=False, prompt_lookup_num_tokens=5)
    assert not is_in_use(whole)
    configure(whole.model.language_model, SPARSE)
    assert is_in_use(whole) and whole.config._attn_implementation != "mtraining"
    with pytest.raises(ConfigError, match="assisted decoding"):
        whole.generate(tokens[:1], **given)
    whole.set_attn_implementation("sdpa")
    assert not is_in_use(whole)
    assert whole.generate(tokens[:1], **given).shape[1] > SEQ


def test_models_beside_the_layers(tokens):
    """Such as Phi-4-multimodal's, which come after them."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
    model = small_model()
    model.model.beside = CLIPVisionModel(CLIPVisionConfig(**sizes))
    ours = with_pattern(model, DENSE)
    expected, found = (each(tokens, use_cache=False).logits for each in (model, ours))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_short_sequences_are_dense(tokens):
    model = small_model()
    config = MTrainingConfig.from_options(vertical=200, slash=10)
    assert_same(model, with_pattern(model, config), input_ids=tokens[:, :90], labels=tokens[:, :90])


def test_a_pruned_backward_leaves_the_loss(tokens):
    """The forward is dense; gradients differ, and what they leave out is counted."""
    model = small_model()
    config = MTrainingConfig.from_options(price=0.0, block_size=64, backward_threshold=3.0)
    ours = with_pattern(model, config).train()
    expected, grads = loss_and_gradients(model.train(), input_ids=tokens, labels=tokens)
    found, own = loss_and_gradients(ours, input_ids=tokens, labels=tokens)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    means = take_backward_means(ours)
    assert (means.density < take_means(ours).density).all() and (means.dropped > 0).all()
    assert take_backward_means(ours).density.isnan().all(), "taken"
    name = next(name for name in grads if "k_proj" in name)
    assert not torch.allclose(own[name], grads[name], rtol=1e-3, atol=1e-5)


def test_settings_differ_by_layer(tokens, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"layers": {"1": {"dense": true}}}')
    options = dict(vertical=16, slash=4, window=64, block_size=64)
    ours = with_pattern(small_model(), MTrainingConfig.from_options(**options, settings=str(path)))
    ours(tokens, use_cache=False)
    density = take_means(ours).density.mean(-1)
    assert density[1] == 1 and density[0] < 0.9


def test_settings_that_look_ahead_warn():
    config = MTrainingConfig.from_options(policy="moba", block_lookahead=True, block_size=64)
    with pytest.warns(UserWarning, match="--mtraining-block-lookahead: .* later tokens"):
        configure(small_model(num_hidden_layers=1), config)


def test_the_way_back(tokens):
    model = small_model()
    ours = with_pattern(model, SPARSE)
    ours.set_attn_implementation("eager")
    assert ours(tokens, use_cache=False).logits.equal(model(tokens, use_cache=False).logits)


def test_a_model_can_be_pickled(tokens):
    """With its prices, and without the optimizers that have stepped."""
    config = MTrainingConfig.from_options(target_recall=0.6, block_size=64, window=64)
    ours = with_pattern(small_model(num_hidden_layers=1), config)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    for _ in range(2):
        ours(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    again = pickle.loads(pickle.dumps(ours))
    for model in (ours, again):
        advance(model)
    assert state_of(again).steering.step == state_of(ours).steering.step == 2
    assert again(tokens, use_cache=False).logits.equal(ours(tokens, use_cache=False).logits)


def refused(match, model, config=SPARSE, **batch):
    with pytest.raises(ConfigError, match=match):
        configure(model, config)
        model(**batch, use_cache=False)


def test_what_is_refused_names_itself(tokens):
    refused("dropout 0.1", small_model(attention_dropout=0.1), input_ids=tokens)
    refused("dimension 32", small_model(head_dim=32))
    refused(
        "chunked_attention",
        small_model("qwen2", layer_types=["chunked_attention"] * 2),
    )
    refused(
        "keys of dimension 128 and values of 64",
        small_model("deepseek_v3", v_head_dim=64, qk_nope_head_dim=64, qk_rope_head_dim=64),
    )
    refused("gathered_ranks is 2", small_model(), MTrainingConfig.from_options(gathered_ranks=2))
    refused("batching is cost", small_model(), MTrainingConfig.from_options(batching="cost"))
    refused("tuning is on", small_model(), MTrainingConfig.from_options(tuning="on"))
    refused("give an MTrainingConfig", small_model(), {"price": 1})
    refused("give a model of transformers", torch.nn.Linear(2, 2))
    mask = torch.ones_like(tokens)
    mask[0, 50:60] = 0
    refused("2 separate stretches", small_model(), input_ids=tokens, attention_mask=mask)
    four = torch.zeros(2, 1, SEQ, SEQ)
    refused("two-dimensional attention_mask", small_model(), input_ids=tokens, attention_mask=four)


def test_settings_of_single_layers_are_refused():
    pytest.importorskip("transformers.integrations.heterogeneity")
    for field, value in (("sliding_window", 64), ("num_attention_heads", 2), ("head_dim", 128)):
        model = small_model("mistral")
        model.config.per_layer_config = {1: {field: value}}
        refused(f"MistralForCausalLM has layers with {field} of their own", model)


def loaded(model, folder, **how):
    from transformers import AutoModelForCausalLM

    model.save_pretrained(folder)
    how = dict(attn_implementation="mtraining") | how
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).train()


def test_the_name_gives_default_settings(tokens, tmp_path):
    """Where a model is loaded, and where it is set; configure may change them after."""
    model = small_model(num_hidden_layers=1)
    ours = loaded(model, tmp_path)
    assert state_of(ours).config == MTrainingConfig()
    found = ours(tokens[:1], use_cache=False).logits
    assert found.equal(with_pattern(model, None)(tokens[:1], use_cache=False).logits)
    take_means(ours)
    configure(ours, SPARSE)
    assert state_of(ours).config == SPARSE
    ours(tokens[:1], use_cache=False)
    assert take_means(ours).density.mean() < 0.9

    model.set_attn_implementation("mtraining")
    assert model(tokens[:1], use_cache=False).logits.equal(found)
    model.save_pretrained(tmp_path)
    again = loaded(model, tmp_path, attn_implementation=None)
    assert again.config._attn_implementation == "sdpa", "a saved model is dense"


def test_the_name_is_refused_as_configure_refuses(tmp_path):
    for match, changes in (
        ("dimension 32", dict(head_dim=32)),
        ("chunked_attention", dict(layer_types=["chunked_attention"] * 2)),
    ):
        model = small_model("qwen2", **changes)
        with pytest.raises(ConfigError, match=match):
            loaded(model, tmp_path)
        with pytest.raises(ConfigError, match=match):
            model.set_attn_implementation("mtraining")
        assert model.config._attn_implementation == "eager"


def test_a_model_without_the_interface_is_refused(monkeypatch):
    model = small_model()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    for how in (configure, lambda model: model.set_attn_implementation("mtraining")):
        with pytest.raises(ConfigError, match="not go through transformers' attention interface"):
            how(model)


def test_layers_without_settings_say_what_to_do(tokens):
    ours = with_pattern(small_model(), SPARSE)
    del ours.model.layers[1].self_attn.mtraining_state
    with pytest.raises(ConfigError, match="layer 1 .* no settings: call .*configure"):
        ours(tokens, use_cache=False)
    with pytest.raises(ConfigError, match="outside of the model's own call"):
        ours.model.forward(tokens, use_cache=False)


def test_one_process_has_one_device(tokens):
    model = small_model()
    model.lm_head.to("meta")
    with pytest.raises(ConfigError, match="parameters on cpu, meta: .*torchrun"):
        configure(model, SPARSE)
    by_name = small_model()
    by_name.set_attn_implementation("mtraining")
    by_name.model.norm.to("meta")
    with pytest.raises(ConfigError, match="parameters on cpu, meta: .*torchrun"):
        by_name(tokens)
    replica = with_pattern(small_model(num_hidden_layers=1), SPARSE)
    attention = replica.model.layers[0].self_attn
    replica.model.layers[0].self_attn = attention._replicate_for_data_parallel()
    with pytest.raises(ConfigError, match="nn.DataParallel.*torchrun"):
        replica.model.layers[0].self_attn(
            torch.zeros(1, SEQ, 256), (torch.zeros(1, SEQ, 64),) * 2, None
        )
