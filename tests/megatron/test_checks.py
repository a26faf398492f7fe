# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Every unsupported setting of Megatron is refused, with its value and what to do."""

from enum import Enum
from types import SimpleNamespace

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron.arguments import ArgumentsError
from megatron_mtraining.megatron.checks import REFUSALS, check_settings, is_from
from megatron_mtraining.megatron.layer_pattern import GATED_OVER_RANKS, HYBRID
from tests.support.megatron_cases import check, parse

REFUSED = {
    "attention_dropout": 0.1,
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "use_kitchen_attention": True,
    "window_size": (128, 128),
    "decoder_seq_length": 256,
    "position_embedding_type": "mrope",
    "rl_use_sequence_packing": True,
    "sequence_packing_scheduler": "dp_balanced",
    "use_varlen_dataset": True,
    "cp_partition_mode": "contiguous",
    "rotary_base_per_layer": [1e4, 1e6],
    "hybrid_context_parallel": True,
    "dynamic_context_parallel": True,
    "hierarchical_context_parallel_sizes": [2, 2, 2],
    "cp_comm_type": ["a2a"],
    "mtp_hsm": True,
    "is_hybrid_model": True,
    "hybrid_layer_pattern": "D*",
    "hybrid_override_pattern": "M*M*",
    "hybrid_attention_ratio": 0.5,
    "hybrid_mlp_ratio": 0.5,
    "use_legacy_models": True,
    "yaml_cfg": "run.yaml",
    "cuda_graph_impl": "full_iteration",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "transformer_impl": "inference_optimized",
    "flash_decode": True,
    "perform_rl_step": True,
    "batch_invariant_mode": True,
    "qk_clip": True,
    "log_max_attention_logit": True,
    "flash_attention_version": 3,
    "inprocess_restart": True,
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
}


def test_every_refusal_is_tried():
    assert {refusal.name for refusal in REFUSALS} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_option_value_and_what_to_do(name):
    if name == "is_hybrid_model" and is_from(HYBRID):
        pytest.skip("says how a HybridModel is built")
    value = REFUSED[name]
    refusal = next(refusal for refusal in REFUSALS if refusal.name == name)
    with pytest.raises(ArgumentsError) as raised:
        check(parse(**{name: value}))
    message = str(raised.value)
    assert "--" + name.replace("_", "-") in message
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    assert f"is {shown}," in message
    assert refusal.advice in message and refusal.why in message
    check(parse(backend="auto", **{name: value}))


def test_dropout_of_a_checkpoint_s_arguments_is_named():
    with pytest.raises(
        ArgumentsError, match="is 0.1, .*--use-checkpoint-args prefers its arguments"
    ):
        check(parse(attention_dropout=0.1, use_checkpoint_args=True))


PATTERNS = {"*-*-": True, "GE|*E": True, "M*M*": True, "*-/*-": False, "D-": False, "--": False}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layers_of_a_pattern(pattern):
    """All that are not supported, and multi-token prediction, are refused; before 0.18 all patterns."""
    args = parse(hybrid_layer_pattern=pattern, num_layers=4)
    if PATTERNS[pattern] and is_from(HYBRID):
        check(args)
        return
    with pytest.raises(ArgumentsError, match="--hybrid-layer-pattern is .* at least one attention"):
        check(args)


def test_scaling_that_a_hybrid_model_ignores_is_refused():
    if not is_from(HYBRID):
        pytest.skip("no HybridModel")
    args = parse(hybrid_layer_pattern="*-", num_layers=2, use_rope_scaling=True)
    with pytest.raises(ArgumentsError, match="--use-rope-scaling is given with --hybrid-layer"):
        check(args)


GRAPHS = {
    # what is captured, by which implementation, in a HybridModel or not, and whether it can run
    "router": (["moe_router", "moe_preprocess"], "local", False, True),
    "MLP": (["mlp"], "transformer_engine", False, True),
    "a layer with its attention": (["mlp"], "local", False, False),
    "an MLP layer": (["mlp", "moe_router"], "local", True, True),
    "attention": (["attn", "moe_router"], "transformer_engine", False, False),
    "whole layers": ([], "transformer_engine", True, False),
    "as text": ("moe_router,mlp", "transformer_engine", False, True),
    "all": ("full", "local", False, False),
}


@pytest.mark.parametrize("attribute", ["cuda_graph_modules", "cuda_graph_scope"])
@pytest.mark.parametrize("name", GRAPHS)
def test_cuda_graphs_without_attention_run(name, attribute):
    captured, impl, hybrid, works = GRAPHS[name]
    Part = Enum("Part", "attn mlp moe moe_router moe_preprocess")
    given = captured if isinstance(captured, str) else [Part[each] for each in captured]
    settings = SimpleNamespace(
        cuda_graph_impl=impl, is_hybrid_model=hybrid and is_from(HYBRID), **{attribute: given}
    )
    if works and (not hybrid or is_from(HYBRID)):
        check_settings(settings, command_line=False)
        return
    with pytest.raises(ConfigError, match=f"cuda_graph_impl is {impl} .*{attribute}.* ring cannot"):
        check_settings(settings, command_line=False)


