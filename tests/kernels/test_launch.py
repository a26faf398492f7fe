# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Launches by what was found before: the same kernel only where Triton would find the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from megatron_mtraining.kernels.common import launch as module
from megatron_mtraining.kernels.common.launch import launch


class Kernel:
    """As Triton's: called with a grid it looks for a compiled one, and returns that."""

    def __init__(self):
        self.params = [SimpleNamespace(name=name) for name in ("x", "n", "WIDE", "BLOCK")]
        self.found, self.launched = 0, []

    def __getitem__(self, grid):
        def run(*arguments, BLOCK, WIDE, num_warps):
            self.found += 1
            self.launched.append((grid, *arguments, WIDE, BLOCK))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "_FOUND", {})
    active = SimpleNamespace(get_current_device=lambda: 0)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    return Kernel()


def test_what_is_the_same_to_the_compiler_is_looked_for_once(kernel):
    x, y = torch.zeros(64), torch.ones(64)
    launch(kernel, (3,), x, 7, BLOCK=32, WIDE=True, num_warps=4)
    launch(kernel, (5, 2), y, 7, BLOCK=32, WIDE=True, num_warps=4)
    assert kernel.found == 1
    assert kernel.launched[0][0] == (3,) and kernel.launched[1][0] == (5, 2, 1)
    assert kernel.launched[1][1] is y and kernel.launched[1][2:] == (7, True, 32)


def test_what_may_be_another_to_the_compiler_is_looked_for(kernel):
    x = torch.zeros(64)
    variants = [
        ((x, 7), dict(BLOCK=32, WIDE=True, num_warps=4)),
        ((x.half(), 7), dict(BLOCK=32, WIDE=True, num_warps=4)),
        ((x[1:], 7), dict(BLOCK=32, WIDE=True, num_warps=4)),
        ((x, 16), dict(BLOCK=32, WIDE=True, num_warps=4)),
        ((x, 7), dict(BLOCK=64, WIDE=True, num_warps=4)),
        ((x, 7), dict(BLOCK=32, WIDE=False, num_warps=4)),
        ((x, 7), dict(BLOCK=32, WIDE=True, num_warps=8)),
    ]
    for _ in range(2):
        for arguments, constants in variants:
            launch(kernel, (1,), *arguments, **constants)
    assert kernel.found == len(variants)


def test_what_is_kept_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    for n in range(10):
        launch(kernel, (1,), torch.zeros(64), n, BLOCK=32, WIDE=True, num_warps=4)
        assert len(module._FOUND) <= 3


@triton.jit
def _shift_kernel(x_ptr, y_ptr, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + by, mask=at < n)


@pytest.mark.gpu
def test_kernels_get_what_they_are_given():
    x = torch.randn(1000, device="cuda")
    for offset in (0, 1, 0, 4, 1):  # aligned and not
        for n in (900, 512, 900):
            y = torch.zeros_like(x)
            launch(_shift_kernel, (8,), x[offset:], y, n, 2.5, BLOCK=128, num_warps=4)
            assert torch.equal(y[:n], x[offset : offset + n] + 2.5) and not y[n:].any()
