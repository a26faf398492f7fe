# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pattern search of a short sequence, captured as a CUDA graph.

A search has about 14 launches. With up to :data:`MAX_TOKENS` tokens on a rank, the host takes longer for the
launches than the GPU takes for the kernels. The launches depend on shapes and settings alone
(:class:`SearchKind`), and nothing is read back to the host. So the second search of a kind is captured, and
later ones replay the graph: the same kernels, and the same bits.

A graph reads and writes fixed addresses. Each replay copies keys and sampled rows to the addresses that the
graph reads, a few MB, and copies the index to new memory, in one launch. The graphs of a stream share this
memory, and run one after the other. Collectives are not captured: a collective ends a graph and begins the
next one. So ranks that replay and ranks that launch kernel by kernel run the same collectives.

These searches are not captured: with packed documents; with policies that choose key blocks; with budget
policies over several ranks; on a stream that is being captured. ``MTRAINING_SEARCH_GRAPH`` in the environment
chooses: ``0`` captures none, ``1`` all others; without it those of one rank are captured, as replays between
collectives of several GPUs are not measured yet, and none with ``CUDA_LAUNCH_BLOCKING=1``.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import MTrainingConfig, Policy
from ..cp_group import CPGroup
from ..errors import ConfigError
from .captured_search import CapturedGroup, CopiedIndex, Memory, padded
from .sampled_rows import SampledRows, gather_rows
from .vertical_slash_index import VerticalSlashIndex

MAX_TOKENS = 32768
"""Tokens on a rank, of all batch entries, up to which a search is captured."""

MAX_KEY_BYTES = 64 * 2**20
"""Bytes of keys up to which a search is captured. A stream holds one copy of them."""

MAX_GRAPHS = 128
"""Graphs of a stream at most. Searches of further kinds are launched kernel by kernel."""

RENEWAL = 16384
"""If a stream has :data:`MAX_GRAPHS` graphs, a further kind replaces all of them after this many searches."""

_MAX_STREAMS = 4

Search = Callable[[SampledRows, Tensor, Tensor | None, CPGroup], VerticalSlashIndex]
"""A search of the given rows, keys and price, over a group of ranks."""


class SearchKind(NamedTuple):
    """Everything that the launches of a search depend on."""

    config: MTrainingConfig
    policies: tuple[Policy, ...] | None
    softmax_scale: float
    query: torch.Size
    key: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]
    price: tuple[torch.Size, torch.dtype] | None
    layout: tuple[int, int, int]

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        config: MTrainingConfig,
        cp: CPGroup,
        softmax_scale: float,
        policies: Sequence[Policy] | None,
        price: Tensor | None,
    ) -> SearchKind:
        """The kind of :func:`.search.search_pattern` with these arguments."""
        return cls(
            config,
            None if policies is None else tuple(policies),
            softmax_scale,
            query.shape,
            key.shape,
            (query.dtype, key.dtype),
            None if price is None else (price.shape, price.dtype),
            (cp.rank, cp.world, cp.inner),
        )


