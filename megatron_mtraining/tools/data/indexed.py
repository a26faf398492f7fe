# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Writing samples as Megatron's indexed dataset; the only module of this tool that imports Megatron."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from .output import Output


def write(
    output: Output, samples: Iterable[np.ndarray], dtype, report: Callable[[], bytes]
) -> None:
    """Write a dataset whose sequences and documents are the samples, and its report.

    Args:
        samples: token ids ``[seq_length]``.
        report: gives the content of PREFIX.json; called after the last sample.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(output.new[".bin"]), dtype)
    try:
        for ids in samples:
            builder.add_document(ids, [len(ids)])
        builder.finalize(str(output.new[".idx"]))
    except BaseException:
        with suppress(OSError):  # of what is left to write to a full disk
            builder.data_file.close()
        raise
    output.new[".json"].write_bytes(report())
    for path in output.new.values():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    output.move()
