# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Groups of ranks and their collectives: the only module of the package's core that calls torch.distributed.

A context-parallel group of ``W = O x I`` ranks has ``O`` inner groups of ``I`` ranks each (Megatron's words
for hierarchical context parallelism). Rank ``x * I + y`` has inner rank ``y`` in inner group ``x``; the
ranks with one inner rank are an outer group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .errors import ConfigError
from .layout import inner_size

Transmission = tuple[Tensor, int]
"""A contiguous tensor, and the rank in the group that it goes to or comes from."""


class RankGroup:
    """The ranks of a process group; ``group`` None is this process alone.

    Attributes:
        rank, world: this process's rank in the group, and the group's size.

    Raises:
        ValueError: this process is not a member of the group, or it is no process group.
    """

    def __init__(self, group: ProcessGroup | None):
        # GroupMember.NON_GROUP_MEMBER: this process is not in the group.
        outside = dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER
        if group is not None and not isinstance(group, ProcessGroup) and not outside:
            raise ValueError(
                f"the process group is a {type(group).__name__}: give one of torch.distributed, or None"
            )
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the process group given")

    @classmethod
    def everyone(cls) -> RankGroup:
        """All ranks of the run."""
        return cls(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)

    @property
    def device(self) -> torch.device | None:
        """The device that collectives need; None for any."""
        if self._nccl() is None:
            return None
        return torch.device("cuda", torch.cuda.current_device())

    def _nccl(self) -> str | None:
        """The backends of the group, as ``new_group`` takes them, if NCCL is among them and there is a GPU.
        A group that was made without a backend has one for each kind of device."""
        if self.group is None or not torch.cuda.is_available():
            return None
        backend = dist.get_backend(self.group)
        if backend != "nccl":
            backend = dist.get_backend_config(self.group)
        return backend if "nccl" in backend else None

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over all ranks, in place; the same bits on every rank.

        Args:
            op: "sum" or "max".
        """
        if self.world > 1:
            reduce = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
            dist.all_reduce(tensor, reduce, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, stacked in rank order: ``[world, ...]``."""
        if self.world == 1:
            return tensor[None]
        parts = tensor.new_empty(self.world, *tensor.shape)
        if tensor.is_cuda:
            dist.all_gather_into_tensor(parts, tensor.contiguous(), group=self.group)
        else:
            dist.all_gather(list(parts.unbind()), tensor.contiguous(), group=self.group)
        return parts

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's part of the sum over all ranks, cut along the last dimension: ``[..., length /
        world]``, contiguous."""
        if self.world == 1:
            return tensor
        if not tensor.is_cuda:  # gloo has no such collective in all versions of torch
            return self.all_reduce(tensor).chunk(self.world, -1)[self.rank].contiguous()
        parts = tensor.unflatten(-1, (self.world, -1)).movedim(-2, 0).contiguous()
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts, group=self.group)
        return own

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """The first dimension, cut into a part for each rank: what the ranks have sent here, in their order.

        Args:
            sends, receives: lengths of the parts that go to each rank, and that come from each.
        """
        if self.world == 1:
            return tensor
        parts = tensor.new_empty(sum(receives), *tensor.shape[1:])
        dist.all_to_all_single(parts, tensor.contiguous(), receives, sends, group=self.group)
        return parts

    def gather_objects(self, value: Any) -> list:
        """Every rank's value, which must be picklable, in rank order."""
        if self.world == 1:
            return [value]
        found: list = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found


