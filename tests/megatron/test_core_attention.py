# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``MTrainingAttention`` as Megatron builds and calls it."""

import json
import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import DENSE, Span
from megatron_mtraining.megatron import arguments, core_attention, run_state
from megatron_mtraining.megatron.run_state import RUN
from tests.support.megatron_cases import (
    BATCH,
    DIM,
    GROUPS,
    HEADS,
    SEQUENCE,
    make,
    make_config,
    operands,
)


def dense(query, key, value, scale):
    """Causal attention in plain PyTorch, ``[s, b, h * d]``."""
    query, key, value = (x.permute(1, 2, 0, 3).double() for x in (query, key, value))
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    hidden = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
    return out.permute(2, 0, 1, 3).flatten(2)


def test_all_layers_of_a_run_share_its_prices(monkeypatch):
    monkeypatch.setattr(RUN, "_steerings", {})
    args = Namespace(
        attention_backend=AttnBackend.mtraining, num_layers=3, num_attention_heads=HEADS
    )
    for module in (core_attention, arguments, run_state):
        monkeypatch.setattr(module, "training_arguments", lambda: args)
    target = MTrainingConfig.from_options(block_size=64, target_recall=0.9)
    layers = [make(make_config(mtraining=target), layer_number=n) for n in (1, 3)]
    assert layers[0].steering is layers[1].steering is RUN.steering_of_run(target)
    assert layers[1].steering.price(torch.device("cpu"), 2, 0, HEADS).shape == (HEADS,)
    args.num_attention_heads = 2 * HEADS  # this layer has others than the run
    with pytest.raises(ConfigError, match="layer 3 has 4 heads, but --num-attention-heads is 8"):
        make(make_config(mtraining=target))
    one = MTrainingConfig.from_options(block_size=64, target_recall=0.9, target_scope="model")
    assert make(make_config(mtraining=one)).steering is RUN.steering_of_run(one)
    # Other pipeline stages know the command line's target alone.
    args.num_attention_heads, args.pipeline_model_parallel_size = HEADS, 2
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "config_from_args", lambda args: target)
        assert make(make_config(mtraining=target)).steering is layers[0].steering
        with pytest.raises(ConfigError, match="a target of its own .* 2 pipeline stages"):
            make(make_config(mtraining=one))
        make(make_config(mtraining=MTrainingConfig.from_options(block_size=64)))  # has none


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("layer_scaling", [False, True])
def test_dense_attention_where_everything_is_kept(scale, layer_scaling):
    attention = make(make_config(apply_query_key_layer_scaling=layer_scaling), softmax_scale=scale)
    query, key, value = operands()
    assert not value.is_contiguous()
    out = attention(query, key, value, None, attn_mask_type=AttnMaskType.causal)
    expected = dense(query, key, value, DIM**-0.5 if scale is None else scale)
    assert out.shape == (SEQUENCE, BATCH, HEADS * DIM)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_as_megatron_builds_it_without_parameters(group):
    attention = make(cp_comm_type="p2p", pg_collection=type("Groups", (), {"cp": group(0, 1)})())
    assert not list(attention.parameters()) and not attention.state_dict()
    assert attention.cp_group is None


