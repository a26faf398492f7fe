# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checks of attention's operands. The caller runs them once; the kernels rely on it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.dispatch import uses_triton
from ..limits import HEAD_DIMS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of query, key and value. The reference implementations also take float64."""


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that the kernels can take these operands.

    Args:
        query: ``[s, b, h, d]``.
        key, value: ``[s, b, hk, d]``.

    Raises:
        ValueError: a shape, head dimension or dtype that is not supported; the message has the values.
    """
    shape, kv_shape = query.shape, key.shape
    if len(shape) != 4 or kv_shape != value.shape or shape[:2] != kv_shape[:2]:
        raise ValueError(
            "expected query [s, b, h, d] and key and value [s, b, hk, d], got "
            + _shapes(query, key, value)
        )
    if shape[3] != kv_shape[3] or shape[2] % kv_shape[2]:
        raise ValueError(
            "head dims must be equal, KV heads must divide query heads: "
            + _shapes(query, key, value)
        )
    if shape[3] not in HEAD_DIMS:
        raise ValueError(f"head dim {shape[3]} is not supported: use one of {HEAD_DIMS}")
    allowed = DTYPES if uses_triton(query) else (*DTYPES, torch.float64)
    if query.dtype not in allowed or not query.dtype == key.dtype == value.dtype:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(
            f"query, key, value are {query.dtype}, {key.dtype}, {value.dtype}: "
            f"they must share one dtype of {names}"
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def unit_stride(*tensors: Tensor) -> list[Tensor]:
    """The tensors with unit stride in the last dimension, which the kernels need: copied where they have
    another. Megatron's projections give operands of unit stride."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
