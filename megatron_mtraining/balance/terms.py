# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The terms that the time of a layer's attention is a sum of.

Each has a coefficient of 0 or more that ``mtraining profile`` measures on a GPU:
so times are never negative, never fall with the attended query-key pairs, and grow beyond the measured
lengths as the work does. With ``h`` query heads, ``hk`` key and value heads, ``N`` tokens, ``n`` tokens on a
context-parallel rank and ``a`` attended pairs of a head on that rank:

========== ================= ==========================================================================
term       quantity          what takes this time
========== ================= ==========================================================================
launch     1                 kernels that do next to nothing
rows       h n / 1e6         what is done once for a query: loads, stores, the block on the diagonal
key_rows   hk n / 1e6        what is done once for a key
pairs      h a / 1e9         matrix products and exponentials of attended pairs
query_path a / n / 1e3       the mean keys of a query: one program, while others have nothing left to do
key_path   h a / (hk n) / 1e3 the mean queries of a key, over the query heads of its head: likewise
square     h N n / 1e9       the pattern search of key blocks compares all pairs of blocks
========== ================= ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from ..errors import ConfigError

KINDS = ("vertical_slash", "block_lists", "dense")
"""Kinds of patterns: slashes and columns; lists of key blocks; everything, without a search."""
TERMS = ("launch", "rows", "key_rows", "pairs", "query_path", "key_path", "square")
PARTS: dict[str, tuple[str, ...]] = {
    "search": ("launch", "rows", "key_rows", "square"),
    "forward": ("launch", "rows", "pairs", "query_path"),
    "backward": ("launch", "rows", "key_rows", "pairs", "query_path", "key_path"),
}
"""The terms of each part of a layer's attention."""

Numbers: TypeAlias = "float | np.ndarray"


class AttentionShape(NamedTuple):
    """The heads of an attention layer on one tensor-parallel rank."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int


class Latency(NamedTuple):
    """Milliseconds of one attention layer, a number or an array each."""

    search_ms: Numbers
    forward_ms: Numbers
    backward_ms: Numbers

    @property
    def total_ms(self) -> Numbers:
        """Search, forward and backward."""
        return self.search_ms + self.forward_ms + self.backward_ms


class Error(NamedTuple):
    """How far predictions were from measurements of shapes that were not fitted."""

    median: float
    """Relative, as a share of the measured time."""
    worst: float
    count: int
    """Measurements."""


@dataclass(frozen=True)
class Entry:
    """The coefficients of one kind of pattern and head dimension.

    Attributes:
        kind: one of :data:`KINDS`.
        head_dim: 64 or 128.
        coefficients: milliseconds per quantity of a term, by part and term (:data:`PARTS`).
        host: milliseconds that the host takes to launch each part.
    """

    kind: str
    head_dim: int
    coefficients: Mapping[str, Mapping[str, float]]
    host: Latency


def quantities(tokens, pairs, density, shape: AttentionShape, cp_size: int = 1) -> dict:
    """The quantity of each term, by its name; see the module's text. Arguments as for
    :meth:`LatencyModel.predict`; all float64 of one shape, but ``launch``, which is 1."""
    heads, kv_heads, _ = shape
    if heads < 1 or kv_heads < 1 or cp_size < 1:
        raise ConfigError(
            f"a layer has {heads} query heads and {kv_heads} key and value heads on each of {cp_size} "
            "context-parallel ranks: use 1 or more of each"
        )
    tokens, pairs, density = np.broadcast_arrays(
        *(np.asarray(each, dtype=np.float64) for each in (tokens, pairs, density))
    )
    tokens, pairs = np.maximum(tokens, 0.0), np.maximum(pairs, 0.0)
    rows = tokens / cp_size
    attended = pairs * np.clip(density, 0.0, 1.0) / cp_size
    each = attended / np.maximum(rows, 1.0)
    return {
        "launch": 1.0,
        "rows": heads * rows / 1e6,
        "key_rows": kv_heads * rows / 1e6,
        "pairs": heads * attended / 1e9,
        "query_path": each / 1e3,
        "key_path": heads / kv_heads * each / 1e3,
        "square": heads * tokens * rows / 1e9,
    }
