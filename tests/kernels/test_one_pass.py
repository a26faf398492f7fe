# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The one-pass backward: when it is taken, and that it computes the same gradients. The GPU tests of the
kernels run both ways (``backward_path``)."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.kernels import attention as kernels
from megatron_mtraining.kernels.attention import backward_path as paths
from megatron_mtraining.kernels.types import BackwardPath
from megatron_mtraining.pattern import full_index, search_pattern
from megatron_mtraining.pattern.block_list_index import pruned_index
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import (
    dense_attention,
    random_index,
    random_operands,
    relative_error,
    simulated_ring,
    written_out_mask,
)

pytest.importorskip("triton")


def operands_of(dtype=torch.float32):
    query = torch.zeros(128, 1, 2, 64, dtype=dtype)
    return random_index(128, 1, 2, 64, 1, "all", "cpu"), query, query, query, query


def gradients(operands, index, scale):
    """Gradients of query, key and value; the last of the operands is the gradient of the output."""
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    out = ring_attention(*leaves, index, Ring(CPGroup(None)), scale).out
    return torch.autograd.grad(out, leaves, operands[3])


def taken(dtype=torch.float32):
    return kernels.choose_backward(*operands_of(dtype)) is BackwardPath.ONE_PASS


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("auto", False), ("two_kernels", False), ("one_pass", True)],
)
def test_environment_chooses(monkeypatch, value, expected):
    monkeypatch.delenv("MTRAINING_BACKWARD", raising=False)
    if value is not None:
        monkeypatch.setenv("MTRAINING_BACKWARD", value)
    assert taken() is expected


def test_other_values_are_refused(monkeypatch):
    monkeypatch.setenv("MTRAINING_BACKWARD", "fast")
    with pytest.raises(
        ValueError, match="MTRAINING_BACKWARD is 'fast'.*auto, one_pass or two_kernels"
    ):
        taken()


def test_not_under_deterministic_algorithms(monkeypatch, deterministic):
    monkeypatch.setenv("MTRAINING_BACKWARD", "one_pass")
    assert not taken()


def test_not_with_portable_kernels(monkeypatch):
    monkeypatch.setenv("MTRAINING_BACKWARD", "one_pass")
    operands = operands_of()  # before: on a GPU machine no kernel is to be imported interpreted
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.choose_backward(*operands) is BackwardPath.TWO_KERNELS


@pytest.mark.parametrize("budget", ["none", "columns", "few", "all"])
@pytest.mark.parametrize(
    ("seq_length", "world", "inner"), [(300, 1, 1), (384, 2, 2), (512, 2, 1), (768, 6, 3)]
)
def test_references(monkeypatch, seq_length, world, inner, budget):
    monkeypatch.setenv("MTRAINING_BACKWARD", "one_pass")
    monkeypatch.delattr(kernels.reference, "backward_query")  # not called
    operands = random_operands(seq_length, 2, 4, 2, 64, torch.float64, "cpu")
    index = random_index(seq_length, 2, 4, 64, world, budget, "cpu", inner)
    expected = dense_attention(*operands, written_out_mask(index, 2, 4), 0.1)
    for actual, exact in zip(simulated_ring(*operands, index, 0.1), expected):
        assert relative_error(actual, exact) < 1e-12


def test_ring_attention_takes_it(monkeypatch):
    monkeypatch.setenv("MTRAINING_BACKWARD", "one_pass")
    monkeypatch.delattr(kernels.reference, "backward_query")
    operands = random_operands(320, 1, 4, 2, 64, torch.float64, "cpu")
    index = random_index(320, 1, 4, 64, 1, "few", "cpu")
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    out = ring_attention(*leaves, index, Ring(CPGroup(None)), 0.1).out
    found = torch.autograd.grad(out, leaves, operands[3])
    expected = dense_attention(*operands, written_out_mask(index, 1, 4), 0.1)
    for actual, exact in zip((out.detach(), *found), expected):
        assert relative_error(actual, exact) < 1e-12


