# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sparse attention and its gradients, for one round of the ring at a time.

Each operation has up to three backends, which compute the same (``backends.py`` chooses by the operands):

- ``reference.py``: PyTorch, for CPU tensors; it defines the operation
- ``portable/``: Triton, for any GPU that Triton compiles for
- ``hopper/``: Gluon, for Hopper GPUs

Dense attention on one rank may be a library's (``library.py``).

Shapes: query, out and their gradients ``[s, b, h, d]``; key, value and their gradients ``[s, b, hk, d]``,
and ``[I, s, b, hk, d]`` for the I ranks of a round; lse and delta ``[b, h, s]``, float32. ``s`` is the length
of a rank's part of the sequence, ``h`` a multiple of ``hk``. Operands have unit stride in ``d`` and any other
strides (``operands.unit_stride``), and the caller has checked them (``operands.check_operands``). float64
operands, which only the reference takes, have float64 where others have float32.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..common.dispatch import dispatch
from ..types import PatternOperand, Round
from . import marks as block_marks
from . import reference
from .backends import OnePassBackend, backend_for, choose_backward
from .library import library_for
from .marks import new_marks
from .operands import BackwardInputs, ForwardInputs, RoundKeys, StepKeys

__all__ = [
    "BackwardInputs",
    "ForwardInputs",
    "RoundKeys",
    "StepKeys",
    "backward_columns",
    "backward_key",
    "backward_query",
    "choose_backward",
    "delta",
    "finish_query_sums",
    "forward",
    "gather_columns",
    "library_for",
    "new_marks",
    "new_query_sums",
    "pack_kv",
    "pack_marks",
    "unpack_marks",
]

delta = dispatch(reference.delta, "portable.delta")
gather_columns = dispatch(reference.gather_columns, "portable.columns")
pack_kv = dispatch(reference.pack_kv, "portable.pack_kv")
pack_marks = dispatch(block_marks.pack_marks, "portable.pruning")
unpack_marks = dispatch(block_marks.unpack_marks, "portable.pruning")


def forward(inputs: ForwardInputs) -> Tensor:
    """Attention to the keys of one round, added to the result of the rounds before.

    Returns:
        out ``[s, b, h, d]``: in the query's dtype after the last round, else float32. It may be the
        accumulator's memory.
    """
    query, keys = inputs.query, inputs.keys
    out = _result(query, keys.round, inputs.accumulator)
    backend_for(inputs.index, query, keys.key, keys.value).forward(inputs, out)
    return out


def backward_query(
    inputs: BackwardInputs,
    keys: RoundKeys,
    *,
    accumulator: Tensor | None = None,
    grad_query: Tensor | None = None,
    head_part: tuple[int, int] = (0, 1),
) -> Tensor:
    """The query's gradient through the keys of one round, added to the gradient of the previous rounds.

    Args:
        accumulator: the gradient of the rounds before, float32 ``[s, b, h, d]``; None in the first round.
        grad_query: what this function returned for the parts before; None for the first part.
        head_part: (p, P): compute part p of P of the ``b * h`` heads of all batch entries.

    Returns:
        ``[s, b, h, d]``: in the query's dtype after the last round, else float32. It may be the
        accumulator's memory.
    """
    query = inputs.query
    if grad_query is None:
        grad_query = _result(query, keys.round, accumulator)
    part, parts = head_part
    heads = query.shape[1] * query.shape[2]
    head_range = range(part * heads // parts, (part + 1) * heads // parts)
    if head_range:
        backend = backend_for(inputs.index, query, keys.key, keys.value, inputs.grad_out)
        backend.backward_query(inputs, keys, grad_query, accumulator, head_range)
    return grad_query


def backward_columns(inputs: BackwardInputs, column_kv: Tensor, rank: int) -> Tensor:
    """Gradients of the keys and values of all columns through the queries of one rank.

    Args:
        column_kv: ``[2, b, h, C, d]`` (:func:`gather_columns`).
        rank: whose queries these are.

    Returns:
        float32 ``[2, b, h, splits, C, d]``: of keys (without the factor ``softmax_scale``) and values, each
        the sum over splits; undefined past a head's number of columns. The gradient is the sum over ranks.
    """
    backend = backend_for(inputs.index, inputs.query, inputs.grad_out)
    return backend.backward_columns(inputs, column_kv, rank)


def backward_key(
    inputs: BackwardInputs,
    keys: StepKeys,
    *,
    accumulator: Tensor | None = None,
    column_gradients: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gradients of one rank's keys and values through the queries of one rank.

    Args:
        accumulator: gradients of the same keys and values through other queries, float32
            ``[2, s, b, hk, d]``, contiguous: added to the result.
        column_gradients: the result of :func:`backward_columns`, summed over ranks. Its rows that are among
            these keys are added to the result: to be given once for each key, on its own rank.
        dtype: of the result.

    Returns:
        ``[2, s, b, hk, d]``, contiguous. It may be the accumulator's memory.
    """
    query, key = inputs.query, keys.key
    if dtype == torch.float32:
        dtype = torch.promote_types(query.dtype, dtype)
    grad_kv = accumulator
    if grad_kv is None or grad_kv.dtype != dtype:
        grad_kv = torch.empty((2, *key.shape), dtype=dtype, device=key.device)
    backend = backend_for(inputs.index, query, key, keys.value, inputs.grad_out)
    backend.backward_key(inputs, keys, grad_kv, accumulator, column_gradients)
    return grad_kv


def new_query_sums(query: Tensor, key: Tensor, value: Tensor, index: PatternOperand) -> Tensor:
    """Zeros to add the queries' gradient to, in one pass (:data:`~..types.BackwardPath.ONE_PASS`).

    :func:`backward_columns` and :func:`backward_key` add to it, over all keys; :func:`finish_query_sums`
    makes the gradient of it. What is in it is the backend's own.

    Args:
        query: ``[s, b, h, d]``.
        key, value: ``[s, b, hk, d]``.
    """
    return cast(OnePassBackend, backend_for(index, query, key, value)).new_query_sums(query)


def finish_query_sums(inputs: BackwardInputs, key: Tensor, value: Tensor) -> Tensor:
    """The queries' gradient, ``[s, b, h, d]`` in the query's dtype, once all keys have been added; key and
    value as for :func:`new_query_sums`."""
    assert inputs.query_sums is not None
    backend = cast(OnePassBackend, backend_for(inputs.index, inputs.query, key, value))
    return backend.finish_query_sums(inputs.query_sums, inputs.query, inputs.softmax_scale)


def _result(query: Tensor, round_: Round, accumulator: Tensor | None) -> Tensor:
    """Memory for the result of a round, ``[s, b, h, d]``: the accumulator's where the dtype stays."""
    if accumulator is not None and not round_.last:
        return accumulator
    dtype = query.dtype if round_.last else torch.promote_types(query.dtype, torch.float32)
    return torch.empty(query.shape, dtype=dtype, device=query.device)
