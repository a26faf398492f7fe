# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Moving keys, values and gradients between the ranks of a context-parallel group, asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..cp_group import CPGroup
from ..labels import TIMES, WAIT
from .schedule import Link


class Awaitable(Protocol):
    """A transfer, or a collective of torch.distributed."""

    def wait(self): ...


class Transfer:
    """A tensor in flight: one is being sent, and its like received."""

    def __init__(self, sent: Tensor, received: Tensor, works: Sequence[Awaitable]):
        # The sent tensor is held until the transfer is over, or its memory might be reused.
        self._sent: Tensor | None = sent
        self._received, self._works = received, works

    @property
    def is_in_flight(self) -> bool:
        """Whether there is anything to wait for: not on one rank, nor a second time."""
        return bool(self._works)

    def wait(self) -> Tensor:
        """The tensor received. Later work of the current stream (on CPU: the caller) waits for it."""
        for work in self._works:
            work.wait()
        self._sent, self._works = None, []
        return self._received


class Ring:
    """The transfers of ring attention over a context-parallel group.

    Each kind of transfer has its own communicator (over NCCL), so that transfers that are under way at once
    cannot wait for each other, nor be mixed up.

    Attributes:
        cp: the group.
        trace: None, or a function of a name and a number (the round in the forward, a count of kernels in
            the backward) that returns a context manager, entered around what a ring runs: for measurements.
    """

    VALUES, GRADIENTS, COLUMNS, GATHER = "values", "gradients", "columns", "gather"
    _TAGS: ClassVar = {VALUES: 0, GRADIENTS: 1, COLUMNS: 2, GATHER: 3}

    def __init__(self, cp: CPGroup):
        self.cp = cp
        self.trace: Callable[..., AbstractContextManager] | None = None
        self._side_stream: torch.cuda.Stream | None = None

    def span(self, name: str, number: int | None = None) -> AbstractContextManager:
        """A context around a part of the work; see ``trace``."""
        return (self.trace or TIMES.of_ring)(name, number)

    def wait(self, transfer: Transfer) -> Tensor:
        """What a transfer brings; waiting for it is a part of the work."""
        if not transfer.is_in_flight:
            return transfer.wait()
        with self.span(WAIT):
            return transfer.wait()

    def post(
        self, tensor: Tensor, kind: str, link: Link, received: Tensor | None = None
    ) -> Transfer:
        """Start to send a contiguous tensor to the next rank over a link, and to receive its like from the
        previous rank. Returns at once; call it before the compute that is to hide the transfer.

        Args:
            kind: VALUES or GRADIENTS.
            received: what to receive into, contiguous; None for new memory.
        """
        if received is None:
            received = torch.empty_like(tensor)
        ranks = self.cp.inner_ranks if link is Link.INNER else self.cp.outer_ranks
        place = ranks.index(self.cp.rank)
        works = self.cp.exchange(
            [(tensor, ranks[(place + 1) % len(ranks)])],
            [(received, ranks[place - 1])],
            self.cp.communicator(kind, ranks),
            self._TAGS[kind] + 4 * (link is Link.OUTER),
        )
        return Transfer(tensor, received, works)

    def gather(self, tensor: Tensor, after: Transfer | None = None) -> Transfer:
        """Start to gather over the inner group: fill ``tensor`` ``[I, ...]``, contiguous, with what each rank
        has at its inner rank.

        Args:
            after: what receives this rank's own entry, posted since ``tensor`` was made, if that is still in
                flight: nobody waits for it here (on CPU, the caller does).

        Returns:
            What ``tensor`` is waited for with.
        """
        cp = self.cp
        own = tensor[cp.inner_rank]
        if cp.inner == 1:
            return Transfer(own, tensor, [after] if after else [])
        if not tensor.is_cuda:
            # Between pairs of ranks: gloo would need a process group for each inner group.
            if after:
                after.wait()
            return Transfer(own, tensor, self._exchange_pairs(tensor))
        communicator = cp.communicator(self.GATHER, cp.inner_ranks)
        if after is None:
            return Transfer(own, tensor, [cp.start_all_gather(tensor, own, communicator)])
        # A side stream waits for the entry, so that the compute stream need not. The entry has been posted
        # after the tensor was made, so that is waited for with it.
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()
        with torch.cuda.stream(self._side_stream):
            after.wait()
            return Transfer(own, tensor, [cp.start_all_gather(tensor, own, communicator)])

    def _exchange_pairs(self, tensor: Tensor) -> Sequence[Awaitable]:
        cp = self.cp
        sends, receives = [], []
        for by in range(1, cp.inner):
            to, source = (cp.inner_rank + by) % cp.inner, (cp.inner_rank - by) % cp.inner
            sends.append((tensor[cp.inner_rank], cp.inner_ranks[to]))
            receives.append((tensor[source], cp.inner_ranks[source]))
        group = cp.communicator(self.GATHER, cp.inner_ranks)
        return cp.exchange(sends, receives, group, self._TAGS[self.GATHER])

    def sum_columns(self, tensor: Tensor) -> Transfer:
        """Start to sum a contiguous tensor over all ranks, in place."""
        cp = self.cp
        if cp.world == 1:
            return Transfer(tensor, tensor, [])
        communicator = cp.communicator(self.COLUMNS, range(cp.world))
        return Transfer(tensor, tensor, [cp.start_all_reduce(tensor, communicator)])


_RINGS: WeakKeyDictionary[CPGroup, Ring] = WeakKeyDictionary()


def ring_of(cp: CPGroup) -> Ring:
    """The ring over a group, always the same one."""
    if cp not in _RINGS:
        _RINGS[cp] = Ring(cp)
    return _RINGS[cp]
