# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Digests that tell one run from another: of files, arrays and values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

LENGTH = 16
"""Characters of a digest."""


def digest_of_files(path: Path) -> str:
    """Of names, sizes and times of a model's files."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    about = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(about).encode("utf-8", "surrogateescape")).hexdigest()[:LENGTH]


def digest_of_array(values: np.ndarray) -> str:
    """Of an array's elements."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:LENGTH]


def digest_of_value(value: object) -> str:
    """Of what JSON can hold."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]
