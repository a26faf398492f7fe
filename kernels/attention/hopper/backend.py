# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The Hopper kernels as a backend (``..backends.Backend``)."""

from .backward_columns import backward_columns
from .backward_key import backward_key
from .backward_query import backward_query
from .forward import forward
from .query_gradient import finish_query_sums, new_query_sums

__all__ = [
    "backward_columns",
    "backward_key",
    "backward_query",
    "finish_query_sums",
    "forward",
    "new_query_sums",
]
