# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balancing data-parallel ranks (SparseBalance, arXiv 2604.13847): what attention will cost before it runs,
where samples are placed by it, and which prices of the pattern search are tuned.

- :mod:`.latency`: the time of a layer's attention, from length, density and pattern kind; a sum of
  :mod:`.terms`.
- :mod:`.profile_file`: the measured profile of a GPU, as a file.
- :mod:`.placement`: which rank and micro-batch gets which sample of a global batch.
- :mod:`.estimates`: running estimates of density and recall for each kind of data.
- :mod:`.plan`: the plan of one step, from both.
- :mod:`.planner`: the plans of a run, made ahead of time in a thread.

Knows no Megatron and no process group.
"""

from .latency import LatencyModel, visible_pairs
from .terms import KINDS, AttentionShape, Latency

__all__ = ["KINDS", "AttentionShape", "Latency", "LatencyModel", "visible_pairs"]
