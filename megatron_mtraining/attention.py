# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparse attention over a context-parallel group: search the pattern, run the ring."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .agreement import check_agreement
from .config import ConfigError, MTrainingConfig, Policy, option
from .cp_group import CPGroup, ProcessGroup, cp_group_of
from .documents import Documents
from .kernels.attention.operands import check_operands, unit_stride
from .pattern import BlockListIndex, VerticalSlashIndex, check_search, search_pattern
from .pattern.vertical_slash_index import PatternIndex
from .ring.attention import KeysAndValues, RingResult, ring_attention
from .ring.pruning import BackwardPruning, check_size, packed_shape
from .ring.transport import ring_of
from .switches import SWITCHES
from .tensors import check_values, own_context

Pattern = VerticalSlashIndex | BlockListIndex

_MAX_SCALE = torch.finfo(torch.float32).max


class AttentionResult(NamedTuple):
    """The result of :func:`attend`: all that its backward needs beside the operands."""

    out: Tensor
    """``[s, b, h, d]``, in the query's dtype, contiguous."""
    lse: Tensor
    """Log-sum-exp of the rows' scores, ``[b, h, s]``, float32 (float64 for float64); no gradient."""
    # Shadows tuple.index(), which is never used.
    index: Pattern  # type: ignore[assignment]
    """The pattern that was attended to."""
    packed: Tensor | None = None
    """With a pruned backward, which of the pattern's blocks it keeps: uint8, a bit for each pair of an own
    query block and a key block. None without."""
    softmax_scale: float | None = None
    """What the scores were multiplied by; None if it is not known, and then not compared in a replay."""


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
    first_pass: AttentionResult | Pattern | None = None,
    observe_backward: Callable[[Tensor, Tensor], None] | None = None,
) -> AttentionResult:
    """Causal self-attention to the keys that each head's pattern selects. It has first derivatives only.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence in the block-striped layout.
        key, value: ``[s, b, hk, d]``. Head dim 64 or 128; bf16, fp16 or fp32; any strides (tensors
            without unit stride in ``d`` are copied).
        config: the settings; ``s * world`` must be a multiple of ``block_size * world`` (on one rank
            the last block may be partial). Its file is not read: see ``head_policies``.
        cp_group: the context-parallel group; None for a single process.
        cp_inner: ranks of an inner group, whose keys are attended to in one round; None for
            :func:`~megatron_mtraining.layout.inner_size`.
        softmax_scale: default ``d ** -0.5``.
        documents: packed documents of the whole sequence, on this device: queries attend to keys of their own
            document alone, in the pattern search too. None for one document.
        head_policies: the policy of each of the ``h`` heads, a list, as
            :func:`~megatron_mtraining.config.head_policies` reads them; None for ``config.policy`` in all.
        price: float32 ``[]`` or ``[h]``, in place of the price of ``config``; of heads that have one. It
            must be given if ``config`` has a schedule.
        first_pass: the result for the same operands in the first pass, in a replay under activation
            recomputation, on all ranks or on none: no forward is run and nothing is sent, but the result has
            a backward. Its pattern alone (``index``) is used again, and attention computed again.
        observe_backward: called in the backward, if ``config.backward_threshold`` is not 0, with the density
            of the pairs that it keeps, and with the share of attention in those that it leaves out (the mean
            over this rank's queries): float32 ``[b, h]`` each.

    Returns:
        out, its log-sum-exp and the pattern.

    Raises:
        ValueError: on operands, a sequence length or a pattern that do not fit.
        ConfigError: on documents or settings that do not; on every rank, if ranks are given other settings,
            shapes, documents or prices, or a first pass on some alone. They compare these in each call on the
            CPU. On GPUs, where it would wait for the device, they compare settings and shapes at the first
            call with them. Ranks that part later are not refused there: with other shapes they wait for each
            other until the process group's timeout, and its error names a collective, not the difference;
            with other settings, documents or prices of the same shapes, results can be wrong.
    """
    _check_kinds(query, key, value, config, softmax_scale, documents, head_policies)
    if (within := own_context(query.device)) is not None:
        with within:
            return attend(
                query, key, value, config=config, cp_group=cp_group, cp_inner=cp_inner,
                softmax_scale=softmax_scale, documents=documents, head_policies=head_policies,
                price=price, first_pass=first_pass, observe_backward=observe_backward,
            )  # fmt: skip
    if softmax_scale is None:
        head_dim = query.shape[-1] if query.dim() else 0
        softmax_scale = max(1, head_dim) ** -0.5
    softmax_scale = float(softmax_scale)
    cp = cp_group_of(cp_group, cp_inner)
    # Before what one rank alone may find wrong: it would leave the others waiting.
    _compare_with_ranks(
        cp, query, key, value, config, softmax_scale, documents, head_policies, price, first_pass
    )
    _check(query, key, value, cp, softmax_scale, documents)
    _check_policies(head_policies, query.shape[2], config)
    _check_price(price, query, config)
    query, key, value = unit_stride(query, key, value)
    ring = ring_of(cp)
    pruning = None
    if config.backward_threshold:
        check_size(query, config.block_size, cp.world, cp.inner)
        pruning = BackwardPruning(config.backward_threshold, observe_backward)
    if first_pass is None:
        if price is None and config.steps is not None:
            raise ConfigError(
                "the settings have a schedule, but price is None: give the price of this step, or settings "
                "with a price of 0 for dense attention"
            )
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
        keys = None
        index, computed = _of_first_pass(first_pass, query, softmax_scale)
        check_index(index, query, cp)
        _check_replay(index, config, documents)
        if computed is not None:
            _check_packed(computed.packed, query, index, config)
    found = ring_attention(query, key, value, index, ring, softmax_scale, computed, keys, pruning)
    return AttentionResult(found.out, found.lse, index, found.packed, softmax_scale)


