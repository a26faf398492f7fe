# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Counters of persistent kernels: each is used once, from where it starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from megatron_mtraining.kernels.common import counters
from megatron_mtraining.kernels.common.counters import work_counter


@pytest.mark.parametrize("first", [0, 12])
def test_a_counter_on_the_cpu(first):
    counter = work_counter(first, torch.device("cpu"))
    assert counter.dtype == torch.int32 and counter.tolist() == [first]


def test_streams_share_no_counters(monkeypatch):
    """With GPUs pretended: counters are made many at a time, for a stream of a device. Each is used once."""
    made, now = [], SimpleNamespace(stream=0, capturing=False)

    def zeros(length, dtype, device):
        made.append((torch.zeros(length, dtype=dtype), device.index, now.stream))
        return made[-1][0]

    cuda = SimpleNamespace(is_current_stream_capturing=lambda: now.capturing)
    fake = SimpleNamespace(
        cuda=cuda, zeros=zeros, full=lambda *given, **rest: given, int32=torch.int32
    )
    monkeypatch.setattr(counters, "torch", fake)
    monkeypatch.setattr(counters, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(counters, "_FREE", {})
    devices = [SimpleNamespace(type="cuda", index=index) for index in (0, 1)]
    for number in range(2 * 2 * counters._AT_ONCE):
        now.stream, device = number % 2, devices[number // 2 % 2]
        counter = work_counter(0, device)
        assert counter.shape == (1,) and counter.item() == 0
        counter.fill_(1 + 2 * device.index + now.stream)
    assert len(made) == 4
    for counts, device, stream in made:
        assert set(counts.tolist()) == {0, 1 + 2 * device + stream}
        assert counts.count_nonzero() == counters._AT_ONCE
    now.capturing = True
    assert work_counter(0, devices[0]) == ((1,), 0), "made by the captured graph itself"


@pytest.mark.gpu
def test_each_counter_is_used_once(monkeypatch):
    monkeypatch.setattr(counters, "_FREE", {})
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    used = []
    for number in range(2 * counters._AT_ONCE + 3):
        with torch.cuda.stream(streams[number % 2]):
            counter = work_counter(0, device)
            assert counter.shape == (1,) and counter.data_ptr() % 16 == 0
            used.append(counter.add_(number + 1))
    torch.cuda.synchronize()
    assert [counter.item() for counter in used] == [number + 1 for number in range(len(used))]
    assert len(counters._FREE) == 2
    assert work_counter(7, device).item() == 7


@pytest.mark.gpu
def test_a_captured_counter_starts_again():
    """Megatron may capture a layer: the counter must be 0 in each replay."""
    device = torch.device("cuda", torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter = work_counter(0, device)
        counter += 5
    for _ in range(3):
        graph.replay()
        assert counter.item() == 5
