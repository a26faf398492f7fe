# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What became of the documents: counted while packing, reported as a table and as JSON."""

from __future__ import annotations

import numpy as np

from ..report.table import table
from .inputs import NAMED, Inputs
from .packing import Piece

DOCUMENTS = (
    "read",
    "empty",
    "short",
    "longer_dropped",
    "longer_cut",
    "cut_at_end_of_sample",
    "eod_inside",
    "left_over",
)
TOKENS = ("read", "short", "longer_dropped", "written", "end_of_document", "left_over")
ROWS = (
    ("read", "read", "read"),
    ("left out: shorter than --long-only", "short", "short"),
    ("left out: longer than a sample", "longer_dropped", "longer_dropped"),
    ("left out: at the end, less than a sample", "left_over", "left_over"),
    ("longer than a sample, cut into several", "longer_cut", None),
    ("cut where a sample was full", "cut_at_end_of_sample", None),
    ("with the end-of-document token inside", "eod_inside", None),
    ("empty", "empty", None),
    ("end-of-document tokens added", None, "end_of_document"),
)
"""Of the table: what is told, and which counts of documents and tokens."""
ALWAYS = (ROWS[0][0], ROWS[3][0])
"""Rows that are there even with zeros."""


class Tally:
    """Counts of documents and tokens.

    Args:
        seq_length: tokens of a sample.
        found: what was left out of folders.
    """

    def __init__(self, seq_length: int, found: Inputs):
        self.seq_length, self.found = seq_length, found
        self.documents, self.tokens = dict.fromkeys(DOCUMENTS, 0), dict.fromkeys(TOKENS, 0)
        self.samples = self.of_one_document = self.skipped_files = 0
        self.skipped_names: list[str] = []
        self.by_length = np.zeros((32, 2), np.int64)

    def read(self, counts: dict) -> None:
        """Count the documents of a part, see :meth:`~megatron_mtraining.tools.data.store.Parts.load`."""
        lengths = np.array(counts["lengths"], np.int64)
        self.documents["read"] += len(lengths)
        self.tokens["read"] += int(lengths.sum())
        self.documents["empty"] += counts["empty"]
        self.documents["eod_inside"] += counts["with_eod"]
        self.skipped_files += counts["skipped"]
        self.skipped_names += counts["skipped_names"]
        power = np.frexp(lengths.astype(np.float64))[1] - 1
        self.by_length[:, 0] += np.bincount(power, minlength=32)
        self.by_length[:, 1] += np.bincount(power, lengths, minlength=32).astype(np.int64)

    def drop(self, why: str, length: int) -> None:
        """Count a document that is left out: ``short`` or ``longer_dropped``."""
        self.documents[why] += 1
        self.tokens[why] += length

    def sample(self, pieces: list[Piece]) -> None:
        """Count a sample that is written."""
        self.samples += 1
        self.of_one_document += len(pieces) == 1
        for piece in pieces:
            self.tokens["written"] += piece.stop - piece.start
            self.tokens["end_of_document"] += piece.eod
            first = piece.start == 0 and not piece.whole
            # The first piece of a document that is longer than a sample fills one.
            if first and len(piece) < self.seq_length:
                self.documents["cut_at_end_of_sample"] += 1

    def left_over(self, pieces: list[Piece]) -> None:
        """Count what does not fill a last sample, and is dropped."""
        self.documents["left_over"] += len(pieces)
        self.tokens["left_over"] += sum(piece.stop - piece.start for piece in pieces)

    @property
    def samples_an_epoch(self) -> int:
        """That Megatron draws: the last sample has no next one, whose first token is its last label."""
        return max(0, self.samples - 1)

    def histogram(self) -> list[dict]:
        """Of the documents that were read: lengths from a power of two to below the next."""
        used = np.flatnonzero(self.by_length[:, 0])
        return [
            {"from": 1 << power, "to": (2 << power) - 1, "documents": documents, "tokens": tokens}
            for power in (range(used[0], used[-1] + 1) if len(used) else ())
            for documents, tokens in [self.by_length[power].tolist()]
        ]

    def numbers(self) -> dict:
        """All counts, for JSON."""
        return {
            "samples": self.samples,
            "samples_an_epoch": self.samples_an_epoch,
            "samples_of_one_document": self.of_one_document,
            "documents": self.documents,
            "tokens": self.tokens,
            "left_out_in_folders": len(self.found.others),
            "left_out_names": _printable(self.found.others[:NAMED]),
            "skipped_files": self.skipped_files,
            "skipped_names": _printable(self.skipped_names[:NAMED]),
            "histogram": self.histogram(),
        }

    def text(self) -> str:
        """All counts, for people."""
        rows = [
            (what, self.documents.get(documents, ""), self.tokens.get(tokens, ""))
            for what, documents, tokens in ROWS
            if self.documents.get(documents) or self.tokens.get(tokens) or what in ALWAYS
        ]
        rows.append(("written", "", self.samples * self.seq_length))
        total = max(1, self.tokens["read"])
        lengths = [
            (f"{first} to {last}", documents, tokens, tokens / total)
            for first, last, documents, tokens in (row.values() for row in self.histogram())
        ]
        shown = [
            table(header, [_shown(row) for row in some])
            for header, some in (
                (("documents", "number", "tokens"), rows),
                (("length (tokens)", "documents", "tokens", "share"), lengths),
            )
        ]
        others = self.found.others
        for count, names, what in (
            (self.skipped_files, self.skipped_names, "files that are not UTF-8 text"),
            (len(others), others, "hidden files, links and pipes, and unfinished runs,"),
        ):
            if count:
                told = ", ".join(_printable(names[:3])) + ", ..." * (count > 3)
                shown.append(f"{count} {what} were left out: {told}")
        return "\n\n".join(shown)


def _printable(names: list[str]) -> list[str]:
    """Names whose bytes are not UTF-8, or would move the cursor, in a form that can be shown."""
    return [ascii(name)[1:-1] if not name.isprintable() else name for name in names]


def _shown(row: tuple) -> tuple[str, ...]:
    """Cells of a row: numbers with separators, shares as percentages."""
    kinds = {int: "{:,}", float: "{:.1%}", str: "{}"}
    return tuple(kinds[type(cell)].format(cell) for cell in row)
