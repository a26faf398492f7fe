# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pattern search of a short sequence, captured as a CUDA graph.

A search has about 14 launches, of key blocks 20 or more. With up to :data:`MAX_TOKENS` tokens on a rank, the
host takes longer for the launches than the GPU takes for the kernels. The launches depend on shapes and
settings alone (:class:`SearchKind`), and nothing is read back to the host. So the second search of a kind is
captured, and later ones replay the graph: the same kernels, and the same bits.

A graph reads and writes fixed addresses. Each replay copies keys and sampled rows to the addresses that the
graph reads, a few MB, and all queries if a selector reads them (``Selector.reads_query``); and it copies the
index to new memory, in one launch. The graphs of a stream share this memory, and run one after the other.
Collectives are not captured: a collective ends a graph and begins the next one. So ranks that replay and
ranks that launch kernel by kernel run the same collectives.

These searches are not captured: with visible ranges; by selectors that a graph cannot hold
(``Selector.is_captured``); of block lists whose entries the host counts (``UNCOUNTED_ENTRIES``); on a stream
that is being captured. ``MTRAINING_SEARCH_GRAPH`` in the environment chooses: ``0`` captures none, ``1`` all
others; without it those of one rank are captured, as replays between collectives of several GPUs are not
measured yet, and none with ``CUDA_LAUNCH_BLOCKING=1``.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import MTrainingConfig, Policy
from ..cp_group import CPGroup
from ..kernels.types import SampledRows
from ..stream_graphs import Memory, StreamGraphs, of_current_stream
from .block_list_index import BlockListIndex
from .captured_search import CapturedGroup, CopiedIndex
from .constants import constants_read
from .sampled_rows import gather_rows
from .vertical_slash_index import VerticalSlashIndex

MAX_TOKENS = 32768
"""Tokens on a rank, of all batch entries, up to which a search is captured."""

MAX_KEY_BYTES = 64 * 2**20
"""Bytes of keys up to which a search is captured. A stream holds one copy of them."""

MAX_QUERY_BYTES = 128 * 2**20
"""Bytes of queries up to which a search that reads all of them is captured. A stream holds one copy."""

Index = VerticalSlashIndex | BlockListIndex

Search = Callable[[SampledRows, Tensor, Tensor, CPGroup, Tensor | None], Index]
"""A search of the given sample, keys and prices, over a group of ranks; and of all queries, if it reads
them."""


class SearchKind(NamedTuple):
    """Everything that the launches of a search depend on."""

    config: MTrainingConfig
    policies: tuple[Policy, ...] | None
    softmax_scale: float
    query: torch.Size
    key: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]
    layout: tuple[int, int, int]

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        config: MTrainingConfig,
        cp: CPGroup,
        softmax_scale: float,
        policies: tuple[Policy, ...] | None,
    ) -> SearchKind:
        """The kind of :func:`.search.search_pattern` with these arguments."""
        return cls(
            config,
            policies,
            softmax_scale,
            query.shape,
            key.shape,
            (query.dtype, key.dtype),
            (cp.rank, cp.world, cp.inner),
        )


class SearchGraphs(StreamGraphs[SearchKind, "SearchGraph"]):
    """The captured searches of one stream."""

    WHAT, SWITCH = "the pattern search", "MTRAINING_SEARCH_GRAPH"

    @staticmethod
    def of_stream(query: Tensor, key: Tensor, world: int = 1) -> SearchGraphs | None:
        """The captured searches of the current stream; None if a search with these operands, over this
        number of ranks, is not to be captured.

        Raises:
            ConfigError: another value of ``MTRAINING_SEARCH_GRAPH``.
        """
        tokens = query.shape[0] * query.shape[1]
        if not query.is_cuda or tokens > MAX_TOKENS or key.nbytes > MAX_KEY_BYTES:
            return None
        wanted = SearchGraphs.wanted()
        if wanted is None:
            wanted = world == 1 and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1"
        if not wanted:
            return None
        return of_current_stream(_STREAMS, SearchGraphs, query.device)

    def capture(
        self,
        kind: SearchKind,
        search: Search,
        sample: SampledRows,
        key: Tensor,
        cp: CPGroup,
        prices: Tensor,
        query: Tensor | None = None,
    ) -> None:
        """Capture a search for later ones of its kind, if it is due. The caller still has to search. This
        runs no collective.

        Args:
            sample, key, prices: of this search.
            query: likewise; None if the search reads no more of it than the sample.
        """
        self.make(
            kind,
            _inputs(sample, key, prices, query),
            lambda memory, lock: SearchGraph(search, sample, key, cp, prices, memory, lock, query),
        )


def _inputs(sample: SampledRows, key: Tensor, prices: Tensor, query: Tensor | None) -> list[Tensor]:
    return [sample.query, key, prices, *([] if query is None else [query])]


_STREAMS: dict[tuple[int, int], SearchGraphs] = {}
"""By device and stream."""

atexit.register(_STREAMS.clear)  # while the driver is there


class SearchGraph:
    """One captured search.

    Args:
        search: reads nothing back to the host.
        sample, key, prices, cp, query: as at the capture; those of later calls must be of the same kind.
        memory: of the stream's graphs.
        lock: held while that memory is in use.
    """

    def __init__(
        self,
        search: Search,
        sample: SampledRows,
        key: Tensor,
        cp: CPGroup,
        prices: Tensor,
        memory: Memory,
        lock: AbstractContextManager,
        query: Tensor | None = None,
    ):
        self._lock = lock
        given = _inputs(sample, key, prices, query)
        own = memory.like(given)
        self._rows, self._key, self._prices = own[:3]
        self._query = None if query is None else own[3]
        self._sample = replace(sample, query=self._rows)  # the graph reads the positions, too
        for each, value in zip(own, given):
            each.copy_(value)
        group = CapturedGroup(cp, memory)
        # Compiles kernels and makes constants, which cannot be done in a capture.
        search(self._sample, self._key, self._prices, group, self._query)
        memory.side.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(memory.side), constants_read() as self._constants:
            group.begin()
            try:
                found = CopiedIndex(
                    search(self._sample, self._key, self._prices, group, self._query)
                )
            finally:
                group.end()
        self._steps, self._found = group.steps, found

    def __call__(
        self, query: Tensor, key: Tensor, config: MTrainingConfig, cp: CPGroup, prices: Tensor
    ) -> Index:
        """Launch the search of these operands, which are those of :func:`.search.search_pattern`."""
        with self._lock:
            gather_rows(query, config, cp, out=self._rows)
            if self._query is not None:
                self._query.copy_(query)
            self._key.copy_(key)
            self._prices.copy_(prices)
            for step in self._steps:
                step(cp)
            return self._found.copy()
