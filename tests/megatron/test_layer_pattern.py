# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which layers have attention, by Megatron-LM's arguments."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.megatron import recurrent
from megatron_mtraining.megatron.arguments import ArgumentsError
from megatron_mtraining.megatron.borders import Borders
from megatron_mtraining.megatron.checks import is_from
from megatron_mtraining.megatron.density import RUN, wrap_floating_point_operations
from megatron_mtraining.megatron.layer_pattern import HYBRID, layers_with_attention
from megatron_mtraining.megatron.recurrent import wrap_forward
from tests.support.megatron_cases import check, parse

GATED = dict(experimental_attention_variant="gated_delta_net")
CASES = {
    # arguments of a model of four layers, and which have attention
    "all": ({}, [0, 1, 2, 3]),
    "multi-token prediction": ({"mtp_num_layers": 1}, [0, 1, 2, 3, 4]),
    "pattern": ({"hybrid_layer_pattern": "*-*-"}, [0, 2]),
    "stages": ({"hybrid_layer_pattern": "G*E|*"}, [1, 3]),
    "every second": (GATED | {"linear_attention_freq": 2, "mtp_num_layers": 1}, [1, 3, 4]),
    "listed": (GATED | {"linear_attention_freq": [0, 1, 0, 1], "mtp_num_layers": 1}, [0, 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_numbered_over_all_kinds(name):
    given, expected = CASES[name]
    assert layers_with_attention(SimpleNamespace(num_layers=4, **given)) == expected


@pytest.mark.parametrize(
    "given", [GATED | {"linear_attention_freq": 4}, {"hybrid_layer_pattern": "*-M-"}]
)
def test_packed_documents_are_refused_with_recurrent_layers(given):
    if "hybrid_layer_pattern" in given and not is_from(HYBRID):
        pytest.skip("no HybridModel")
    check(parse(num_layers=4, context_parallel_size=1, **given))
    with pytest.raises(ArgumentsError, match="--reset-attention-mask does not work with recurrent"):
        check(
            parse(
                num_layers=4, context_parallel_size=1, reset_attention_mask=True,
                reset_position_ids=True, **given,
            )
        )  # fmt: skip


def test_orders_of_an_evaluation_are_for_training_too():
    borders = Borders(RankGroup(None), RankGroup(None), ((0,),), 64, 1)
    token = recurrent._borders.set(borders)
    try:
        undo = recurrent.wrap_undo(None)
        with torch.inference_mode():
            undo(torch.ones(128, 2))
        tokens = torch.arange(256.0).view(128, 2).requires_grad_()
        (grad,) = torch.autograd.grad(undo(tokens).sum(), tokens)
    finally:
        recurrent._borders.reset(token)
    assert (grad == 1).all()


def test_a_gated_delta_net_refuses_packed_documents():
    forward = wrap_forward(lambda self, hidden_states, packed_seq_params=None: hidden_states)
    for backend in ("mtraining", "auto"):
        layer = SimpleNamespace(
            config=SimpleNamespace(attention_backend=backend),
            layer_number=3,
            mtraining_borders=None,
        )
        assert forward(layer, 1) == 1
        if backend == "auto":
            assert forward(layer, 1, packed_seq_params="documents") == 1
            continue
        with pytest.raises(ConfigError, match="layer 3 is given packed documents"):
            forward(layer, 1, packed_seq_params="documents")


def test_operations_are_those_of_layers_with_attention(monkeypatch):
    monkeypatch.setattr(RUN, "computed", 0.25)
    args = parse(hybrid_layer_pattern="*-*-", num_layers=4, kv_channels=64, num_attention_heads=8)
    count = wrap_floating_point_operations(lambda args, batch_size: 10**15)
    saved = 0.75 * 6 * 2 * 64 * 8 * 3 * args.seq_length**2
    assert count(args, 3) == pytest.approx(10**15 - saved)


def test_settings_of_layers_with_a_window_are_refused(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"layers": {"1": {"price": 0.5}}}))
    given = dict(window_size=(128, 0), num_layers=4, mtraining_settings=str(path))
    check(parse(window_attn_skip_freq=[1, 0, 1, 0], **given))
    with pytest.raises(ArgumentsError, match="layer 1, which has .*window.*a pattern are 0, 2"):
        check(parse(window_attn_skip_freq=[0, 1, 0, 1], **given))
    del given["mtraining_settings"]
    for frequency in (None, [1, 1, 1, 1]):
        with pytest.raises(
            ArgumentsError, match=r"--window-size is \(128, 0\).*none has a pattern"
        ):
            check(parse(window_attn_skip_freq=frequency, **given))


@pytest.mark.skipif(not is_from(HYBRID), reason="no HybridModel")
def test_a_settings_file_names_layers_with_attention(tmp_path):
    path = tmp_path / "settings.json"
    given = dict(hybrid_layer_pattern="*-*-", num_layers=4, mtraining_settings=str(path))
    path.write_text(json.dumps({"layers": {"2": {"price": 0.5}}}))
    check(parse(**given))
    path.write_text(json.dumps({"layers": {"0": {"price": 0.5}, "3": {"price": 0.5}}}))
    with pytest.raises(ArgumentsError, match="layer 3, which has no attention.*a pattern are 0, 2"):
        check(parse(**given))
