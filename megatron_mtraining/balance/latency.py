# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The time of a layer's attention, from its length, density and pattern kind.

A time is a sum of terms, each a quantity times a coefficient of 0 or more, which ``mtraining profile`` fits to
measurements on a GPU. Times are therefore never negative and never fall with density. With ``h`` query heads,
``hk`` key and value heads, ``N`` tokens, ``P`` visible pairs, ``L = 2 P / N`` tokens of the document that a
token is in (the mean over tokens), and, on a context-parallel rank, ``n`` tokens and ``a`` attended pairs of a
head:

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

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import ConfigError
from ..files import read_json

KINDS = ("vertical_slash", "block_lists", "dense")
"""Kinds of patterns: slashes and columns; lists of key blocks; everything, without a search."""
PARTS: dict[str, tuple[str, ...]] = {
    "search": ("launch", "heads", "rows", "packed_rows", "candidates", "square"),
    "forward": ("launch", "heads", "rows", "packed_rows", "pairs", "far_pairs", "query_path"),
    "backward": (
        "launch", "heads", "rows", "packed_rows", "key_rows", "pairs", "far_pairs", "key_span",
    ),
}  # fmt: skip
"""The terms of each part of a layer's attention."""
BLOCK = 128
"""Tokens in a block: keys of a program that computes their gradients."""
CACHED = 512 * 1024
"""Length of a document in tokens at which half of the keys are assumed to come from memory."""
CANDIDATES = 16 * 1024
"""Length in tokens beyond which the number of candidate columns does not grow."""
FORMAT = "megatron-mtraining latency profile"
FOLDER = Path(__file__).parent / "profiles"
DEFAULT = "NVIDIA H200"
"""The GPU whose profile is used for GPUs without a profile."""

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


@dataclass(frozen=True)
class Entry:
    """The coefficients of one kind of pattern and head dimension.

    Attributes:
        kind: one of :data:`KINDS`.
        head_dim: 64 or 128.
        coefficients: milliseconds per quantity of a term, by part and term (:data:`PARTS`).
    """

    kind: str
    head_dim: int
    coefficients: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class LatencyModel:
    """Predicts the time of a layer's attention on one GPU; see the module's text.

    Attributes:
        gpu: the name that torch has for the GPU.
        entries: the coefficients, one entry for each kind and head dimension.
        processors: multiprocessors of the GPU.
        warning: a text for the user if the profile is of another GPU; else empty.
    """

    gpu: str
    entries: tuple[Entry, ...]
    processors: int = 132
    warning: str = ""

    def predict(
        self,
        tokens: Numbers,
        pairs: Numbers,
        density: Numbers,
        shape: AttentionShape,
        *,
        kind: str = "vertical_slash",
        cp_size: int = 1,
        packed: bool | None = None,
    ) -> Latency:
        """One attention layer of one sequence on one context-parallel rank.

        Args:
            tokens: tokens of the whole sequence, a number or an array. The time of 0 tokens is 0.
            pairs: visible query-key pairs of the whole sequence (:func:`visible_pairs`), a number or an
                array.
            density: the share of these pairs that is attended to, a number or an array; clipped to 0 to 1.
            shape: heads of one tensor-parallel rank.
            kind: one of :data:`KINDS`.
            cp_size: context-parallel ranks, which have equal work.
            packed: whether the layer is given documents (also if it is one document). None: yes if not all
                pairs of the sequence are visible.

        Returns:
            Milliseconds, arrays of the shape that the arguments broadcast to.

        Raises:
            ConfigError: the profile has no such kind or head dimension.
        """
        entry = self.entry(kind, shape.head_dim)
        amounts = quantities(
            tokens, pairs, density, shape, cp_size, kind=kind, packed=packed, processors=self.processors
        )  # fmt: skip
        there = np.asarray(tokens, dtype=np.float64) > 0
        found = []
        for part in PARTS:
            time = sum(
                coefficient * amounts[term]
                for term, coefficient in entry.coefficients[part].items()
            )
            # [()] makes a number of an array without dimensions.
            found.append(np.where(there, time + np.zeros_like(amounts["pairs"]), 0.0)[()])
        return Latency(*found)

    def entry(self, kind: str, head_dim: int) -> Entry:
        """The coefficients of a kind and head dimension.

        Raises:
            ConfigError: there are none.
        """
        for entry in self.entries:
            if (entry.kind, entry.head_dim) == (kind, head_dim):
                return entry
        raise ConfigError(
            f"the latency profile of {self.gpu} has no {kind} attention of head dim {head_dim}: run "
            "mtraining profile and give --mtraining-profile FILE, or use --mtraining-batching length"
        )

    @classmethod
    def load(cls, path: Path | str) -> LatencyModel:
        """Read a profile.

        Raises:
            ConfigError: the file cannot be read, or is no profile.
        """
        name = f"the latency profile {path}"
        found = read_json(Path(path), name)
        try:
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']!r}")
            entries = tuple(_entry(each) for each in found["entries"])
            model = cls(str(found["gpu"]), entries, int(found["processors"]))
            if not 1 <= model.processors <= 1 << 20 or not entries:
                raise ValueError("it has no entries, or no processors")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{name} cannot be used ({type(error).__name__}: {error}): give a file that mtraining profile "
                "wrote"
            ) from None
        return model

    def as_text(self) -> str:
        """The content of the profile's file, JSON."""
        entries = [
            {"kind": entry.kind, "head_dim": entry.head_dim, **entry.coefficients}
            for entry in self.entries
        ]
        content = dict(format=FORMAT, gpu=self.gpu, processors=self.processors, entries=entries)
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def for_gpu(cls, name: str, path: Path | str | None = None) -> LatencyModel:
        """The profile of a GPU.

        Args:
            name: the GPU's name, as ``torch.cuda.get_device_name`` has it.
            path: the user's profile (``--mtraining-profile``); None for one that the package has.

        Returns:
            The profile; if it is of another GPU, :attr:`warning` says so. If the package has no profile of
            the GPU, the H200's is used: its absolute times are wrong, its relative times are closer.

        Raises:
            ConfigError: see :meth:`load`.
        """
        own = FOLDER / f"{_slug(name)}.json"
        found = cls.load(path or (own if own.is_file() else FOLDER / f"{_slug(DEFAULT)}.json"))
        if found.gpu == name:
            return found
        warning = (
            f"the latency profile is of GPU {found.gpu}, and this one is {name}: the former's relative times "
            "are used; run mtraining profile on this one and give --mtraining-profile FILE"
        )
        return cls(found.gpu, found.entries, found.processors, warning)


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def _entry(found: Mapping[str, Any]) -> Entry:
    """Of a file's content; errors of Python say what is wrong with it."""
    coefficients: dict[str, dict[str, float]] = {}
    for part, terms in PARTS.items():
        coefficients[part] = {}
        for term, value in found[part].items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if term not in terms or not number or not 0 <= value < math.inf:
                raise ValueError(f"{part} has {value!r} for {term!r}")
            coefficients[part][term] = float(value)
        if not any(coefficients[part].values()) and part != "search":
            raise ValueError(f"{part} takes no time")
    if found["kind"] not in KINDS:
        raise ValueError(f"a kind is {found['kind']!r}")
    return Entry(found["kind"], int(found["head_dim"]), coefficients)


