# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Writing samples as Megatron's indexed dataset; the only module of this tool that imports Megatron."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from .packing import Piece
from .store import Parts
from .tally import Tally
from .tokenization import Encoder

OPEN_PARTS = 256
"""Parts whose files are open at a time."""


def write(
    new: dict[str, Path],
    samples: Iterable[list[Piece]],
    parts: Parts,
    encoder: Encoder,
    tally: Tally,
) -> None:
    """Write a dataset whose sequences and documents are the samples that are full.

    Args:
        new: its files, by suffix.
        samples: the pieces of each; a document is (number of its part, first token in it).
        tally: counts them.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tqdm import tqdm

    # Not mapped: mapped pages count as this process's memory.
    tokens = lru_cache(OPEN_PARTS)(parts.tokens)
    width = np.dtype(encoder.dtype).itemsize
    total = tally.tokens["read"]
    builder = IndexedDatasetBuilder(str(new[".bin"]), encoder.dtype)
    try:
        with tqdm(total=total, desc="pack", unit="tok", unit_scale=True, file=sys.stderr) as bar:
            for pieces in samples:
                if sum(map(len, pieces)) < tally.seq_length:
                    tally.left_over(pieces)
                    continue
                ids = np.full(tally.seq_length, encoder.eod, encoder.dtype)
                at = 0
                for piece in pieces:
                    number, first = piece.document
                    count = piece.stop - piece.start
                    file = tokens(number)
                    file.seek((first + piece.start) * width)
                    ids[at : at + count] = np.fromfile(file, encoder.dtype, count)
                    at += len(piece)
                    bar.update(count)
                tally.sample(pieces)
                builder.add_document(ids, [len(ids)])
        builder.finalize(str(new[".idx"]))
    except BaseException:
        with suppress(OSError):  # of what is left to write to a full disk
            builder.data_file.close()
        raise
