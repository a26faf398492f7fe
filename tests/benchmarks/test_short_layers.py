# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/layer/short_layers.py: its rows, where no GPU is needed."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.layer import short_layers
from benchmarks.lib import jobs

SWITCH = "MTRAINING_SEARCH_GRAPH"


@pytest.mark.parametrize("policy", ["price", "fixed"])
def test_rows_with_and_without_graphs(tmp_path, monkeypatch, policy):
    monkeypatch.setattr(short_layers, "ROUNDS", 1)
    monkeypatch.setattr(short_layers, "RUNS", 1)
    monkeypatch.setattr(short_layers, "SHAPE", dict(heads=2, kv_heads=1, dim=64))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = []
    original = short_layers.search_pattern
    monkeypatch.setattr(
        short_layers,
        "search_pattern",
        lambda *all: asked.append(os.environ.get(SWITCH)) or original(*all),
    )
    output = tmp_path / "rows.jsonl"
    short_layers.main(["--seq", "1024", "--policy", policy, "--output", str(output)])
    rows = jobs.read(output)
    assert [row["search"] for row in rows] == ["kernels", "graph"]
    for row in rows:
        assert (row["seq"], row["heads"], row["kv_heads"], row["dim"]) == (1024, 2, 1, 64)
        for part in ("search", "forward", "backward"):
            assert row[f"{part}_host_us"] > 0 and row[f"{part}_ms"] > 0
    assert set(asked) == {"0", "1"}
    assert SWITCH not in os.environ