_COMPARED: WeakKeyDictionary[CPGroup, set[tuple]] = WeakKeyDictionary()
"""What the ranks of a group have found to be the same on all of them, of operands on GPUs."""


def _compare_with_ranks(
    cp: CPGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig,
    softmax_scale: float,
    documents: Documents | None,
    head_policies: Sequence[Policy] | None,
    price: Tensor | None,
    first_pass: AttentionResult | Pattern | None,
) -> None:
    """Raise :class:`~.errors.ConfigError`, on every rank, unless all ranks of the group are given the same.
    A collective in each call on the CPU; on GPUs, as it would wait for them, in the first with these
    settings, shapes and dtypes. Documents and prices are compared, too, if they are on the CPU."""
    if cp.world == 1:
        return
    kind = (
        config, None if head_policies is None else tuple(head_policies), query.shape, key.shape, value.shape,
        query.dtype, key.dtype, value.dtype, softmax_scale, _shape_of_documents(documents), _shape_of(price),
    )  # fmt: skip
    compared = _COMPARED.setdefault(cp, set()) if query.is_cuda else set()
    if kind in compared:
        return
    given = {option(name): value for name, value in config.options().items() if value is not None}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        given[f"the shape of the {name}"] = tuple(tensor.shape)
        given[f"the dtype of the {name}"] = str(tensor.dtype)
    given["the number of ranks in an inner group"] = cp.inner
    given["softmax_scale"] = softmax_scale
    # Some change which collectives there are.
    given.update({f"{name} in the environment": os.environ.get(name, "unset") for name in SWITCHES})
    given["documents"] = "none" if documents is None else _shown(documents)
    given["the shape of the documents"] = _shape_of_documents(documents)
    given["the shape of the price"] = _shape_of(price)
    if isinstance(price, Tensor) and price.device.type == "cpu" and price.layout is torch.strided:
        given["price"] = price.tolist()
    given["first_pass"] = "none" if first_pass is None else "given"
    for head, policy in enumerate(head_policies or ()):
        given[f"the policy of head {head}"] = policy
    check_agreement(cp, given, "the ranks of a context-parallel group")
    compared.add(kind)


def _shape_of(tensor: Tensor | None) -> tuple[int, ...] | None:
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else None


def _shape_of_documents(documents: Documents | None) -> tuple[int, ...] | None:
    return None if documents is None else _shape_of(documents.starts)


def _shown(documents: Documents) -> str:
    """``packed``, and on the CPU a digest of where they start."""
    starts = documents.starts
    if starts.device.type != "cpu":
        return "packed"
    digest = hashlib.sha256(starts.numpy().tobytes()).hexdigest()
    return f"packed (SHA-256 of their starts {digest[:16]})"


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cp: CPGroup,
    softmax_scale: float,
    documents: Documents | None,
) -> None:
    """Raise ValueError or :class:`~.errors.ConfigError` unless operands and documents fit each other."""
    # Above the largest float32, scores are infinite or not numbers.
    if not 0 < softmax_scale <= _MAX_SCALE:
        raise ValueError(f"softmax_scale is {softmax_scale}: it must be positive and finite")
    if query.dim() == 4 and 0 in (*query.shape, *key.shape):
        raise ValueError(
            f"query {tuple(query.shape)} or key {tuple(key.shape)} is empty: give 1 or more in each dimension"
        )
    check_operands(query, key, value)
    if documents is not None:
        documents.check(query.shape[1], query.shape[0] * cp.world, query.device)


def _check_kinds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig,
    softmax_scale: float | None,
    documents: Documents | None,
    head_policies: Sequence[Policy] | None,
) -> None:
    """Raise ValueError unless operands are tensors with values on one device, and the others what they are
    said to be."""
    check_values(query=query, key=key, value=value)
    if not isinstance(config, MTrainingConfig):
        raise ValueError(f"config is a {type(config).__name__}: give an MTrainingConfig")
    # A tensor on a GPU would be read back in every layer.
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float | None):
        raise ValueError(f"softmax_scale is {softmax_scale!r}: give a number")
    if documents is not None and not isinstance(documents, Documents):
        raise ValueError(f"documents are a {type(documents).__name__}: give Documents, or None")
    if head_policies is None:
        return
    if not isinstance(head_policies, list | tuple):
        raise ValueError(
            f"head_policies are a {type(head_policies).__name__}: give a list of policies"
        )
    for head, policy in enumerate(head_policies):
        if not isinstance(policy, Policy):
            raise ValueError(f"the policy of head {head} is {policy!r}: give a policy")


