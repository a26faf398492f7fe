# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The arguments of one call of :func:`~.attention.attend`, their checks, and its result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .agreement import check_agreement
from .config import ConfigError, MTrainingConfig, Policy, option
from .cp_group import CPGroup
from .kernels.attention.operands import check_operands
from .pattern import BlockListIndex, VerticalSlashIndex
from .pattern.vertical_slash_index import PatternIndex
from .ring.pruning import packed_shape
from .switches import SWITCHES
from .tensors import check_values
from .visibility import VisibleRanges

Pattern = VerticalSlashIndex | BlockListIndex

_MAX_SCALE = torch.finfo(torch.float32).max
_COMPARED: WeakKeyDictionary[CPGroup, set[tuple]] = WeakKeyDictionary()
"""What the ranks of a group have found to be the same on all of them, of operands on GPUs."""


class AttentionResult(NamedTuple):
    """The result of :func:`~.attention.attend`: all that its backward needs beside the operands."""

    out: Tensor
    """``[s, b, h, d]``, in the query's dtype, contiguous."""
    lse: Tensor
    """Log-sum-exp of the rows' scores, and of the softmax offset, ``[b, h, s]``, float32 (float64 for
    float64); no gradient."""
    # Shadows tuple.index(), which is never used.
    index: Pattern  # type: ignore[assignment]
    """The pattern that was attended to."""
    packed: Tensor | None = None
    """With a pruned backward, which of the pattern's blocks it keeps: uint8, a bit for each pair of an own
    query block and a key block. None without."""
    softmax_scale: float | None = None
    """What the scores were multiplied by; None if it is not known, and then not compared in a replay."""


