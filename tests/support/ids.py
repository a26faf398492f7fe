# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ids of parametrized attention tests: ``H8-KV2-D128-N1024-cp3``."""

from __future__ import annotations

import pytest
import torch

PREFIXES = {
    "dim": "D",
    "seq_length": "N",
    "batch": "b",
    "world": "cp",
    "inner": "I",
    "block": "B",
}


def part(name: str, value) -> str:
    """One part of an id: query heads (H), key and value heads (KV), head dimension (D), tokens (N), ranks
    (cp), ranks of a round (I), block size (B)."""
    if name == "heads":
        return "H{}-KV{}".format(*value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"{PREFIXES.get(name, '')}{value}"


def parametrize(names: str, values):
    """``pytest.mark.parametrize`` with readable ids. ``names`` are separated by commas."""
    split = [name.strip() for name in names.split(",")]
    values = list(values)
    rows = values if len(split) > 1 else [(value,) for value in values]
    ids = ["-".join(part(*pair) for pair in zip(split, row)) for row in rows]
    return pytest.mark.parametrize(split if len(split) > 1 else split[0], values, ids=ids)
