# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The attention of a short sequence and its gradients on one rank, captured as CUDA graphs.

In a short sequence the host takes longer to launch the kernels of a layer than the GPU takes to run them.
With ``MTRAINING_ATTENTION_GRAPH=1`` in the environment, they are captured (:mod:`..stream_graphs`): a forward
and a backward are then some copies and one graph each. The kernels are the same, and so are the bits.

Operands are copied to fixed addresses, and results to new memory, which takes the GPU longer. So this pays
only where the host is the slower one, and is not the default.

Captured are patterns that a captured search has found (:mod:`..pattern.search_graph`), whose tensors lie in
one piece of memory; on one rank, of up to ``search_graph.MAX_TOKENS`` tokens, without packed documents and
without a pruned backward. The copies are aligned, so operands that are not, which take other kernels, are
launched kernel by kernel.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention.backends import fits_tma
from ..pattern.captured_search import Place, placed, tensors_of
from ..pattern.search_graph import MAX_TOKENS
from ..pattern.vertical_slash_index import PatternIndex
from ..stream_graphs import Memory, StreamGraphs, of_current_stream

Run = Callable[[Sequence[Tensor], PatternIndex], Sequence[Tensor]]
"""What is captured: a function of operands and a pattern, which reads nothing back to the host."""

KERNEL_SWITCHES = ("MTRAINING_BACKWARD", "MTRAINING_PORTABLE_KERNELS")
"""Environment variables that choose kernels."""


class AttentionKind(NamedTuple):
    """Everything that the launches of a call depend on."""

    name: str
    operands: tuple[tuple[torch.Size, torch.dtype], ...]
    places: tuple[Place, ...]
    pattern: tuple[type, int, int, bool]
    softmax_scale: float
    switches: tuple[str | None, ...]
    deterministic: bool


class AttentionGraphs(StreamGraphs[AttentionKind, "AttentionGraph"]):
    """The captured attention of one stream."""

    WHAT, SWITCH = "attention", "MTRAINING_ATTENTION_GRAPH"
    LIMIT = 8

    @staticmethod
    def of_stream(query: Tensor) -> AttentionGraphs | None:
        """The captured attention of the current stream; None if none is to be captured for this query.

        Raises:
            ConfigError: another value of ``MTRAINING_ATTENTION_GRAPH``.
        """
        wanted = AttentionGraphs.wanted()
        if not wanted or not query.is_cuda or query.shape[0] * query.shape[1] > MAX_TOKENS:
            return None
        return of_current_stream(_STREAMS, AttentionGraphs, query.device)


_STREAMS: dict[tuple[int, int], AttentionGraphs] = {}
"""By device and stream."""

atexit.register(_STREAMS.clear)  # while the driver is there


def replayed(
    name: str, run: Run, operands: Sequence[Tensor], index: PatternIndex, softmax_scale: float
) -> list[Tensor] | None:
    """``run(operands, index)`` by its graph; None if there is none, and the caller has to run it.

    Args:
        name: of the function.
        run: depends on nothing but shapes, the index and ``softmax_scale``. If it is to be captured, for
            later calls of this kind, it is run here.
        operands: query, key and value; of a backward, after them the gradient of out, out and lse.
    """
    graphs = AttentionGraphs.of_stream(operands[0])
    if graphs is None or index.documents is not None or not all(map(fits_tma, operands)):
        return None
    bytes_of_index = _bytes_of(index)
    if bytes_of_index is None:
        return None
    kind = AttentionKind(
        name,
        tuple((each.shape, each.dtype) for each in operands),
        _places_of(index),
        (type(index), index.seq_length, index.block_size, index.is_dense),
        softmax_scale,
        tuple(map(os.environ.get, KERNEL_SWITCHES)),
        torch.are_deterministic_algorithms_enabled(),
    )
    given = [*operands, bytes_of_index]
    graph = graphs.get(kind)
    if graph is not None:
        return graph(given)
    # The same room for a forward and its backward. If the backward asked for more, the memory and the
    # forward's graph would be dropped for it.
    query, key, value, *_ = operands
    room = [query, query, query, query, key, value, bytes_of_index]
    graphs.make(kind, room, lambda memory, lock: AttentionGraph(run, given, index, memory, lock))
    return None


class AttentionGraph:
    """One captured call.

    Args:
        run: what to capture.
        given: its operands, and the bytes of its index; those of later calls must be of the same kind.
        index: the index.
        memory: of the stream's graphs.
        lock: held while that memory is in use.
    """

    def __init__(
        self,
        run: Run,
        given: Sequence[Tensor],
        index: PatternIndex,
        memory: Memory,
        lock: AbstractContextManager,
    ):
        self._lock, self._given = lock, memory.like(given)
        self._copy(given)
        *operands, bytes_of_index = self._given
        own = placed(index, _places_of(index), bytes_of_index)
        # Compiles kernels and makes constants, which cannot be done in a capture.
        run(operands, own)
        memory.side.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(memory.side):
            self._graph = memory.begin_capture()
            try:
                self._found = run(operands, own)
            finally:
                self._graph.capture_end()

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The results for these operands and index, in memory of their own."""
        with self._lock:
            self._copy(given)
            self._graph.replay()
            return [each.clone() for each in self._found]

    def _copy(self, given: Sequence[Tensor]) -> None:
        for own, each in zip(self._given, given, strict=True):
            own.copy_(each)


def _bytes_of(index: PatternIndex) -> Tensor | None:
    """The memory of an index, uint8, if all its tensors lie in one piece; else None."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(index).values()]
    if len({storage.data_ptr() for storage in storages}) != 1:
        return None
    return torch.empty(0, dtype=torch.uint8, device=index.columns.device).set_(storages[0])


def _places_of(index: PatternIndex) -> tuple[Place, ...]:
    return tuple(
        (name, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        for name, tensor in tensors_of(index).items()
    )
