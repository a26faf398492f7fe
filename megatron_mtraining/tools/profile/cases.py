# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What is measured: lengths, densities, documents and heads; those that are fitted, and those held out.

Numbers of heads are constants of the kernels. Each number of them, kind of pattern, and documents or none is
compiled for 7 to 24 seconds, so other heads than those of the shape are few, and of the main kind only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...balance import AttentionShape

K = 1024


@dataclass(frozen=True)
class Case:
    """A layer's attention to measure.

    Attributes:
        kind: one of ``balance.KINDS``.
        shape: the heads.
        tokens: of the sequence.
        density: wanted share of the visible pairs; what a drawn pattern has is measured.
        columns: the share of that density that columns bring, the others slashes; of kind vertical_slash.
        documents: packed, of unequal lengths; 1 for a sequence that is not packed.
        held_out: whether predictions are checked on it, and not fitted to it.
    """

    kind: str
    shape: AttentionShape
    tokens: int
    density: float
    columns: float = 0.0
    documents: int = 1
    held_out: bool = False

    def __str__(self) -> str:
        heads = f"{self.shape.num_heads}/{self.shape.num_kv_heads} heads of {self.shape.head_dim}"
        packed = f" in {self.documents} documents" if self.documents > 1 else ""
        return f"{self.kind} {self.tokens} tokens{packed} {heads}, density {self.density:g}"


FITTED = {
    4 * K: ((0.5, 0.3), (1.0, 0.0)),
    8 * K: ((0.05, 0.5), (0.6, 0.3)),
    16 * K: ((0.03, 0.5), (0.1, 0.0), (0.3, 0.5)),
    64 * K: ((0.015, 0.5), (0.05, 0.6), (0.15, 0.3), (0.4, 0.0)),
    128 * K: ((0.02, 0.4), (0.25, 0.1)),
    256 * K: ((0.01, 0.5), (0.1, 0.1)),
    512 * K: ((0.01, 0.4),),
}
"""Densities of vertical-slash patterns, and shares of them in columns, by tokens."""
PACKED = (
    (8 * K, 4, 0.3, 0.3),
    (32 * K, 8, 0.15, 0.5),
    (32 * K, 64, 0.5, 0.0),
    (64 * K, 16, 1.0, 0.0),
    (128 * K, 40, 0.1, 0.5),
    (256 * K, 12, 0.05, 0.3),
)
"""Tokens, documents, density and share in columns."""
SCALED = ((16 * K, 0.1, 0.3), (64 * K, 0.1, 0.3))
"""Tokens, density and share in columns that other numbers of heads are measured at."""
DENSE = ((4 * K, 1), (16 * K, 1), (32 * K, 6), (64 * K, 1), (128 * K, 1))
LISTS = (
    (4 * K, 0.4, 1), (8 * K, 0.2, 1), (16 * K, 0.5, 1), (32 * K, 0.1, 1), (32 * K, 0.3, 8),
    (64 * K, 0.2, 1), (128 * K, 0.05, 1),
)  # fmt: skip
"""Tokens, density and documents."""
HELD_OUT = (
    (6 * K, 0.2, 0.3, 1), (12 * K, 0.06, 0.5, 1), (24 * K, 0.5, 0.2, 1), (48 * K, 0.2, 0.3, 1),
    (96 * K, 0.08, 0.2, 1), (192 * K, 0.02, 0.4, 1),
    (24 * K, 0.2, 0.3, 5), (48 * K, 0.3, 0.2, 24), (192 * K, 0.5, 0.1, 60),
)  # fmt: skip
"""Tokens, density, share in columns and documents of vertical-slash patterns that are not fitted."""
QUICK = (4 * K, 16 * K, 64 * K)


def cases(shapes: Sequence[AttentionShape], quick: bool = False) -> list[Case]:
    """The cases of these shapes: fitted ones first, the shortest sequences first."""
    found: list[Case] = []
    for shape in shapes:
        found += _fitted(shape) + _held_out(shape)
    if quick:
        found = [case for case in found if case.tokens <= max(QUICK)]
        found = [case for case in found if case.held_out or case.tokens in QUICK]
    return sorted(found, key=lambda case: (case.held_out, case.tokens))


def tiny(shapes: Sequence[AttentionShape]) -> list[Case]:
    """A few cases that the reference kernels of a CPU take seconds for."""
    found = []
    for shape in shapes:
        for tokens in (256, 512):
            first = Case("vertical_slash", shape, tokens, 0.7, columns=0.2)
            found += [first, replace(first, density=0.9, documents=2)]
            found += [Case("dense", shape, tokens, 1.0), Case("block_lists", shape, tokens, 0.7)]
        found += [Case("vertical_slash", shape, 384, 0.8, columns=0.2, held_out=True)]
        found += [Case(kind, shape, 384, 1.0, held_out=True) for kind in ("dense", "block_lists")]
    return found


def _fitted(shape: AttentionShape) -> list[Case]:
    found = [
        Case("vertical_slash", shape, tokens, density, columns)
        for tokens, kept in FITTED.items()
        for density, columns in kept
    ]
    found += [
        Case("vertical_slash", shape, tokens, density, columns, documents)
        for tokens, documents, density, columns in PACKED
    ]
    # Both other numbers of query heads, and of those of a key and value head: what is done for queries and
    # what is done for keys is told apart.
    found += [
        Case("vertical_slash", other, tokens, density, columns)
        for tokens, density, columns in SCALED
        for other in _scaled(shape, (1, 4))
    ]
    found += [Case("dense", shape, tokens, 1.0, documents=count) for tokens, count in DENSE]
    found += [
        Case("block_lists", shape, tokens, density, documents=count)
        for tokens, density, count in LISTS
    ]
    return found


def _held_out(shape: AttentionShape) -> list[Case]:
    found = [
        Case("vertical_slash", shape, tokens, density, columns, documents)
        for tokens, density, columns, documents in HELD_OUT
    ]
    (other,) = _scaled(shape, (2,))
    found += [
        Case("vertical_slash", other, 32 * K, 0.15, 0.4),
        Case("vertical_slash", other, 128 * K, 0.05, 0.3),
        Case("dense", shape, 24 * K, 1.0),
        Case("dense", shape, 96 * K, 1.0, documents=7),
        Case("block_lists", shape, 24 * K, 0.3),
        Case("block_lists", shape, 96 * K, 0.1, documents=5),
    ]
    return [replace(case, held_out=True) for case in found]


def _scaled(shape: AttentionShape, sizes: Sequence[int]) -> list[AttentionShape]:
    """Shapes of the same head dimension with so many key and value heads, and other numbers of query heads a
    key and value head than ``shape``."""
    group = max(1, shape.num_heads // shape.num_kv_heads)
    return [
        AttentionShape(size * (group if size % 2 else max(1, group // 2)), size, shape.head_dim)
        for size in sizes
    ]
