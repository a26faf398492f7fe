# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The parts of a captured search (:mod:`.search_graph`): graphs between collectives, and copies of its
index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..cp_group import CPGroup
from ..stream_graphs import ALIGNMENT, Memory, padded
from .block_list_index import BlockListIndex
from .vertical_slash_index import VerticalSlashIndex

AnyIndex = TypeVar("AnyIndex", VerticalSlashIndex, BlockListIndex)

METRIC = "metrics."
"""Before the name of a metric, beside names of fields."""


class CopiedIndex(Generic[AnyIndex]):
    """An index whose tensors are written again and again, to be copied each time.

    Attributes:
        index: that index.
    """

    def __init__(self, index: AnyIndex):
        tensors = {
            each.name: value.contiguous()
            for each in fields(index)
            if isinstance(value := getattr(index, each.name), Tensor)
        }
        tensors |= {METRIC + name: value.contiguous() for name, value in index.metrics.items()}
        self.index = _replaced(index, tensors)
        spare = torch.empty(ALIGNMENT, dtype=torch.uint8, device=index.columns.device)
        self._parts: list[Tensor] = []
        self._places: list[tuple[str, torch.dtype, torch.Size, tuple[int, ...], int]] = []
        offset = 0
        for name, tensor in tensors.items():
            place = offset // tensor.element_size()
            self._places.append((name, tensor.dtype, tensor.shape, tensor.stride(), place))
            length = padded(tensor)
            self._parts += [tensor.reshape(-1).view(torch.uint8), spare[: length - tensor.nbytes]]
            offset += length
        self._parts = [part for part in self._parts if len(part)]

    def copy(self) -> AnyIndex:
        """The index as it is now, in memory of its own."""
        memory = torch.cat(self._parts)
        typed = {dtype: memory.view(dtype) for dtype in {dtype for _, dtype, *_ in self._places}}
        tensors = {
            name: typed[dtype].as_strided(shape, stride, typed[dtype].storage_offset() + offset)
            for name, dtype, shape, stride, offset in self._places
        }
        return _replaced(self.index, tensors)


def _replaced(index: AnyIndex, tensors: dict[str, Tensor]) -> AnyIndex:
    metrics = {name: tensors[METRIC + name] for name in index.metrics}
    own: dict[str, Any] = {n: each for n, each in tensors.items() if not n.startswith(METRIC)}
    return replace(index, metrics=metrics, **own)


class CapturedGroup(CPGroup):
    """Stands in for a group of ranks while a search is captured: a collective ends a graph, and begins the
    next one. Outside of a capture a collective does nothing.

    Attributes:
        steps: the graphs and collectives, functions of the group.
    """

    def __init__(self, cp: CPGroup, memory: Memory):
        super().__init__(None)
        self.rank, self.world, self.inner = cp.rank, cp.world, cp.inner
        self.outer, self.inner_rank = cp.outer, cp.inner_rank
        self.steps: list[Callable[[CPGroup], object]] = []
        self._memory = memory
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Begin to capture a graph on the current stream."""
        self._graph = self._memory.begin_capture()

    def end(self) -> None:
        """End the graph that :meth:`begin` has begun; do nothing if it has ended in an error."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self.steps.append(lambda cp: graph.replay())

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """See :meth:`.RankGroup.all_reduce`."""
        if self.world > 1:
            self._collect(lambda cp: cp.all_reduce(tensor, op))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See :meth:`.RankGroup.all_gather`."""
        if self.world == 1:
            return tensor[None]
        parts = tensor.new_zeros(self.world, *tensor.shape)
        self._collect(lambda cp: parts.copy_(cp.all_gather(tensor)))
        return parts

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """See :meth:`.RankGroup.reduce_scatter`."""
        if self.world == 1:
            return tensor
        own = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] // self.world)
        self._collect(lambda cp: own.copy_(cp.reduce_scatter(tensor)))
        return own

    def _collect(self, collective: Callable[[CPGroup], object]) -> None:
        if self._graph is not None:
            self.end()
            self.steps.append(collective)
            self.begin()
