# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The kernel benchmarks: the work that they count, and what they compare with."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import attention, numerics
from benchmarks.lib import workloads
from megatron_mtraining.pattern import build_index
from tests.support.attention_cases import dense_attention, relative_error

SHARES = pytest.mark.parametrize(("share", "columns"), [(0.3, 0), (0.0, 40), (1.0, 0)])


def drawn_mask(distances, columns, seq):
    rows = torch.arange(seq)
    masks = [workloads.mask_rows(d, c, rows, seq) for d, c in zip(distances[0], columns[0])]
    return torch.stack(masks)[None]


@SHARES
def test_the_mask_written_out_is_the_index_s(share, columns):
    """Also of a length that is no multiple of blocks."""
    for seq in (640, 1000):
        distances, picked = workloads.draw_pattern(seq, 3, share, columns)
        index = build_index(distances, picked, seq, workloads.BLOCK, 1)
        mask = drawn_mask(distances, picked, seq)
        assert all(torch.equal(mask[0, h], index.token_mask(0, h)) for h in range(3))
        assert index.work().sum() == mask.sum()


@pytest.mark.parametrize("density", [0.05, 0.25])
def test_slashes_keep_what_a_case_says(density):
    share = workloads.share_for(density, 65536)
    kept = workloads.draw_index(65536, 32, share, 0, "cpu").density().mean()
    assert kept == pytest.approx(density, rel=0.15)


def test_rates_count_the_work_that_is_kept():
    """At 1 ms, by hand: 10^6 pairs x 4 x 64 = 0.256 GFLOP forward, 2.5 times that backward."""
    case = attention.Case("a case", 4096, 2, 1, 64, 0.1, 100)
    causal = 2048 * 2049 / 2 * 2
    times = {
        "forward": {"mtraining": 1.0, "cudnn": 2.0},
        "backward": {"mtraining": 1.0, "cudnn": 5.0},
    }
    rows = attention.rows_of(case, 1e6, 7, 2048, times)
    ours, dense, ours_backward, dense_backward = rows
    assert ours["tflops"] == pytest.approx(0.256, abs=0.06)  # a tenth is what a row keeps
    assert ours_backward["tflops"] == pytest.approx(0.64, abs=0.06)
    assert ours["share_of_cudnn"] == round(1e6 / (causal / 2), 3)
    assert ours_backward["share_of_cudnn"] == round(1e6 / (causal / 5), 3)
    assert ours["density"] == round(1e6 / (4096 * 4097 / 2 * 2), 5)
    assert (dense["seq"], dense["density"], dense["share_of_cudnn"]) == (2048, 1, 1)
    assert (ours["dense_seq"], dense_backward["share_of_cudnn"]) == (2048, 1)
    alone = attention.rows_of(case, 1e6, 7, 2048, {"forward": {"mtraining": 1.0}})[0]
    assert alone["share_of_cudnn"] is None and alone["dense_seq"] is None


def test_pairs_of_packed_documents_are_within_them(monkeypatch):
    monkeypatch.setattr(attention, "TURN", 1e-3)
    case = attention.Case("tiny", 512, 4, 2, 64, 1.0, 0, documents=3)
    rows = attention.run_case(case, {"mtraining"}, 256, 1e-3, "cpu")
    torch.manual_seed(0)  # the case's own pattern, then its documents
    workloads.draw_index(512, 4, 1.0, 0, "cpu")
    pairs = sum(length * (length + 1) / 2 for length in attention.draw_lengths(512, 3))
    assert all(row["density"] == round(pairs / (512 * 513 / 2), 5) < 1 for row in rows)


@pytest.mark.parametrize("share", [None, 0.1])
def test_float64_truth_of_some_rows_is_that_of_all(share):
    """Against dense attention with everything in memory; a few chunks; the pattern with columns."""
    seq, heads = 1024, 4
    operands = workloads.draw_operands(seq, heads, 2, 64, torch.float32, "cpu")
    pattern = None if share is None else workloads.draw_pattern(seq, heads, share, 30)
    if pattern is None:
        mask = torch.ones(seq, seq, dtype=torch.bool).tril().expand(1, heads, seq, seq)
    else:
        mask = drawn_mask(*pattern, seq)
    queries, keys = numerics.samples(seq, 600, "cpu")
    actual = numerics.truth(operands, pattern, queries, keys, held=2 * 128 * seq)
    expected = numerics.pick(dense_attention(*operands, mask, 64**-0.5), queries, keys)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert relative_error(value, expected[name]) < 1e-12, name


def test_an_error_that_is_no_number_is_too_far():
    rows = [dict(of_dense=value) for value in (1.0, 1.6, float("nan"))]
    assert numerics.too_far(rows) == rows[1:]