def _check_policies(
    head_policies: Sequence[Policy] | None, num_heads: int, config: MTrainingConfig
) -> None:
    """Raise ValueError unless there is a policy for each head, which goes with the settings."""
    if head_policies is None:
        return
    if len(head_policies) != num_heads:
        raise ValueError(
            f"there are {len(head_policies)} head_policies, but {num_heads} heads: give one for each"
        )
    _check_fit(tuple(head_policies), config)


@lru_cache(maxsize=256)
def _check_fit(policies: tuple[Policy, ...], config: MTrainingConfig) -> None:
    """Raise :class:`~.errors.ConfigError` unless policies go with the settings. Looked at once: it takes
    10 us a head."""
    for head, policy in enumerate(policies):
        try:
            config.with_policy(policy)
        except ConfigError as error:
            raise ConfigError(f"the policy of head {head} does not fit: {error}") from None


def _check_price(price: Tensor | None, query: Tensor, config: MTrainingConfig) -> None:
    """Raise ValueError unless there is a price for all heads, or one for each, in place of one. What the
    prices are is not read on a GPU: that would wait for it."""
    if price is None:
        return
    if not getattr(config.policy, "price", None):
        raise ValueError(
            f"price is given, but the policy of config is {config.policy}: use a PricePolicy whose price is "
            "above 0, or leave it out"
        )
    if not isinstance(price, Tensor) or not price.is_floating_point():
        raise ValueError(f"price is {price!r}: give a float32 tensor")
    check_values(query=query, price=price)
    num_heads = query.shape[2]
    if tuple(price.shape) not in ((), (1,), (num_heads,)):
        raise ValueError(
            f"price has shape {list(price.shape)}: give one, or one for each of {num_heads} heads"
        )
    if price.requires_grad:
        raise ValueError("price requires a gradient, which the pattern search has not: detach it")
    if not price.is_cuda and not bool(((price >= 0) & price.isfinite()).all()):
        raise ValueError(f"price is {price.tolist()}: give finite numbers of 0 or more")


def _of_first_pass(
    first_pass: AttentionResult | Pattern, query: Tensor, softmax_scale: float
) -> tuple[Pattern, RingResult | None]:
    """The pattern of a first pass, and what it computed if that is to be used. Raises ValueError unless it
    was for such queries and this scale."""
    if isinstance(first_pass, Pattern):
        return first_pass, None
    if not isinstance(first_pass, AttentionResult) or not isinstance(first_pass.index, Pattern):
        raise ValueError(
            f"first_pass is a {type(first_pass).__name__}: give the AttentionResult of the first pass, or "
            "its index"
        )
    scale = first_pass.softmax_scale
    if scale is not None and scale != softmax_scale:
        raise ValueError(
            f"softmax_scale is {softmax_scale}, but in the first pass it was {scale}: give the same"
        )
    out, lse = first_pass.out, first_pass.lse
    check_values(query=query, **{"first_pass.out": out, "first_pass.lse": lse})
    length, batch, heads, _ = query.shape
    wanted = {
        "out": (out, query.shape, query.dtype),
        "lse": (lse, (batch, heads, length), torch.promote_types(query.dtype, torch.float32)),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"first_pass.{name} is {list(tensor.shape)} {tensor.dtype}, but for this query it would be "
                f"{list(shape)} {dtype}: give the result for the same operands"
            )
    return first_pass.index, RingResult(out, lse, first_pass.packed)


def _check_replay(
    index: PatternIndex, config: MTrainingConfig, documents: Documents | None
) -> None:
    """Raise ValueError if a first pass had other blocks, or no documents: its pattern has both."""
    if index.block_size != config.block_size:
        raise ValueError(
            f"the pattern of first_pass is for blocks of {index.block_size}, but config has "
            f"{config.block_size}: give the config of the first pass"
        )
    if documents is not None and index.documents is None:
        raise ValueError(
            "documents are given, but first_pass had none: give the same in the first pass"
        )


def _check_packed(
    packed: Tensor | None, query: Tensor, index: PatternIndex, config: MTrainingConfig
) -> None:
    """Raise ValueError unless a first pass has what a pruned backward needs."""
    if not config.backward_threshold:
        return
    if packed is None:
        raise ValueError(
            f"{option('backward_threshold')} is {config.backward_threshold:g}, but the first pass had none: "
            "give the config of the first pass"
        )
    check_values(query=query, **{"first_pass.packed": packed})
    wanted = packed_shape(index)
    if packed.shape != wanted or packed.dtype != torch.uint8:
        raise ValueError(
            f"first_pass.packed is {list(packed.shape)} {packed.dtype}, but with this config it would be "
            f"{list(wanted)} torch.uint8: give the result for the same operands and config"
        )


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
