# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Operations of the pattern search: statistics of sampled rows, selection of slashes, columns and blocks, and
the lists of the indexes.

Each is defined, with its arguments, by its reference implementation.
"""

from __future__ import annotations

from ..common.dispatch import dispatch
from . import reference_blocks, reference_index, reference_masses, reference_threshold, topk_torch

# Statistics of the sampled rows.
partial_lse = dispatch(reference_masses.partial_lse, "lse")
merge_lse = dispatch(reference_masses.merge_lse, "lse")
attention_masses = dispatch(reference_masses.attention_masses, "masses")
diagonal_masses = dispatch(reference_masses.diagonal_masses, "diagonal_mass")

# Selection by price, and its recall.
slash_mass_in_columns = dispatch(reference_threshold.slash_mass_in_columns, "threshold")
select_slashes_by_price = dispatch(reference_threshold.select_slashes_by_price, "threshold")
select_columns_by_price = dispatch(reference_threshold.select_columns_by_price, "threshold")
column_masses = dispatch(reference_threshold.column_masses, "threshold")
attention_recall = dispatch(reference_threshold.attention_recall, "threshold")

# Selection by count.
select_topk = dispatch(topk_torch.select_topk, "topk")
merge_topk = dispatch(topk_torch.merge_topk, "topk")

# Selection of blocks.
antidiagonal_lse = dispatch(reference_blocks.antidiagonal_lse, "antidiagonal")
block_masses = dispatch(reference_blocks.block_masses, "antidiagonal")
attention_in_blocks = dispatch(reference_blocks.attention_in_blocks, "block_recall")
top_blocks = dispatch(reference_blocks.top_blocks, "block_topk")

# Lists of the indexes.
vertical_slash_lists = dispatch(reference_index.vertical_slash_lists, "vertical_slash_index")
vertical_slash_density = dispatch(reference_index.vertical_slash_density, "density")
block_list_offsets = dispatch(reference_index.block_list_offsets, "block_list_index")
block_lists = dispatch(reference_index.block_lists, "block_list_index")

__all__ = [
    "antidiagonal_lse",
    "attention_in_blocks",
    "attention_masses",
    "attention_recall",
    "block_list_offsets",
    "block_lists",
    "block_masses",
    "column_masses",
    "diagonal_masses",
    "merge_lse",
    "merge_topk",
    "partial_lse",
    "select_columns_by_price",
    "select_slashes_by_price",
    "select_topk",
    "slash_mass_in_columns",
    "top_blocks",
    "vertical_slash_density",
    "vertical_slash_lists",
]