@pytest.mark.parametrize("dim", [64, 128])
def test_order_of_sums(triton_device, dim):
    """The gradient made of sums is what ``query_sums._to_rows`` takes apart."""
    gradient = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.query_gradient")
    length, batch, heads, scale = 150, 2, 3, 0.5
    query = torch.zeros(length, batch, heads, dim, device=triton_device)
    exact = torch.randn(192, batch, heads, dim, device=triton_device)
    sums = gradient.new_query_sums(query)
    tiles = exact.permute(1, 2, 0, 3).reshape(batch * heads, 3, 64, 2, dim // 2).transpose(2, 3)
    parts = tiles.reshape(batch * heads, 6, 4, 2, 4, 2, dim // 16, 4, 2)
    sums += parts.permute(0, 1, 6, 2, 4, 5, 7, 3, 8).reshape(sums.shape)
    found = gradient.finish_query_sums(sums, query, scale)
    assert torch.equal(found, exact[:length] * scale)


@pytest.mark.gpu
def test_deterministic_algorithms_on_a_gpu(monkeypatch, deterministic):
    """Equal bits from run to run, through the kernel of the queries' gradient."""
    monkeypatch.setenv("MTRAINING_BACKWARD", "one_pass")
    operands = random_operands(4096, 1, 8, 2, 128, torch.bfloat16, "cuda")
    index = random_index(4096, 1, 8, 128, 1, "few", "cuda")
    calls, backward_query = [], kernels.backward_query

    def spy(inputs, keys, **options):
        calls.append(keys.round)
        return backward_query(inputs, keys, **options)

    monkeypatch.setattr(kernels, "backward_query", spy)
    runs = [gradients(operands, index, 0.1) for _ in range(3)]
    assert len(calls) == 3
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_long_dense_attention_on_a_gpu(monkeypatch, dim):
    """At the length from which ``auto`` takes one pass, and there in chunks if they are faster."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only the Hopper kernels have a choice")
    length = paths.ONE_PASS_TOKENS[paths.gpu_of(torch.device("cuda", 0))]
    operands = random_operands(length, 1, 2, 1, dim, torch.bfloat16, "cuda")
    index = full_index(1, 2, length, 128, 1, 1, "cuda")
    monkeypatch.setenv("MTRAINING_BACKWARD", "two_kernels")
    exact = gradients(operands, index, dim**-0.5)
    monkeypatch.setenv("MTRAINING_BACKWARD", "auto")
    monkeypatch.delattr(kernels, "backward_query")  # not called
    for one, other in zip(gradients(operands, index, dim**-0.5), exact, strict=True):
        assert relative_error(one, other) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("one_launch", [True, False])
def test_chunks_of_a_long_sequence(monkeypatch, one_launch):
    """Chunks of the size that is chosen by default, as if less fitted the cache."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only the Hopper kernels have chunks")
    key = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.backward_key")
    operands = random_operands(4096, 1, 8, 2, 128, torch.bfloat16, "cuda")
    index = random_index(4096, 1, 8, 128, 1, "few", "cuda")
    launched = []
    original = key._launches

    def spy(*given):
        launched.append(given)
        return original(*given)

    monkeypatch.setenv("MTRAINING_BACKWARD", "two_kernels")
    exact = gradients(operands, index, 0.1)
    monkeypatch.setenv("MTRAINING_BACKWARD", "one_pass")
    monkeypatch.setattr(key, "_launches", spy)
    monkeypatch.setattr(key, "chunks", lambda *given: (True, one_launch))
    monkeypatch.setattr(paths, "CHUNK_BYTES", 8 * 4 * 128 * 128 * 4)
    found = gradients(operands, index, 0.1)
    assert launched == [(32, 8, True, one_launch)]
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one, other) < 5e-3


