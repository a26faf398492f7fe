# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The whole of sparse attention on GPUs: against the CPU references, over NCCL, and at large sizes."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.layout import stripe, unstripe
from megatron_mtraining.pattern import build_index, search_pattern
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import (
    dense_attention,
    random_operands,
    relative_error,
    simulated_ring,
    written_out_mask,
)

pytestmark = pytest.mark.gpu
CONFIG = MTrainingConfig.from_options(
    vertical=64, slash=6, window=100, block_size=64, sample_strata=32
)


def test_gpu_chooses_what_the_cpu_chooses():
    query, key, _, _ = random_operands(4096, 2, 8, 2, 128, torch.float32, "cpu")
    query += torch.roll(key, 777, 0).repeat_interleave(4, 2)  # a diagonal to find
    on_cpu = search_pattern(query, key, CONFIG, CPGroup(None), 0.09)
    on_gpu = search_pattern(query.cuda(), key.cuda(), CONFIG, CPGroup(None), 0.09)
    # Sums round differently; candidates of nearly equal mass may swap.
    assert (on_cpu.distances() != on_gpu.distances().cpu()).float().mean() < 0.01
    assert on_gpu.distances()[:, :, 777 // 64].all()


def test_sparse_attention_against_its_own_mask():
    print("torch seed", torch.seed())
    operands = random_operands(2048, 1, 8, 2, 128, torch.bfloat16, "cuda")
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    out, _, index, *_ = attend(*leaves, config=CONFIG)
    out.backward(operands[3])
    expected = dense_attention(*operands, written_out_mask(index, 1, 8), 128**-0.5)
    for actual, truth in zip((out, *(leaf.grad for leaf in leaves)), expected):
        assert actual.dtype == torch.bfloat16
        assert relative_error(actual, truth) < 1e-2


@pytest.mark.parametrize(
    ("length", "config"), [(4096, CONFIG), (131072, MTrainingConfig())], ids=["4K", "128K"]
)
def test_nothing_is_read_back_to_the_host(length, config):
    operands = random_operands(length, 1, 4, 2, 128, torch.bfloat16, "cuda")
    leaves = [t.clone().requires_grad_() for t in operands[:3]]

    def step():
        attend(*leaves, config=config)[0].backward(operands[3])

    step()  # compilation may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_32_bits():
    """1.25M tokens x 16 heads x 128: offsets in the last rows are beyond 2^31. The last 512 tokens see
    their own block, the one before, and two columns there: attention over just these must agree."""
    if torch.cuda.get_device_properties(0).total_memory < 75e9:
        pytest.skip("needs 75 GB of GPU memory")
    seq, tail = 2**20 + 2**18, 512
    assert (seq - tail) * 16 * 128 > 2**31

    def index_of(length):
        distances = torch.zeros(1, 16, length // 128, dtype=torch.bool)
        distances[..., :2] = True
        columns = torch.tensor([length - 400, length - 300]).expand(1, 16, -1)
        return build_index(distances.cuda(), columns.cuda(), length, 128, 1)

    query = torch.randn(seq, 1, 16, 128, device="cuda", dtype=torch.bfloat16)
    # Keys in one tensor with the heads' stride of the queries, so that their offsets are as large.
    both = torch.randn(seq, 1, 16, 128, device="cuda", dtype=torch.bfloat16)
    key, value = both[:, :, :2], both[:, :, 2:4]
    grad_out = torch.randn_like(query)
    actual = simulated_ring(query, key, value, grad_out, index_of(seq), 0.1)
    parts = [t[-tail:] for t in (query, key, value, grad_out)]
    expected = dense_attention(*parts, written_out_mask(index_of(tail), 1, 16), 0.1)
    # The first half of the tail has neighbours outside of it.
    for a, e in zip(actual, expected):
        assert relative_error(a[-tail // 2 :], e[-tail // 2 :]) < 1e-2


def _nccl_rank(rank, world, inner, port, operands, lengths, results):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    parts = [stripe(t, rank, world, CONFIG.block_size, inner=inner).cuda() for t in operands]
    leaves = [t.requires_grad_() for t in parts[:3]]
    documents = lengths and VisibleRanges.from_lengths(lengths, len(operands[0]), "cuda")
    out, _, index, *_ = attend(
        *leaves, config=CONFIG, cp_group=dist.group.WORLD, cp_inner=inner, documents=documents
    )
    out.backward(parts[3])
    masks = torch.stack([index.token_mask(0, h) for h in range(operands[0].shape[2])])
    results[rank] = [t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves), masks)]
    dist.destroy_process_group()


@pytest.mark.parametrize("packed", [False, True], ids=["one", "documents"])
@pytest.mark.parametrize(("world", "inner"), [(2, None), (2, 1), (3, None), (4, None), (4, 2)])
def test_nccl_ring(world, inner, packed):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, and there are {torch.cuda.device_count()}")
    seq_length = 64 * world * 8
    operands = random_operands(seq_length, 1, 8, 2, 128, torch.bfloat16, "cpu")
    lengths = [[300, 1, seq_length - 300 - 1 - 75, 75]] if packed else None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").Manager().dict()
    given = world, inner, port, operands, lengths, results
    mp.start_processes(_nccl_rank, given, nprocs=world)
    parts = [results[rank] for rank in range(world)]
    masks = parts[0][4]
    assert all(torch.equal(p[4], masks) for p in parts), "ranks chose different patterns"
    expected = dense_attention(*operands, masks[None], 128**-0.5)
    for i, truth in enumerate(expected):
        whole = unstripe([p[i] for p in parts], CONFIG.block_size, inner=inner)
        assert relative_error(whole, truth) < 1e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("threshold", [0, 3.0])
def test_operands_on_another_than_the_current_gpu(threshold):
    """As without torch.cuda.set_device: kernels are launched where the operands are."""
    config = MTrainingConfig.from_options(price=0.25, block_size=64, backward_threshold=threshold)
    given = random_operands(1024, 1, 4, 2, 128, torch.bfloat16, "cpu")
    found = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [each.to(device).requires_grad_() for each in given[:3]]
        out = attend(*leaves, config=config).out
        out.backward(given[3].to(device))
        found.append([out, *(each.grad for each in leaves)])
    assert torch.cuda.current_device() == 0
    for one, other in zip(*found):
        assert torch.equal(one.cpu(), other.cpu())
