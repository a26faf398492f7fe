# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Moving tensors around a ring of ranks: the only place of the ring that talks to a process group."""

from __future__ import annotations

import itertools
import socket
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import inner_size
from .schedule import Link


class Transfer:
    """A tensor on its way: one being sent to the next rank, one coming from the rank before."""

    def __init__(self, sent: Tensor, received: Tensor, works: list):
        # The sent tensor is held until the transfer is over, or its memory might be reused.
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """The tensor received. Later work of the current stream (on CPU: the caller) waits for it."""
        for work in self._works:
            work.wait()
        self._sent, self._works = None, []
        return self._received


class Ring:
    """The ranks of a process group, in nodes, and nodes in a circle; ``group`` None is one rank.

    Args:
        inner: ranks of a node, that gather their keys: rank ``x * inner + y`` is number y of node x. None
            for :func:`~megatron_mtraining.layout.inner_size`; 1 for a ring of all ranks.

    Over NCCL each kind of transfer has a communicator of its own, and so a stream: transfers that share
    one wait for each other. They are made when they are first needed, by the members of the group alone;
    all of them must build their rings in the same order.

    Attributes:
        rank, world: this process's position in the group, and the group's size.
        inner, outer: ranks a node, and nodes.
        number: this rank's in its node.
        trace: None, or a function of a name and a step that gives a context manager, entered around
            what a ring runs: for measurements.

    Raises:
        ConfigError: ``inner`` does not divide the group's size.
    """

    VALUES, GRADIENTS, COLUMNS, GATHER = 0, 1, 2, 3

    def __init__(self, group: dist.ProcessGroup | None, inner: int | None = None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the context-parallel group given")
        self.inner = inner_size(self.world, inner)
        self.outer = self.world // self.inner
        self.number = self.rank % self.inner
        self.trace = None
        self.checked = False
        self._groups, self._next, self._aside = {}, {}, None

    def span(self, name: str, step=None):
        """A context around a part of the work; see ``trace``."""
        return nullcontext() if self.trace is None else self.trace(name, step)

    def post(
        self, tensor: Tensor, kind: int, link: Link, received: Tensor | None = None
    ) -> Transfer:
        """Start sending a contiguous tensor to the next rank over a link, and receiving its like from the
        one before. Returns at once; call it before the compute that the transfer is to hide behind.

        Args:
            kind: VALUES or GRADIENTS, so that two transfers under way at once cannot be mixed up
                (gloo matches by tag; NCCL has a communicator each).
            received: what to receive into, contiguous; None for new memory.
        """
        if received is None:
            received = torch.empty_like(tensor)
        group = self._group_of(kind, link)
        following, previous = self._neighbours(link)
        tag = kind + 4 * (link is Link.OUTER)
        operations = [
            dist.P2POp(dist.isend, tensor, following, group, tag),
            dist.P2POp(dist.irecv, received, previous, group, tag),
        ]
        return Transfer(tensor, received, dist.batch_isend_irecv(operations))

    def gather(self, tensor: Tensor, after: Transfer | None = None) -> Transfer:
        """Start to fill ``tensor`` ``[inner, ...]``, contiguous, with what the ranks of a node have at their
        numbers in theirs.

        Args:
            after: what brings this rank's own entry, posted since ``tensor`` was made, if that is still on
                its way: nobody waits for it here (on CPU, the caller does).

        What is waited for is ``tensor``.
        """
        own = tensor[self.number]
        if self.inner == 1:
            return Transfer(own, tensor, [after] if after else [])
        if not tensor.is_cuda:
            # Between pairs of ranks: gloo would want a process group a node for a collective.
            if after:
                after.wait()
            return Transfer(own, tensor, dist.batch_isend_irecv(self._exchange(tensor)))
        group = self._group_of(Ring.GATHER, Link.INNER)
        if after is None:
            return Transfer(own, tensor, [_all_gather(tensor, own, group)])
        # A stream aside waits for the entry, so that the compute stream need not. The entry has been posted
        # after the tensor was made, so that is waited for with it.
        if self._aside is None:
            self._aside = torch.cuda.Stream()
        with torch.cuda.stream(self._aside):
            after.wait()
            return Transfer(own, tensor, [_all_gather(tensor, own, group)])

    def _exchange(self, tensor: Tensor) -> list:
        node = self.rank - self.number
        operations = []
        for by in range(1, self.inner):
            to, source = (self.number + by) % self.inner, (self.number - by) % self.inner
            for do, slot, peer in (
                (dist.isend, self.number, to),
                (dist.irecv, source, source),
            ):
                peer = dist.get_global_rank(self.group, node + peer)
                operations.append(dist.P2POp(do, tensor[slot], peer, self.group, Ring.GATHER))
        return operations

    def sum_columns(self, tensor: Tensor) -> Transfer:
        """Start summing a contiguous tensor over all ranks, in place."""
        if self.world == 1:
            return Transfer(tensor, tensor, [])
        group = self._group_of(Ring.COLUMNS, None)
        return Transfer(tensor, tensor, [dist.all_reduce(tensor, group=group, async_op=True)])

    def _neighbours(self, link: Link) -> tuple[int, int]:
        """The next rank over a link and the one before, as the whole world counts them."""
        if link not in self._next:
            ranks, place = self._circle(link)
            self._next[link] = tuple(
                dist.get_global_rank(self.group, ranks[(place + by) % len(ranks)]) for by in (1, -1)
            )
        return self._next[link]

    def _circle(self, link: Link) -> tuple[list[int], int]:
        """The ranks of the group in this rank's circle, in order, and its place there."""
        x, y = divmod(self.rank, self.inner)
        if link is Link.INNER:
            return [x * self.inner + i for i in range(self.inner)], y
        return [o * self.inner + y for o in range(self.outer)], x

    def _group_of(self, kind: int, link: Link | None) -> dist.ProcessGroup:
        key = (kind, link)
        if key in self._groups:
            return self._groups[key]
        if dist.get_backend(self.group) != "nccl":
            self._groups[key] = self.group
        else:
            ranks = range(self.world) if link is None else self._circle(link)[0]
            self._groups[key] = dist.new_group(
                [dist.get_global_rank(self.group, rank) for rank in ranks],
                backend="nccl",
                timeout=_timeout_of(self.group),
                use_local_synchronization=True,
            )
        return self._groups[key]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on every rank."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self.group)
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
        """This rank's stretch of the sum over all ranks, cut along the last dimension: ``[...,
        length / world]``, contiguous."""
        if self.world == 1:
            return tensor
        if not tensor.is_cuda:  # gloo has no such collective in all versions of torch
            return self.all_reduce(tensor).chunk(self.world, -1)[self.rank].contiguous()
        parts = tensor.unflatten(-1, (self.world, -1)).movedim(-2, 0).contiguous()
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts, group=self.group)
        return own


