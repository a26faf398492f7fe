# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparse attention over a context-parallel group: search the pattern, run the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .agreement import check_agreement
from .config import MTrainingConfig, Policy, option
from .cp_group import CPGroup, ProcessGroup, cp_group_of
from .documents import Documents
from .kernels.attention.operands import check_operands, unit_stride
from .pattern import BlockListIndex, VerticalSlashIndex, check_search, search_pattern
from .pattern.vertical_slash_index import PatternIndex
from .ring.attention import KeysAndValues, ring_attention
from .ring.transport import ring_of


class AttentionResult(NamedTuple):
    """The result of :func:`attend`: all that its backward needs beside the operands."""

    out: Tensor
    """``[s, b, h, d]``, in the query's dtype, contiguous."""
    lse: Tensor
    """Log-sum-exp of the rows' scores, ``[b, h, s]``, float32 (float64 for float64); no gradient."""
    # It hides a method of tuples, which a result has no use for.
    index: VerticalSlashIndex | BlockListIndex  # type: ignore[assignment]
    """The pattern that was attended to."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: MTrainingConfig,
    cp_group: ProcessGroup | None = None,
    cp_inner: int | None = None,
    softmax_scale: float | None = None,
    documents: Documents | None = None,
    head_policies: Sequence[Policy] | None = None,
    price: Tensor | None = None,
    first_pass: AttentionResult | None = None,
) -> AttentionResult:
    """Causal self-attention to the keys that each head's pattern selects.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence in the block-striped layout.
        key, value: ``[s, b, hk, d]``. Head dim 64 or 128; bf16, fp16 or fp32; any strides (those of other
            than unit stride in ``d`` are copied).
        config: the settings; ``s * world`` must be a multiple of ``block_size * world`` (on one rank
            the last block may be partial).
        cp_group: the context-parallel group; None for a single process.
        cp_inner: ranks of an inner group, whose keys are attended to in one round; None for
            :func:`~megatron_mtraining.layout.inner_size`.
        softmax_scale: default ``d ** -0.5``.
        documents: packed documents of the whole sequence, on this device: queries attend to keys of their own
            document alone, in the pattern search too. None for one document.
        head_policies: the policy of each of the ``h`` heads; None for ``config.policy`` in all.
        price: float32 ``[]`` or ``[h]``, in place of the price of ``config``.
        first_pass: the result for the same operands in the first pass, in a replay under activation
            recomputation; on all ranks or on none. Its pattern is used again. Without its ``out`` and ``lse``
            attention is computed again; with them no forward is run and nothing is sent, but the result has
            a backward.

    Returns:
        out, its log-sum-exp and the pattern.

    Raises:
        ValueError: on operands, a sequence length or a pattern that do not fit.
        ConfigError: on documents or settings that do not; on every rank, if ranks are given other settings
            or operands of other shapes. They compare what they are given at the first call of each kind.
    """
    _check_kinds(query, key, value, config)
    cp = cp_group_of(cp_group, cp_inner)
    if softmax_scale is None:
        softmax_scale = query.shape[-1] ** -0.5
    _compare_with_ranks(cp, query, key, value, config, softmax_scale, documents, head_policies)
    _check(query, key, value, cp, softmax_scale, documents)
    _check_of_heads(query.shape[2], head_policies, price)
    query, key, value = unit_stride(query, key, value)
    ring = ring_of(cp)
    if first_pass is None:
        check_search(query.shape[0] * cp.world, config, cp.world)
        keys = KeysAndValues(key, value, ring)  # in flight during the pattern search
        index = search_pattern(
            query,
            key,
            config,
            cp,
            softmax_scale,
            head_policies=head_policies,
            price=price,
            documents=documents,
            gather_keys=keys.gather_column_keys,
        )
        computed = None
    else:
        index, keys = first_pass.index, None
        check_index(index, query, cp)
        computed = None if first_pass.out is None else (first_pass.out, first_pass.lse)
    found = ring_attention(
        query, key, value, index, ring, softmax_scale, computed, config.bf16_gradients, keys
    )
    return AttentionResult(*found, index)


_COMPARED: WeakKeyDictionary[CPGroup, set[tuple]] = WeakKeyDictionary()
"""What the ranks of a group have found to be the same on all of them."""


def _compare_with_ranks(
    cp: CPGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig,
    softmax_scale: float,
    documents: Documents | None,
    head_policies: Sequence[Policy] | None,
) -> None:
    """Raise :class:`~.errors.ConfigError`, on every rank, unless all ranks of the group are given the same.
    A collective at the first call with these settings, shapes and dtypes."""
    if cp.world == 1:
        return
    kind = (
        config, None if head_policies is None else tuple(head_policies), query.shape, key.shape, value.shape,
        query.dtype, key.dtype, value.dtype, softmax_scale, documents is None,
    )  # fmt: skip
    compared = _COMPARED.setdefault(cp, set())
    if kind in compared:
        return
    given = {option(name): value for name, value in config.options().items() if value is not None}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        given[f"the shape of the {name}"] = tuple(tensor.shape)
        given[f"the dtype of the {name}"] = str(tensor.dtype)
    given["the number of ranks in an inner group"] = cp.inner
    given["softmax_scale"] = softmax_scale
    given["documents"] = "none" if documents is None else "packed"
    for head, policy in enumerate(head_policies or ()):
        given[f"the policy of head {head}"] = policy
    check_agreement(cp, given, "the ranks of a context-parallel group")
    compared.add(kind)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cp: CPGroup,
    softmax_scale: float,
    documents: Documents | None,
) -> None:
    """Raise ValueError or :class:`~.errors.ConfigError` unless operands and documents fit each other."""
    check_operands(query, key, value)
    # Above the largest float32, scores are infinite or not numbers.
    if not 0 < softmax_scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"softmax_scale is {softmax_scale}: it must be positive and finite")
    if 0 in (*query.shape, *key.shape):
        raise ValueError(
            f"query {tuple(query.shape)} or key {tuple(key.shape)} is empty: give 1 or more in each dimension"
        )
    if documents is not None:
        documents.check(query.shape[1], query.shape[0] * cp.world, query.device)


def _check_kinds(query: Tensor, key: Tensor, value: Tensor, config: MTrainingConfig) -> None:
    """Raise ValueError unless operands are tensors, and the settings settings."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: give a tensor")
    if not isinstance(config, MTrainingConfig):
        raise ValueError(f"config is a {type(config).__name__}: give an MTrainingConfig")