OTHERS = {
    "sequence not a multiple": ({"seq_length": 1000}, "--seq-length is 1000", "1024"),
    "sequence from the old option": (
        {"seq_length": None, "encoder_seq_length": 1000},
        "--seq-length is 1000",
        "1024",
    ),
    "layers one by one": (
        {"overlap_moe_expert_parallel_comm": True, "context_parallel_size": 2},
        "--overlap-moe-expert-parallel-comm does not work with --context-parallel-size 2",
    ),
    "gated delta nets": (
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}
        | {"context_parallel_size": 2, "cp_comm_type": ["p2p"]},
        "gated delta nets do not work with --context-parallel-size 2",
    ),
    "head dim given": ({"kv_channels": 80}, "--kv-channels", "is 80"),
    "head dim derived": ({"hidden_size": 8 * 32}, "is 32", "(64, 96, 128, 192, 256)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_refusals(name):
    given, *words = OTHERS[name]
    if name == "gated delta nets" and is_from(GATED_OVER_RANKS):
        check(parse(**given))
        return
    with pytest.raises(ArgumentsError) as raised:
        check(parse(**given))
    assert all(word in str(raised.value) for word in words)


def test_gathered_ranks_must_fit_the_context_parallel_ranks():
    check(parse(context_parallel_size=8, mtraining_gathered_ranks=4))
    with pytest.raises(ArgumentsError, match="--mtraining-gathered-ranks is 3.* 8 .*divisor"):
        check(parse(context_parallel_size=8, mtraining_gathered_ranks=3))
    with pytest.raises(ArgumentsError, match="--mtraining-gathered-ranks is -1"):
        check(parse(context_parallel_size=8, mtraining_gathered_ranks=-1))
    nodes = dict(context_parallel_size=8, hierarchical_context_parallel_sizes=[4, 2])
    check(parse(**nodes, mtraining_gathered_ranks=4))
    with pytest.raises(
        ArgumentsError, match="--mtraining-gathered-ranks is 2, but .*inner groups of 4"
    ):
        check(parse(**nodes, mtraining_gathered_ranks=2))


def test_hierarchical_sizes_must_make_the_context_parallel_ranks():
    check(parse(context_parallel_size=8, hierarchical_context_parallel_sizes=[4, 2]))
    with pytest.raises(
        ArgumentsError, match="--hierarchical-context-parallel-sizes is 2 2.* 4 ranks.* 8"
    ):
        check(parse(context_parallel_size=8, hierarchical_context_parallel_sizes=[2, 2]))


@pytest.mark.parametrize("sizes", [4, "22", [2.0, 2.0], [2, -2], [True, 4], [4]])
def test_hierarchical_sizes_are_two_whole_numbers(sizes):
    settings = SimpleNamespace(hierarchical_context_parallel_sizes=sizes)
    with pytest.raises(ConfigError, match="hierarchical_context_parallel_sizes is .*two whole"):
        check_settings(settings, command_line=False)


@pytest.mark.parametrize("groups", [3, 16, 0])
def test_query_groups_must_divide_the_heads(groups):
    with pytest.raises(ArgumentsError, match=f"--num-query-groups is {groups}.* 8 attention heads"):
        check(parse(group_query_attention=True, num_query_groups=groups))
    check(parse(group_query_attention=True, num_query_groups=2))
    check(parse(group_query_attention=False, num_query_groups=groups))


UNEVEN = {
    "ends masked": (dict(eod_mask_loss=True, mock_data=True), True),
    "padding masked": (dict(mock_data=False), True),
    "no loss mask": (dict(mock_data=True), False),
    "one rank": (dict(eod_mask_loss=True, context_parallel_size=1), False),
    "mean over tokens": (dict(eod_mask_loss=True, calculate_per_token_loss=True), False),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_that_divide_by_their_own_loss_tokens_are_warned_of(name):
    given, warned = UNEVEN[name]
    said = [line for line in check(parse(**given)) if "add --calculate-per-token-loss" in line]
    assert len(said) == warned
    assert not warned or said[0].startswith("warning: --context-parallel-size is 2")
    assert check(parse(backend="auto", **given)) == []


EXPERTS = dict(num_experts=4, moe_aux_loss_coeff=[0.01, 0.0], calculate_per_token_loss=True)
SCALED = {
    "aux": ({}, "give --moe-aux-loss-coeff 2 times"),
    "both, TP 2": (
        dict(moe_z_loss_coeff=1e-3, tensor_model_parallel_size=2),
        "give --moe-aux-loss-coeff and --moe-z-loss-coeff 4 times",
    ),
    "one rank": (dict(context_parallel_size=1), ""),
    "no auxiliary loss": (dict(moe_aux_loss_coeff=0.0), ""),
    "no experts": (dict(num_experts=None), ""),
    "mean over ranks": (dict(calculate_per_token_loss=False), ""),
}


@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.0", "1.0"])
@pytest.mark.parametrize("name", SCALED)
def test_losses_of_experts_that_megatron_scales_down_are_warned_of(name, version, monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", version)
    given, expected = SCALED[name]
    said = [
        line
        for line in check(parse(**{**EXPERTS, **given}))
        if "auxiliary losses of experts" in line
    ]
    assert len(said) == (bool(expected) and version.startswith("0.1") and version < "0.19")
    assert all(expected in line and line.startswith("warning: ") for line in said)
