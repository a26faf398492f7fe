# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Moving tensors around a ring of ranks: the only place of the ring that talks to a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Transfer:
    """A tensor on its way: one being sent to the next rank, one coming from the rank before."""

    def __init__(self, sent: Tensor, received: Tensor, works: list):
        # The sent tensor is held until the transfer is over, or its memory might be reused.
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """The tensor received. Later work of the current stream (on CPU: the caller) waits for it."""
        for work in self._works:
            work.wait()
        self._sent = None
        return self._received


class Ring:
    """The ranks of a process group in a circle; ``group`` None is a circle of one.

    Attributes:
        rank, world: this process's position in the group, and the group's size.
    """

    VALUES, GRADIENTS = 0, 1

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the context-parallel group given")

    def post(self, tensor: Tensor, kind: int) -> Transfer:
        """Start sending a contiguous tensor to the next rank and receiving its like from the one
        before. Returns at once; call it before the compute that the transfer is to hide behind.

        Args:
            kind: VALUES or GRADIENTS, so that two transfers under way at once cannot be mixed up
                (gloo matches by tag; NCCL by order, which is the same on all ranks).
        """
        received = torch.empty_like(tensor)
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.world)
        previous = dist.get_global_rank(self.group, (self.rank - 1) % self.world)
        operations = [
            dist.P2POp(dist.isend, tensor, following, self.group, kind),
            dist.P2POp(dist.irecv, received, previous, self.group, kind),
        ]
        return Transfer(tensor, received, dist.batch_isend_irecv(operations))

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
