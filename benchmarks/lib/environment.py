# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Variables of the environment for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable, and put back what it was: the command of a row names the variables that are set."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
