# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient checkpointing: a layer that is run again attends once, by what the first run has found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_mtraining.transformers import checkpointing, configure, take_means
from tests.support.transformers_cases import (
    LAYERS,
    SPARSE,
    loss_and_gradients,
    small_model,
    with_pattern,
)

pytest.importorskip("transformers")


@pytest.fixture
def calls(monkeypatch):
    """What each call of attention was given of a first run, or None."""
    found, original = [], checkpointing.attend

    def spy(*args, saved=None, **kwargs):
        found.append(saved)
        return original(*args, saved=saved, **kwargs)

    monkeypatch.setattr(checkpointing, "attend", spy)
    return found


@pytest.mark.parametrize("kind", ("llama", "gpt_oss", "kept by settings"))
@pytest.mark.parametrize("reentrant", (True, False), ids=("reentrant", "not reentrant"))
def test_checkpointed_layers_attend_once(kind, reentrant, tokens, calls):
    """No bit changes, and a step counts once; in batches with padding too."""
    twice = kind == "kept by settings"
    config = replace(SPARSE, recompute_attention=twice)
    sizes = {}
    if kind == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * LAYERS
        sizes = dict(
            num_local_experts=2, num_experts_per_tok=2, sliding_window=150, layer_types=kinds[:LAYERS]
        )  # fmt: skip
    ours = with_pattern(small_model("llama" if twice else kind, **sizes), config)
    mask = torch.ones_like(tokens)
    mask[0, :70] = 0
    batch = dict(input_ids=tokens, labels=tokens, attention_mask=mask)
    plain, means = loss_and_gradients(ours, **batch)[1], take_means(ours)
    ours.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    calls.clear()
    for _ in range(2):
        again = loss_and_gradients(ours, **batch)[1]
        for name, grad in plain.items():
            assert again[name].equal(grad), name
        torch.testing.assert_close(take_means(ours), means, rtol=0, atol=0, equal_nan=True)
    taken = len(calls) - calls.count(None)
    assert taken == (0 if twice else len(calls) / 2) and len(calls) == 2 * 2 * LAYERS * 2


def test_other_settings_say_whether_layers_attend_once(tokens, calls):
    ours = with_pattern(small_model(), SPARSE)
    ours.gradient_checkpointing_enable()
    for twice in (False, True, False):
        configure(ours, replace(SPARSE, recompute_attention=twice))
        calls.clear()
        loss_and_gradients(ours, input_ids=tokens, labels=tokens)
        assert calls.count(None) == (2 * LAYERS if twice else LAYERS)


@pytest.mark.parametrize("reentrant", (True, False), ids=("reentrant", "not reentrant"))
def test_what_offloads_activations_has_what_attention_found(reentrant, tokens, calls):
    ours = with_pattern(small_model("llama"), replace(SPARSE, backward_threshold=3.0))
    ours.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    plain = loss_and_gradients(ours, input_ids=tokens, labels=tokens)[1]
    packed, back = {}, []
    calls.clear()

    def pack(tensor):
        packed[len(packed) + len(back)] = tensor.clone()
        return max(packed)

    def unpack(number):  # once, as TRL's
        back.append(packed.pop(number))
        return back[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        again = loss_and_gradients(ours, input_ids=tokens, labels=tokens)[1]
    for name, grad in plain.items():
        assert again[name].equal(grad), name
    second = [each for saved in calls if saved for each in (saved.out, saved.lse, saved.packed)]
    assert len(second) == 3 * LAYERS == 3 * len(calls) / 2
    assert {id(each) for each in second} <= {id(each) for each in back}


def test_selective_checkpointing_runs_attention_twice(tokens, calls):
    """It compares the operations of both runs."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, operation, *args, **kwargs):
        saved = operation == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    batch = dict(input_ids=tokens, labels=tokens)
    ours = with_pattern(small_model(), SPARSE)
    _, expected = loss_and_gradients(ours, **batch)
    how = dict(
        use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    calls.clear()
    _, found = loss_and_gradients(ours, **batch)
    torch.testing.assert_close(found, expected)
    assert calls == [None] * 2 * LAYERS


def test_a_gradient_that_does_not_come_through_a_layers_output(tokens):
    """Such as a router's loss alone: attention runs again, by the pattern of the first run."""
    found = []
    for is_checkpointed in (False, True):
        ours, seen = with_pattern(small_model("llama"), SPARSE), []
        if is_checkpointed:
            ours.gradient_checkpointing_enable(dict(use_reentrant=False))
        attention = ours.model.layers[1].self_attn
        attention.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1][0]))
        ours(tokens, use_cache=False)
        seen[0].square().sum().backward()
        found.append(attention.q_proj.weight.grad)
    assert found[0].any() and found[1].equal(found[0])


@pytest.mark.parametrize("wrap", [lambda x: dict(out=x), lambda x: (None, x), lambda x: ()])
def test_layers_that_return_something_else(wrap):
    """Such as models with code of their own: what attention found stays beside the graph."""
    layer = checkpointing._Layer(None)
    layer.kept.append(object())
    output = wrap(torch.ones(2, requires_grad=True))
    assert layer.saved_behind(output) is output and not layer.is_saved
