# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hidden states between Megatron's context-parallel layout, outside of the layers, and the striped one.

Batches, embeddings, labels, losses and log-probabilities stay as Megatron, or a trainer that is built on it,
has laid them out; see :mod:`..relayout`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from ..config import ConfigError
from ..cp_group import RankGroup
from ..layout import check_layout
from ..relayout import Relayout, relayout, striped_owner, unzigzag, zigzag_owner


class Borders(NamedTuple):
    """How a model's hidden states are laid out over ranks.

    Attributes:
        cp: the context-parallel group.
        group: the ranks that have parts of a sequence: ``cp``, with sequence parallelism times the
            tensor-parallel group.
        ranks: by context-parallel and tensor-parallel rank, the rank in ``group``.
        block_size, inner: of the striped layout.
    """

    cp: RankGroup
    group: RankGroup
    ranks: tuple[tuple[int, ...], ...]
    block_size: int
    inner: int

    def padded(self, length: int) -> int:
        """Tokens of a sequence in the striped layout, which needs whole blocks on all ranks."""
        multiple = self.block_size * len(self.ranks)
        return -(-length // multiple) * multiple


def borders_of(model, block_size: int, inner: int) -> Borders | None:
    """The borders of a ``GPTModel`` with this backend; None without context parallelism.

    Raises:
        ConfigError: tensor- and context-parallel ranks are no grid.
    """
    groups = model.pg_collection
    cp, tp = RankGroup(groups.cp), RankGroup(groups.tp)
    if cp.world == 1:
        return None
    if not model.config.sequence_parallel or tp.world == 1:
        return Borders(cp, cp, tuple((rank,) for rank in range(cp.world)), block_size, inner)
    group = getattr(groups, "tp_cp", None) or parallel_state.get_tensor_and_context_parallel_group()
    every = RankGroup(group)
    ranks = every.all_gather(torch.tensor([cp.rank, tp.rank], device=every.device)).tolist()
    at = {(c, t): rank for rank, (c, t) in enumerate(ranks)}
    if len(at) != cp.world * tp.world:
        raise ConfigError(
            f"the tensor- and context-parallel group has {every.world} ranks, which are not "
            f"{cp.world} x {tp.world}: give the model a pg_collection with tp_cp of both"
        )
    grid = tuple(tuple(at[c, t] for t in range(tp.world)) for c in range(cp.world))
    return Borders(cp, every, grid, block_size, inner)


@functools.lru_cache(maxsize=8)  # interleaved pipelines go in and out by turns
def _relayout(borders: Borders, lengths: tuple[int, ...], device: torch.device) -> Relayout:
    """From Megatron's layout of (packed) sequences to the striped one."""
    cp, tp = len(borders.ranks), len(borders.ranks[0])
    grid = torch.tensor(borders.ranks, device=device)
    total = sum(lengths)
    padded = borders.padded(total)
    ends = []
    for (rank, at), length in (
        (zigzag_owner(lengths, cp, device), total),
        (striped_owner(padded, cp, borders.block_size, borders.inner, device), padded),
    ):
        own = length // (cp * tp)
        ends.append((grid[rank[:total], at[:total] // own], at[:total] % own, own))
    (*source, source_length), (*target, target_length) = ends
    return relayout(source, target, (source_length, target_length), borders.group)


def relayout_of(borders: Borders, hidden: Tensor, lengths: tuple[int, ...] | None) -> Relayout:
    """From Megatron's layout to the striped one.

    Args:
        hidden: a rank's part ``[s / cp, b, h]`` in either layout; ``s / (cp tp)`` with sequence parallelism.
        lengths: of the packed sequences that Megatron's layout cuts apart; None for the whole sequence.
    """
    if lengths is None:
        total = hidden.shape[0] * len(borders.ranks) * len(borders.ranks[0])
        check_layout(total, len(borders.ranks), borders.block_size)
        lengths = (total,)
    return _relayout(borders, lengths, hidden.device)


def enter(borders: Borders, given: dict, lengths: tuple[int, ...] | None) -> None:
    """Put ``hidden_states`` and ``padding_mask`` of a call of layers, by its arguments, into the striped
    layout; ``lengths`` as for :func:`relayout_of`."""
    plan = relayout_of(borders, given["hidden_states"], lengths)
    given["hidden_states"] = plan.there(given["hidden_states"])
    if given.get("padding_mask") is not None:
        given["padding_mask"] = plan.there(given["padding_mask"].t()).t()


def whole_sequence(tensor: Tensor, borders: Borders) -> Tensor:
    """``[b, s]`` of every context-parallel rank's ``[b, s / cp]``, in Megatron's layout of one sequence."""
    return unzigzag(borders.cp.all_gather(tensor))