class CPGroup(RankGroup):
    """A context-parallel group, with its inner and outer groups.

    Over NCCL each kind of transfer has a communicator of its own (:meth:`communicator`), and so a stream:
    transfers that share one wait for each other. They are made when they are first needed, by their members
    alone; all ranks must make theirs in the same order.

    Args:
        group: the process group; None for one rank.
        inner: ranks of an inner group; None for :func:`~megatron_mtraining.layout.inner_size`.

    Attributes:
        inner, outer: sizes of an inner and of an outer group (I, O).
        inner_rank: this rank's in its inner group.

    Raises:
        ConfigError: ``inner`` does not divide the group's size, or the group's ranks do not ascend.
    """

    def __init__(self, group: ProcessGroup | None, inner: int | None = None):
        super().__init__(group)
        self.inner = inner_size(self.world, inner)
        self.outer = self.world // self.inner
        self.inner_rank = self.rank % self.inner
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        if self._ranks != sorted(self._ranks):
            # torch sorts the ranks of the groups that are made of it.
            raise ConfigError(
                f"the ranks of the context-parallel group are {self._ranks}: give them in ascending order"
            )
        self._communicators: dict[tuple, ProcessGroup] = {}

    @property
    def inner_ranks(self) -> list[int]:
        """The ranks of this rank's inner group."""
        first = self.rank - self.inner_rank
        return list(range(first, first + self.inner))

    @property
    def outer_ranks(self) -> list[int]:
        """The ranks of this rank's outer group."""
        return list(range(self.inner_rank, self.world, self.inner))

    def communicator(self, purpose: str, ranks: Sequence[int]) -> ProcessGroup:
        """A communicator over some of the ranks, this one among them, for one purpose; made once. This
        group's own with other backends than NCCL."""
        assert self.group is not None, "a rank alone has nobody to send to"
        key = (purpose, tuple(ranks))
        if key not in self._communicators:
            backend = self._nccl()
            if backend is None:
                self._communicators[key] = self.group
            else:
                with _not_split_off():
                    made = dist.new_group(
                        [self._ranks[rank] for rank in ranks],
                        backend=backend,
                        timeout=_timeout_of(self.group),
                        use_local_synchronization=True,
                    )
                assert isinstance(made, ProcessGroup), "this rank is one of them"
                self._communicators[key] = made
        return self._communicators[key]

    def exchange(
        self,
        sends: list[Transmission],
        receives: list[Transmission],
        communicator: ProcessGroup,
        tag: int,
    ) -> list[dist.Work]:
        """Start to send tensors to ranks and to receive tensors from ranks, as one batch. Pairs of a send
        and a receive are posted in the order of the lists.

        Args:
            tag: tells transfers apart that are under way at once: gloo matches by it.
        """
        operations = []
        for (sent, to), (received, source) in zip(sends, receives, strict=True):
            operations += [
                dist.P2POp(dist.isend, sent, self._ranks[to], communicator, tag),
                dist.P2POp(dist.irecv, received, self._ranks[source], communicator, tag),
            ]
        return dist.batch_isend_irecv(operations)

    def start_all_reduce(self, tensor: Tensor, communicator: ProcessGroup) -> dist.Work:
        """Start to sum a contiguous tensor over a communicator's ranks, in place."""
        work = dist.all_reduce(tensor, group=communicator, async_op=True)
        assert work is not None, "asynchronous, and this rank is a member"
        return work

    def start_all_gather(self, parts: Tensor, own: Tensor, communicator: ProcessGroup) -> dist.Work:
        """Start to gather each rank's ``own`` into ``parts``, contiguous, over a communicator's ranks."""
        work = dist.all_gather_into_tensor(parts, own, group=communicator, async_op=True)
        assert work is not None, "asynchronous, and this rank is a member"
        return work


_CP_GROUPS: dict[tuple[ProcessGroup | None, int | None], CPGroup] = {}


def cp_group_of(group: ProcessGroup | None, inner: int | None = None) -> CPGroup:
    """The :class:`CPGroup` of a process group, always the same one: its communicators are made once."""
    if not isinstance(group, ProcessGroup | None) or type(inner) not in (int, type(None)):
        return CPGroup(group, inner)  # refuses them
    key = (group, inner)
    if key not in _CP_GROUPS:
        _CP_GROUPS[key] = CPGroup(group, inner)
    return _CP_GROUPS[key]


def shut_down() -> None:
    """End this process's process groups: for the last lines of a program.

    A thread of gloo's releases a collective's tensors a moment after the collective is over, and needs
    Python's lock for it: if Python has begun to end by then, the process aborts ("terminate called without
    an active exception", torch 2.13). So this waits for that moment, unless an exception is being handled,
    which is to be reported first.
    """
    if sys.exc_info()[1] is None and "gloo" in dist.get_backend_config():
        time.sleep(0.2)
    dist.destroy_process_group()
    _CP_GROUPS.clear()


@contextmanager
def _not_split_off():
    """Has groups made of their members alone, where the default group is bound to a device: NCCL would split
    their communicators off its own, which needs all of its ranks at once."""
    default = dist.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long an NCCL group waits for a rank that does not come; None if it does not say."""
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    return getattr(options, "_timeout", None)
