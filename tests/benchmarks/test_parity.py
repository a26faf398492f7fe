# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/parity.py: three runs of a tiny model leave rows that can be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.model import parity as parity_script
from tests.support.inspect_cases import save_model


@pytest.fixture(scope="module")
def parity():
    return parity_script


@pytest.mark.slow
def test_three_runs(parity, tmp_path):
    model = save_model(tmp_path / "model")
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text())
    output = tmp_path / "parity.jsonl"
    words = [str(model), "--text", str(text), "--seq", "512", "--steps", "3", "--held-out", "2"]
    words += ["--block-size", "64", "--lr", "1e-3", "--device", "cpu", "--output", str(output)]
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"layers": {"1": {"target_recall": 0.8}}}))
    parity.main([*words, "--overrides", str(own), "--dense-steps", "2", "0"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["run"] for row in rows] == ["dense", "price", "price", "overrides", "coverage"]
    late = rows.pop(1)  # dense for two of three steps
    assert late["dense_steps"] == 2 and rows[1]["dense_steps"] == 0
    assert late["density"] > rows[1]["density"] and late["losses"][:2] == rows[0]["losses"][:2]
    assert rows[2]["overrides"]["layers"] == {"1": {"target_recall": 0.8}}
    assert rows[1]["overrides"] is None and rows[1]["price"] < rows[2]["price"]
    rows = {row["run"]: row for row in rows}
    assert {row["held_out_before"] for row in rows.values()} == {rows["dense"]["held_out_before"]}
    for row in rows.values():
        assert len(row["losses"]) == 3 and row["losses"][0] > row["losses"][-1]
        assert 0 < row["density"] <= 1 and 0 < row["recall"] <= 1
        # An untrained model's attention is even: what is left out of it changes little.
        assert abs(row["held_out_after_over_dense"]) < 0.05
    assert rows["dense"]["density"] == 1 and rows["dense"]["held_out_after_over_dense"] == 0
    assert rows["price"]["density"] < 1 and rows["price"]["price"] > 0
    assert rows["coverage"]["coverage"] > 0
    assert output.with_suffix(".png").stat().st_size > 1000


def test_the_loss_is_the_model_s_own(parity, tmp_path):
    model = save_model(tmp_path / "model")
    options = parity.parse([str(model), "--device", "cpu"])
    loaded = parity.load(options, parity.Attention())
    tokens = torch.randint(200, (130,))
    loss = parity.loss_of(loaded, tokens, options)
    # transformers shifts labels itself: of the last token nothing is asked.
    expected = loaded(input_ids=tokens[None], labels=tokens[None]).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