@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("blocks", "chunk"), [(7, 2), (8, 4), (5, 1), (3, 2), (9, 3)])
def test_chunks_meet_every_query_block_once(blocks, chunk, own, one_launch):
    """By programs of launches, in the order that they are started: which query blocks a key block meets."""
    key = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.backward_key")
    launches = key._launches(blocks, chunk, own, one_launch)
    met = torch.zeros(blocks, blocks, dtype=torch.int)  # query block, key block
    for launch in launches:
        before = [0] * blocks  # programs of the launch that have added to a key block
        for number, kv_block in product(
            range(launch.chunks), range(launch.kv_blocks(blocks, chunk))
        ):
            begin = launch.first_q_block + number * chunk
            end_kv_block = begin + launch.kv_ahead
            end = begin + chunk
            if launch.diagonal:  # from its own place, as no query block before sees it
                begin, end = kv_block, (kv_block // chunk + 1) * chunk
            elif kv_block >= end_kv_block:
                continue  # the program returns
            if launch.chunks > 1:
                turn = (end_kv_block - 1) // chunk - kv_block // chunk
                assert turn == before[kv_block], "all that it waits for were started earlier"
            before[kv_block] += 1
            met[begin:end, kv_block] += 1
    assert torch.equal(met.tril(), torch.ones_like(met).tril())
    assert len(launches) == (2 if one_launch else -(-blocks // chunk))
    # The last one has all key blocks: it makes the result.
    assert launches[-1].kv_blocks(blocks, chunk) == blocks and launches[-1].diagonal == own
    assert not own or torch.equal(met, met.tril())


@pytest.mark.parametrize(
    ("gpu", "dense", "dim", "blocks", "chunked", "one_launch"),
    [
        ("H100", False, 128, 511, False, True),
        ("H100", False, 128, 512, True, True),
        ("H200", False, 128, 1023, False, True),
        ("H200", False, 128, 1024, True, True),
        ("H200", True, 128, 255, False, True),
        ("H200", True, 128, 256, True, True),
        ("H200", True, 128, 1023, True, True),
        ("H200", True, 128, 1024, True, False),
        ("H200", True, 64, 1023, False, True),
        ("H200", True, 64, 1024, True, True),
        ("H100", True, 128, 127, False, True),
        ("H100", True, 128, 128, True, True),
        ("H100", True, 128, 1023, True, True),
        ("H100", True, 128, 1024, True, False),
        ("H100", False, 64, 1023, False, True),
        ("H100", False, 64, 1024, True, True),
    ],
)
def test_when_there_are_chunks(gpu, dense, dim, blocks, chunked, one_launch):
    assert paths.chunks(blocks, dense, dim, gpu) == (chunked, one_launch)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA GH200 480GB", "H100")],
)
def test_tables_by_gpu(monkeypatch, name, gpu):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert paths.gpu_of.__wrapped__(torch.device("cuda")) == gpu
    assert paths.gpu_of(torch.device("cpu")) == "H100"


def test_auto_takes_it_for_long_dense_attention(monkeypatch):
    monkeypatch.setenv("MTRAINING_BACKWARD", "auto")
    monkeypatch.setitem(paths.ONE_PASS_TOKENS, "H100", 256)

    def taken(length):
        index = full_index(1, 4, length, 64, 1, 1, "cpu")
        operands = random_operands(length, 1, 4, 2, 64, torch.float32, "cpu")
        return kernels.choose_backward(index, *operands) is BackwardPath.ONE_PASS

    assert taken(256) and not taken(192)
    operands = random_operands(256, 1, 4, 2, 64, torch.float32, "cpu")
    # Also over all pairs, if the host does not know that they are all.
    index = random_index(256, 1, 4, 64, 1, "all", "cpu")
    assert kernels.choose_backward(index, *operands) is BackwardPath.TWO_KERNELS
    monkeypatch.setenv("MTRAINING_BACKWARD", "two_kernels")
    assert not taken(256)


def test_only_an_index_of_everything_is_dense():
    """Not one of packed documents, and not what a pruned backward makes of it."""
    operands = random_operands(256, 1, 4, 2, 64, torch.float32, "cpu")
    query, key, *_ = operands
    documents = VisibleRanges.from_lengths([100, 156], 256, "cpu")
    for options, dense in (
        (dict(policy="fixed", vertical=0, slash=256), True),
        (dict(policy="price", price=0), True),
        (dict(policy="fixed", vertical=8, slash=8), False),
        (dict(policy="price", price=0.5), False),
        (dict(policy="moba", block_top_k=2), False),
    ):
        config = MTrainingConfig.from_options(block_size=64, window=64, sample_strata=16, **options)
        index = search_pattern(query, key, config, CPGroup(None), 0.1)
        assert index.is_dense == dense, options
        index = search_pattern(query, key, config, CPGroup(None), 0.1, visible=documents)
        assert not index.is_dense
    pruned = pruned_index(
        full_index(1, 4, 256, 64, 1, 1, "cpu"),
        torch.ones(1, 4, 4, 4, dtype=torch.uint8),
        0,
        40,
    )
    assert not pruned.is_dense


def test_chunks_have_rows_for_the_cache():
    for group, dim, blocks in (
        (8, 128, 64),
        (7, 128, 64),
        (1, 128, 512),
        (7, 64, 128),
        (512, 128, 8),
    ):
        assert paths.chunk_blocks(group, dim, 128) == blocks
