# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Kernels of one ring step of sparse attention, in Triton, with plain PyTorch twins.

CUDA tensors take the Triton kernels; CPU tensors take the twins, or the kernels too under Triton's
interpreter (``TRITON_INTERPRET=1``). Nothing here knows of process groups or of Megatron.

Shapes, throughout: query, out and their gradients ``[s, b, h, d]``, key, value and theirs
``[s, b, hk, d]`` with ``h`` a multiple of ``hk``; any strides with unit stride in ``d``; softmax_lse
and delta ``[b, h, s]``. ``s`` is this rank's part of the sequence. ``index`` is a
:class:`~megatron_mtraining.pattern.index.VerticalSlashIndex`, ``step`` a
:class:`~megatron_mtraining.ring.schedule.RingStep`.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..config import HEAD_DIMS
from . import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

__all__ = [
    "attention_backward",
    "attention_delta",
    "attention_forward",
    "check_operands",
    "diagonal_mass",
]


def uses_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels run on this tensor; read at call time, as tests switch it."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError, naming what was given, unless the kernels can take these operands."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() != 4 or key.shape != value.shape or query.shape[:2] != key.shape[:2]:
        raise ValueError(f"expected [s, b, h, d] and twice [s, b, hk, d], got {shapes}")
    if query.shape[3] != key.shape[3] or query.shape[2] % key.shape[2]:
        raise ValueError(f"head dims must be equal, KV heads must divide query heads: {shapes}")
    if query.shape[3] not in HEAD_DIMS:
        raise ValueError(f"head dim {query.shape[3]} is not supported: use one of {HEAD_DIMS}")
    # float64 runs on the twins alone: a reference for tests.
    allowed = DTYPES if uses_triton(query) else (*DTYPES, torch.float64)
    if query.dtype not in allowed or not query.dtype == key.dtype == value.dtype:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(
            f"query, key, value are {query.dtype}, {key.dtype}, {value.dtype}: "
            f"they must share one dtype of {names}"
        )


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index,
    step,
    softmax_scale: float,
    carry: Tensor | None,
    lse: Tensor,
) -> Tensor:
    """Attend to the keys of one ring step, on top of the steps before.

    Args:
        carry: out of the steps before, float32; None at the first.
        lse: softmax log-sum-exp so far (natural logarithm), float32, updated in place; its content
            is not read at the first step.

    Returns:
        out ``[s, b, h, d]``: in the query's dtype after the last step, otherwise float32 (which may
        be the carry's memory).
    """
    if not uses_triton(query):
        out = reference.attention_forward(query, key, value, index, step, softmax_scale, carry, lse)
        return out.to(query.dtype) if step.last else out
    from .forward import forward

    out = carry
    if step.last or carry is None:
        dtype = query.dtype if step.last else torch.float32
        out = torch.empty(query.shape, dtype=dtype, device=query.device)
    forward(query, key, value, index, step, softmax_scale, carry, out, lse)
    return out


def attention_delta(out: Tensor, grad_out: Tensor) -> Tensor:
    """Row sums of ``out * grad_out``: float32 ``[b, h, s]``."""
    if not uses_triton(out):
        return reference.attention_delta(out, grad_out)
    from .backward_query import delta

    length, batch, heads, _ = out.shape
    result = torch.empty(batch, heads, length, dtype=torch.float32, device=out.device)
    delta(out, grad_out, result)
    return result


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index,
    step,
    softmax_scale: float,
    grad_query: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of one ring step.

    Args:
        lse, delta: the whole ring's log-sum-exp and row sums, float32.
        grad_query: the queries' gradient of the steps before, float32; None at the first.

    Returns:
        grad_query, in the query's dtype after the last step, otherwise float32; the gradients of
        key and value from this step alone, stacked ``[2, s, b, hk, d]``, float32 (in the key's dtype
        if the ring has only this step).
    """
    single = step.first and step.last
    if not uses_triton(query):
        dq, dkv = reference.attention_backward(
            query, key, value, grad_out, lse, delta, index, step, softmax_scale, grad_query
        )
        return dq.to(query.dtype) if step.last else dq, dkv.to(key.dtype) if single else dkv
    from .backward_key import backward_key
    from .backward_query import backward_query

    out_dtype = query.dtype if step.last else torch.float32
    dq = grad_query
    if step.last or grad_query is None:
        dq = torch.empty(query.shape, dtype=out_dtype, device=query.device)
    backward_query(
        query, key, value, grad_out, lse, delta, index, step, softmax_scale, grad_query, dq
    )
    kv_dtype = key.dtype if single else torch.float32
    dkv = torch.empty((2, *key.shape), dtype=kv_dtype, device=key.device)
    backward_key(
        query, key, value, grad_out, lse, delta, index, step, softmax_scale, dkv[0], dkv[1]
    )
    return dq, dkv


def diagonal_mass(
    probabilities: Tensor, rows: Tensor, seq_length: int, rank: int, world: int, block_size: int
) -> Tensor:
    """Sum attention probabilities by token distance.

    Args:
        probabilities: float32 ``[b, h, R, s]``, contiguous, of sampled query rows over this rank's
            keys; 0 where the key comes after the query.
        rows: int64 ``[R]``, the rows' global positions.
        seq_length, rank, world, block_size: the striped layout of the keys.

    Returns:
        float32 ``[b, h, seq_length]``: this rank's share, by ``row - key``.
    """
    if not uses_triton(probabilities):
        return reference.diagonal_mass(probabilities, rows, seq_length, rank, world, block_size)
    from .diagonal import diagonal_mass as launch

    return launch(probabilities, rows, seq_length, rank, world, block_size)
