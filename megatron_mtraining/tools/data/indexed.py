# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Writing samples as Megatron's indexed dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from .outputs import CACHED, FINAL, beside, cache
from .parts import cannot_write, written


def write(prefix: Path, samples: Iterable[np.ndarray], dtype, report) -> None:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``, with a sequence and a document a sample, and ``PREFIX.json``.

    All appear at the end, the index last: without it there is no dataset. Of one that is replaced, the
    index goes first.

    Args:
        samples: token ids ``[seq_length]``.
        report: gives the bytes of PREFIX.json; called when all samples are taken.

    Raises:
        ConfigError: they cannot be written.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    final = {suffix: beside(prefix, suffix) for suffix in FINAL}
    partial = {suffix: beside(prefix, f"{suffix}.partial") for suffix in final}
    builder = None
    try:
        builder = IndexedDatasetBuilder(str(partial[".bin"]), dtype)
        for ids in samples:
            builder.add_document(ids, [len(ids)])
        builder.finalize(str(partial[".idx"]))
        for suffix in (".bin", ".idx"):
            with open(partial[suffix], "rb") as file:
                os.fsync(file.fileno())
        text = report()
        forget_cached(prefix)  # first: where that fails, the old dataset is still there
        with suppress(FileNotFoundError):
            final[".idx"].unlink()
        os.replace(partial[".bin"], final[".bin"])
        with written(final[".json"]) as file:
            file.write(text)
        os.replace(partial[".idx"], final[".idx"])
    except OSError as error:
        raise cannot_write(final[".bin"], error) from error
    finally:
        if builder is not None:
            with suppress(OSError):  # of what is left to write to a disk that is full
                builder.data_file.close()
        for path in partial.values():
            with suppress(FileNotFoundError):
                path.unlink()


def forget_cached(prefix: Path) -> None:
    """Remove what Megatron has kept of an earlier dataset of this name: it would be taken for ours."""
    kept = list(cache(prefix).glob(CACHED))
    for path in kept:
        path.unlink()
    for folder in (cache(prefix), prefix / "cache", prefix) if kept else ():
        with suppress(OSError):  # it has other things in it
            folder.rmdir()
