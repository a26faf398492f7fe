# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sequence parallel training: each rank holds consecutive tokens of the same sequences.

As in DeepSpeed-Ulysses (arXiv 2309.14509), an all-to-all before attention gives each rank all tokens of some
heads, and one after it gives each rank all heads of its tokens again. In between, attention is that of one
process. Where ranks cannot share the heads evenly, the all-to-alls go to the striped layout
(:mod:`..layout`) and back, and in between is the ring (:mod:`..ring`). All else in a model is of each token
alone, once it is told where the token is (``position_ids``).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..agreement import check_agreement
from ..config import ConfigError
from ..cp_group import ProcessGroup, RankGroup
from ..relayout import Relayout, relayout, striped_owner

WHO = "the ranks of sequence_parallel"
TOKENS = {"input_ids": 1, "inputs_embeds": 1, "labels": 1, "shift_labels": 1, "attention_mask": 1,
          "position_ids": -1, "seq_idx": 1}  # fmt: skip
"""What a batch has of each token, and the dimension that counts them."""
GATHERED = ("attention_mask", "position_ids", "seq_idx")
"""What says where tokens and sequences are: ranks need that of all tokens."""
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
IGNORED = -100
"""The label of tokens without a loss."""


class SequenceParallel:
    """The ranks that hold the tokens of the same sequences, in the order of the process group.

    Args:
        group: the process group.
        heads: query heads of each layer of the model.
        block_size: of the settings.
        evaluates: whether forwards in evaluation mode that have no KV cache are of parts of sequences, too.

    Attributes:
        ranks: the ranks.
        heads: those that this rank has during attention.
        ring: the process group over which attention is a ring; None if each rank has all tokens there.

    Raises:
        ConfigError: the group is none of this process.
    """

    def __init__(
        self, group: ProcessGroup, heads: int, block_size: int = 128, evaluates: bool = True
    ):
        self.ranks, self.evaluates, self.block_size = _ranks_of(group), evaluates, block_size
        self.ring = group if heads % self.ranks.world else None
        own = heads if self.ring is not None else heads // self.ranks.world
        first = 0 if self.ring is not None else self.ranks.rank * own
        self.heads = slice(first, first + own)
        self._relayouts: dict[tuple[int, torch.device], Relayout] = {}

    def __deepcopy__(self, memo) -> SequenceParallel:
        return self  # a copy of a model has the same ranks

    def whole(self, given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """What says where the tokens and sequences of all ranks are. A collective, once a forward.

        Args:
            given: keyword arguments of the model's forward on this rank, of ``[b, s / world]`` tokens.
            settings: by name, what all ranks must have alike.

        Returns:
            Those of :data:`GATHERED` that are given, ``[b, s]``.

        Raises:
            ConfigError: on every rank, if ranks differ in the settings or in the size of what they are given;
                if there are no positions, positions that skip some in one sequence, or ends of sequences.
        """
        found = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        shapes = {
            f"the shape of {name}": tuple(found[name].shape) for name in TOKENS if name in found
        }
        ends = [name for name in ENDS if given.get(name) is not None]
        check_agreement(self.ranks, {**settings, **shapes, "what is given": ends}, WHO)
        if ends:
            raise ConfigError(
                f"{ends[0]} is given with sequence_parallel, whose ranks have parts of sequences: leave it "
                "out, and give position_ids that start again where a packed sequence starts"
            )
        if "position_ids" not in found:
            raise ConfigError(
                "position_ids are missing: with sequence_parallel, each rank has a part of the sequence, and "
                "its model counts positions from 0. Cut each batch by "
                "megatron_mtraining.transformers.cut_batch(batch, group)"
            )
        whole = {name: self._gather(found[name]) for name in GATHERED if name in found}
        step = whole["position_ids"].diff(dim=-1)
        # transformers takes these for packed, and each rank has its own part's.
        if "attention_mask" not in whole and bool((step > 1).any() & (step > 0).all()):
            raise ConfigError(
                "position_ids skip some positions: with sequence_parallel, give an attention_mask of ones "
                "beside them"
            )
        return whole

    def _gather(self, value: Tensor) -> Tensor:
        value = value.to(self.ranks.device or value.device)
        if value.dtype == torch.bool:
            value = value.long()  # not all backends have it
        return torch.cat(self.ranks.all_gather(value).unbind(), -1)

    def padded(self, length: int) -> int:
        """Tokens of a sequence of ``length`` in attention: with a ring, to whole blocks of each rank."""
        step = 1 if self.ring is None else self.block_size * self.ranks.world
        return -(-length // step) * step

    def _striped(self, length: int, device: torch.device) -> Relayout:
        """From consecutive tokens to the striped layout."""
        if (length, device) not in self._relayouts:
            world, part = self.ranks.world, length // self.ranks.world
            token = torch.arange(length, device=device)
            there = striped_owner(length, world, self.block_size, device=device)
            lengths = part, self.padded(length) // world
            made = relayout((token // part, token % part), there, lengths, self.ranks)
            self._relayouts = {(length, device): made}  # of one length at a time
        return self._relayouts[length, device]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's query heads, and of the KV heads that these attend to. With a ring, this
        rank's tokens in the striped layout, of all heads; zeros for those beyond the sequence.

        Args:
            query: ``[b, h, s / world, d]``; key, value ``[b, hk, s / world, d]``; of one dtype. ``h`` is a
                multiple of ``hk``.

        Returns:
            ``[b, h / world, s, d]``, and two ``[b, n, s, d]``, strided. Where KV heads are not as many as
            ranks, or a multiple, they are repeated, and their gradients are the sums over ranks. With a ring,
            ``[b, h, t, d]`` and two ``[b, hk, t, d]``, where ``t`` is a rank's part of the padded sequence.
        """
        world, heads = self.ranks.world, query.shape[1]
        if self.ring is not None:
            both = torch.cat((query, key, value), 1).permute(2, 0, 1, 3)
            there = self._striped(len(both) * world, query.device).there(both).permute(1, 2, 0, 3)
            return there.split([heads, key.shape[1], value.shape[1]], 1)
        of_one = heads // key.shape[1]  # query heads of a KV head
        repeats = of_one // gcd(of_one, heads // world)
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        parts = [each.unflatten(1, (world, -1)) for each in (query, key, value)]
        parts = [part.permute(1, 3, 0, 2, 4) for part in parts]  # [world, s / world, b, n, d]
        own = _Exchange.apply(torch.cat(parts, 3), self.ranks).flatten(0, 1).permute(1, 2, 0, 3)
        return own.split([part.shape[3] for part in parts], 1)

    def to_tokens(self, out: Tensor, length: int) -> Tensor:
        """All heads of this rank's tokens: ``[b, s / world, h, d]`` of ``[b, s, h / world, d]``, or with a
        ring of ``[b, t, h, d]``.

        Args:
            length: s.
        """
        if self.ring is not None:
            return self._striped(length, out.device).back(out.transpose(0, 1)).transpose(0, 1)
        sent = out.unflatten(1, (self.ranks.world, -1)).transpose(0, 1)
        # [world, b, s / world, n, d], of the heads of each rank
        return _Exchange.apply(sent, self.ranks).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def of_all_heads(self, values: Tensor) -> Tensor:
        """What is known of each head: ``[..., h]`` of this rank's ``[..., h / world]``; with a ring, the mean
        of what ranks know of their rows. A collective."""
        if self.ring is not None:
            return self.ranks.all_gather(values).mean(0)
        return torch.cat(self.ranks.all_gather(values).unbind(), -1)


class _Exchange(torch.autograd.Function):
    """Part ``i`` of the first dimension to rank ``i``. It is its own transpose, so its own backward."""

    @staticmethod
    def forward(ctx, parts: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        each = [1] * ranks.world
        return ranks.all_to_all(parts.contiguous(), each, each)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _Exchange.apply(grad, ctx.ranks), None


def _ranks_of(group) -> RankGroup:
    try:
        if group is None:
            raise ValueError("the process group is None: give one of torch.distributed")
        return RankGroup(group)
    except ValueError as error:
        raise ConfigError(f"sequence_parallel: {error}") from error


def check_model(config, name: str, recurrent: Sequence[int]) -> None:
    """Raise :class:`ConfigError` for a model that needs more of a sequence than a rank has.

    Args:
        config: transformers' configuration of the model.
        name: the model's, for the message.
        recurrent: its layers with linear attention.
    """
    if recurrent:
        raise ConfigError(
            f"sequence_parallel is given, and layer {recurrent[0]} of {name} has linear attention, which "
            "needs whole sequences: leave sequence_parallel out"
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise ConfigError(
            f"sequence_parallel is given, and {name} has attn_temperature_tuning, which counts the tokens "
            "that a rank has: set it to False in the model's config, or leave sequence_parallel out"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)]
    if odd := [kind for kind in kinds if kind and ("dynamic" in kind or kind == "longrope")]:
        raise ConfigError(
            f"sequence_parallel is given, and {name} has rope_type {odd[0]!r}, which goes by the length of "
            "the sequence, of which a rank has a part: use a rope_type such as 'yarn', or leave "
            "sequence_parallel out"
        )


def cut_batch(batch: Mapping[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """This rank's part of a batch, for a model with ``configure(..., sequence_parallel=group)``.

    The mean over ranks of the losses that the model returns for it is the loss of the whole batch, whatever
    labels each rank has. So are the gradients, whose mean DistributedDataParallel and FSDP take. Ranks
    call it together.

    Args:
        batch: the whole batch, the same on all ranks of the group: ``input_ids`` and ``labels``, int64
            ``[b, s]``; ``position_ids``, ``attention_mask`` and ``seq_idx`` if it has them; and
            ``num_items_in_batch``, labels of all batches of a step, if it is accumulated.
        group: the process group of the ranks.

    Returns:
        Of each, this rank's ``[b, s / world]``. Positions are counted from 0 if there are none. Batches that
        the ranks cannot share evenly are padded, by the ``attention_mask``. For the loss: the labels of the
        next tokens, as ``labels`` and ``shift_labels``, and their number, ``num_items_in_batch``, over the
        ranks'. ``use_cache`` is False, by which a model in evaluation mode knows that it is given a part.

    Raises:
        ConfigError: on every rank, if the ranks are given different batches; if there is something that
            cannot be cut.
    """
    ranks = _ranks_of(group)
    given = {name: value for name, value in batch.items() if value is not None}
    count = given.pop("num_items_in_batch", None)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    check_agreement(ranks, {name: _shown(value) for name, value in given.items()}, WHO)
    unknown = [name for name in tensors if name not in TOKENS]
    if unknown or not {"input_ids", "inputs_embeds"} & tensors.keys():
        raise ConfigError(
            f"the batch has {unknown[0]}, which cut_batch cannot cut: leave it out, and say where packed "
            "sequences start by position_ids"
            if unknown
            else f"the batch has {', '.join(given) or 'nothing'}: give input_ids"
        )
    tokens = tensors.get("input_ids", tensors.get("inputs_embeds"))
    (entries, length), world = tokens.shape[:2], ranks.world
    if "position_ids" not in tensors:
        positions = torch.arange(length, device=tokens.device)
        tensors["position_ids"] = positions.expand(entries, length)
    labels = tensors.pop("labels", None)
    if labels is not None and "shift_labels" not in tensors:
        tensors["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    padding = -length % world
    if padding and "attention_mask" not in tensors:
        tensors["attention_mask"] = tokens.new_ones((entries, length), dtype=torch.long)
    cut = {name: value for name, value in given.items() if name not in tensors}
    cut["use_cache"] = False
    for name, value in tensors.items():
        dim = TOKENS[name] % value.dim()
        if value.shape[dim] != length:
            raise ConfigError(
                f"{name} is of shape {list(value.shape)}, and the batch of {length} tokens: give one value "
                "for each token"
            )
        if padding:
            empty = IGNORED if name == "shift_labels" else 0
            shape = [*value.shape[:dim], padding, *value.shape[dim + 1 :]]
            value = torch.cat((value, value.new_full(shape, empty)), dim)
        cut[name] = value.chunk(world, dim)[ranks.rank].contiguous()
    if "shift_labels" in cut:
        cut["labels"] = cut["shift_labels"]  # or models leave the loss out
        if count is None:
            count = (tensors["shift_labels"] != IGNORED).sum()
        cut["num_items_in_batch"] = max(1, int(count)) / world
    return cut


def _shown(value: Any) -> str:
    """What ranks compare of a value of a batch."""
    if not isinstance(value, Tensor):
        return repr(value)
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {list(value.shape)} (CRC-32 {zlib.crc32(content):08x})"
