# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Our core attention in copies of Megatron's layer specs, and the specs that are refused."""

import dataclasses
from functools import partial

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron import MTrainingAttention
from megatron_mtraining.megatron.layer_spec import module_of, replace_core_attention


def attention(core=DotProductAttention, **others) -> ModuleSpec:
    needed = {f.name: IdentityOp for f in dataclasses.fields(SelfAttentionSubmodules)}
    return ModuleSpec(
        module=SelfAttention,
        submodules=SelfAttentionSubmodules(**{**needed, "core_attention": core}),
    )


def layer(self_attention, **others) -> ModuleSpec:
    submodules = TransformerLayerSubmodules(self_attention=self_attention, **others)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def core_of(spec):
    return spec.submodules.self_attention.submodules.core_attention


class TEDotProductAttention:
    """Stands in for Transformer Engine's, which is known by its name."""


@pytest.mark.parametrize("experts", [None, 4], ids=["dense", "moe"])
def test_local_specs_dense_and_moe(experts):
    spec = get_gpt_layer_local_spec(num_experts=experts)
    before = repr(spec)
    ours = replace_core_attention(spec)
    assert core_of(ours) is MTrainingAttention
    assert core_of(spec) is DotProductAttention and repr(spec) == before, "specs are shared"
    assert ours.submodules.mlp is spec.submodules.mlp, "what does not change is not copied"


@pytest.mark.parametrize("experts", [None, 4], ids=["dense", "moe"])
def test_transformer_engine_specs_dense_and_moe(experts):
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts)
    assert core_of(replace_core_attention(spec)) is MTrainingAttention
    assert core_of(spec).__name__ == "TEDotProductAttention"


@pytest.mark.parametrize("core", [DotProductAttention, TEDotProductAttention])
@pytest.mark.parametrize(
    "given",
    [lambda core: core, lambda core: ModuleSpec(module=core), lambda core: partial(core)],
    ids=["class", "ModuleSpec", "partial"],
)
def test_known_core_attentions_in_every_form(core, given):
    assert core_of(replace_core_attention(layer(attention(given(core))))) is MTrainingAttention


def test_a_spec_made_by_hand_stays():
    spec = layer(attention(MTrainingAttention))
    assert core_of(replace_core_attention(spec)) is MTrainingAttention


def test_blocks_of_layers_that_differ_and_share():
    shared = layer(attention())
    without = layer(ModuleSpec(module=IdentityOp))
    block = TransformerBlockSubmodules(layer_specs=[shared, without, shared])
    ours = replace_core_attention(block)
    assert [core_of(ours.layer_specs[i]) for i in (0, 2)] == [MTrainingAttention] * 2
    assert ours.layer_specs[1] is without
    assert core_of(shared) is DotProductAttention


def test_partials():
    submodules = attention().submodules
    spec = layer(partial(SelfAttention, submodules=submodules))
    ours = replace_core_attention(spec).submodules.self_attention
    assert ours.func is SelfAttention
    assert ours.keywords["submodules"].core_attention is MTrainingAttention
    assert submodules.core_attention is DotProductAttention


def test_a_pipeline_stage_without_layers():
    block = TransformerBlockSubmodules(layer_specs=[])
    assert replace_core_attention(block) is block


class Unknown:
    pass


def cross_submodules():
    needed = {f.name: IdentityOp for f in dataclasses.fields(CrossAttentionSubmodules)}
    return CrossAttentionSubmodules(**needed)


REFUSED = {
    "another core attention": (lambda: layer(attention(Unknown)), "core_attention is Unknown"),
    "parameters of its own": (
        lambda: layer(attention(ModuleSpec(module=DotProductAttention, params={"a": 1}))),
        "DotProductAttention with {'a': 1}",
    ),
    "cross attention": (
        lambda: layer(
            attention(),
            cross_attention=ModuleSpec(module=CrossAttention, submodules=cross_submodules()),
        ),
        "cross_attention is CrossAttention",
    ),
    "cross attention as the first": (
        lambda: layer(ModuleSpec(module=CrossAttention, submodules=cross_submodules())),
        "self_attention is CrossAttention",
    ),
    "linear attention": (lambda: layer(ModuleSpec(module=Unknown)), "self_attention is Unknown"),
    "submodules alone": (cross_submodules, "CrossAttentionSubmodules"),
    "nothing to replace": (lambda: layer(IdentityOp), "holds no self-attention"),
    "not a spec": (lambda: Unknown, "Unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_and_where(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError) as raised:
        replace_core_attention(make())
    assert message in str(raised.value)
    if name == "another core attention":
        assert "ModuleSpec.submodules.self_attention.submodules" in str(raised.value)


def test_multi_latent_attention_is_refused():
    with pytest.raises(ConfigError, match="MLASelfAttention"):
        replace_core_attention(get_gpt_layer_local_spec(multi_latent_attention=True))


def test_module_of_sees_through_every_form():
    assert module_of(ModuleSpec(module=partial(Unknown))) is Unknown
    assert module_of(partial(ModuleSpec, 1)) is ModuleSpec
    assert module_of(TransformerLayer.forward) is TransformerLayer.forward
