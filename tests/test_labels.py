# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What runs is named under a profiler, and only there."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.labels import (
    BACKWARD,
    FORWARD,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    SEARCH,
    TIMES,
)
from megatron_mtraining.loss import linear_cross_entropy


def step() -> None:
    query, key, value = (torch.randn(256, 1, heads, 64, requires_grad=True) for heads in (2, 1, 1))
    config = MTrainingConfig.from_options(price=0.5, block_size=64)
    out = attend(query, key, value, config=config).out
    weight = torch.randn(32, 128)
    labels = torch.randint(32, (256, 1))
    linear_cross_entropy(out.reshape(256, 1, 128), weight, labels, 100).mean().backward()


def test_parts_are_named_under_a_profiler(monkeypatch):
    with torch.profiler.profile() as profiler:
        step()
    found = [event.name for event in profiler.events() if event.name.startswith("mtraining/")]
    wanted = (
        "pattern search",
        "attention forward",
        "loss forward",
        "loss backward",
        "attention backward",
    )
    assert sorted(found) == sorted(f"mtraining/{name}" for name in wanted)

    def unwanted(name):
        raise AssertionError(f"{name} without a profiler")

    monkeypatch.setattr("megatron_mtraining.labels.record_function", unwanted)
    step()
    ranges = []

    @contextmanager
    def nvtx(name):
        ranges.append(name)
        yield

    monkeypatch.setattr("megatron_mtraining.labels.IN_NSYS", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    step()
    assert sorted(ranges) == sorted(found)


def test_times_of_the_parts_while_they_are_wanted():
    step()
    assert TIMES.take() == {}
    TIMES.on = True
    step()
    found = TIMES.take()
    assert sorted(found) == sorted(
        (SEARCH, FORWARD, BACKWARD, LOSS_FORWARD, LOSS_BACKWARD)
    ) and all(time > 0 for time in found.values())
    step()
    assert TIMES.take() == {} and not TIMES.on
