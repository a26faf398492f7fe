# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings of the whole suite: GPU tests are skipped, saying so, where there is no GPU."""

import os

# Before torch starts its threads: several test processes share the cores of the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib
import pkgutil

import pytest
import torch


def import_kernels_interpreted() -> None:
    """Import the kernels' modules under Triton's interpreter, which is chosen as they are imported.

    Else the tests that interpret them pass or fail by what was imported before. The variable does
    not stay set: CPU tensors take the PyTorch twins again, except in those tests.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        package = importlib.import_module("megatron_mtraining.kernels")
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if not torch.cuda.is_available():
    import_kernels_interpreted()


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_report_header(config):
    from importlib.metadata import PackageNotFoundError, version

    def of(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        f"torch {torch.__version__}, megatron-core {of('megatron-core')}, "
        f"triton {of('triton')}, transformer-engine {of('transformer-engine')}, {gpus} GPUs"
    )