def visible_pairs(lengths: Iterable[float] | np.ndarray) -> float:
    """The visible query-key pairs of packed documents: the sum of ``l (l + 1) / 2`` over their lengths."""
    if not isinstance(lengths, np.ndarray):
        lengths = list(lengths)
    lengths = np.asarray(lengths, dtype=np.float64)
    return float((lengths * (lengths + 1) / 2).sum())


def quantities(
    tokens,
    pairs,
    density,
    shape: AttentionShape,
    cp_size: int = 1,
    *,
    kind: str = "vertical_slash",
    packed: bool | None = None,
    processors: int = 132,
) -> dict:
    """The quantity of each term, by its name; see the module's text. Arguments as for
    :meth:`LatencyModel.predict`; all float64 of one shape, but numbers for ``launch`` and ``heads``."""
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
    if packed is None:
        masked = pairs < (1 - 1e-6) * tokens * (tokens + 1) / 2
    else:
        masked = np.full(tokens.shape, packed)
    work = heads * attended / 1e9
    return {
        "launch": 1.0,
        "heads": float(heads),
        "rows": heads * rows / 1e6,
        "packed_rows": np.where(masked, heads * rows / 1e6, 0.0)[()],
        "key_rows": kv_heads * rows / 1e6,
        "pairs": work,
        "far_pairs": work * length / (length + CACHED),
        "query_path": attended / np.maximum(rows, 1.0) / 1e3,
        "key_span": _key_span(kind, work, rows, length, shape, processors),
        "candidates": heads * np.minimum(length, CANDIDATES) / 1e6,
        "square": heads * tokens * rows / 1e9,
    }


def _key_span(kind: str, work, rows, length, shape: AttentionShape, processors: int) -> np.ndarray:
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
    return np.maximum(work, processors * longest)