class AttentionCall(NamedTuple):
    """The arguments of a call, as :func:`~.attention.attend` describes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    config: MTrainingConfig
    softmax_scale: float | None
    documents: VisibleRanges | None
    head_policies: Sequence[Policy] | None
    price: Tensor | None
    pattern: Pattern | None
    saved: AttentionResult | None
    softmax_offset: Tensor | None = None

    @property
    def scale(self) -> float:
        """What scores are multiplied by: ``d ** -0.5`` if none is given."""
        if self.softmax_scale is not None:
            return float(self.softmax_scale)
        return max(1, self.query.shape[-1] if self.query.dim() else 0) ** -0.5

    def compare_with_ranks(self, cp: CPGroup) -> None:
        """Raise :class:`~.errors.ConfigError`, on every rank, unless all ranks are given the same.

        A collective in each call on the CPU; on GPUs, as it would wait for them, in the first with these
        settings, shapes and dtypes. Documents and prices are compared, too, if they are on the CPU."""
        if cp.world == 1:
            return
        operands = {"query": self.query, "key": self.key, "value": self.value}
        kind = (
            self.config, self.scale,
            None if self.head_policies is None else tuple(self.head_policies),
            *[(tensor.shape, tensor.dtype) for tensor in operands.values()],
            _shape_of_documents(self.documents), _shape_of(self.price),
            _shape_of(self.softmax_offset),
        )  # fmt: skip
        compared = _COMPARED.setdefault(cp, set()) if self.query.is_cuda else set()
        if kind in compared:
            return
        given = self.config.given()
        for name, tensor in operands.items():
            given[f"the shape of the {name}"] = tuple(tensor.shape)
            given[f"the dtype of the {name}"] = str(tensor.dtype)
        given["the number of ranks in an inner group"] = cp.inner
        given["softmax_scale"] = self.scale
        given["the shape of the softmax_offset"] = _shape_of(self.softmax_offset)
        if _is_on_cpu(self.softmax_offset):
            given["softmax_offset"] = self.softmax_offset.tolist()
        # Some change which collectives there are.
        given.update(
            {f"{name} in the environment": os.environ.get(name, "unset") for name in SWITCHES}
        )
        given["documents"] = "none" if self.documents is None else _shown(self.documents)
        given["the shape of the documents"] = _shape_of_documents(self.documents)
        price = self.price
        given["the shape of the price"] = _shape_of(price)
        if _is_on_cpu(price):
            given["price"] = price.tolist()
        for name in ("pattern", "saved"):
            given[name] = "none" if getattr(self, name) is None else "given"
        for head, policy in enumerate(self.head_policies or ()):
            given[f"the policy of head {head}"] = policy
        check_agreement(cp, given, "the ranks of a context-parallel group")
        compared.add(kind)

    def check_kinds(self) -> None:
        """Raise ValueError unless operands are tensors with values on one device, and the others what they
        are said to be."""
        check_values(query=self.query, key=self.key, value=self.value)
        if not isinstance(self.config, MTrainingConfig):
            raise ValueError(f"config is a {_kind(self.config)}: give an MTrainingConfig")
        # A tensor on a GPU would be read back in every layer.
        scale = self.softmax_scale
        if isinstance(scale, bool) or not isinstance(scale, int | float | None):
            raise ValueError(f"softmax_scale is {scale!r}: give a number")
        if not isinstance(self.documents, VisibleRanges | None):
            raise ValueError(
                f"documents are a {_kind(self.documents)}: give VisibleRanges, or None"
            )
        if not isinstance(self.head_policies, list | tuple | None):
            raise ValueError(
                f"head_policies are a {_kind(self.head_policies)}: give a list of policies"
            )
        for head, policy in enumerate(self.head_policies or ()):
            if not isinstance(policy, Policy):
                raise ValueError(f"the policy of head {head} is {policy!r}: give a policy")

    def check(self, cp: CPGroup) -> None:
        """Raise ValueError or :class:`~.errors.ConfigError` unless all fits each other."""
        query, key = self.query, self.key
        # Above the largest float32, scores are infinite or not numbers.
        if not 0 < self.scale <= _MAX_SCALE:
            raise ValueError(f"softmax_scale is {self.scale}: it must be positive and finite")
        if query.dim() == 4 and 0 in (*query.shape, *key.shape):
            raise ValueError(
                f"query {tuple(query.shape)} or key {tuple(key.shape)} is empty: give 1 or more in each "
                "dimension"
            )
        check_operands(query, key, self.value)
        if self.documents is not None:
            self.documents.check(query.shape[1], query.shape[0] * cp.world, query.device)
        self._check_offset()
        self._check_policies()
        self._check_price()
        if self.pattern is not None and self.saved is not None:
            raise ValueError("pattern and saved are both given: leave out pattern, which saved has")
        index = self.pattern
        if self.saved is not None:
            index = self._check_saved()
        if index is None:
            return
        if not isinstance(index, Pattern):
            raise ValueError(f"pattern is a {_kind(index)}: give the index of an AttentionResult")
        check_index(index, query, cp)
        if index.block_size != self.config.block_size:
            raise ValueError(
                f"the pattern is for blocks of {index.block_size}, but config has {self.config.block_size}: "
                "give the config that it was selected with"
            )
        if self.documents is not None and index.visible is None:
            raise ValueError(
                "documents are given, but the pattern was selected without: give the same in both"
            )
        if not _are_alike(self.documents, index.visible):
            raise ValueError(
                "documents are given, but the pattern was selected with others: give the same in both"
            )
        if self.saved is not None and self.config.backward_threshold:
            self._check_packed(self.saved.packed, index)

    def _check_offset(self) -> None:
        """Raise ValueError unless there is a softmax offset for each head, or none."""
        offset = self.softmax_offset
        if offset is None:
            return
        if not isinstance(offset, Tensor) or not offset.is_floating_point():
            raise ValueError(f"softmax_offset is {offset!r}: give a tensor of floats, or None")
        check_values(query=self.query, softmax_offset=offset)
        heads = self.query.shape[2]
        if tuple(offset.shape) != (heads,):
            raise ValueError(
                f"softmax_offset has shape {list(offset.shape)}: give one number for each of {heads} heads"
            )

    def _check_policies(self) -> None:
        """Raise ValueError unless there is a policy for each head, which goes with the settings."""
        if self.head_policies is None:
            return
        count, heads = len(self.head_policies), self.query.shape[2]
        if count != heads:
            raise ValueError(
                f"there are {count} head_policies, but {heads} heads: give one for each"
            )
        _check_fit(tuple(self.head_policies), self.config)

    def _check_price(self) -> None:
        """Raise ValueError unless there is a price for all heads, or one for each, in place of one. What the
        prices are is not read on a GPU: that would wait for it."""
        price = self.price
        if price is None:
            return
        if not getattr(self.config.policy, "price", None):
            raise ValueError(
                f"price is given, but the policy of config is {self.config.policy}: use a PricePolicy whose "
                "price is above 0, or leave it out"
            )
        if not isinstance(price, Tensor) or not price.is_floating_point():
            raise ValueError(f"price is {price!r}: give a float32 tensor")
        check_values(query=self.query, price=price)
        heads = self.query.shape[2]
        if tuple(price.shape) not in ((), (1,), (heads,)):
            raise ValueError(
                f"price has shape {list(price.shape)}: give one, or one for each of {heads} heads"
            )
        if price.requires_grad:
            raise ValueError(
                "price requires a gradient, which the pattern search has not: detach it"
            )
        if not price.is_cuda and not bool(((price >= 0) & price.isfinite()).all()):
            raise ValueError(f"price is {price.tolist()}: give finite numbers of 0 or more")

    def _check_saved(self) -> Pattern:
        """The pattern of the saved result. Raises ValueError unless that was for such queries and this
        scale."""
        saved, query = self.saved, self.query
        if not isinstance(saved, AttentionResult) or not isinstance(saved.index, Pattern):
            raise ValueError(
                f"saved is a {_kind(saved)}: give the AttentionResult of the first pass"
            )
        if saved.softmax_scale not in (None, self.scale):
            raise ValueError(
                f"softmax_scale is {self.scale}, but in the first pass it was "
                f"{saved.softmax_scale}: give the same"
            )
        out, lse = saved.out, saved.lse
        check_values(query=query, **{"saved.out": out, "saved.lse": lse})
        length, batch, heads, _ = query.shape
        wanted = {
            "out": (out, query.shape, query.dtype),
            "lse": (lse, (batch, heads, length), torch.promote_types(query.dtype, torch.float32)),
        }
        for name, (tensor, shape, dtype) in wanted.items():
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"saved.{name} is {list(tensor.shape)} {tensor.dtype}, but for this query it would be "
                    f"{list(shape)} {dtype}: give the result for the same operands"
                )
        return saved.index

    def _check_packed(self, packed: Tensor | None, index: PatternIndex) -> None:
        """Raise ValueError unless the saved result has what a pruned backward needs."""
        if packed is None:
            raise ValueError(
                f"{option('backward_threshold')} is {self.config.backward_threshold:g}, but the first pass "
                "had none: give the config of the first pass"
            )
        check_values(query=self.query, **{"saved.packed": packed})
        wanted = packed_shape(index)
        if packed.shape != wanted or packed.dtype != torch.uint8:
            raise ValueError(
                f"saved.packed is {list(packed.shape)} {packed.dtype}, but with this config it would be "
                f"{list(wanted)} torch.uint8: give the result for the same operands and config"
            )


def _kind(value: object) -> str:
    return type(value).__name__


def _is_on_cpu(tensor: object) -> TypeGuard[Tensor]:
    if not isinstance(tensor, Tensor):
        return False
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _shape_of(tensor: Tensor | None) -> tuple[int, ...] | None:
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else None


def _are_alike(given: VisibleRanges | None, own: VisibleRanges | None) -> bool:
    """Whether documents, if they are given, are a pattern's own. They are not looked at on GPUs."""
    if given is None or own is None or given is own or not _is_on_cpu(given.start):
        return True
    return given.start.equal(own.start)


def _shape_of_documents(documents: VisibleRanges | None) -> tuple[int, ...] | None:
    return None if documents is None else _shape_of(documents.start)


def _shown(documents: VisibleRanges) -> str:
    """``packed``, and on the CPU a digest of where they start."""
    starts = documents.start
    if starts.device.type != "cpu":
        return "packed"
    digest = hashlib.sha256(starts.numpy().tobytes()).hexdigest()
    return f"packed (SHA-256 of their starts {digest[:16]})"


@lru_cache(maxsize=256)
def _check_fit(policies: tuple[Policy, ...], config: MTrainingConfig) -> None:
    """Raise :class:`~.errors.ConfigError` unless policies go with the settings. Looked at once: it takes
    10 us a head."""
    for head, policy in enumerate(policies):
        try:
            config.with_policy(policy)
        except ConfigError as error:
            raise ConfigError(f"the policy of head {head} does not fit: {error}") from None


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
    if index.visible is not None:
        index.visible.check(query.shape[1], index.seq_length, query.device)
