# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of ``mtraining convert``."""

import pytest


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Hugging Face folder, and the Megatron checkpoint that it converts to."""
    from tests.support.convert_cases import plain_pair

    return plain_pair(tmp_path_factory.mktemp("plain"))
