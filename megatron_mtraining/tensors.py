# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checks of tensor arguments by their metadata (layout, dtype, device). They never wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from .errors import ConfigError


def own_context(device: torch.device) -> AbstractContextManager | None:
    """A context in which kernels are launched on ``device``, and autocast changes no dtype there; None where
    that is so already. Autocast would round scores that are in float32. A backward is under it if it is
    called in its region, whatever the forward was under."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    if elsewhere or torch.is_autocast_enabled(device.type):
        return _own_context(device)
    return None


@contextmanager
def _own_context(device: torch.device) -> Iterator[None]:
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, torch.autocast(device.type, enabled=False):
        yield


def check_dense(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a dense tensor: sparse, nested and quantized ones have
    no elements that can be sliced or indexed."""
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}: give a tensor")
    if value.is_nested:
        raise ConfigError(f"{name} is a nested tensor: give a dense one, padded to one length")
    if value.layout is not torch.strided:
        raise ConfigError(f"{name} is {value.layout}: give a dense tensor, as to_dense() makes it")


def check_values(**tensors: object) -> None:
    """Raise :class:`ConfigError` unless all are dense tensors with values, on one device."""
    first = ""
    device: torch.device | None = None
    for name, value in tensors.items():
        check_dense(name, value)
        assert isinstance(value, Tensor)
        if value.is_meta:
            raise ConfigError(
                f"{name} is on device meta, where tensors have no values: give one on a CPU or GPU"
            )
        if device is None:
            first, device = name, value.device
        elif value.device != device:
            raise ConfigError(
                f"{first} is on {device}, but {name} on {value.device}: put them on one device"
            )
