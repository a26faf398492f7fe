# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of ``mtraining inspect``."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.inspect_cases import argparse_file, save_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    if find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed")
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(Path(argparse_file()).read_text()[:4000])
    return path
