# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pattern search: which keys each query head attends to.

- :mod:`.search`: the entry, :func:`search_pattern`, with what all selectors share.
- :mod:`.sampled_rows`: the query rows that a pattern is estimated from.
- :mod:`.selector`: what a selector is, and how those of a layer are joined;
  :mod:`.selectors`: one for each policy.
- :mod:`.vertical_slash_index`, :mod:`.block_list_index`: the results, as the kernels read them;
  :mod:`.visible_density`: their density where queries do not see all keys.
- :mod:`.search_graph`, :mod:`.captured_search`: searches of short sequences, captured as CUDA graphs.
- :mod:`.steering`: what changes from step to step.
"""

from .block_list_index import BlockListIndex, build_block_index
from .search import check_search, search_pattern, search_price_series
from .selector import Pattern, Selected, Selector, SelectorCall, selects_for
from .selectors import select_key_blocks
from .steering import Steering
from .vertical_slash_index import PatternIndex, VerticalSlashIndex, build_index, full_index

__all__ = [
    "BlockListIndex",
    "Pattern",
    "PatternIndex",
    "Selected",
    "Selector",
    "SelectorCall",
    "Steering",
    "VerticalSlashIndex",
    "build_block_index",
    "build_index",
    "check_search",
    "full_index",
    "search_pattern",
    "search_price_series",
    "select_key_blocks",
    "selects_for",
]