BUILT = {
    "dropout in the config": (dict(config=dict(attention_dropout=0.1)), "config.attention_dropout"),
    "dropout given": (dict(attention_dropout=0.1), "dropout 0.1"),
    "window": (dict(config=dict(window_size=(8, 8))), "config.window_size is 8 8"),
    "layers with windows": (
        dict(config=dict(window_size=(8, 0), window_attn_skip_freq=[1, 0])),
        "skip_freq is [1, 0]",
    ),
    "every 0th layer": (
        dict(config=dict(window_size=(8, 0), window_attn_skip_freq=0)),
        "skip_freq is 0",
    ),
    "softmax": (dict(config=dict(softmax_type="odd")), "config.softmax_type is odd"),
    "MLA": (dict(config=dict(multi_latent_attention=True)), "config.multi_latent_attention"),
    "MLA's head dims": (dict(k_channels=192, v_channels=128), "k_channels, v_channels"),
    "cross": (dict(attention_type="cross"), "cross attention"),
    "mask": (dict(attn_mask_type=AttnMaskType.padding), "mask type padding"),
    "no mask": (dict(attn_mask_type=AttnMaskType.no_mask), "mask type no_mask"),
    "head dim": (dict(config=dict(kv_channels=80)), "is 80"),
    "settings": (dict(config=dict(mtraining=5)), "config.mtraining is 5"),
    "communication": (dict(cp_comm_type="a2a"), "cp_comm_type a2a"),
    "number": (dict(layer_number=0), "layer_number is 0"),
    "number of a text": (dict(layer_number="1"), "layer_number is '1'"),
    "no group": (dict(config=dict(context_parallel_size=2)), "context_parallel_size is 2"),
    "query groups": (dict(config=dict(num_query_groups=3)), "config.num_query_groups is 3"),
}


@pytest.mark.parametrize("name", BUILT)
def test_refused_when_built(name):
    given, message = BUILT[name]
    given = dict(given)
    config = make_config(**given.pop("config", {}))
    with pytest.raises(ConfigError) as raised:
        make(config, **given)
    assert message in str(raised.value)


CALLED = {
    "bias": (dict(attention_bias=torch.zeros(1)), "attention_bias"),
    "packed": (dict(packed_seq_params=object()), "packed_seq_params"),
    "mask": (dict(attn_mask_type=AttnMaskType.arbitrary), "mask type arbitrary"),
}


@pytest.mark.parametrize("name", CALLED)
def test_refused_when_called(name):
    given, message = CALLED[name]
    with pytest.raises(ConfigError, match=message):
        make()(*operands(), None, **given)


