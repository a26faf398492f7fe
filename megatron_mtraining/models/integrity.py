# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checksums beside a checkpoint: ``integrity.json``, as Megatron-Core 0.19 writes and verifies it.

``pretrain_gpt.py --verify-integrity`` reads it too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..errors import ConfigError, short
from ..files import read_json, size_of

MANIFEST = "integrity.json"
PART = 8 << 20


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder."""
    sums = {
        file.name: _checksum(file)
        for file in sorted(folder.iterdir())
        if file.is_file() and file.name != MANIFEST
    }
    text = json.dumps({"algorithm": "sha256", "files": sums}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def verify_checksums(folder: Path) -> bool:
    """Compare a checkpoint's files with its checksums; False if it has none, as most have.

    Raises:
        ConfigError: a file differs from its checksum, is missing, or has none.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        return False
    found = read_json(manifest)
    sums, kind = found.get("files"), found.get("algorithm", "sha256")
    if kind != "sha256" or not isinstance(sums, dict):
        raise ConfigError(
            f"{manifest} has no checksums of the kind sha256 ({short(kind)}): remove it, if you trust the "
            "checkpoint without them"
        )
    for name, expected in sums.items():
        size_of(folder / name, f"{MANIFEST} has its checksum")
        if _checksum(folder / name) != expected:
            raise ConfigError(
                f"{folder / name} differs from its checksum in {MANIFEST}: it has been changed or damaged "
                "since it was written; copy the checkpoint again"
            )
    for name in (".metadata", "common.pt", *sorted(path.name for path in folder.glob("*.distcp"))):
        if name not in sums and (folder / name).exists():
            raise ConfigError(
                f"{folder / name} has no checksum in {MANIFEST}, which lists all files: it was added "
                "since, or the file is of another checkpoint"
            )
    return True


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(PART):
            digest.update(part)
    return digest.hexdigest()
