# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Block striping: every token exactly once, and back."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import layout
from megatron_mtraining.config import ConfigError
from megatron_mtraining.layout import locate, stripe, token_positions, unstripe

NODES = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 3), (6, 2), (12, 4)]  # ranks, ranks of a node
every_shape = pytest.mark.parametrize(("world", "inner"), NODES)


@every_shape
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_round_trip(world, inner, dim):
    shape = [3, 5, 7]
    shape[dim] = 64 * world * 3
    tensor = torch.randn(shape)
    parts = [stripe(tensor, rank, world, 64, dim, inner) for rank in range(world)]
    assert all(part.is_contiguous() and part.shape[dim] == 64 * 3 for part in parts)
    assert torch.equal(unstripe(parts, 64, dim, inner), tensor)


@every_shape
def test_blocks_go_round_nodes_and_there_and_back_in_them(world, inner):
    outer, blocks = world // inner, 5
    owners, seen = {}, []
    for rank in range(world):
        positions = token_positions(128 * world * blocks, rank, world, 128, inner=inner)
        assert (positions.diff() > 0).all()
        owner, local = locate(positions, world, 128, inner)
        assert (owner == rank).all()
        assert torch.equal(local, torch.arange(len(positions)))
        for local_block, block in enumerate((positions[::128] // 128).tolist()):
            assert block // world == local_block and block % outer == rank // inner
            owners[block] = rank
            seen.append(block)
    assert sorted(seen) == list(range(world * blocks))
    for node in range(outer):
        numbers = [owners[block] % inner for block in range(node, world * blocks, outer)]
        there = list(range(inner))
        assert numbers == (there + there[::-1]) * (blocks // 2) + there


def test_ranks_have_equal_sums_of_positions():
    """Which is what causal attention's work is counted by; of ranks in one node, and an even number of
    blocks."""
    sums = {int(token_positions(64 * 8 * 6, rank, 8, 64).sum()) for rank in range(8)}
    assert len(sums) == 1


@pytest.mark.parametrize(("length", "world"), [(100, 1), (192, 2), (0, 2)])
def test_a_length_that_does_not_divide_is_refused(length, world):
    with pytest.raises(ConfigError, match=f"{length} tokens.*{64 * world}"):
        stripe(torch.zeros(length), 0, world, 64)


TOKENS = torch.arange(512).view(1, 512)


def nested() -> torch.Tensor:
    parts = [torch.ones(512), torch.ones(256)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


NO_LAYOUTS = {
    "a rank past the last": (lambda: layout.stripe(TOKENS, 7, 4, 64, 1), "cp_rank is 7"),
    "a negative rank": (lambda: layout.stripe(TOKENS, -1, 2, 64, 1), "cp_rank is -1"),
    "rank 1 of 1": (lambda: layout.stripe(TOKENS, 1, 1, 64, 1), "cp_rank is 1"),
    "positions of no rank": (lambda: layout.token_positions(512, 2, 2, 64), "cp_rank is 2"),
    "a dimension too many": (lambda: layout.stripe(TOKENS, 0, 2, 64, 3), "dim is 3"),
    "no tensor": (lambda: layout.stripe([1] * 512, 0, 2, 64), "is a list: give a tensor"),
    "an inner size of one rank": (lambda: layout.stripe(TOKENS, 0, 1, 64, 1, 3), "groups of 3"),
    "a fraction": (lambda: layout.token_positions(512.0, 1, 2, 64), "seq_length is 512.0"),
    "no ranks": (lambda: layout.inner_size(0), "there are 0"),
    "negative ranks": (lambda: layout.inner_size(-4), "there are -4"),
    "a text": (lambda: layout.inner_size("4"), "cp_size is '4'"),
    "a block of none": (lambda: layout.check_layout(512, 2, 0), "blocks of 0"),
    "a negative block": (lambda: layout.check_layout(512, 2, -64), "blocks of -64"),
    "parts of two dtypes": (lambda: layout.unstripe([TOKENS, TOKENS.float()], 64, 1), "float32"),
    "parts on two devices": (
        lambda: layout.unstripe([TOKENS, TOKENS.to("meta")], 64, 1),
        "on meta",
    ),
    "one part, not in a list": (
        lambda: layout.unstripe(TOKENS, 64, 1),
        "parts of ranks are a Tensor",
    ),
    "a part that is none": (
        lambda: layout.unstripe([TOKENS, None], 64, 1),
        "of rank 1 is a NoneType",
    ),
    "a sparse tensor": (lambda: layout.stripe(TOKENS.to_sparse(), 0, 2, 64, 1), "torch.sparse_coo"),
    "a nested tensor": (lambda: layout.stripe(nested(), 0, 2, 64, 1), "nested"),
}


@pytest.mark.parametrize("case", NO_LAYOUTS)
def test_what_has_no_layout_is_refused(case):
    """And not sliced somehow: wrong tokens train without an error."""
    wrong, named = NO_LAYOUTS[case]
    with pytest.raises(ConfigError, match=named):
        wrong()


POSITIONS = torch.arange(4)
NO_POSITIONS = {
    "a negative one": (dict(positions=torch.tensor([3, -1])), "positions have -1"),
    "one past the end": (
        dict(positions=torch.tensor([3, 512]), seq_length=512),
        "positions have 512",
    ),
    "a fraction": (dict(positions=torch.tensor([1.5])), "positions are of torch.float32"),
    "truth values": (dict(positions=torch.tensor([True])), "positions are of torch.bool"),
    "a list": (dict(positions=[1, 2]), "positions is a list"),
    "nothing": (dict(positions=None), "positions is a NoneType"),
    "no values": (dict(positions=POSITIONS.to("meta")), "positions is on device meta"),
    "sparse ones": (dict(positions=POSITIONS.to_sparse()), "positions is torch.sparse_coo"),
    "a block of none": (dict(block_size=0), "blocks of 0"),
    "a negative block": (dict(block_size=-64), "blocks of -64"),
    "a block of a fraction": (dict(block_size=1.5), "block_size is 1.5"),
    "no ranks": (dict(cp_size=0), "over 0"),
    "a sequence of another length": (dict(seq_length=100), "100 tokens"),
}


@pytest.mark.parametrize("case", NO_POSITIONS)
def test_positions_that_are_none_are_not_located(case):
    wrong, named = NO_POSITIONS[case]
    with pytest.raises(ConfigError, match=named):
        locate(**dict(positions=POSITIONS, cp_size=2, block_size=64) | wrong)


def test_positions_of_a_small_dtype_are_located():
    positions = torch.tensor([100, 200], dtype=torch.uint8)
    rank, local = locate(positions, 8, 64)
    assert rank.tolist() == [1, 3] and local.tolist() == [36, 8]
    assert rank.dtype == local.dtype == torch.int64