class SearchGraphs:
    """The captured searches of one stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renew()

    def _renew(self) -> None:
        self._graphs: dict[SearchKind, SearchGraph] = {}
        self._seen: set[SearchKind] = set()
        self._memory: Memory | None = None
        self._searches = 0

    @staticmethod
    def of_stream(query: Tensor, key: Tensor, world: int = 1) -> SearchGraphs | None:
        """Those of the current stream; None if a search with these operands, over so many ranks, is not to be
        captured.

        Raises:
            ConfigError: another value of ``MTRAINING_SEARCH_GRAPH``.
        """
        tokens = query.shape[0] * query.shape[1]
        if not query.is_cuda or tokens > MAX_TOKENS or key.nbytes > MAX_KEY_BYTES:
            return None
        if not _captures(world):
            return None
        if torch.version.cuda is None or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(query.device)
        at = (stream.device_index, stream.cuda_stream)
        if at not in _STREAMS:
            if len(_STREAMS) >= _MAX_STREAMS:
                return None
            _STREAMS[at] = SearchGraphs()
        return _STREAMS[at]

    def get(self, kind: SearchKind) -> SearchGraph | None:
        """The captured search of a kind. Called once for each search."""
        self._searches += 1
        return self._graphs.get(kind)

    def capture(
        self,
        kind: SearchKind,
        search: Search,
        rows: SampledRows,
        key: Tensor,
        cp: CPGroup,
        price: Tensor | None,
    ) -> None:
        """Capture a search for later ones of its kind. The first one is not captured: it may be the only one.
        The caller still has to search. This runs no collective.

        Args:
            rows, key, price: of this search.
        """
        with self._lock:
            if not self._is_due(kind):
                return
            needed = sum(map(padded, _inputs(rows, key, price)))
            if self._memory is not None and needed > self._memory.nbytes:
                self._drop()
            try:
                with torch.inference_mode(False), torch.no_grad():
                    if self._memory is None:
                        self._memory = Memory(needed, key.device)
                    graph = SearchGraph(search, rows, key, cp, price, self._memory, self._lock)
            except RuntimeError as error:
                # Not launched kernel by kernel instead: PyTorch's allocator may still be capturing.
                raise RuntimeError(
                    f"the pattern search cannot be captured as a CUDA graph ({error}): set "
                    "MTRAINING_SEARCH_GRAPH=0 in the environment"
                ) from error
            self._graphs[kind] = graph

    def _is_due(self, kind: SearchKind) -> bool:
        if kind not in self._seen:
            if len(self._seen) >= 8 * MAX_GRAPHS:
                self._seen.clear()
            self._seen.add(kind)
            return False
        if len(self._graphs) >= MAX_GRAPHS:
            if self._searches < RENEWAL:
                return False
            self._drop()
        return True

    def _drop(self) -> None:
        """Release all graphs and their memory."""
        if self._memory is not None:  # they may be running
            torch.cuda.current_stream(self._memory.device).synchronize()
        self._renew()


def _captures(world: int) -> bool:
    wanted = os.environ.get("MTRAINING_SEARCH_GRAPH")
    if wanted not in (None, "0", "1"):
        raise ConfigError(
            f"MTRAINING_SEARCH_GRAPH is {wanted!r} in the environment: set it to 0 or 1, or unset it"
        )
    if wanted is None:
        return world == 1 and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1"
    return wanted == "1"


_STREAMS: dict[tuple[int, int], SearchGraphs] = {}
"""By device and stream."""

atexit.register(_STREAMS.clear)  # while the driver is there


class SearchGraph:
    """One captured search.

    Args:
        search: reads nothing back to the host.
        rows, key, price, cp: as at the capture; those of later calls must be of the same kind.
        memory: of the stream's graphs.
        lock: held while that memory is in use.
    """

    def __init__(
        self,
        search: Search,
        rows: SampledRows,
        key: Tensor,
        cp: CPGroup,
        price: Tensor | None,
        memory: Memory,
        lock: AbstractContextManager,
    ):
        self._lock = lock
        given = _inputs(rows, key, price)
        own = memory.like(given)
        self._query, self._key, self._price = (*own, None)[:3]
        self._rows = replace(rows, query=self._query)  # the graph reads the positions, too
        for each, value in zip(own, given):
            each.copy_(value)
        group = CapturedGroup(cp, memory)
        # Compiles kernels and makes constants, which cannot be done in a capture.
        search(self._rows, self._key, self._price, group)
        memory.side.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(memory.side):
            group.begin()
            try:
                found = CopiedIndex(search(self._rows, self._key, self._price, group))
            finally:
                group.end()
        self._steps, self._found = group.steps, found

    def __call__(
        self, query: Tensor, key: Tensor, config: MTrainingConfig, cp: CPGroup, price: Tensor | None
    ) -> VerticalSlashIndex:
        """Launch the search of these operands, which are those of :func:`.search.search_pattern`."""
        with self._lock:
            gather_rows(query, config, cp, out=self._query)
            self._key.copy_(key)
            if self._price is not None:
                self._price.copy_(price)
            for step in self._steps:
                step(cp)
            return self._found.copy()


def _inputs(rows: SampledRows, key: Tensor, price: Tensor | None) -> list[Tensor]:
    return [rows.query, key] if price is None else [rows.query, key, price]
