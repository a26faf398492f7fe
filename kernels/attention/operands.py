# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention's operands, one object for each direction, and their checks. The caller runs these once; the
kernels rely on it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.dispatch import uses_triton
from ..limits import HEAD_DIMS
from ..types import PatternOperand, RingStep, Round
from .marks import BlockMarks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of query, key and value. The reference implementations also take float64."""


class RoundKeys(NamedTuple):
    """The keys of one round.

    Attributes:
        key, value: ``[I, s, b, hk, d]``, of the ranks ``round.sources``.
        column_kv: ``[2, b, h, C, d]``, keys and values of the columns of all ranks (``gather_columns``), or
            None if there are none. Each head attends to them in one round.
        round: which keys these are.
    """

    key: Tensor
    value: Tensor
    column_kv: Tensor | None
    round: Round


class StepKeys(NamedTuple):
    """The keys of one rank.

    Attributes:
        key, value: ``[s, b, hk, d]``, of ``ring_step.source``.
        ring_step: whose keys and whose queries meet.
    """

    key: Tensor
    value: Tensor
    ring_step: RingStep


class ForwardInputs(NamedTuple):
    """What attention to the keys of one round takes.

    Attributes:
        query: ``[s, b, h, d]``.
        keys: of the round.
        index: the pattern.
        softmax_scale: factor of the scores.
        lse: log-sum-exp of the scores of the rounds before (natural logarithm), ``[b, h, s]``. Updated in
            place; not read in the first round.
        accumulator: the result of the rounds before, float32 ``[s, b, h, d]``; None in the first round.
        marks: the marks of the blocks of this round are added to these (:mod:`.marks`), from the share of
            each block in the attention to all keys up to it; None for no marks. The keys of a round come in
            this order: the query block itself; columns; with visible ranges, blocks that need a mask, the
            nearest first; the first block that the query block may attend to; all others, the nearest
            first. A key block that is the query block itself or the block before is always marked.
    """

    query: Tensor
    keys: RoundKeys
    # Shadows tuple.index(), which is never used.
    index: PatternOperand  # type: ignore[assignment]
    softmax_scale: float
    lse: Tensor
    accumulator: Tensor | None = None
    marks: BlockMarks | None = None


class BackwardInputs(NamedTuple):
    """What all gradients through the queries of one rank take.

    Attributes:
        query, grad_out: ``[s, b, h, d]``: the queries, and the gradient of their out.
        lse, delta: of all rounds, ``[b, h, s]``.
        index: the pattern.
        softmax_scale: factor of the scores.
        attended: float32 ``[b, h, s]``: the queries' gradient adds the share of each row's attention to the
            keys of a round; it is not read in the first round. None if it is not wanted.
        query_sums: of ``new_query_sums``, in one pass: the gradients of columns and keys add the queries'
            gradient through them. Else None.
    """

    query: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor
    # Shadows tuple.index(), which is never used.
    index: PatternOperand  # type: ignore[assignment]
    softmax_scale: float
    attended: Tensor | None = None
    query_sums: Tensor | None = None


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
