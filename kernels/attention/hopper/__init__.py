# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention for Hopper GPUs, in Gluon: TMA, wgmma and warp specialization.

The kernels and their modules:

- ``forward`` and ``backward_query``, over query blocks. They share ``round_index`` (which keys a query block
  attends to), ``item_tiles`` (shared memory), ``item_loads`` (the loading warps), ``item_arguments`` (of the
  launches) and ``global_rows`` (results of rounds).
- ``backward_key``, over key blocks, and ``backward_columns``, over gathered columns. They share
  ``key_common`` (arguments of the launches, shared memory, the step of a query tile). ``backward_key`` has
  ``key_walk`` (which query tiles attend to a key block) and ``key_gradients`` (its computing warpgroups).
- ``query_sums`` and ``query_gradient``: the queries' gradient in these two, the one-pass backward.

All build on ``pipeline`` (barriers), ``masks``, ``descriptors`` (TMA) and ``compat`` (versions of Gluon).
"""
