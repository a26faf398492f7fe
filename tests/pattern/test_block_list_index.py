# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention by block lists against dense attention under the same mask, in float64; and the lists."""

from __future__ import annotations

import socket
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_mtraining.attention_call import check_index
from megatron_mtraining.cp_group import CPGroup, cp_group_of
from megatron_mtraining.layout import block_at, stripe, unstripe
from megatron_mtraining.pattern import block_list_index, build_block_index, build_index, full_index
from megatron_mtraining.ring import Ring, ring_of
from megatron_mtraining.ring.attention import ring_attention
from tests.support.attention_cases import (
    BACKWARD_PATHS,
    COMPILED_SEQUENCES,
    INTERPRETED_SEQUENCES,
    SEQUENCES,
    TOLERANCE,
    assert_results,
    block_lists_of,
    dense_attention,
    has_backward_path,
    random_operands,
    relative_error,
    simulated_ring,
    written_out_mask,
)
from tests.support.pairs import all_pairs, pairwise
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_inputs")

KINDS = ["none", "lists", "mixed", "slashes", "all"]


def random_sets(seq_length, batch, heads, block, kind, device="cpu"):
    """Blocks ``[b, h, NB, NB]`` in the order of the sequence (also later ones, which do not count),
    distances and columns. "mixed": every second head is a vertical-slash head."""
    num_blocks = -(-seq_length // block)
    blocks = torch.rand(batch, heads, num_blocks, num_blocks) < 0.3
    distances = torch.rand(batch, heads, num_blocks) < 0.3
    columns = torch.stack([torch.randperm(seq_length) for _ in range(batch * heads)])
    columns = columns[:, : max(1, seq_length // 7)].view(batch, heads, -1)
    of_slashes = torch.arange(heads) % 2 == 1
    if kind == "all":
        blocks[:] = True
    if kind in ("none", "lists", "all"):
        of_slashes[:] = False
    if kind == "none":
        blocks[:] = False
    if kind == "slashes":
        of_slashes[:] = True
    blocks &= ~of_slashes[:, None, None]
    distances &= of_slashes[:, None]
    columns = torch.where(of_slashes[:, None], columns, seq_length)
    return blocks.to(device), distances.to(device), columns.to(device)


def mask_of(blocks, distances, columns, seq_length, block):
    """What the sets mean, token by token: bool ``[b, h, N, N]``."""
    position = torch.arange(seq_length, device=blocks.device)
    at = position // block
    mask = blocks[:, :, at[:, None], at] | (at[:, None] == at)
    mask |= distances[:, :, (at[:, None] - at).clamp(min=0)]
    mask |= (columns[..., None] == position).any(2)[:, :, None]
    return mask & (position[:, None] >= position)


def check(
    seq_length, world, inner, heads, dim, kind, dtype, block, tolerance, device="cpu", batch=2
):
    operands = random_operands(seq_length, batch, *heads, dim, dtype, device)
    sets = random_sets(seq_length, batch, heads[0], block, kind, device)
    scale = 0.7 * dim**-0.5
    expected = dense_attention(*operands, mask_of(*sets, seq_length, block), scale)
    indices = block_lists_of(*sets, seq_length, block, world, inner)
    actual = simulated_ring(*operands, indices, scale, parts_of_heads=max(1, inner - 1))
    assert_results(actual, expected, tolerance)


@pairwise(
    {
        "seq_length, world, inner": SEQUENCES,
        "batch": [1, 2],
        "heads": [(4, 2), (7, 1)],
        "kind": KINDS,
    }
)
def test_references(seq_length, world, inner, batch, heads, kind):
    check(seq_length, world, inner, heads, 64, kind, torch.float64, 64, 1e-12, batch=batch)


@pairwise(
    {
        "seq_length, world, inner, block": INTERPRETED_SEQUENCES,
        "heads": [(4, 2), (2, 2)],
        "dim": [64, 128],
        "kind": ["lists", "mixed"],
    }
)
def test_kernels_interpreted(interpreter, seq_length, world, inner, heads, dim, kind, block):
    check(seq_length, world, inner, heads, dim, kind, torch.float32, block, 1e-5, batch=1)


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "seq_length, world, inner, heads, block": COMPILED_SEQUENCES,
        "dim": [64, 128, 256],
        "kind": ["none", "lists", "mixed", "slashes"],
        "dtype": TOLERANCE,
        "backward_path": BACKWARD_PATHS,
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_kernels_compiled(seq_length, world, inner, heads, dim, kind, block, dtype):
    check(seq_length, world, inner, heads, dim, kind, dtype, block, TOLERANCE[dtype], "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "seq_length, world": [(2996, 1), (3072, 2)],
        "dim": [64, 128, 256],
        "kind": ["mixed", "all"],
        "backward_path": BACKWARD_PATHS,
    },
    has_backward_path,
    indirect=["backward_path"],
)
def test_long_sums(monkeypatch, seq_length, world, dim, kind):
    """Sums are put aside after every CHAIN query tiles: here often."""
    monkeypatch.setattr("megatron_mtraining.kernels.attention.launch_args.CHAIN", 32)
    check(seq_length, world, 1, (8, 2), dim, kind, torch.bfloat16, 128, 1e-2, "cuda")


@pytest.mark.gpu
def test_bitwise_equal_from_run_to_run():
    operands = random_operands(4096, 1, 8, 2, 128, torch.bfloat16, "cuda")
    sets = random_sets(4096, 1, 8, 128, "mixed", "cuda")
    indices = block_lists_of(*sets, 4096, 128, 2)
    first = simulated_ring(*operands, indices, 0.1)
    for _ in range(3):
        again = block_lists_of(*sets, 4096, 128, 2)
        for one, other in zip(indices, again):
            assert torch.equal(one.round_list, other.round_list)
            assert torch.equal(one.rank_list, other.rank_list)
        again = simulated_ring(*operands, again, 0.1)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def check_slashes(world, inner, dtype, block, tolerance, device="cpu", nb=5):
    """Distances written out as blocks, in one head of two, or given as they are."""
    seq_length = nb * block * world
    operands = random_operands(seq_length, 1, 2, 1, 64, dtype, device)
    _, distances, columns = random_sets(seq_length, 1, 2, block, "slashes", device)
    columns[:, 0] = seq_length
    at = torch.arange(nb * world, device=device)
    blocks = distances[:, :, (at[:, None] - at).clamp(min=0)]
    given = distances & torch.tensor([False, True], device=device)[:, None]
    indices = block_lists_of(
        blocks & ~given.any(-1)[..., None, None], given, columns, seq_length, block, world, inner
    )
    index = build_index(distances, columns, seq_length, block, world, inner)
    one, other = (simulated_ring(*operands, i, 0.1) for i in (index, indices))
    # The queries' blocks are walked in the same order.
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    for a, b in zip(one, other):
        assert relative_error(b, a.double()) < tolerance
    for rank, of_rank in enumerate(indices):
        assert torch.equal(of_rank.block_mask(rank), index.block_mask(rank))
        assert torch.equal(of_rank.work()[:, :, rank], index.work()[:, :, rank])
        assert of_rank.work().sum() == index.work()[:, :, rank].sum()


@pytest.mark.parametrize(("world", "inner"), [(1, 1), (2, 1), (4, 2), (3, 3)])
def test_slashes_as_lists_are_the_same(world, inner):
    check_slashes(world, inner, torch.float64, 64, 1e-13)


def test_slashes_as_lists_are_the_same_interpreted(interpreter):
    check_slashes(2, 1, torch.float32, 64, 1e-6, nb=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world", "inner", "block"), [(1, 1, 64), (1, 1, 128), (2, 1, 64), (4, 2, 128), (3, 3, 128)]
)
def test_slashes_as_lists_are_the_same_compiled(world, inner, block):
    check_slashes(world, inner, torch.bfloat16, block, 2e-3, "cuda")


def check_lists(seq_length, world, inner, kind, device="cpu"):
    """Lists, work and density against the sets."""
    sets = random_sets(seq_length, 2, 3, 64, kind, device)
    mask = mask_of(*sets, seq_length, 64)
    indices = block_lists_of(*sets, seq_length, 64, world, inner)
    num_blocks = indices[0].member.shape[-1]
    at = torch.arange(num_blocks, device=device)
    seen = sets[0] | sets[1][:, :, (at[:, None] - at).clamp(min=0)] | (at[:, None] == at)
    seen &= at[:, None] >= at
    masks = []
    for rank, index in enumerate(indices):
        nb = index.local_blocks
        own = block_at(torch.arange(nb, device=device), rank, world, inner)
        assert torch.equal(index.block_mask(rank), seen[:, :, own])
        counts = index.rank_ptr.diff().tolist()
        first = 0
        for line, count in enumerate(counts):
            source, b, h, c = (line // (6 * nb), line // (3 * nb) % 2, line // nb % 3, line % nb)
            sees = seen[b, h, own, block_at(c, source, world, inner)].nonzero()[:, 0]
            assert index.rank_list[first : first + count].tolist() == sees.tolist()
            first += count
        masks.append(written_out_mask(index, 2, 3))
        pairs = masks[-1].sum((-1, -2))
        assert torch.equal(index.work()[:, :, rank].sum(-1), pairs.double())
        rows = index._positions()
        assert torch.allclose(index.density().double(), pairs.double() / (rows + 1).sum())
        small = (t.numel() * t.element_size() for t in (index.member, index.column_ptr))
        lists = 4 * int(index.round_ptr[-1]) + 4 * (len(counts) + 1 + len(index.round_ptr))
        assert index.nbytes == lists + sum(small) + 4 * index.columns.numel()
    whole = masks[0] if world == 1 else unstripe(masks, 64, dim=2, inner=inner)
    assert torch.equal(whole, mask)


@pairwise({"seq_length, world, inner": SEQUENCES, "kind": KINDS})
def test_lists(seq_length, world, inner, kind):
    check_lists(seq_length, world, inner, kind)


@pytest.mark.parametrize(
    ("seq_length", "world", "inner", "kind"),
    [(500, 1, 1, "mixed"), (384, 3, 3, "all")],
)
def test_lists_interpreted(interpreter, seq_length, world, inner, kind):
    check_lists(seq_length, world, inner, kind)


@pytest.mark.gpu
@pairwise({"seq_length, world, inner": SEQUENCES, "kind": KINDS})
def test_lists_compiled(seq_length, world, inner, kind):
    check_lists(seq_length, world, inner, kind, "cuda")


def test_density_of_everything_is_one():
    blocks = torch.ones(1, 2, 3, 6, dtype=torch.bool)
    none = torch.zeros(1, 2, 6, dtype=torch.bool), torch.zeros(1, 2, 0, dtype=torch.int64)
    for rank in range(2):
        index = build_block_index(blocks, *none, 384, 64, 2, rank=rank)
        assert (index.density() == 1).all()
    index = build_block_index(torch.ones(1, 2, 6, 6, dtype=torch.uint8), *none, 370, 64, 1)
    assert (index.density() == 1).all()


def test_more_entries_than_memory_are_an_error():
    sets = random_sets(384, 1, 2, 64, "all")
    count = 2 * 6 * 7 // 2
    (index,) = block_lists_of(*sets, 384, 64, 1, capacity=count)
    assert len(index.round_list) == count == int(index.round_ptr[-1])
    (index,) = block_lists_of(*sets, 384, 64, 1, capacity=count + 9)
    assert len(index.rank_list) == count + 9
    check_same_mask(index, sets)
    with pytest.raises(RuntimeError, match=f"more than {count - 1} entries"):
        block_lists_of(*sets, 384, 64, 1, capacity=count - 1)


def check_same_mask(index, sets):
    assert torch.equal(written_out_mask(index, 1, 2), mask_of(*sets, 384, 64))


def test_columns_beside_other_blocks_are_an_error():
    blocks, distances, columns = random_sets(384, 1, 2, 64, "mixed")
    blocks[0, 1, 3, 1] = True
    distances[0, 1, 2] = False
    with pytest.raises(RuntimeError, match="columns, and blocks"):
        block_lists_of(blocks, distances, columns, 384, 64, 1)
    distances[0, 1, 2] = True  # said twice is fine
    (index,) = block_lists_of(blocks, distances, columns, 384, 64, 1)
    check_same_mask(index, (blocks, distances, columns))


def test_what_does_not_fit_is_named():
    blocks, distances, columns = random_sets(384, 1, 2, 64, "mixed")
    with pytest.raises(ValueError, match="384 tokens make 3"):
        build_block_index(blocks, distances, columns, 384, 128, 1)
    with pytest.raises(ValueError, match=r"\(1, 2, 6, 6\).*\(1, 2, 3, 6\)"):
        build_block_index(blocks, distances, columns, 384, 64, 2)
    with pytest.raises(ValueError, match="blocks are torch.float32"):
        build_block_index(blocks.float(), distances, columns, 384, 64, 1)
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        build_block_index(blocks[:, :, :3], distances, columns, 384, 64, 2, rank=2)
    index = build_block_index(blocks[:, :, :3], distances, columns, 384, 64, 2, rank=1)
    with pytest.raises(ValueError, match="rank 1, not of rank 0"):
        index.block_mask(0)
    query = torch.zeros(192, 1, 2, 64)
    cp = CPGroup(None)
    cp.world, cp.inner = 2, 2
    with pytest.raises(ValueError, match="lists of rank 1, but this is rank 0"):
        check_index(index, query, cp)


def run_rings(rank, world, cases, device="cpu"):
    results = []
    for operands, sets, inner in cases:
        seq_length = operands[0].shape[0]
        ring = ring_of(cp_group_of(dist.group.WORLD, inner))
        parts = [stripe(t, rank, world, 64, inner=ring.cp.inner).to(device) for t in operands]
        leaves = [t.clone().requires_grad_() for t in parts[:3]]
        sets = [t.to(device) for t in sets]
        index = block_lists_of(*sets, seq_length, 64, world, ring.cp.inner)[rank]
        out, *_ = ring_attention(*leaves, index, ring, 0.1)
        out.backward(parts[3])
        results.append([t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves))])
    return results


# Ranks to the ranks a node that they are run with (None: all of so few): all in one set of processes.
NODES = {1: [None], 2: [None, 1], 3: [None, 1], 4: [None, 1, 2]}


@pytest.mark.parametrize("world", list(NODES))
def test_processes_agree_with_dense_attention(world):
    seq_length = 64 * world * 3
    dtypes = ((torch.float64, 1e-12), (torch.bfloat16, 1e-2))
    check_rings(world, seq_length, dtypes, lambda cases: run_ranks(world, run_rings, cases))


def check_rings(world, seq_length, dtypes, run):
    cases, expected = [], []
    for (dtype, tolerance), kind, inner in all_pairs(
        list(product(dtypes, ("lists", "mixed", "all"), NODES[world]))
    ):
        operands = random_operands(seq_length, 1, 4, 2, 64, dtype, "cpu")
        sets = random_sets(seq_length, 1, 4, 64, kind)
        truth = dense_attention(*operands, mask_of(*sets, seq_length, 64), 0.1)
        cases.append((operands, sets, inner))
        expected.append((truth, tolerance))
    for case, (truths, tolerance), ranks in zip(cases, expected, zip(*run(cases))):
        for parts, truth in zip(zip(*ranks), truths):
            error = relative_error(unstripe(list(parts), 64, inner=case[-1]), truth)
            assert error < tolerance, f"nodes of {case[-1]}: {error:.1e}"


def _nccl_rank(rank, world, port, cases, results):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    results[rank] = run_rings(rank, world, cases, "cuda")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3, 4])
def test_nccl_ring(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, and there are {torch.cuda.device_count()}")

    def run(cases):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = mp.get_context("spawn").Manager().dict()
        mp.start_processes(_nccl_rank, (world, port, cases, results), nprocs=world)
        return [results[rank] for rank in range(world)]

    check_rings(world, 64 * world * 8, ((torch.bfloat16, 1e-2),), run)


@pytest.mark.gpu
def test_nothing_is_read_back_with_a_capacity():
    query, key, value, grad_out = random_operands(4096, 1, 4, 2, 128, torch.bfloat16, "cuda")
    blocks, distances, columns = random_sets(4096, 1, 4, 128, "mixed", "cuda")
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]

    def step():
        index = build_block_index(blocks, distances, columns, 4096, 128, 1, capacity=4 * 32 * 33)
        ring_attention(*leaves, index, Ring(CPGroup(None)), 0.1)[0].backward(grad_out)

    step()  # compilation may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_all_blocks_are_dense_attention():
    operands = random_operands(384, 1, 4, 2, 64, torch.float64, "cpu")
    indices = block_lists_of(*random_sets(384, 1, 4, 64, "all"), 384, 64, 2)
    dense = full_index(1, 4, 384, 64, 2, 2, "cpu")
    one, other = (simulated_ring(*operands, i, 0.1) for i in (dense, indices))
    for a, b in zip(one, other):  # the same sums, which BLAS may add in another order
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def too_long(rank, world):
    """Rank 1 alone has more than lists can hold."""
    block_list_index.MAX_LIST_ENTRIES = 15
    blocks = torch.zeros(1, 2, 3, 6, dtype=torch.bool)
    blocks[:] = rank == 1
    none = torch.zeros(1, 2, 6, dtype=torch.bool), torch.zeros(1, 2, 0, dtype=torch.int64)
    try:
        build_block_index(blocks, *none, 384, 64, 2, rank=rank, cp=CPGroup(dist.group.WORLD))
    except ValueError as error:
        return str(error)


def test_lists_that_are_too_long_on_one_rank_are_refused_on_every_rank():
    (first, second) = run_ranks(2, too_long)
    assert first == second and "more than 15, use more ranks" in first
