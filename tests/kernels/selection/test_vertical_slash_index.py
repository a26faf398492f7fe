# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Lists and density of the vertical-slash index: the kernels against the reference implementation, and both
against the distances that they were made from."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.kernels import selection
from megatron_mtraining.kernels.selection import reference_index
from megatron_mtraining.pattern import build_index


@pytest.mark.parametrize(
    ("seq", "block", "world", "inner", "columns", "diagonals"),
    [
        pytest.param(500, 64, 1, 1, 70, 9, id="N500-B64-cp1"),
        pytest.param(576, 64, 3, 3, 200, 1, id="N576-B64-cp3"),
        pytest.param(576, 64, 3, 1, 20, 3, id="N576-B64-cp3-inner1"),
        pytest.param(1024, 128, 4, 2, 0, 0, id="N1024-B128-cp4-inner2-empty"),
        pytest.param(128, 128, 1, 1, 5, 2, id="N128-B128-cp1-one-block"),
    ],
)
def test_lists(triton_device, seq, block, world, inner, columns, diagonals):
    picked = torch.stack([torch.randperm(seq)[:columns] for _ in range(6)]).view(2, 3, columns)
    if columns > 6:
        picked[0, 0, 2:5] = seq  # fewer than the budget
    crossed = torch.randint(0, seq + 1, (2, 3, diagonals))
    crossed[..., :1] = 4 * block  # crosses one block distance only
    distances = torch.rand(2, 3, -(-seq // block)) < 0.3
    picked, crossed, distances = (t.to(triton_device) for t in (picked, crossed, distances))
    for given in ((None, crossed.int(), 2, picked.int()), (distances, None, 0, picked)):
        if given[2] > distances.shape[-1]:
            continue
        expected = reference_index.vertical_slash_lists(*given, seq, block, world, inner)
        actual = selection.vertical_slash_lists(*given, seq, block, world, inner)
        for a, e in zip(actual, expected):
            assert a.dtype == e.dtype and torch.equal(a, e)
        member, round_list, round_ptr, rank_list, rank_ptr, *_ = (t.cpu() for t in actual)
        for listed, before, classes in (
            (round_list, round_ptr, world // inner),
            (rank_list, rank_ptr, 2 * world),
        ):
            length = -(-member.shape[-1] // classes)
            for residue in range(classes):
                low, high = (before[1, 2, (residue + i) * length] for i in range(2))
                found = listed[1, 2, low:high].long() * classes + residue
                mine = torch.arange(residue, member.shape[-1], classes)
                assert torch.equal(found, mine[member[1, 2, mine] != 0])


@pytest.mark.parametrize(
    ("seq", "block", "share"),
    [(500, 64, 0.3), (640, 128, 0.5), (1025, 64, 0.0), (100, 128, 1.0), (64 * 3000, 64, 0.1)],
)
def test_density(triton_device, seq, block, share):
    """The kernel, the reference, and the pairs of the pattern written out."""
    num_blocks = -(-seq // block)
    distances = torch.rand(2, 3, num_blocks) < share
    columns = torch.stack([torch.randperm(seq)[: min(seq, 70)] for _ in range(6)]).view(2, 3, -1)
    columns[1, 2] = seq  # none
    index = build_index(distances, columns, seq, block, 1)
    member, column_ptr = index.member.to(triton_device), index.column_ptr.to(triton_device)
    found = selection.vertical_slash_density(member, column_ptr, seq, block).cpu()
    expected = reference_index.vertical_slash_density(index.member, index.column_ptr, seq, block)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    pairs = index.work().sum((-1, -2)) / (seq * (seq + 1) / 2)
    assert torch.equal(found, pairs.float())
    if seq <= 1025:
        mask = index.token_mask(1, 0)
        assert found[1, 0] == (mask.sum().double() / (seq * (seq + 1) / 2)).float()


def test_more_blocks_than_16_bits_are_refused(triton_device):
    nothing = torch.zeros(1, 1, 0, dtype=torch.int32, device=triton_device)
    with pytest.raises(ValueError, match="32768 blocks of 64"):
        selection.vertical_slash_lists(None, nothing, 1, nothing, 32769 * 64, 64, 1, 1)


def test_more_blocks_than_16_bits_are_refused_on_cpu():
    nothing = torch.zeros(1, 1, 0, dtype=torch.int32)
    with pytest.raises(ValueError, match="32768 blocks of 64"):
        selection.vertical_slash_lists(None, nothing, 1, nothing, 32769 * 64, 64, 1, 1)


def test_no_diagonal_is_no_distance(triton_device):
    """Of a length that is no multiple of the block, "none" is within the last block."""
    diagonals = torch.full((1, 2, 3), 500, dtype=torch.int32, device=triton_device)
    diagonals[0, 1, 0] = 130
    columns = torch.zeros(1, 2, 0, dtype=torch.int32, device=triton_device)
    member = selection.vertical_slash_lists(None, diagonals, 1, columns, 500, 64, 1, 1)[0]
    assert member[0].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0, 0]]
    expected = reference_index.vertical_slash_lists(None, diagonals, 1, columns, 500, 64, 1, 1)[0]
    assert torch.equal(member, expected)
