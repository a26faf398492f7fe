# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/sparsebalance/record_patterns.py`` on the CPU: a whole run, and one that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.sparsebalance import record_patterns as script
from tests.support.inspect_cases import LAYERS, save_model


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_and_one_that_goes_on(tmp_path, monkeypatch, capsys):
    model = save_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(Path(json.__file__).read_text())
    output = tmp_path / "patterns.jsonl"
    monkeypatch.setattr(script, "PRICES", (0.1, 0.5))
    words = ["--model", str(model), "--no-code", "--text", f"own={text}", "--device", "cpu"]
    words += ["--seq", "512", "2048", "--windows", "2", "--tokens", "4096", "--output", str(output)]
    script.main([*words, "--packed", "1024x256"])
    rows = rows_in(output)
    assert [(row["seq"], row["document"], row["window"]) for row in rows] == [
        (seq, document, window)
        for seq, document in ((512, 0), (1024, 256), (2048, 0))
        for window in (0, 1)
    ]
    for row in rows:
        assert row["layers"] == LAYERS and row["kind"] == "own"
        assert row["yarn"] == (2.0 if row["seq"] == 2048 else None)
        assert 0 < row["density"][1] <= row["density"][0] <= 1
        assert 0 < row["recall"][1] <= row["recall"][0] <= 1
    starts = [row["start"] for row in rows if row["seq"] == 512]
    assert starts[0] == 0 and starts[1] > 512
    # A window that has a row is left out; the others are as they were.
    output.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    script.main([*words, "--packed", "1024x256"])
    again = rows_in(output)
    assert again[:-1] == rows[1:] and again[-1]["density"] == rows[0]["density"]
    assert "1 of 6 windows" in capsys.readouterr().out


def test_packed_windows_see_their_own_documents(monkeypatch):
    monkeypatch.setattr(script, "PRICES", (0.5,))
    recorder = script.Recorder(script.Window("own", 512, 200, 0), "cpu")
    starts = recorder.documents.starts[0]
    assert starts[[0, 199, 200, 399, 400, 511]].tolist() == [0, 0, 200, 200, 400, 400]
    torch.manual_seed(0)
    query, key, value = (torch.randn(512, 1, heads, 64) for heads in (4, 2, 2))
    out = recorder(script.LayerInput(0, query, key, 0.125, value))
    q, k, v = (
        t[200:400, 0].transpose(0, 1)
        for t in (query, key.repeat_interleave(2, 2), value.repeat_interleave(2, 2))
    )
    alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
    assert torch.allclose(out[200:400, 0].transpose(0, 1), alone, atol=1e-5)


@pytest.mark.parametrize("words", [["--no-code"], ["--text", "book"], ["--packed", "512x1024"]])
def test_bad_input_is_refused(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.options_from(["--model", str(tmp_path), *words])
    assert "error: " in capsys.readouterr().err


def test_a_text_that_is_too_short_is_named(tmp_path):
    window = script.Window("own", 512, 0, 0)
    with pytest.raises(script.ConfigError, match="text own has 100 tokens, and a window 512"):
        script.tokens_of(window, torch.zeros(100), 2)