def test_refused_tensors():
    for made, message in (
        (operands(dtype=torch.int32), "attention of layer 3 cannot run: .*int32"),
        (operands(dim=32), "32"),
        (operands(queries=1), "key-value cache"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()(*made)


def watched(config, seq=512):
    """An attention of its own settings, and what patterns its calls have chosen."""
    attention = make(make_config(mtraining=config))
    found = []
    add = attention.density.add
    attention.density.add = lambda density, *more: (found.append(density), add(density, *more))
    torch.manual_seed(2)
    query = torch.randn(seq, 1, HEADS, DIM)
    key, value = torch.randn(2, seq, 1, GROUPS, DIM)
    return attention, found, (query, key, value)


def sparse(**changes):
    return MTrainingConfig.from_options(
        block_size=64, window=64, sample_strata=16, **{"price": 1.3, **changes}
    )  # fmt: skip


@pytest.fixture
def at(monkeypatch):
    """Sets the share of the schedule that is done."""
    monkeypatch.setattr(RUN, "_steerings", {})
    monkeypatch.setattr(RUN, "span", Span(0, 100))

    def set_share(done):
        RUN.step, RUN._share = done, None

    yield set_share
    set_share(0)


def outputs(attention, given):
    """Output and gradients of a call."""
    given = [each.clone().requires_grad_() for each in given]
    out = attention(*given)
    return out, *torch.autograd.grad(out.square().sum(), given)


@pytest.mark.parametrize("threshold", [0.0, 3.0])
def test_a_dense_step_of_a_schedule_is_dense_attention(at, tmp_path, threshold):
    """Also of heads with policies of their own; steps before are those at their price."""
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"layers": {"0": {"heads": {"1": {"vertical": 8, "slash": 0}}}}}))
    more = dict(settings=str(path), backward_threshold=threshold)
    config = sparse(price=None, schedule="0:3,0.5:1.3,0.8:0", **more)
    attention, found, given = watched(config)
    given = [3 * given[0], *given[1:]]
    at(50)
    same, sparse_found, _ = watched(sparse(price=1.3, **more))
    for mine, other in zip(outputs(attention, given), outputs(same, given), strict=True):
        torch.testing.assert_close(mine, other)
    assert found[0].equal(sparse_found[0]) and found[0].mean() < 0.9
    at(80)
    dense, _, _ = watched(sparse(price=0, backward_threshold=threshold))
    for mine, other in zip(outputs(attention, given), outputs(dense, given), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert found[1].eq(1).all()
    assert RUN.steerings[0].unfinished(0.5) and RUN.steerings[0].unfinished(0.9) is None


def test_evaluation_by_the_step_s_pattern_or_dense(at):
    config = sparse(price=None, schedule="0:3,0.8:0")
    attention, _, given = watched(config)
    own, _, _ = watched(sparse(price=3.0))
    all_keys, _, _ = watched(sparse(price=0))
    with torch.no_grad():
        expected, dense_out = own.eval()(*given), all_keys.eval()(*given)
        assert not expected.equal(dense_out)
        assert attention.eval()(*given).equal(expected)
        asked, _, _ = watched(replace(config, dense_evaluation=True))
        assert asked.eval()(*given).equal(dense_out)
        assert asked.train()(*given).equal(expected)


def test_a_schedule_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(RUN, "span", None)
    attention, _, given = watched(sparse(price=None, schedule="0:3,0.8:0"))
    with pytest.raises(ConfigError, match=r"nothing says how long the run is: call .*advance"):
        attention(*given)
    with pytest.raises(ConfigError, match="num_steps is 0: give"):
        run_state.advance(0, num_steps=0)
    run_state.advance(0, num_steps=10)
    attention(*given)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("points, ahead", [("0:3,0.8:0", 1), ("0:3,0.8:0.5", 0)])
def test_dense_attention_runs_ahead_where_it_will_be_needed(device, points, ahead, at, monkeypatch):
    """In the first step, on GPUs, so that no kernel is left to compile; it changes nothing else."""
    monkeypatch.setattr(RUN, "has_run_dense", False)
    policies, plain = [], core_attention.attend

    def attend(*given, config, **more):
        policies.append(config.policy)
        return plain(*given, config=config, **more)

    monkeypatch.setattr(core_attention, "attend", attend)
    attention, found, given = watched(sparse(price=None, schedule=points))
    given = [each.to(device).requires_grad_() for each in given]
    for _ in range(2):
        attention(*given).sum().backward()
    assert policies.count(DENSE) == (ahead if device == "cuda" else 0)
    assert len(found) == 2 and found[0].equal(found[1]) and found[0].mean() < 0.9
    (gradient,) = torch.autograd.grad(attention(*given).sum(), given[0])
    torch.testing.assert_close(given[0].grad, 2 * gradient)


def test_heads_by_a_file_and_by_tensor_parallel_rank(tmp_path, group):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"layers": {"2": {"heads": {"1": {"dense": True}}}}}))
    config = sparse(settings=str(path))
    groups = type("Groups", (), {"cp": group(0, 1), "tp": group(0, 1)})()
    attention = make(make_config(mtraining=config, num_layers=3), pg_collection=groups)
    assert [policy == DENSE for policy in attention.head_policies] == [False, True, False, False]
    for rank, expected in ((0, [False, True]), (1, [False, False])):
        groups = type("Groups", (), {"cp": group(0, 1), "tp": group(rank, 2)})()
        attention = make(make_config(mtraining=config, num_layers=3), pg_collection=groups)
        assert [policy == DENSE for policy in attention.head_policies] == expected
    attention = make(make_config(mtraining=config, num_layers=3), layer_number=1)
    assert attention.head_policies is None
    with pytest.raises(
        ConfigError, match="attention of layer 3 does not fit.*the model has 1 layers"
    ):
        make(make_config(mtraining=config))
