# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining plan memory --find seq-length``: where the search begins, and where it ends."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.config import ConfigError
from megatron_mtraining.ring.pruning import check_size
from megatron_mtraining.tools.plan.memory import (
    GIB,
    find_context_parallel_size,
    find_seq_length,
    needed,
    plan,
)
from megatron_mtraining.tools.plan.options import read
from megatron_mtraining.tools.plan.setting import Setting
from tests.support.plan_cases import EXAMPLE, OURS


def found(flags: str, fits) -> Setting | None:
    return find_seq_length(read((EXAMPLE + OURS + flags).split())[0], fits)


def up_to(length: int):
    return lambda setting: setting.args.seq_length <= length


LONG = [
    "--mtraining-vertical 4200 --mtraining-slash 100",
    "--mtraining-policy fixed --mtraining-slash 4200",
    "--mtraining-window 4200",
    "--mtraining-sample-strata 140 --mtraining-sample-rows 30",
]
"""These need at least 4200 tokens."""


@pytest.mark.parametrize("flags", LONG)
def test_the_search_begins_where_the_settings_have_room(flags):
    assert found(flags, up_to(100_000)).args.seq_length == 99_840
    assert found(flags, up_to(5000)).args.seq_length == 4608  # 9 blocks on each of 4 ranks
    assert found(flags, up_to(4500)) is None


def test_flags_that_go_with_no_length_are_refused():
    with pytest.raises(ConfigError, match="no --seq-length of 2048 or more .*vertical is 1000000"):
        found("--mtraining-vertical 1000000000", up_to(10**9))
    with pytest.raises(ConfigError, match="^mtraining plan models only Adam"):
        found("--optimizer sgd", up_to(10**9))


def test_the_search_ends_where_a_pruned_backward_is_refused():
    flags = "--mtraining-backward-threshold 3 --mtraining-recompute-attention"
    setting = found(flags, lambda setting: needed(plan(setting)) <= 400 * GIB)
    length, size = setting.args.seq_length, setting.cp
    shape = (1, setting.args.num_attention_heads, setting.head_dim)
    query = torch.empty(length // size, *shape, device="meta")
    check_size(query, 128, size, setting.inner)
    longer = torch.empty((length + 128 * size) // size, *shape, device="meta")
    with pytest.raises(ConfigError, match=f"more than {2**29 - 1}"):
        check_size(longer, 128, size, setting.inner)


GROUPS = "--hierarchical-context-parallel-sizes"
FEWEST = {
    # flags of the groups, and of GPUs that fit, fewest ranks: what is found, and its inner groups and sizes
    "within a host": (f"{GROUPS} 4 2", 4, 4, 4, None),
    "below a host": (f"{GROUPS} 8 4", 2, 2, 2, None),
    "as given": (f"{GROUPS} 4 2", 8, 8, 4, [4, 2]),
    "above what is given": (f"{GROUPS} 4 2", 16, 16, 4, [4, 4]),
    "hosts of 3": (f"{GROUPS} 3 2", 4, 6, 3, [3, 2]),
    "hosts of 6": (f"{GROUPS} 6 2", 4, 6, 6, None),
    "alone": (f"{GROUPS} 1 8", 4, 4, 1, [1, 4]),
    "gathered": ("--mtraining-gathered-ranks 8", 4, 4, 4, None),
    "gathered, two hosts": ("--mtraining-gathered-ranks 2", 4, 4, 2, None),
    "left open": ("", 4, 4, 4, None),
}


@pytest.mark.parametrize("case", FEWEST)
def test_groups_follow_the_number_of_ranks(case):
    """Sizes that were given for another number of ranks pin none: they say how many a host has."""
    flags, fitting, size, inner, sizes = FEWEST[case]
    length = " --seq-length 196608 --max-position-embeddings 196608 "  # 3 and 6 ranks divide it
    args, _ = read((EXAMPLE + OURS + length + flags).split())
    setting = find_context_parallel_size(args, lambda setting: setting.cp >= fitting)
    assert (setting.cp, setting.world, setting.inner) == (size, size, inner)
    assert setting.args.hierarchical_context_parallel_sizes == sizes


@pytest.mark.parametrize("sizes", ["8", "2 2 2", "0 8", "-2 4"])
def test_sizes_that_make_no_groups_are_refused(sizes):
    args, _ = read((EXAMPLE + OURS + f"{GROUPS} {sizes}").split())
    with pytest.raises(ConfigError, match="give two whole numbers"):
        find_context_parallel_size(args, lambda setting: True)
