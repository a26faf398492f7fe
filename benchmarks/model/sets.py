# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A mixed set of documents, packed into samples as ``mtraining data prepare`` packs them.

Each kind of text is a dataset of its own in the blend. Lengths are those of real documents
(``lengths.json``): source files of Python's standard library and of installed packages, C headers, API
descriptions in JSON, speeches, chapters of a book. The set takes those within two ranges of length, so that
each range has its share of the tokens; where a kind has too few in a range, those of all kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_mtraining.tools.data.packing import samples as packed_samples

LENGTHS = Path(__file__).with_name("lengths.json")
KINDS = ("code", "book", "speech", "c", "json")
"""Datasets of the blend, by number."""
SHARES = (0.4, 0.2, 0.1, 0.15, 0.15)
"""Of the tokens."""
FEW = 20
"""With fewer documents of a kind in a range, those of all kinds are drawn from."""


class Range(NamedTuple):
    """Documents of ``low`` to ``high`` tokens, and their share of a set's tokens."""

    low: int
    high: int
    share: float


K = 1024
SEQ_LENGTH = 64 * K
RANGES = (Range(128, 4 * K, 0.5), Range(16 * K, 64 * K, 0.5))
"""Half of the tokens in documents under 4K, half in documents over 16K."""


class PackedSet(NamedTuple):
    """Samples of a set, shuffled."""

    seq_length: int
    datasets: np.ndarray
    """int32 ``[n]``: numbers of :data:`KINDS`."""
    documents: list[np.ndarray]
    """Lengths of each sample's documents; they add up to ``seq_length``."""


def real_lengths(path: Path = LENGTHS) -> dict[str, np.ndarray]:
    """Tokens of real documents by kind, ascending."""
    found = json.loads(path.read_text(encoding="utf-8"))["tokens"]
    return {kind: np.array(found[kind], np.int64) for kind in KINDS}


def draw_lengths(
    kind: str, ranges: tuple[Range, ...], tokens: int, lengths: dict[str, np.ndarray], rng
) -> list[int]:
    """Lengths of documents of a kind, of ``tokens`` tokens or a document more, in random order."""
    choices = []
    for low, high, _ in ranges:
        inside = [each[(each >= low) & (each <= high)] for each in lengths.values()]
        own = lengths[kind][(lengths[kind] >= low) & (lengths[kind] <= high)]
        choices.append(own if len(own) >= FEW else np.concatenate([own, *inside]))
        if not len(choices[-1]):
            # Nothing that long was found: any length of the range, short ones more often.
            choices[-1] = np.exp(np.linspace(np.log(low), np.log(high), FEW)).astype(np.int64)
    # As many documents of a range as give its tokens.
    weights = np.array([each.share for each in ranges]) / [each.mean() for each in choices]
    found: list[int] = []
    total = 0
    while total < tokens:
        which = rng.choice(len(ranges), 4096, p=weights / weights.sum())
        places = rng.random(4096)
        for number, at in zip(which.tolist(), places.tolist()):
            of_range = choices[number]
            found.append(int(of_range[int(at * len(of_range))]))
            total += found[-1]
            if total >= tokens:
                break
    return found


def ranges_at(seq_length: int) -> tuple[Range, ...]:
    """The ranges of documents where samples are shorter or longer, in proportion."""
    ratio = seq_length / SEQ_LENGTH
    return tuple(
        Range(max(16, round(low * ratio)), round(high * ratio), share)
        for low, high, share in RANGES
    )


def pack(
    ranges: tuple[Range, ...],
    seq_length: int,
    count: int,
    seed: int,
    kinds: tuple[str, ...] = KINDS,
) -> PackedSet:
    """About ``count`` samples of documents in ``ranges`` of length, packed best-fit, as ``mtraining data
    prepare`` does by default."""
    rng, lengths = np.random.default_rng(seed), real_lengths()
    share_of = dict(zip(KINDS, SHARES))
    whole = sum(share_of[kind] for kind in kinds)
    datasets, documents = [], []
    for kind in kinds:
        wanted = max(1, round(count * share_of[kind] / whole))
        drawn = draw_lengths(kind, ranges, (wanted + 1) * seq_length, lengths, rng)
        groups = packed_samples(enumerate(drawn), seq_length, "best-fit")
        for sample in (sample for group in groups for sample in group):
            # A piece's end-of-document token belongs to it.
            sizes = np.array([len(piece) for piece in sample], np.int64)
            if sizes.sum() == seq_length and wanted:
                datasets.append(KINDS.index(kind))
                documents.append(sizes)
                wanted -= 1
    order = rng.permutation(len(documents))
    return PackedSet(
        seq_length, np.array(datasets, np.int32)[order], [documents[number] for number in order]
    )
