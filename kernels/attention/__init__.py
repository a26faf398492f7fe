# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sparse attention and its gradients, for one round of the ring at a time.

Each operation has up to three backends, which compute the same (``backends.py`` chooses by the operands):

- ``reference.py``: PyTorch, for CPU tensors; it defines the operation
- ``portable/``: Triton, for any GPU that Triton compiles for
- ``hopper/``: Gluon, for Hopper GPUs

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
from ..types import PatternOperand, RingStep, Round
from . import marks as block_marks
from . import reference
from .backends import OnePassBackend, backend_for, one_pass
from .marks import BlockMarks, new_marks

__all__ = [
    "backward_columns",
    "backward_key",
    "backward_query",
    "delta",
    "finish_query_sums",
    "forward",
    "gather_columns",
    "new_marks",
    "new_query_sums",
    "one_pass",
    "pack_kv",
    "pack_marks",
    "unpack_marks",
]

delta = dispatch(reference.delta, "portable.delta")
gather_columns = dispatch(reference.gather_columns, "portable.columns")
pack_kv = dispatch(reference.pack_kv, "portable.pack_kv")
pack_marks = dispatch(block_marks.pack_marks, "portable.pruning")
unpack_marks = dispatch(block_marks.unpack_marks, "portable.pruning")


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    column_kv: Tensor | None,
    index: PatternOperand,
    round_: Round,
    softmax_scale: float,
    accumulator: Tensor | None,
    lse: Tensor,
    marks: BlockMarks | None = None,
) -> Tensor:
    """Attention to the keys of one round, added to the result of the rounds before.

    Args:
        query: ``[s, b, h, d]``.
        key, value: ``[I, s, b, hk, d]``, of the ranks ``round_.sources``.
        column_kv: ``[2, b, h, C, d]``, keys and values of the columns of all ranks
            (:func:`gather_columns`), or None if there are none. Each head attends to them in one round.
        index: the pattern.
        round_: which keys these are.
        softmax_scale: factor of the scores.
        accumulator: the result of the rounds before, float32 ``[s, b, h, d]``; None in the first round.
        lse: log-sum-exp of the scores of the rounds before (natural logarithm), ``[b, h, s]``. Updated in
            place; not read in the first round.
        marks: the marks of the blocks of this round are added to these (:mod:`.marks`), from the share of
            each block in the attention to all keys up to it; None for no marks. The keys of a round come in
            this order: the query block itself; columns; with visible ranges, blocks that need a mask, the
            nearest first; the first block that the query block may attend to; all others, the nearest
            first. A key block that is the query block itself or the block before is always marked.

    Returns:
        out ``[s, b, h, d]``: in the query's dtype after the last round, else float32. It may be the
        accumulator's memory.
    """
    out = _result(query, round_, accumulator)
    backend_for(index, query, key, value).forward(
        query=query,
        key=key,
        value=value,
        column_kv=column_kv,
        index=index,
        round_=round_,
        softmax_scale=softmax_scale,
        accumulator=accumulator,
        out=out,
        lse=lse,
        marks=marks,
    )
    return out


