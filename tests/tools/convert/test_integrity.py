# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checksums beside a converted checkpoint: bytes that have changed are not read as weights."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

pytest.importorskip("transformers")

from megatron_mtraining import ConfigError
from megatron_mtraining.models.integrity import MANIFEST, verify_checksums
from tests.support.convert_cases import refused

DATA = "__0_0.distcp"


@pytest.fixture
def copied(plain, tmp_path):
    shutil.copytree(plain[1], tmp_path / "meg")
    return tmp_path / "meg"


def flip(file, place=0.5) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def test_a_byte_that_has_changed_is_found(copied, plain, tmp_path, capsys):
    flip(copied / "release" / DATA)
    words = [DATA, "differs from its checksum"]
    refused(capsys, tmp_path / "out", ("megatron-to-hf", copied, tmp_path / "out"), words)
    np.save(tmp_path / "ids.npy", np.arange(128))
    more = ("--text", tmp_path / "ids.npy", "--device", "cpu")
    refused(capsys, tmp_path / "out", ("verify", plain[0], copied, *more), words)


def test_megatron_core_verifies_the_same_file(copied):
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    if not hasattr(validation, "_verify_integrity_manifest_impl"):
        pytest.skip("this Megatron-Core has no checksums")
    validation._verify_integrity_manifest_impl(str(copied / "release"))
    flip(copied / "release" / DATA)
    with pytest.raises(Exception, match="(?i)integrity|hash|checksum"):
        validation._verify_integrity_manifest_impl(str(copied / "release"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"files": []}', "sha256"),
        ('{"files": {}}', "no checksum"),
        ('{"files": {"gone.distcp": "0"}}', "missing"),
        ("\0", "not JSON"),
    ],
)
def test_manifests_that_do_not_fit(content, named, copied):
    (copied / "release" / MANIFEST).write_text(content)
    with pytest.raises(ConfigError, match=named):
        verify_checksums(copied / "release")
