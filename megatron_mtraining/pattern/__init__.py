# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which keys each query head sees: estimation, choice, and the index."""

from .block_choice import choose_block_lists
from .block_index import BlockListIndex, build_block_index
from .index import VerticalSlashIndex, build_index, full_index
from .select import check_choice, choose_index
from .steering import Steering, advance, steering_of, steerings

__all__ = [
    "BlockListIndex",
    "Steering",
    "VerticalSlashIndex",
    "advance",
    "build_block_index",
    "build_index",
    "check_choice",
    "choose_block_lists",
    "choose_index",
    "full_index",
    "steering_of",
    "steerings",
]
