# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pattern search: which keys each query head attends to.

- :mod:`.search`: the entry, :func:`search_pattern`, which decides who searches.
- :mod:`.sampled_rows`: the query rows that a pattern is estimated from.
- :mod:`.vertical_slash_search`: columns and slashes, by :mod:`.price_policy` or :mod:`.fixed_policy`.
- :mod:`.block_list_search`: key blocks of each query block, by :mod:`.key_block_selection`.
- :mod:`.vertical_slash_index`, :mod:`.block_list_index`: the results, as the kernels read them;
  :mod:`.packed_density`: their density where documents are packed.
- :mod:`.search_graph`, :mod:`.captured_search`: searches of short sequences, captured as CUDA graphs.
- :mod:`.steering`: what changes from step to step.
"""

from .block_list_index import BlockListIndex, build_block_index
from .key_block_selection import select_key_blocks
from .search import check_search, search_pattern, search_price_series
from .steering import Steering
from .vertical_slash_index import PatternIndex, VerticalSlashIndex, build_index, full_index

__all__ = [
    "BlockListIndex",
    "PatternIndex",
    "Steering",
    "VerticalSlashIndex",
    "build_block_index",
    "build_index",
    "check_search",
    "full_index",
    "search_pattern",
    "search_price_series",
    "select_key_blocks",
]
