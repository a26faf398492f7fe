# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""CUDA graphs of what is launched again and again, by stream: which kinds of calls are captured, and the
memory that their graphs share.

The second call of a kind is captured, since the first may be the only one; later ones replay the graph. A
graph reads and writes fixed addresses, so operands are copied there before a replay. The graphs of a stream
share this memory, and run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .switches import switch

MAX_GRAPHS = 128
"""Graphs of a stream at most. Calls of further kinds are launched kernel by kernel."""

RENEWAL = 16384
"""If a stream has as many graphs as it may, a further kind replaces all of them after this many calls."""

MAX_STREAMS = 4
"""Streams that have graphs."""

ALIGNMENT = 16
"""Bytes. Kernels are compiled for addresses that are multiples of this, and for others."""


def padded(tensor: Tensor) -> int:
    """A tensor's bytes, rounded up so that what follows is aligned."""
    return -(-prod(tensor.shape) * tensor.element_size() // ALIGNMENT) * ALIGNMENT


class Memory:
    """Where the graphs of a stream have their inputs and all else.

    Attributes:
        nbytes: of inputs.
        device: of the graphs.
        pool: of the graphs.
        side: a stream to capture on.
    """

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes, self.device, self.side = nbytes, device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def begin_capture(self) -> torch.cuda.CUDAGraph:
        """Begin to capture a graph on the current stream."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may launch kernels meanwhile.
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        return graph

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors like these, one after the other."""
        found, offset = [], 0
        for tensor in tensors:
            part = self._bytes[offset : offset + tensor.nbytes]
            found.append(part.view(tensor.dtype).view(tensor.shape))
            offset += padded(tensor)
        return found


Kind = TypeVar("Kind", bound=Hashable)
Graph = TypeVar("Graph")


class StreamGraphs(Generic[Kind, Graph]):
    """The captured calls of one stream, by their kind: everything that their launches depend on."""

    WHAT = "a call"
    """What is captured, in an error."""

    SWITCH = ""
    """The environment variable that says whether it is captured: 0 or 1."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renew()

    def _renew(self) -> None:
        self._graphs: dict[Kind, Graph] = {}
        self._seen: set[Kind] = set()
        self._memory: Memory | None = None
        self._calls = 0

    @classmethod
    def wanted(cls) -> bool | None:
        """Whether the environment asks for captures; None if it does not say.

        Raises:
            ConfigError: it has another value.
        """
        value = switch(cls.SWITCH)
        return None if value is None else value == "1"

    def get(self, kind: Kind) -> Graph | None:
        """The graph of a kind. Called once for each call."""
        self._calls += 1
        return self._graphs.get(kind)

    def make(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        make: Callable[[Memory, AbstractContextManager], Graph],
    ) -> None:
        """Capture a call for later ones of its kind, if it is due.

        Args:
            inputs: tensors that take as much memory as the call's.
            make: captures, given the memory, and the lock that is held while that is in use.
        """
        with self._lock:
            if not self._is_due(kind):
                return
            needed = sum(map(padded, inputs))
            if self._memory is not None and needed > self._memory.nbytes:
                self._drop()
            try:
                with torch.inference_mode(False), torch.no_grad():
                    if self._memory is None:
                        self._memory = Memory(needed, inputs[0].device)
                    graph = make(self._memory, self._lock)
            except RuntimeError as error:
                # Not launched kernel by kernel instead: PyTorch's allocator may still be capturing.
                raise RuntimeError(
                    f"{self.WHAT} cannot be captured as a CUDA graph ({error}): set {self.SWITCH}=0 in the "
                    "environment"
                ) from error
            self._graphs[kind] = graph

    def _is_due(self, kind: Kind) -> bool:
        if kind not in self._seen:
            if len(self._seen) >= 8 * MAX_GRAPHS:
                self._seen.clear()
            self._seen.add(kind)
            return False
        if len(self._graphs) >= MAX_GRAPHS:
            if self._calls < RENEWAL:
                return False
            self._drop()
        return True

    def _drop(self) -> None:
        """Release all graphs and their memory."""
        if self._memory is not None:  # they may be running
            torch.cuda.current_stream(self._memory.device).synchronize()
        self._renew()


Graphs = TypeVar("Graphs", bound=StreamGraphs)


def of_current_stream(
    table: dict[tuple[int, int], Graphs], make: Callable[[], Graphs], device: torch.device
) -> Graphs | None:
    """The graphs of the current stream of a GPU, from a table by device and stream; None if this stream is
    being captured, or if :data:`MAX_STREAMS` others have graphs."""
    if torch.version.cuda is None or torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device)
    at = (stream.device_index, stream.cuda_stream)
    if at not in table:
        if len(table) >= MAX_STREAMS:
            return None
        table[at] = make()
    return table[at]
