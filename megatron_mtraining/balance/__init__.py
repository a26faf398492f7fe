# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance of data-parallel ranks (SparseBalance, arXiv 2604.13847): placement of samples by length or by
predicted cost, and tuning of the price of the pattern search.

- :mod:`.placement`: which rank and micro-batch gets which sample of a global batch.
- :mod:`.latency`: the time of a layer's attention, from length, density and pattern kind.
- :mod:`.estimates`: running estimates of density and recall for each kind of data.
- :mod:`.plan`: the plan of one step, from placement and estimates.
- :mod:`.planner`: the plans of a run, made ahead of time in a thread.
- :mod:`.tuning`: multipliers of the price of each micro-batch.

Imports neither Megatron nor process groups; Megatron's part is :mod:`megatron_mtraining.megatron.balance`.
"""
