# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Key blocks that many query blocks list, such as an attention sink's: several programs share the work.

- which programs there are, against a list in Python, with lists that just fill a segment
- gradients against dense attention under the same mask in float64, and equal bits from run to run
- on a GPU, long lists against what one program makes of each
"""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.kernels.attention.portable import segments
from megatron_mtraining.ring import RingStep
from tests.support.attention_cases import (
    BACKWARD_PATHS,
    TOLERANCE,
    assert_results,
    block_lists_of,
    dense_attention,
    has_backward_path,
    random_operands,
    simulated_ring,
)
from tests.support.pairs import pairwise
from tests.support.pruning_cases import on_device, with_documents

pytestmark = pytest.mark.usefixtures("fresh_inputs")

BUDGETS = ["few", "all", "columns"]
"""Of block lists: a third of the blocks and all first ones; all blocks; as few, but that the last head has
slashes and columns."""


def indices_of(seq_length, world, inner, heads, block, budget, packed, batch=1, device="cpu"):
    """Each rank's index, whose first key block all query blocks list, and the mask of all."""
    num_blocks = -(-seq_length // block)
    blocks = torch.rand(batch, heads, num_blocks, num_blocks) < (1 if budget == "all" else 0.3)
    blocks[..., 0] = True
    distances = torch.zeros(batch, heads, num_blocks, dtype=torch.bool)
    columns = torch.full((batch, heads, seq_length // 7 if budget == "columns" else 0), seq_length)
    if budget == "columns":
        blocks[:, -1] = False
        distances[:, -1] = torch.rand(num_blocks) < 0.5
        columns[:, -1] = torch.randperm(seq_length)[: columns.shape[-1]]
    indices = block_lists_of(blocks, distances, columns, seq_length, block, world, inner)
    if packed:
        indices = [with_documents(index) for index in indices]
    mask = torch.zeros(batch, heads, seq_length, seq_length, dtype=torch.bool)
    for index in indices:
        for b in range(batch):
            for h in range(heads):
                mask[b, h, index._positions()] = index.token_mask(b, h)
    return [on_device(index, device) for index in indices], mask.to(device)


def most_segments(indices, kv_heads):
    """The most segments that a key block has in any step of the ring."""
    most = 0
    for step in steps(indices[0]):
        found = segments.find_segments(indices[step.rank], kv_heads, step)
        most = max(most, 0 if found is None else int(found.programs[:, 3].max()))
    return most


def steps(index):
    world = range(index.world)
    return [RingStep(rank, source, index.inner, index.outer) for rank in world for source in world]


def check(seq_length, world, inner, heads, dim, block, budget, packed, dtype, tolerance, device):
    indices, mask = indices_of(
        seq_length, world, inner, heads[0], block, budget, packed, device=device
    )
    assert most_segments(indices, heads[1]) > 1
    operands = random_operands(seq_length, 1, *heads, dim, dtype, device)
    scale = 0.7 * dim**-0.5
    actual = simulated_ring(*operands, indices, scale)
    assert_results(actual, dense_attention(*operands, mask, scale), tolerance)


def expected_programs(index, kv_heads, step, size):
    """``Segments.programs`` without the rows that stand for no program."""
    batch, heads, _ = index.member.shape
    counts = index.rank_ptr.diff().view(index.world, batch, kv_heads, -1, index.local_blocks)
    listed = counts[step.source].sum(2)
    if step.source == step.rank:
        listed -= heads // kv_heads
    listed = listed.flatten(0, 1).T.tolist()
    return [
        [kv_block, line, number, max(-(-count // size), 1)]
        for kv_block, lines in enumerate(listed)
        for line, count in enumerate(lines)
        for number in range(max(-(-count // size), 1))
    ]


@pairwise(
    {
        "seq_length, world, inner": [(620, 1, 1), (384, 2, 1), (576, 3, 3)],
        "budget": BUDGETS,
        "size": [1, 3, 4, 16],
    },
    lambda budget, size, world, **_: size < 16 or (budget == "all" and world == 1),
)
def test_programs(monkeypatch, triton_device, seq_length, world, inner, budget, size):
    """With all blocks, a group of two heads lists them 18, 16, ... times on one rank: some fill segments."""
    monkeypatch.setattr(segments, "SEGMENT_BLOCKS", size)
    indices, _ = indices_of(
        seq_length, world, inner, 4, 64, budget, False, batch=2, device=triton_device
    )
    for step in steps(indices[0]):
        index = indices[step.rank]
        expected = expected_programs(index, 2, step, size)
        found = segments.find_segments(index, 2, step)
        if found is None:
            assert all(count == 1 for *_, count in expected)
            continue
        programs = found.programs.tolist()
        assert programs[: len(expected)] == expected
        assert all(row == [-1] * 4 for row in programs[len(expected) :])


def test_only_long_block_lists_have_segments(monkeypatch):
    index = indices_of(640, 1, 1, 2, 64, "all", False)[0][0]
    monkeypatch.setattr(segments, "SEGMENT_BLOCKS", 18)
    assert segments.find_segments(index, 1, RingStep(0, 0, 1, 1)) is None


@pairwise(
    {
        "seq_length, world, inner, block": [
            (320, 1, 1, 64), (300, 1, 1, 64), (384, 2, 1, 64), (384, 2, 2, 64), (384, 1, 1, 128),
        ],
        "heads": [(2, 1), (4, 2)],
        "budget": BUDGETS,
        "packed": [False, True],
        "size": [1, 2, 4],
    },
    # Three blocks on a rank are listed four times by a group of two, beside their own places.
    lambda size, block, world, **_: size == 1 or (block == 64 and world == 1),
)  # fmt: skip
def test_gradients_interpreted(
    monkeypatch, interpreter, seq_length, world, inner, block, heads, budget, packed, size
):
    monkeypatch.setattr(segments, "SEGMENT_BLOCKS", size)
    case = seq_length, world, inner, heads, 64, block, budget, packed
    check(*case, torch.float32, 1e-5, "cpu")


def test_equal_bits_interpreted(monkeypatch, interpreter):
    """In other segments, sums are in another order."""
    indices, _ = indices_of(320, 1, 1, 2, 64, "few", False)
    operands = random_operands(320, 1, 2, 1, 64, torch.float32, "cpu")
    results = []
    for size in (2, 2, 3):
        monkeypatch.setattr(segments, "SEGMENT_BLOCKS", size)
        results.append(simulated_ring(*operands, indices, 0.1))
    first, again, other = results
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[2], other[2])


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "seq_length, world, inner": [(2048, 1, 1), (1996, 1, 1), (2048, 2, 1), (3072, 4, 2)],
        "heads": [(8, 1), (14, 2), (4, 4)],
        "dim": [64, 96, 128, 256],
        "budget": BUDGETS,
        "packed": [False, True],
        "size": [1, 3],
        "dtype": TOLERANCE,
        "backward_path": BACKWARD_PATHS,
        "block": [128, 64],
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_gradients_compiled(
    monkeypatch, seq_length, world, inner, heads, dim, block, budget, packed, size, dtype
):
    monkeypatch.setattr(segments, "SEGMENT_BLOCKS", size)
    case = seq_length, world, inner, heads, dim, block, budget, packed
    check(*case, dtype, TOLERANCE[dtype], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_lists(monkeypatch, dim, portable):
    monkeypatch.setenv("MTRAINING_BACKWARD", "two_kernels")
    monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", str(int(portable)))
    indices, _ = indices_of(8192, 1, 1, 14, 128, "few", False, device="cuda")
    operands = random_operands(8192, 1, 14, 2, dim, torch.bfloat16, "cuda")
    assert most_segments(indices, 2) > 4
    first = simulated_ring(*operands, indices, dim**-0.5)
    for _ in range(3):
        again = simulated_ring(*operands, indices, dim**-0.5)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
    monkeypatch.setattr(segments, "SEGMENT_BLOCKS", 8192)
    expected = simulated_ring(*operands, indices, dim**-0.5)
    assert_results(first, [each.double() for each in expected], 1e-2)