def _all_gather(tensor, own, group):
    return dist.all_gather_into_tensor(tensor, own, group=group, async_op=True)


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group of NCCL waits for a rank that does not come; None if it does not say."""
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    return getattr(options, "_timeout", None)


_RINGS: dict[tuple[int, int | None], tuple[dist.ProcessGroup, Ring]] = {}


def ring_of(group: dist.ProcessGroup | None, inner: int | None = None) -> Ring:
    """The ring over a group, always the same one: its communicators are made once."""
    if group is None:
        return Ring(None)
    key = (id(group), inner)
    if key not in _RINGS:
        # The group is kept too, so that no other can have its id.
        _RINGS[key] = (group, Ring(group, inner))
    return _RINGS[key][1]


def shut_down() -> None:
    """End this process's process groups and rings: for the last lines of a program.

    A thread of gloo's lets go of a collective's tensors a moment after the collective is over, and needs
    Python's lock for it: if Python has begun to end by then, the process aborts ("terminate called without
    an active exception", torch 2.13). So it is given that moment; not while an error is on its way, which is
    to be the first that is heard of.
    """
    if sys.exc_info()[1] is not None:
        dist.destroy_process_group()
        return
    if "gloo" in dist.get_backend():
        time.sleep(0.2)
    dist.destroy_process_group()
    _RINGS.clear()


def check_hosts(ring: Ring) -> None:
    """Raise ValueError, on every rank, if a ring's nodes are not hosts: if one spans several.

    A collective over the group, once a ring: :func:`advise_on_hosts` on other ranks is the same one.
    """
    hosts = _hosts(ring)
    for first in range(0, len(hosts), ring.inner):
        names = hosts[first : first + ring.inner]
        if len(set(names)) > 1:
            raise ValueError(
                f"the inner ring of context-parallel ranks {first} to {first + ring.inner - 1} spans "
                f"hosts: {', '.join(names)}, in rank order; use an inner size that fits the ranks on a "
                "host, or leave the sizes out"
            )


def advise_on_hosts(ring: Ring) -> None:
    """Warn, on the first rank, if nodes span hosts although ranks could be grouped by host. A collective over
    the group, once a ring.

    Raises:
        ValueError: on every rank, if ranks disagree about the ranks a node.
    """
    hosts = _hosts(ring)
    nodes = [hosts[first : first + ring.inner] for first in range(0, len(hosts), ring.inner)]
    if ring.rank or all(len(set(node)) == 1 for node in nodes):
        return
    together = [len(list(group)) for _, group in itertools.groupby(hosts)]
    names = ", ".join(dict.fromkeys(hosts))
    if len(together) > len(set(hosts)):
        advice = "start ranks host after host, so that those of one host are neighbours"
    elif len(set(together)) == 1:
        advice = (
            f"--hierarchical-context-parallel-sizes {together[0]} {len(together)} gathers them in each host "
            "and hides what goes between hosts"
        )
    else:
        return
    warnings.warn(
        f"keys are gathered from {ring.inner} context-parallel ranks at a time, over hosts: {names}; "
        f"{advice}",
        stacklevel=2,
    )


def _hosts(ring: Ring) -> tuple[str, ...]:
    """Each rank's host, in rank order; nothing if there is one rank, or they were looked at.

    Raises:
        ValueError: on every rank, if their ``inner`` differ.
    """
    if ring.checked or ring.world == 1:
        return ()
    ring.checked = True
    found: list = [None] * ring.world
    dist.all_gather_object(found, (socket.gethostname(), ring.inner), group=ring.group)
    hosts, inners = zip(*found)
    if len(set(inners)) > 1:
        raise ValueError(
            f"context-parallel ranks disagree about the ranks a node: {list(inners)}, in rank order; give "
            "all the same --hierarchical-context-parallel-sizes or --mtraining-gathered-ranks"
        )
    return hosts
