# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which versions of Triton some of the code is tested with."""

from __future__ import annotations

import functools
import warnings

Versions = tuple[tuple[int, int], tuple[int, int]]
"""First and last (major, minor)."""


@functools.cache
def is_tested_triton(versions: Versions, otherwise: str) -> bool:
    """Whether the installed Triton is one of these versions. If not, warn once with what happens instead."""
    import triton

    installed = tuple(int(part) for part in triton.__version__.split(".")[:2])
    first, last = versions
    if first <= installed <= last:
        return True
    warnings.warn(
        f"Triton {triton.__version__} is not tested with megatron-mtraining: {otherwise}. Use Triton "
        f"{first[0]}.{first[1]} to {last[0]}.{last[1]}",
        stacklevel=3,
    )
    return False
