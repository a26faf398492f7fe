# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which layers have attention, by Megatron-LM's arguments."""

import json
from types import SimpleNamespace

import pytest

from megatron_mtraining.megatron.arguments import ArgumentsError
from megatron_mtraining.megatron.checks import is_from
from megatron_mtraining.megatron.density import RUN, wrap_floating_point_operations
from megatron_mtraining.megatron.layer_pattern import HYBRID, layers_with_attention
from tests.support.megatron_cases import check, parse

PATTERNS = {None: [0, 1, 2, 3], "*-*-": [0, 2], "-*E|*": [1, 3]}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layers_are_numbered_over_all_kinds(pattern):
    args = SimpleNamespace(num_layers=4, hybrid_layer_pattern=pattern)
    assert layers_with_attention(args) == PATTERNS[pattern]


def test_operations_are_those_of_layers_with_attention(monkeypatch):
    monkeypatch.setattr(RUN, "computed", 0.25)
    args = parse(hybrid_layer_pattern="*-*-", num_layers=4, kv_channels=64, num_attention_heads=8)
    count = wrap_floating_point_operations(lambda args, batch_size: 10**15)
    saved = 0.75 * 6 * 2 * 64 * 8 * 3 * args.seq_length**2
    assert count(args, 3) == pytest.approx(10**15 - saved)


@pytest.mark.skipif(not is_from(HYBRID), reason="no HybridModel")
def test_a_settings_file_names_layers_with_attention(tmp_path):
    path = tmp_path / "settings.json"
    given = dict(hybrid_layer_pattern="*-*-", num_layers=4, mtraining_settings=str(path))
    path.write_text(json.dumps({"layers": {"2": {"price": 0.5}}}))
    check(parse(**given))
    path.write_text(json.dumps({"layers": {"0": {"price": 0.5}, "3": {"price": 0.5}}}))
    with pytest.raises(ArgumentsError, match="layer 3, which has no attention.*attention are 0, 2"):
        check(parse(**given))
