# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparse attention over a context-parallel group: choose the pattern, run the ring."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from .config import MTrainingConfig
from .documents import Documents
from .kernels.attention.operands import check_operands, unit_stride
from .pattern import BlockListIndex, VerticalSlashIndex, check_choice, choose_index
from .ring import KeysAndValues, ring_attention, ring_of


class Attended(NamedTuple):
    """What attention has found, all that its backward needs beside the operands."""

    out: Tensor
    """``[s, b, h, d]``, in the query's dtype, contiguous."""
    lse: Tensor
    """Log-sum-exp of the rows' scores, ``[b, h, s]``, float32 (float64 for float64); no gradient."""
    index: VerticalSlashIndex | BlockListIndex
    """The pattern it was computed with."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: MTrainingConfig,
    cp_group: dist.ProcessGroup | None = None,
    cp_inner: int | None = None,
    softmax_scale: float | None = None,
    attended: Attended | None = None,
    documents: Documents | None = None,
    **choice,
) -> Attended:
    """Causal self-attention to the keys that each head's pattern keeps.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence in the block-striped layout.
        key, value: ``[s, b, hk, d]``. Head dim 64 or 128; bf16, fp16 or fp32.
        config: the settings; ``s * world`` must be a multiple of ``block_size * world`` (on one rank
            the last block may be partial).
        cp_group: the context-parallel group; None for a single process.
        cp_inner: ranks of a node, whose keys are attended to at once; None for
            :func:`~megatron_mtraining.layout.inner_size`.
        softmax_scale: default ``d ** -0.5``.
        attended: what this function has returned for the same operands before, as in a replay under
            activation recomputation, on all ranks or on none: no pattern is chosen then, no forward
            is run and nothing is sent, but the result has a backward. Without its ``out``, the pattern alone
            is taken from it.
        documents: packed ones, of the whole sequence, on this device: queries attend to keys of their own
            document alone, and the pattern is chosen from what they may attend to. None for one document.
            ``attended`` has them already.
        choice: ``head_policies`` and ``price`` of :func:`~megatron_mtraining.pattern.choose_index`.

    Returns:
        out, its log-sum-exp and the pattern.

    Raises:
        ValueError: on operands or a sequence length that do not fit, before any communication.
        ConfigError: on documents or settings that do not.
    """
    ring = ring_of(cp_group, cp_inner)
    check_operands(query, key, value)
    query, key, value = unit_stride(query, key, value)
    if documents is not None:
        documents.check(query.shape[1], query.shape[0] * ring.world, query.device)
    if softmax_scale is None:
        softmax_scale = query.shape[-1] ** -0.5
    keys = before = None
    if attended is None:
        check_choice(query.shape[0] * ring.world, config, ring.world)
    if attended is None or attended.out is None:
        # They travel while the pattern is chosen.
        keys = KeysAndValues(key, value, ring)
    else:
        before = attended.out, attended.lse
    if attended is None:
        index = choose_index(
            query, key, config, ring, softmax_scale, documents=documents,
            gather=lambda index: keys.columns(index).wait()[0], **choice,
        )  # fmt: skip
    else:
        index = attended.index
    found = ring_attention(
        query, key, value, index, ring, softmax_scale, before, config.bf16_gradients, keys
    )
    return Attended(*found, index)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: MTrainingConfig,
    cp_group: dist.ProcessGroup | None = None,
    cp_inner: int | None = None,
    softmax_scale: float | None = None,
    documents: Documents | None = None,
    **choice,
) -> tuple[Tensor, VerticalSlashIndex | BlockListIndex]:
    """out and pattern of :func:`attend`, which says what is taken."""
    out, _, index = attend(
        query, key, value, config=config, cp_group=cp_group, cp_inner=cp_inner,
        softmax_scale=softmax_scale, documents=documents, **choice,
    )  # fmt: skip
    return out, index