def backward_query(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    column_kv: Tensor | None,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index: PatternOperand,
    round_: Round,
    softmax_scale: float,
    accumulator: Tensor | None,
    grad_query: Tensor | None = None,
    head_part: tuple[int, int] = (0, 1),
    attended: Tensor | None = None,
) -> Tensor:
    """The query's gradient through the keys of one round, added to the gradient of the previous rounds.

    Args:
        query, key, value, column_kv, index, round_, softmax_scale: as for :func:`forward`.
        grad_out: gradient of out, ``[s, b, h, d]``.
        lse, delta: of all rounds (:func:`forward`, :func:`delta`), ``[b, h, s]``.
        accumulator: the gradient of the rounds before, float32 ``[s, b, h, d]``; None in the first round.
        grad_query: what this function returned for the parts before; None for the first part.
        head_part: (p, P): compute part p of P of the ``b * h`` heads of all batch entries.
        attended: float32 ``[b, h, s]``: the share of each row's attention to the keys of this round is added;
            it is not read in the first round. None if it is not wanted.

    Returns:
        ``[s, b, h, d]``: in the query's dtype after the last round, else float32. It may be the
        accumulator's memory.
    """
    if grad_query is None:
        grad_query = _result(query, round_, accumulator)
    part, parts = head_part
    heads = query.shape[1] * query.shape[2]
    head_range = range(part * heads // parts, (part + 1) * heads // parts)
    if head_range:
        backend_for(index, query, key, value, grad_out).backward_query(
            query=query,
            key=key,
            value=value,
            column_kv=column_kv,
            grad_out=grad_out,
            lse=lse,
            delta=delta,
            index=index,
            round_=round_,
            softmax_scale=softmax_scale,
            accumulator=accumulator,
            grad_query=grad_query,
            head_range=head_range,
            attended=attended,
        )
    return grad_query


def backward_columns(
    query: Tensor,
    *,
    column_kv: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index: PatternOperand,
    rank: int,
    softmax_scale: float,
    query_sums: Tensor | None = None,
) -> Tensor:
    """Gradients of the keys and values of all columns through the queries of one rank.

    Args:
        query: ``[s, b, h, d]``, of ``rank``.
        column_kv, index, softmax_scale: as for :func:`forward`.
        grad_out, lse, delta: as for :func:`backward_query`.
        query_sums: of :func:`new_query_sums`: the queries' gradient through the columns is added.

    Returns:
        float32 ``[2, b, h, splits, C, d]``: of keys (without the factor ``softmax_scale``) and values, each
        the sum over splits; undefined past a head's number of columns. The gradient is the sum over ranks.
    """
    return backend_for(index, query, grad_out).backward_columns(
        query=query,
        column_kv=column_kv,
        grad_out=grad_out,
        lse=lse,
        delta=delta,
        index=index,
        rank=rank,
        softmax_scale=softmax_scale,
        query_sums=query_sums,
    )


def backward_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    index: PatternOperand,
    ring_step: RingStep,
    softmax_scale: float,
    accumulator: Tensor | None = None,
    column_gradients: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    query_sums: Tensor | None = None,
) -> Tensor:
    """Gradients of one rank's keys and values through the queries of one rank.

    Args:
        query, grad_out: ``[s, b, h, d]``, of ``ring_step.rank``.
        key, value: ``[s, b, hk, d]``, of ``ring_step.source``.
        lse, delta, index, softmax_scale: as for :func:`backward_query`.
        ring_step: whose queries and whose keys these are.
        accumulator: gradients of the same keys and values through other queries, float32
            ``[2, s, b, hk, d]``, contiguous: added to the result.
        column_gradients: the result of :func:`backward_columns`, summed over ranks. Its rows that are among
            these keys are added to the result: to be given once for each key, on its own rank.
        dtype: of the result.
        query_sums: of :func:`new_query_sums`: the queries' gradient through these keys is added.

    Returns:
        ``[2, s, b, hk, d]``, contiguous. It may be the accumulator's memory.
    """
    if dtype == torch.float32:
        dtype = torch.promote_types(query.dtype, dtype)
    grad_kv = accumulator
    if grad_kv is None or grad_kv.dtype != dtype:
        grad_kv = torch.empty((2, *key.shape), dtype=dtype, device=key.device)
    backend_for(index, query, key, value, grad_out).backward_key(
        query=query,
        key=key,
        value=value,
        grad_out=grad_out,
        lse=lse,
        delta=delta,
        index=index,
        ring_step=ring_step,
        softmax_scale=softmax_scale,
        accumulator=accumulator,
        column_gradients=column_gradients,
        grad_kv=grad_kv,
        query_sums=query_sums,
    )
    return grad_kv


def new_query_sums(query: Tensor, key: Tensor, value: Tensor, index: PatternOperand) -> Tensor:
    """Zeros to add the queries' gradient of a one-pass backward to (:func:`.backends.one_pass`).

    :func:`backward_columns` and :func:`backward_key` add to it, over all keys; :func:`finish_query_sums`
    makes the gradient of it. What is in it is the backend's own.

    Args:
        query: ``[s, b, h, d]``.
        key, value: ``[s, b, hk, d]``.
    """
    return cast(OnePassBackend, backend_for(index, query, key, value)).new_query_sums(query)


def finish_query_sums(
    query_sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: PatternOperand,
    *,
    softmax_scale: float,
) -> Tensor:
    """The queries' gradient, ``[s, b, h, d]`` in the query's dtype, once all keys have been added; operands
    as for :func:`new_query_sums`."""
    backend = cast(OnePassBackend, backend_for(index, query, key, value))
    return backend.finish_query_sums(query_sums, query, softmax_scale)


def _result(query: Tensor, round_: Round, accumulator: Tensor | None) -> Tensor:
    """Memory for the result of a round, ``[s, b, h, d]``: the accumulator's where the dtype stays."""
    if accumulator is not None and not round_.last:
        return accumulator
    dtype = query.dtype if round_.last else torch.promote_types(query.dtype, torch.float32)
    return torch.empty(query.shape, dtype=dtype, device=query.device)
