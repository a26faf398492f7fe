# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of models."""

from importlib.util import find_spec

import pytest

from tests.support.inspect_cases import save_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    if find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed")
    return save_model(tmp_path_factory.mktemp("llama"))
