# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""From Megatron's layouts of a sequence over context-parallel ranks to the striped one, and back.

Megatron cuts a sequence, or each of the packed sequences, into ``2 cp`` chunks of equal length, of which rank
r has the chunks r and ``2 cp - 1 - r`` (zigzag). Batches, labels and losses stay so; hidden states go to the
striped layout (:mod:`.layout`) before the first layer and come back after the last one: one all-to-all of
``[s / cp, b, h]`` each. With sequence parallelism each rank's part is cut once more, over its tensor-parallel
ranks, and the exchange is between all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cp_group import RankGroup
from .errors import ConfigError
from .layout import located


def check_segments(lengths: Sequence[int], cp_size: int) -> None:
    """Raise :class:`ConfigError` unless each packed sequence can be cut into ``2 cp_size`` chunks."""
    for number, length in enumerate(lengths):
        if length < 0 or length % (2 * cp_size):
            raise ConfigError(
                f"packed sequence {number} has {length} tokens, with padding: Megatron's context-parallel "
                f"layout needs multiples of 2 x {cp_size} = {2 * cp_size}; pad each sequence to one"
            )


def zigzag(tensor: Tensor, cp_rank: int, cp_size: int, dim: int = 1) -> Tensor:
    """A rank's part of one sequence in Megatron's layout, as its ``get_batch_on_this_cp_rank`` cuts it."""
    chunks = tensor.chunk(2 * cp_size, dim)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]), dim)


def unzigzag(parts: Tensor, dim: int = 1) -> Tensor:
    """The inverse of :func:`zigzag`: the sequence of all ranks' parts, stacked in rank order."""
    early, late = parts.chunk(2, 1 + dim)
    return torch.cat((*early, *late.flip(0)), dim)


def zigzag_owner(lengths: Sequence[int], cp_size: int, device=None) -> tuple[Tensor, Tensor]:
    """Where Megatron's layout has each token.

    Args:
        lengths: tokens of the packed sequences, one after the other, with their padding, multiples of
            ``2 cp_size``; of one sequence its length alone.

    Returns:
        The rank and the position in its part, int64 ``[sum(lengths)]`` each.
    """
    check_segments(lengths, cp_size)
    length = torch.tensor([each for each in lengths if each], device=device)
    start = length.cumsum(0) - length
    segment = torch.repeat_interleave(length)
    token = torch.arange(len(segment), device=device)
    chunk_len = (length // (2 * cp_size))[segment]
    first = start[segment]
    chunk, within = (token - first) // chunk_len, (token - first) % chunk_len
    is_late = chunk >= cp_size
    rank = torch.where(is_late, 2 * cp_size - 1 - chunk, chunk)
    return rank, first // cp_size + is_late * chunk_len + within


def striped_owner(
    length: int, cp_size: int, block_size: int, inner: int | None = None, device=None
) -> tuple[Tensor, Tensor]:
    """Where the striped layout has each token, as :func:`zigzag_owner`."""
    return located(torch.arange(length, device=device), cp_size, block_size, inner)


@dataclass(frozen=True)
class Relayout:
    """What one rank sends and receives on the way from a layout to another one.

    Attributes:
        group: the ranks of both layouts.
        send: int64 ``[tokens there]``: its tokens in the order in which they are sent.
        place: int64: where the received tokens go, in the order in which they come.
        sent, received: how many go to, and come from, each rank.
        length: tokens of its part here; more than are received where the sequence is padded.
    """

    group: RankGroup
    send: Tensor
    place: Tensor
    sent: list[int]
    received: list[int]
    length: int

    def there(self, tensor: Tensor) -> Tensor:
        """``[tokens, ...]`` in the other layout; padding is zero. Differentiable."""
        return _Exchange.apply(tensor, self, False)

    def back(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`there`. Differentiable."""
        return _Exchange.apply(tensor, self, True)


def relayout(
    source: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    lengths: tuple[int, int],
    group: RankGroup,
) -> Relayout:
    """The way from one layout to another. Waits for the device of the tensors.

    Args:
        source, target: the rank in ``group`` and the position in its part, of each token, int64 ``[n]``.
        lengths: tokens of its part in the two layouts.
    """
    (from_rank, from_at), (to_rank, to_at) = source, target
    own = (from_rank == group.rank).nonzero().flatten()
    own = own[(to_rank[own] * max(lengths) + to_at[own]).argsort()]
    wanted = (to_rank == group.rank).nonzero().flatten()
    wanted = wanted[(from_rank[wanted] * max(lengths) + to_at[wanted]).argsort()]
    size = group.world
    counts = torch.stack(
        (
            torch.bincount(to_rank[own], minlength=size),
            torch.bincount(from_rank[wanted], minlength=size),
        )
    )
    sent, received = counts.tolist()
    return Relayout(group, from_at[own], to_at[wanted], sent, received, lengths[1])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, plan: Relayout, is_back: bool) -> Tensor:
        ctx.plan, ctx.is_back = plan, is_back
        return _exchange(tensor, plan, is_back)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _exchange(grad, ctx.plan, not ctx.is_back), None, None


def _exchange(tensor: Tensor, plan: Relayout, is_back: bool) -> Tensor:
    send, place, sent, received, length = (
        (plan.place, plan.send, plan.received, plan.sent, len(plan.send))
        if is_back
        else (plan.send, plan.place, plan.sent, plan.received, plan.length)
    )
    outgoing = tensor.index_select(0, send)
    incoming = plan.group.all_to_all(outgoing, sent, received)
    if len(place) < length:
        result = incoming.new_zeros((length, *tensor.shape[1:]))
    else:
        result = torch.empty_like(incoming)
    return result.index_copy_(0, place, incoming)
