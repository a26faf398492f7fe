# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Recorded patterns of a trained model's heads, to draw beside those of the quickstart's small model.

``python -m benchmarks.model.recorded_heads`` writes ``trained_heads.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")
CELL = 16
"""Tokens along a side of a picture's cell."""


def read() -> dict:
    """The record: model, text, ``tokens``, ``block_size``, mean ``density`` and ``recall``, and ``heads``."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def picture(head: dict, tokens: int, block_size: int) -> np.ndarray:
    """The fraction of the query-key pairs in each cell that a head's pattern selects: ``[cells, cells]``."""
    position = np.arange(tokens)
    query, key = position[:, None], position[None, :]
    selected = np.isin(query // block_size - key // block_size, head["slashes"])
    selected |= np.isin(key, head["columns"])
    selected &= key <= query
    cells = tokens // CELL
    return selected.reshape(cells, CELL, cells, CELL).mean((1, 3))


def pictures(record: dict) -> dict[str, np.ndarray]:
    """A picture of each recorded head, by its name, with its recall."""
    return {
        f"layer {head['layer']}, head {head['head']}, recall {head['recall']:.0%}": picture(
            head, record["tokens"], record["block_size"]
        )
        for head in record["heads"]
    }
