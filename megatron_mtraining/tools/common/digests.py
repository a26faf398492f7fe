# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Digests that tell one run from another: of files and values."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

LENGTH = 16
"""Characters of a digest."""


def digest_of_files(path: Path, without: Iterable[Path] = ()) -> str:
    """Of names, sizes and times of a file, or of all files in a folder; not of where they are.

    Args:
        without: files and folders inside the folder that are left out, such as a run's own output. One that
            is the folder itself, or has it inside, leaves nothing out.
    """
    files, folder = [path], path.parent
    if path.is_dir():
        real = Path(os.path.realpath(path))
        left_out = {Path(os.path.realpath(each)) for each in without} - {real, *real.parents}

        def is_in(file: Path) -> bool:
            place = real / file.relative_to(path)
            return left_out.isdisjoint((place, *place.parents))

        # Files alone: the time of a folder changes with what is left out.
        files = [each for each in sorted(path.rglob("*")) if is_in(each) and each.is_file()]
        folder = path
    about = [
        (str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
    ]
    return hashlib.sha256(repr(about).encode("utf-8", "surrogateescape")).hexdigest()[:LENGTH]


def digest_of_value(value: object) -> str:
    """Of what JSON can hold."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]