def _check_of_heads(
    num_heads: int, head_policies: Sequence[Policy] | None, price: Tensor | None
) -> None:
    """Raise ValueError unless there is a policy, and a price or one for all, for each head. What the prices
    are is not read: that would wait for the device."""
    if head_policies is not None:
        if len(head_policies) != num_heads:
            raise ValueError(
                f"there are {len(head_policies)} head_policies, but {num_heads} heads: give one for each"
            )
        for head, policy in enumerate(head_policies):
            if not isinstance(policy, Policy):
                raise ValueError(f"the policy of head {head} is {policy!r}: give a policy")
    if price is None:
        return
    if not isinstance(price, Tensor) or not price.is_floating_point():
        raise ValueError(f"price is {price!r}: give a float32 tensor")
    if tuple(price.shape) not in ((), (1,), (num_heads,)):
        raise ValueError(
            f"price has shape {list(price.shape)}: give one, or one for each of {num_heads} heads"
        )
    if not price.is_cuda and not bool(((price >= 0) & price.isfinite()).all()):
        raise ValueError(f"price is {price.tolist()}: give finite numbers of 0 or more")


def check_index(index: PatternIndex, query: Tensor, cp: CPGroup) -> None:
    """Raise ValueError unless a pattern is for these operands."""
    if (index.world, index.inner) != (cp.world, cp.inner):
        raise ValueError(
            f"the index is for {index.world} ranks in inner groups of {index.inner}, but there are "
            f"{cp.world} in inner groups of {cp.inner}"
        )
    if isinstance(index, BlockListIndex) and index.rank != cp.rank:
        raise ValueError(
            f"the index has the lists of rank {index.rank}, but this is rank {cp.rank}"
        )
    if index.seq_length != query.shape[0] * cp.world:
        raise ValueError(
            f"the index is for {index.seq_length} tokens, but {cp.world} ranks with "
            f"{query.shape[0]} each have {query.shape[0] * cp.world}"
        )
    if tuple(index.member.shape[:2]) != tuple(query.shape[1:3]):
        raise ValueError(
            f"the index is for {tuple(index.member.shape[:2])} (batch, heads), "
            f"but the query has {tuple(query.shape[1:3])}"
        )
    if index.documents is not None:
        index.documents.check(query.shape[1], index.seq_length, query.device)
