# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of ``mtraining eval``."""

from importlib.util import find_spec

import pytest

from tests.support import eval_cases


@pytest.fixture(scope="module", autouse=True)
def packages():
    for name in ("transformers", "lm_eval", "longppl"):
        if find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")


@pytest.fixture(scope="module")
def llama(packages, tmp_path_factory):
    return eval_cases.save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(eval_cases.text())
    return path
