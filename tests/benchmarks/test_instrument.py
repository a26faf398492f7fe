# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/instrument.py``: in the trace of a real GPTModel every product is in its part's range, forward
and backward."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.model import breakdown
from tests.support import breakdown_worker
from tests.support.ranks import run_script

pytestmark = pytest.mark.slow
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
LAYERS = breakdown_worker.LAYERS
CHUNKS = math.ceil(breakdown_worker.SEQUENCE / breakdown_worker.CHUNK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    run = run_script(1, breakdown_worker.__file__, folder)
    assert run.returncode == 0, run.stdout[-4000:]
    return folder


def products(trace: Path) -> Counter:
    """How many matrix products a step has in each part: each is given a kernel of a microsecond."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [e for e in events if e.get("name") == "mtraining: step"]
    assert len(steps) == breakdown_worker.TRACED
    made = []
    for step in steps:
        end = step["ts"] + step["dur"]
        found = [e for e in events if e.get("name") in PRODUCTS and step["ts"] <= e["ts"] < end]
        assert len(found) < step["dur"]
        for at, event in enumerate(found):
            number = dict(correlation=len(made))
            made.append({**event, "cat": "cuda_runtime", "dur": 1, "args": number})
            made.append({**made[-1], "cat": "kernel", "name": "gemm", "ts": step["ts"] + at})
    parts = breakdown.split(events + made)["breakdown"]
    assert parts.pop("waiting") > 0
    return Counter({part: round(1000 * ms) for part, ms in parts.items() if ms})


@pytest.mark.parametrize("case", [c for c in breakdown_worker.CASES if "not" not in c])
def test_products_by_part(folder, case):
    settings = breakdown_worker.CASES[case]
    again = 1 if settings.get("config") else 0
    # Four linear layers, each with two products in its backward.
    expected = {"layers": 4 * (1 + again + 2) * LAYERS}
    expected["loss"] = 4 * CHUNKS if settings.get("chunk") else 3
    if not settings.get("ours"):
        runs = 1 if settings.get("kept") else 1 + again
        expected["attention"] = 2 * (runs + 2) * LAYERS
    found = products(folder / case / "trace-0.json")
    if settings.get("ours"):
        assert found.pop("attention", 0) > 0  # as its kernels' stand-in has them
    assert found == expected


def test_ranges_and_our_loss_change_no_loss(folder):
    losses = {name: torch.load(folder / name / "losses.pt") for name in breakdown_worker.CASES}
    first = losses.pop("dense")
    assert len(set(first)) == breakdown_worker.STEPS
    for name, other in losses.items():
        assert other == pytest.approx(first, rel=1e-5), name
