# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The tokens of documents that make up each sample. Only lengths and positions: no tokens here.

A sample is filled to the last token and nothing is padded. Every document is followed by an
end-of-document token, except where its own last token is a sample's last.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from .options import Options

POOL = 8192
"""Documents that best-fit chooses among."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a document, and the end-of-document token where it has one.

    Attributes:
        document: whatever names it.
        start: its first token, counted in the document.
        stop: the token after its last.
        eod: an end-of-document token follows.
        whole: the whole document is in it.
    """

    document: Hashable
    start: int
    stop: int
    eod: bool = True
    whole: bool = True

    def __len__(self) -> int:
        return self.stop - self.start + self.eod

    def split(self, length: int) -> tuple[Piece, Piece | None]:
        """The first ``length`` tokens, and what is left; only the end-of-document token is left out."""
        middle = self.start + length
        if middle == self.stop:
            return replace(self, eod=False), None
        head = replace(self, stop=middle, eod=False, whole=False)
        return head, replace(self, start=middle, whole=False)


def packed(documents: Iterable[tuple[Hashable, int]], options: Options) -> Iterator[list[Piece]]:
    """The pieces of each sample, shuffled where the options say so; the last one may have fewer tokens.

    Args:
        documents: names and lengths in tokens, the end-of-document token not counted.
    """
    if options.shuffle:
        documents = _shuffled(documents, options.buffer, random.Random(options.seed + 1))
    how = "in-order" if options.pack == "as-is" else options.pack
    groups: Iterable[list[list[Piece]]] = samples(documents, options.seq_length, how)
    if options.shuffle:
        # Else short documents, and those left for the last, would be together at the end: in --split's
        # validation data.
        rng = random.Random(options.seed + 2)
        groups = _shuffled(groups, options.buffer, rng, lambda group: sum(map(len, group)))
    return chain.from_iterable(groups)


def _shuffled(items: Iterable, size: int, rng: random.Random, weigh=lambda item: 1) -> Iterator:
    """Any of the items that wait, as soon as these weigh more than ``size``."""
    waiting, weight = [], 0
    for item in items:
        waiting.append(item)
        weight += weigh(item)
        while weight > size:
            place = int(rng.random() * len(waiting))
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            item = waiting.pop()
            weight -= weigh(item)
            yield item
    rng.shuffle(waiting)
    yield from waiting


def cut(document: Hashable, length: int, seq_length: int) -> tuple[list[Piece], Piece | None]:
    """Pieces of a document that fill a sample each, from its start, and the rest, which does not."""
    count = length // seq_length
    whole = length <= seq_length
    full = [
        Piece(document, number * seq_length, (number + 1) * seq_length, False, whole)
        for number in range(count)
    ]
    if length == count * seq_length:
        return full, None
    rest = Piece(document, count * seq_length, length, whole=whole)
    if len(rest) == seq_length:
        return [*full, rest], None
    return full, rest


def samples(
    documents: Iterable[tuple[Hashable, int]], seq_length: int, how: str, pool: int = POOL
) -> Iterator[list[list[Piece]]]:
    """Samples of exactly ``seq_length`` tokens; the last one has fewer if not all fill up.

    Those that a long document fills come together in one list, any other in a list of its own.

    Args:
        documents: names and lengths in tokens, the end-of-document token not counted.
        how: ``in-order``: a document goes on in the next sample where one is full; ``best-fit``: a sample
            begins with the document that has waited longest and takes the longest that fits from then on,
            of ``pool`` that wait (after Ding et al., arXiv 2404.10830; but what stays free is filled with a
            part of the shortest, not padded).
    """
    pieces = (cut(document, length, seq_length) for document, length in documents)
    waiting = _Waiting()
    sample, free = [], seq_length
    while True:
        # In order: best-fit with one to choose from.
        while len(waiting) < (pool if how == "best-fit" else 1):
            if (found := next(pieces, None)) is None:
                break
            full, rest = found
            if full:
                yield [[piece] for piece in full]
            if rest is not None:
                waiting.add(rest)
        if not len(waiting):
            break
        piece = waiting.fitting(free) if sample else waiting.oldest()
        head, rest = (piece, None) if len(piece) <= free else piece.split(free)
        if rest is not None:
            waiting.put_back(rest)
        sample.append(head)
        free -= len(head)
        if not free:
            yield [sample]
            sample, free = [], seq_length
    if sample:
        yield [sample]


class _Waiting:
    """Pieces by age and by length."""

    def __init__(self):
        self.by_age: OrderedDict[int, Piece] = OrderedDict()
        self.by_length: list[tuple[int, int]] = []
        self.count = 0

    def __len__(self) -> int:
        return len(self.by_age)

    def add(self, piece: Piece) -> None:
        self.by_age[self.count] = piece
        insort(self.by_length, (len(piece), self.count))
        self.count += 1

    def put_back(self, piece: Piece) -> None:
        """The rest of a piece, which is the next in turn."""
        self.add(piece)
        self.by_age.move_to_end(self.count - 1, last=False)

    def oldest(self) -> Piece:
        """Take out the one that has waited longest."""
        return self._take(next(iter(self.by_age)))

    def fitting(self, free: int) -> Piece:
        """Take out the longest that fits; or else the shortest, which is to be cut.

        Rather than leave a gap, one that fits but for its end-of-document token.
        """
        place = bisect_right(self.by_length, (free, self.count))
        fills = place and self.by_length[place - 1][0] == free
        longer = self.by_length[place : place + 1]
        if not fills and longer and longer[0][0] == free + 1:
            place += 1
        return self._take(self.by_length[max(0, place - 1)][1])

    def _take(self, age: int) -> Piece:
        piece = self.by_age.pop(age)
        del self.by_length[bisect_left(self.by_length, (len(piece), age))]
        return piece
