# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Observation of attention and the table of a step on a GPU: real events and copies, and no wait in them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core", reason="the table is part of the Megatron plug-in")

from megatron_mtraining.megatron.balance.observer import LayerObserver, Observed
from megatron_mtraining.megatron.balance.table import StepTable

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_wait():
    """What runs in the test raises where it waits for the GPU; events, waited for by name, may."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def observed(device):
    ones = torch.ones(1, 4, device=device)
    return [
        Observed([0.1 * ones, 0.2 * ones], [0.9 * ones, 0.8 * ones], [(0, 1.5), (1, 2.0)]),
        Observed([0.3 * ones, 0.4 * ones], [0.7 * ones, 0.6 * ones], [(0, 0.5), (1, 1.0)]),
    ]


@pytest.mark.parametrize("on_device", [False, True], ids=["price_float", "price_tensor"])
def test_the_table_of_a_gpu_is_that_of_the_cpu(no_wait, on_device):
    found = {}
    for device in ("cpu", "cuda"):
        device = torch.device(device)
        # Written on the device by a kernel, as a copy from ordinary memory would wait.
        price = torch.full([], 0.25, device=device) if on_device else 0.25
        table = StepTable(2, 3, 1)
        table.keep(table.fill(None, price, observed(device), 2, device))
        header, rows = table.read()
        found[device.type] = header, {name: row.tolist() for name, row in rows.items()}
        assert table.on_device("multipliers").device.type == device.type
    assert found["cuda"][0] == found["cpu"][0] == {"planned": 0.0, "price": 0.25}
    for name, rows in found["cpu"][1].items():
        torch.testing.assert_close(
            torch.tensor(found["cuda"][1][name]), torch.tensor(rows), msg=name
        )
    assert found["cuda"][1]["density_sum"][0][1] == pytest.approx(0.4)
    assert found["cuda"][1]["measured_ms"] == [[0, 1, 0], [0, 1.5, 0]]


def test_what_was_kept_is_not_changed_by_the_next_step():
    """The copy to the host is of the step that was kept, whatever the GPU has still to do."""
    table = StepTable(1, 1, 0)
    for step in range(20):
        torch.cuda._sleep(2_000_000)
        table.keep(table.fill(None, float(step), [], 1, torch.device("cuda")))
        header, _ = table.read()
        assert header["price"] == step


def test_forward_and_backward_are_timed_by_events():
    """Not what the GPU does between them: the whole, with as much between, takes longer."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            torch.cuda._sleep(20_000_000)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            torch.cuda._sleep(40_000_000)
            return grad

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls = LayerObserver()
    x = torch.ones(8, device="cuda", requires_grad=True)
    start.record()
    out = calls.begin().timed(lambda: SimpleNamespace(out=Slow.apply(x)), cuda=True).out
    torch.cuda._sleep(60_000_000)  # other work
    out.sum().backward()
    end.record()
    (first, forward), (second, backward) = calls.take().times
    end.synchronize()
    assert first == second == 0
    assert 0 < forward and 0 < backward
    assert forward + backward < 0.75 * start.elapsed_time(end)
    assert x.grad is not None and calls.take().times == []
