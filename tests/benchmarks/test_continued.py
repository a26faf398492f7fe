# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/continued.py: the whole way of a tiny model, on a CPU; needs a Megatron-LM checkout."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.model import continued
from tests.support.convert_cases import save
from tests.support.data_cases import save_tokenizer
from tests.support.pretrain_tree import SHIM

ON_CPU = """
    --distributed-backend gloo --use-cpu-initialization --no-rope-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""


def test_there_and_on_and_back(tree, tmp_path, monkeypatch):
    launch = [*continued.TORCHRUN, SHIM, "-m", "megatron_mtraining.launch"]
    monkeypatch.setattr(continued, "LAUNCH", launch)
    root = tree.roots["launcher"]
    monkeypatch.setenv("PYTHONPATH", str(root))
    model = save("qwen2 tied", tmp_path / "hf")
    save_tokenizer(model, eos_token="<eod>")
    words = ["continued.py", root, "--model", model, "--seq", 256, "--steps", 3, "--lr", "1e-3"]
    words += ["--transformer-impl", "local", *ON_CPU.split()]
    words += ["--output", tmp_path / "rows.jsonl", "--log", tmp_path / "logs"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    assert continued.main() == 0
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(row["losses"]) == len(row["losses_dense"]) == 3
    # Nothing of the model is lost on the way, and the first loss is before any step.
    assert row["losses"][0] == pytest.approx(row["losses_dense"][0], abs=0.05)
    assert row["losses"][2] < row["losses"][0] and row["held_out_after"] < row["held_out_before"]
    assert row["seconds"]["megatron-to-hf"] > 0 and row["files"] > 1
