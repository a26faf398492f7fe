# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Cross entropy of vocabulary-parallel logits: the statistics of each row, and the gradient.

``reference.py`` defines both operations, for CPU tensors; ``cross_entropy.py`` has the Triton kernels.
"""

from __future__ import annotations

from ..common.dispatch import dispatch
from . import reference

__all__ = ["cross_entropy_gradient", "cross_entropy_rows"]

cross_entropy_rows = dispatch(reference.cross_entropy_rows, "cross_entropy")
cross_entropy_gradient = dispatch(reference.cross_entropy_gradient, "cross_entropy")
