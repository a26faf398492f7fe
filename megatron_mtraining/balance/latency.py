# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The time of a layer's attention, from its length, density and pattern kind.

A time is a sum of terms, each a quantity times a coefficient of 0 or more that was fitted to measurements
(:mod:`.coefficients`). Times are therefore never negative and never fall with density. With ``h`` query
heads, ``hk`` key and value heads, ``N`` tokens, ``P`` visible pairs, ``L = 2 P / N`` tokens of the document
that a token is in (the mean over tokens), and, on a context-parallel rank, ``n`` tokens and ``a`` attended
pairs of a head:

=========== ==================== =====================================================================
term        quantity             what takes this time
=========== ==================== =====================================================================
launch      1                    kernels that do next to nothing
heads       h                    what is done once for a head: sorting columns, room for their gradients
rows        h n / 1e6            what is done once for a query: loads, stores, the block on the diagonal
packed_rows h n / 1e6            likewise, of packed documents only: masks, and tiles of keys that reach
                                 beyond a document; else 0
key_rows    hk n / 1e6           what is done once for a key
pairs       h a / 1e9            matrix products and exponentials of attended pairs
far_pairs   h a / 1e9 L/(L+512K) likewise, but of keys that the L2 cache no longer has
query_path  a / n / 1e3          the mean keys of a query: one program, while others have nothing left to do
key_span    see ``_key_span``    gradients of keys: the pairs, or the program with the most of them
candidates  h min(L, 16K) / 1e6  columns that the search looks at twice: the more keys, the more stand out
square      h N n / 1e9          the pattern search of key blocks compares all pairs of blocks
=========== ==================== =====================================================================
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from ..errors import ConfigError
from .coefficients import Coefficients

PROCESSORS = 132
"""Multiprocessors of an H200."""
BLOCK = 128
"""Tokens in a block: keys of a program that computes their gradients."""
CACHED = 512 * 1024
"""Length of a document in tokens at which half of the keys are assumed to come from memory."""
CANDIDATES = 16 * 1024
"""Length in tokens beyond which the number of candidate columns does not grow."""

Numbers: TypeAlias = "float | np.ndarray"


class AttentionShape(NamedTuple):
    """The heads of an attention layer on one tensor-parallel rank."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int


class Latency(NamedTuple):
    """Milliseconds of one attention layer on the GPU, a number or an array each."""

    search_ms: Numbers
    forward_ms: Numbers
    backward_ms: Numbers

    @property
    def total_ms(self) -> Numbers:
        """Search, forward and backward."""
        return self.search_ms + self.forward_ms + self.backward_ms


def predict(
    coefficients: Coefficients,
    tokens: Numbers,
    pairs: Numbers,
    density: Numbers,
    shape: AttentionShape,
    *,
    packed: bool,
    kind: str = "vertical_slash",
    cp_size: int = 1,
) -> Latency:
    """The time of one attention layer of one sequence on one context-parallel rank.

    Args:
        coefficients: of the kind and head dimension, from :mod:`.coefficients`.
        tokens: tokens of the whole sequence, a number or an array. The time of 0 tokens is 0.
        pairs: visible query-key pairs of the whole sequence, a number or an array.
        density: the share of these pairs that is attended to, a number or an array; clipped to 0 to 1.
        shape: heads of one tensor-parallel rank.
        packed: whether the layer is given documents (also if it is one document).
        kind: vertical_slash (slashes and columns), block_lists or dense.
        cp_size: context-parallel ranks, which have equal work.

    Returns:
        Milliseconds, arrays of the shape that the arguments broadcast to.
    """
    amounts = quantities(tokens, pairs, density, shape, cp_size, packed=packed, kind=kind)
    there = np.asarray(tokens, dtype=np.float64) > 0
    found = []
    for part in ("search", "forward", "backward"):
        time = sum(each * amounts[term] for term, each in coefficients[part].items())
        # [()] makes a number of an array without dimensions.
        found.append(np.where(there, time + np.zeros_like(amounts["pairs"]), 0.0)[()])
    return Latency(*found)


def quantities(
    tokens,
    pairs,
    density,
    shape: AttentionShape,
    cp_size: int = 1,
    *,
    packed: bool,
    kind: str = "vertical_slash",
) -> dict:
    """The quantity of each term, by its name; see the module's text. Arguments as for
    :func:`predict`; all float64 of one shape, but numbers for ``launch`` and ``heads``."""
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
    length = 2 * pairs / np.maximum(tokens, 1.0)
    work = heads * attended / 1e9
    return {
        "launch": 1.0,
        "heads": float(heads),
        "rows": heads * rows / 1e6,
        "packed_rows": packed * heads * rows / 1e6,
        "key_rows": kv_heads * rows / 1e6,
        "pairs": work,
        "far_pairs": work * length / (length + CACHED),
        "query_path": attended / np.maximum(rows, 1.0) / 1e3,
        "key_span": _key_span(kind, work, rows, length, shape),
        "candidates": heads * np.minimum(length, CANDIDATES) / 1e6,
        "square": heads * tokens * rows / 1e9,
    }


def _key_span(kind: str, work, rows, length, shape: AttentionShape) -> np.ndarray:
    """Pairs, in 1e9, that all multiprocessors could compute while the gradients of keys are computed.

    A program has one block of keys of a KV head, and all queries of its query heads that attend to the block.
    If there are few programs, the longest one determines the time. The first block of a document has twice
    the mean number of queries. With lists of key blocks, all queries of the document may attend to one block.
    """
    if kind == "block_lists":
        longest = BLOCK * length * shape.num_heads / shape.num_kv_heads / 1e9
        longest = np.minimum(longest, work)
    else:
        programs = shape.num_kv_heads * np.maximum(rows / BLOCK, 1.0)
        longest = work * np.minimum(2 / programs, 1.0)
    return np.maximum(work, PROCESSORS * longest)
