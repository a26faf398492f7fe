# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention and its gradients, a round at a time: by the kernels for these operands, or the twins."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.dispatch import uses_hopper, uses_triton
from . import reference


def pack(key: Tensor, value: Tensor, out: Tensor) -> None:
    """Copy keys and values, of unit stride in ``d``, into ``out``, ``[2, s, b, hk, d]``, contiguous."""
    if not uses_triton(key):
        out[0].copy_(key)
        out[1].copy_(value)
        return
    from .pack_kv import pack as launch

    launch(key, value, out)


def gather_columns(key: Tensor, value: Tensor | None, index, rank: int) -> Tensor:
    """Each head's columns that ``rank`` owns, from its keys and values; zeros for those of other ranks.

    Args:
        value: None for keys alone.
        index: anything with ``columns``, int32 ``[b, h, C]`` in any order, and the layout.

    Returns:
        ``[2, b, h, C, d]`` (``[1, ...]`` of keys alone) in the key's dtype, contiguous, in the order of
        ``index.columns``. The sum over ranks, which is exact, is all columns: ``columns`` of the functions
        below.
    """
    if not uses_triton(key):
        return reference.gather_columns(key, value, index, rank)
    from .columns import gather_columns as launch

    return launch(key, value, index, rank)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor | None,
    index,
    this,
    softmax_scale: float,
    carry: Tensor | None,
    lse: Tensor,
) -> Tensor:
    """Attend to the keys of one round, on top of the rounds before.

    Args:
        key, value: ``[I, s, b, hk, d]``, of the ranks at ``this.sources``.
        columns: ``[2, b, h, C, d]``, the columns of all ranks, attended in one of the rounds by each head
            (``this.round_index``); None if there are none.
        carry: out of the rounds before, float32; None at the first.
        lse: softmax log-sum-exp so far (natural logarithm), float32, updated in place; its content
            is not read at the first round.

    Returns:
        out ``[s, b, h, d]``: in the query's dtype after the last round, otherwise float32 (which may
        be the carry's memory).
    """
    operands = (query, key, value, columns, index, this, softmax_scale, carry)
    if not uses_triton(query):
        out = reference.attention_forward(*operands, lse)
        return out.to(query.dtype) if this.last else out
    if uses_hopper(index, query, key, value):
        from .hopper.forward import forward
    else:
        from .portable.forward import forward

    out = carry
    if this.last or carry is None:
        dtype = query.dtype if this.last else torch.float32
        out = torch.empty(query.shape, dtype=dtype, device=query.device)
    forward(*operands, out, lse)
    return out


def attention_delta(out: Tensor, grad_out: Tensor) -> Tensor:
    """Row sums of ``out * grad_out``: float32 ``[b, h, s]``."""
    if not uses_triton(out):
        return reference.attention_delta(out, grad_out)
    from .portable.backward_query import delta

    length, batch, heads, _ = out.shape
    result = torch.empty(batch, heads, length, dtype=torch.float32, device=out.device)
    delta(out, grad_out, result)
    return result


def attention_backward_query(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor | None,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index,
    this,
    softmax_scale: float,
    carry: Tensor | None,
    gradient: Tensor | None = None,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    """The queries' gradient of one round, on top of the rounds before.

    Args:
        key, value, columns: as for the forward.
        lse, delta: of all rounds, float32.
        carry: the gradient of the rounds before, float32; None at the first.
        gradient: where to, what this function has returned for the other parts; None for the first part.
        part: (p, P): for the heads (of all batch entries) from ``p / P`` on to ``(p + 1) / P`` alone.

    Returns:
        ``[s, b, h, d]``, in the query's dtype after the last round, otherwise float32 (which may be the
        carry's memory).
    """
    operands = (query, key, value, columns, grad_out, lse, delta, index, this, softmax_scale, carry)
    dq = gradient
    if dq is None:
        dq = carry
        if this.last or carry is None:
            dtype = query.dtype
            if not this.last:
                dtype = torch.promote_types(dtype, torch.float32)
            dq = torch.empty(query.shape, dtype=dtype, device=query.device)
    lines = query.shape[1] * query.shape[2]
    heads = range(part[0] * lines // part[1], (part[0] + 1) * lines // part[1])
    if not heads:
        return dq
    if not uses_triton(query):
        reference.attention_backward_query(*operands, dq, heads)
        return dq
    if uses_hopper(index, query, key, value, grad_out):
        from .hopper.backward_query import backward_query
    else:
        from .portable.backward_query import backward_query
    backward_query(*operands, dq, heads)
    return dq


def attention_backward_columns(
    query: Tensor,
    columns: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index,
    rank: int,
    softmax_scale: float,
) -> Tensor:
    """Gradients of all columns from the queries of ``rank``.

    Returns:
        float32 ``[2, b, h, parts, C, d]``: of keys (``softmax_scale`` left out) and values, as sums of their
        parts; undefined past a head's number of columns. What all ranks have is to be summed.
    """
    operands = (query, columns, grad_out, lse, delta, index, rank, softmax_scale)
    if not uses_triton(query):
        return reference.attention_backward_columns(*operands)
    if uses_hopper(index, query, grad_out):
        from .hopper.backward_columns import backward_columns
    else:
        from .portable.backward_key import backward_columns
    return backward_columns(*operands)


def attention_backward_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index,
    step,
    softmax_scale: float,
    carry: Tensor | None = None,
    column_gradients: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gradients of one rank's keys and values.

    Args:
        key, value: ``[s, b, hk, d]``, of the rank at ``step.source``.
        carry: the same keys' gradients from other ranks, float32 ``[2, s, b, hk, d]``, contiguous: added.
        column_gradients: those of all columns (:func:`attention_backward_columns`), summed over ranks:
            the rows that are among these keys are added. Once for each key: on its own rank.
        dtype: of the result.

    Returns:
        ``[2, s, b, hk, d]``, contiguous; it may be the carry's memory.
    """
    operands = (query, key, value, grad_out, lse, delta, index, step, softmax_scale)
    if not uses_triton(query):
        gradients = reference.attention_backward_key(*operands, carry, column_gradients)
        return gradients.to(
            torch.promote_types(query.dtype, dtype) if dtype == torch.float32 else dtype
        )
    gradients = carry
    if carry is None or dtype != carry.dtype:
        gradients = torch.empty((2, *key.shape), dtype=dtype, device=key.device)
    if uses_hopper(index, query, key, value, grad_out):
        from .hopper.backward_key import backward_key
    else:
        from .portable.backward_key import backward_key
    backward_key(*operands, carry, column_gradients, gradients)
    return gradients
