# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dispatch: CPU tensors take the reference implementation, others the kernel's function of the same name."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_mtraining.kernels.common.dispatch import dispatch


def scaled(rows: object, values: torch.Tensor, *, factor: float = 2.0):
    """Values times a factor."""
    return "reference", values * factor


@pytest.fixture
def kernel(monkeypatch):
    """A module ``scale_kernel`` of this package whose ``scaled`` says that it ran."""
    module = ModuleType(f"{__package__}.scale_kernel")
    module.scaled = lambda rows, values, *, factor=2.0: ("kernel", values * factor)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_cpu_tensors_take_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = dispatch(scaled, "no_such_module")  # must not be imported
    which, result = op(None, torch.ones(2), factor=3.0)
    assert which == "reference" and result.tolist() == [3.0, 3.0]


def test_the_environment_is_read_at_each_call(monkeypatch, kernel):
    op = dispatch(scaled, "scale_kernel")
    for interpret, expected in (("1", "kernel"), ("0", "reference"), ("1", "kernel")):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert op(None, torch.ones(2))[0] == expected


@pytest.mark.gpu
def test_gpu_tensors_take_the_kernel(kernel):
    assert dispatch(scaled, "scale_kernel")(None, torch.ones(2, device="cuda"))[0] == "kernel"


def test_the_first_tensor_decides(monkeypatch, kernel):
    """Operands before it are skipped, and it may be given by keyword."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op = dispatch(scaled, "scale_kernel")
    assert op(SimpleNamespace(query=torch.ones(1)), values=torch.ones(2))[0] == "kernel"
    with pytest.raises(TypeError, match="no operand is a tensor"):
        op(None, 3)


def test_signature_and_docstring_are_the_references():
    op = dispatch(scaled, "scale_kernel")
    assert inspect.signature(op) == inspect.signature(scaled)
    assert op.__doc__ == scaled.__doc__ and op.__name__ == "scaled"
