# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance of data-parallel ranks (SparseBalance, arXiv 2604.13847): the predicted cost of attention, the
placement of samples by this cost, and the tuning of prices of the pattern search.

- :mod:`.latency`: the time of a layer's attention, from length, density and pattern kind; a sum of
  :mod:`.terms`.
- :mod:`.profile_file`: the measured profile of a GPU, as a file.
- :mod:`.placement`: which rank and micro-batch gets which sample of a global batch.
- :mod:`.estimates`: running estimates of density and recall for each kind of data.
- :mod:`.plan`: the plan of one step, from placement and estimates.
- :mod:`.planner`: the plans of a run, made ahead of time in a thread.
- :mod:`.tuning`: multipliers of the price of each micro-batch.

Imports neither Megatron nor process groups.
"""

from .latency import LatencyModel, visible_pairs
from .terms import KINDS, AttentionShape, Latency

__all__ = ["KINDS", "AttentionShape", "Latency", "LatencyModel", "visible_pairs"]
