# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balancing data-parallel ranks (SparseBalance, arXiv 2604.13847): samples that make ranks wait are placed
better, and prices of the pattern search are tuned.

- :mod:`.placement`: which rank and micro-batch gets which sample of a global batch.
- :mod:`.estimates`: running estimates of density and recall for each kind of data.
- :mod:`.plan`: the plan of one step, from both.

Knows no Megatron and no process group.
"""
