# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance over data-parallel ranks and micro-batches: what attention will cost, before it runs.

- :mod:`.latency`: the time of a layer's attention, from length, density and pattern kind; a sum of
  :mod:`.terms`.
- :mod:`.profile_file`: the measured profile of a GPU, as a file.
"""

from .latency import LatencyModel, visible_pairs
from .terms import KINDS, AttentionShape, Latency

__all__ = ["KINDS", "AttentionShape", "Latency", "LatencyModel", "visible_pairs"]
