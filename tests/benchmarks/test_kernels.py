# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The kernel benchmarks where no GPU is needed: what they run, how they count, what they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.kernels import attention, loss, numerics
from benchmarks.lib import plots, record, workloads
from megatron_mtraining.kernels.attention.operands import check_operands
from megatron_mtraining.pattern import build_index
from tests.support.attention_cases import dense_attention, relative_error

SCRIPTS = dict(
    record=record, workloads=workloads, plots=plots, kernels=attention, numerics=numerics, loss=loss
)


@pytest.fixture(scope="module")
def scripts():
    return SCRIPTS


def drawn_mask(workloads, distances, columns, seq):
    rows = torch.arange(seq)
    masks = [workloads.mask_rows(d, c, rows, seq) for d, c in zip(distances[0], columns[0])]
    return torch.stack(masks)[None]


@pytest.mark.parametrize("seq", [640, 1000])
@pytest.mark.parametrize(("share", "columns"), [(0.3, 0), (0.0, 40), (1.0, 0)])
def test_the_mask_written_out_is_the_index_s(scripts, seq, share, columns):
    workloads = scripts["workloads"]
    distances, picked = workloads.draw_pattern(seq, 3, share, columns)
    index = build_index(distances, picked, seq, workloads.BLOCK, 1)
    mask = drawn_mask(workloads, distances, picked, seq)
    assert all(torch.equal(mask[0, h], index.token_mask(0, h)) for h in range(3))
    assert index.work().sum() == mask.sum()
    rows = torch.tensor([0, 5, 300])
    some = workloads.mask_rows(distances[0, 1], picked[0, 1], rows, 301)
    assert torch.equal(some, mask[0, 1][rows, :301])


@pytest.mark.parametrize("density", [0.05, 0.25])
@pytest.mark.parametrize("seq", [65536, 262144])
def test_slashes_keep_what_a_case_says(scripts, seq, density):
    workloads = scripts["workloads"]
    share = workloads.share_for(density, seq)
    kept = workloads.draw_index(seq, 32, share, 0, "cpu").density().mean()
    assert kept == pytest.approx(density, rel=0.15)


def test_operands_are_laid_out_as_megatron_s(scripts):
    workloads = scripts["workloads"]
    query, key, value, grad_out = workloads.draw_operands(192, 8, 2, 64, torch.bfloat16, "cpu")
    check_operands(query, key, value)
    assert query.is_contiguous() and key.is_contiguous() and grad_out.shape == query.shape
    assert not value.is_contiguous() and value.stride(-1) == 1
    dense = workloads.heads_first(value)
    assert dense.is_contiguous() and torch.equal(dense[0, 1], value[:, 0, 1])


def test_cases_are_valid(scripts):
    kernels = scripts["kernels"]
    names = [case.name for case in kernels.CASES]
    assert len(set(names)) == len(names)
    for case in kernels.CASES:
        assert case.heads % case.kv_heads == 0 and case.dim in (64, 128)
        assert 0 <= case.share <= 1 and case.columns < case.seq and case.seq % kernels.BLOCK == 0
    assert 0 < len(kernels.selected(True, None)) < len(kernels.selected(False, None))
    assert kernels.selected(False, None) == kernels.CASES
    assert {case.seq for case in kernels.selected(False, ["64K", "512K"])} == {65536, 524288}
    assert kernels.selected(True, ["no such case"]) == []


def test_rates_count_the_work_that_is_kept(scripts):
    """At 1 ms, by hand: 10^6 pairs x 4 x 64 = 0.256 GFLOP forward, 2.5 times that backward."""
    kernels = scripts["kernels"]
    case = kernels.Case("a case", 4096, 2, 1, 64, 0.1, 100)
    causal = 2048 * 2049 / 2 * 2
    times = {
        "forward": {"mtraining": 1.0, "cudnn": 2.0},
        "backward": {"mtraining": 1.0, "cudnn": 5.0},
    }
    rows = kernels.rows_of(case, 1e6, 7, 2048, times)
    ours, dense, ours_backward, dense_backward = rows
    assert ours["tflops"] == pytest.approx(0.256, abs=0.06)  # a tenth is what a row keeps
    assert ours_backward["tflops"] == pytest.approx(0.64, abs=0.06)
    assert ours["share_of_cudnn"] == round(1e6 / (causal / 2), 3)
    assert ours_backward["share_of_cudnn"] == round(1e6 / (causal / 5), 3)
    assert ours["density"] == round(1e6 / (4096 * 4097 / 2 * 2), 5)
    assert (ours["seq"], ours["vertical"], ours["slash"], ours["dense_seq"]) == (4096, 100, 7, 2048)
    assert (dense["seq"], dense["vertical"], dense["density"]) == (2048, 0, 1)
    assert dense["share_of_cudnn"] == dense_backward["share_of_cudnn"] == 1
    alone = kernels.rows_of(case, 1e6, 7, 2048, {"forward": {"mtraining": 1.0}})[0]
    assert alone["share_of_cudnn"] is None and alone["dense_seq"] is None
    assert all("cuDNN" in kernels.line(row) for row in rows) and "cuDNN" not in kernels.line(alone)


def test_a_case_from_drawing_to_picture(scripts, monkeypatch, tmp_path):
    kernels, plots, record = (scripts[name] for name in ("kernels", "plots", "record"))
    monkeypatch.setitem(kernels.DENSE, "cudnn", torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(kernels, "TURN", 1e-3)
    implementations = {"mtraining", "cudnn"}
    file = tmp_path / "kernels.jsonl"
    for columns in (0, 9):
        case = kernels.Case("tiny", 512, 4, 2, 64, 0.0, columns)
        record.append(file, kernels.run_case(case, implementations, 256, 1e-3, "cpu"))
    rows = kernels.read_rows(file)
    assert [(row["op"], row["impl"]) for row in rows[:4]] == [
        (op, impl) for op in ("forward", "backward") for impl in ("mtraining", "cudnn")
    ]
    assert all(row["ms"] > 0 and row["tflops"] >= 0 and row["gpu"] for row in rows)
    older = [dict(row, commit="older", tflops=1e6) for row in rows]
    # Dense rows of the same shape: the newest alone.
    assert len(plots.newest(older + rows)) == len(rows) - 2
    drawn = []
    monkeypatch.setattr(plots.pyplot, "close", drawn.append)
    picture = plots.kernels(tmp_path / "kernels.png", older + rows)
    assert picture.stat().st_size > 10_000
    assert [axes.get_title() for axes in drawn[0].axes] == ["forward", "backward"]
    assert drawn[0].axes[0].get_ylim()[1] < 1e6
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert "cuDNN, dense" in labels and "flash, dense" not in labels
    monkeypatch.undo()
    plots.pyplot.close("all")


def test_packed_documents_are_a_case_of_their_own(scripts, monkeypatch, tmp_path):
    """Rates count pairs within documents; pictures of other cases are without them."""
    kernels, plots = scripts["kernels"], scripts["plots"]
    monkeypatch.setattr(kernels, "TURN", 1e-3)
    lengths = kernels.draw_lengths(1000, 7)
    assert sum(lengths) == 1000 and len(lengths) == 7 and min(lengths) > 0
    assert 8 < max(lengths) / min(lengths) < 24
    case = kernels.Case("tiny", 512, 4, 2, 64, 1.0, 0, documents=3)
    rows = kernels.run_case(case, {"mtraining"}, 256, 1e-3, "cpu")
    torch.manual_seed(0)
    workloads = scripts["workloads"]
    workloads.draw_index(512, 4, 1.0, 0, "cpu")
    lengths = kernels.draw_lengths(512, 3)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    assert all(row["documents"] == 3 for row in rows) and "3 documents" in kernels.line(rows[0])
    assert rows[0]["density"] == round(pairs / (512 * 513 / 2), 5)
    plain = kernels.run_case(case._replace(documents=0), {"mtraining"}, 256, 1e-3, "cpu")
    plain, packed = ([dict(row, commit="a", gpu="b") for row in found] for found in (plain, rows))
    assert plots.newest(plain + packed) == plots.newest(plain) and len(plots.newest(plain)) == 2
    assert plots.newest(packed) == []
    # A later run of fewer cases is no picture of its own.
    assert plots.newest([*plain, dict(plain[0], commit="later")]) == plots.newest(plain)


def test_kept_results_can_be_drawn(scripts, tmp_path):
    kernels, plots, record = (scripts[name] for name in ("kernels", "plots", "record"))
    rows = kernels.read_rows(record.RESULTS / "kernels.jsonl")
    assert plots.kernels(tmp_path / "kernels.png", rows).exists()


@pytest.mark.parametrize("share", [None, 0.1, 1.0])
def test_float64_truth_of_some_rows_is_that_of_all(scripts, share):
    """Against dense attention with everything in memory; a few chunks; the pattern with columns."""
    workloads, numerics = scripts["workloads"], scripts["numerics"]
    seq, heads = 1024, 4
    operands = workloads.draw_operands(seq, heads, 2, 64, torch.float32, "cpu")
    pattern = mask = None
    if share is not None:
        pattern = workloads.draw_pattern(seq, heads, share, 30)
        mask = drawn_mask(workloads, *pattern, seq)
    else:
        mask = torch.ones(seq, seq, dtype=torch.bool).tril().expand(1, heads, seq, seq)
    queries, keys = numerics.samples(seq, 600, "cpu")
    assert keys["spread"].min() >= seq - 600 and keys["fewest"].max() == seq - 1
    actual = numerics.truth(operands, pattern, queries, keys, held=2 * 128 * seq)
    expected = numerics.pick(dense_attention(*operands, mask, 64**-0.5), queries, keys)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert relative_error(value, expected[name]) < 1e-12, name


def test_numerics_from_inputs_to_verdict(scripts, monkeypatch):
    numerics = scripts["numerics"]
    monkeypatch.setitem(numerics.SHAPES, 64, (4, 2))
    rows = numerics.run(numerics.Inputs(640, 64, torch.bfloat16), "cpu", 640)
    assert {row["tensor"] for row in rows} == set(numerics.TENSORS)
    assert {row["impl"] for row in rows} == {"mtraining", "math"}
    assert numerics.too_far(rows) == []
    assert all(1e-5 < row["error"] < 1e-2 for row in rows)
    wrong = [dict(rows[-1], of_dense=1.6), dict(rows[-1], of_dense=float("nan"))]
    assert numerics.too_far(rows + wrong) == wrong
    assert len(numerics.table(rows).splitlines()) == 2 * 4


def test_numerics_inputs(scripts):
    numerics = scripts["numerics"]
    types = [torch.bfloat16, torch.float16]
    inputs = numerics.inputs_for([65536, 131072], [128, 64], types, peaked=True)
    assert len(inputs) == 4 + 1 + 1 and inputs[-1].seq == 131072 and inputs[-2].sharp > 1
    assert [i.sharp for i in numerics.inputs_for([512], [64], types, peaked=False)] == [1, 1]


@pytest.mark.slow
def test_losses_side_by_side(tmp_path):
    output = tmp_path / "loss.jsonl"
    words = "--device cpu --tokens 96 40 --hidden 64 --vocab 500 --chunk 7 64 --rounds 2 --dtype float32"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels.loss", *words.split(), "--output", output],
        env={**os.environ, "MTRAINING_COMMIT": "a commit"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(row) for row in output.read_text().splitlines()]
    chunks = [("chunked", chunk, main) for chunk in (7, 64) for main in (False, True)]
    each = [*chunks, ("megatron", None, None), ("megatron_fused", None, None)]
    assert [(r["tokens"], r["impl"], r["chunk"], r["main_grad"]) for r in rows] == [
        (tokens, *one) for tokens in (96, 40) for one in each
    ]
    for row in rows:
        assert (row["hidden"], row["vocab"], row["commit"]) == (64, 500, "a commit")
        assert row["fwd_ms"] > 0 and row["bwd_ms"] > 0 and row["peak_gib"] is None
        assert not row["out_of_memory"]


def test_what_runs_out_of_memory_has_a_row(scripts, monkeypatch):
    loss = scripts["loss"]
    turns = []

    def run_once(function, operands, device):
        turns.append(function)
        return None if function == "large" else (1.0, len(turns), 3.25)

    monkeypatch.setattr(loss, "run_once", run_once)
    monkeypatch.setattr(loss, "megatron", lambda *_: "large")
    words = "--tokens 96 --hidden 8 --vocab 50 --chunk 7 --impl megatron chunked --device cpu"
    large, plain, main_grad = loss.run_case(96, loss.parse(words.split()))
    assert turns.count("large") == 1 and len(turns) == 1 + 2 * 6
    assert large["out_of_memory"] and large["fwd_ms"] is large["peak_gib"] is None
    assert (plain["fwd_ms"], plain["bwd_ms"], plain["peak_gib"]) == (1.0, 8, 3.25)
    assert main_grad["main_grad"] and "out of memory" in loss.line(large)
    assert "3.25 GiB" in loss.line(plain)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cpu --tokens 0", "--tokens 0: use 1 or more"),
        ("--device cpu --chunk 5 -1", "--chunk -1"),
        ("--device cpu --impl megatron_te", "needs Transformer Engine"),
        ("--device cuda", "there is no GPU here"),
    ],
)
def test_bad_options_of_the_loss_benchmark(scripts, monkeypatch, capsys, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        scripts["loss"].record, "installed", lambda name: "none" if "engine" in name else "1"
    )
    with pytest.raises(SystemExit):
        scripts["loss"].parse(words.split())
    assert message in capsys.readouterr().err


def test_both_ways_of_the_backward(monkeypatch):
    """Rows of both, which the environment chooses, with gradients that agree."""
    from benchmarks.kernels import backward_paths

    monkeypatch.setenv("MTRAINING_BACKWARD", "auto")  # put back after the test
    case = attention.Case("small", 512, 4, 2, 64, 0.3, 0)
    rows = backward_paths.run_case(case, 0.01, "cpu", cudnn=False)
    assert [row["path"] for row in rows] == ["two_kernels", "one_pass_64"]
    assert all(row["impl"] == "mtraining" and row["op"] == "backward" for row in rows)
    assert all(row["difference"] < 1e-2 for row in rows) and rows[0]["difference"] == 0
    key = backward_paths.backward_key

    def settings():
        return os.environ["MTRAINING_BACKWARD"], key.CHUNK, key.ONE_LAUNCH

    before = settings()
    assert backward_paths.along("one_pass", 32, True, settings)() == ("one_pass", 32, True)
    assert settings() == before
    assert [*backward_paths.paths([0, 64], True)] == [
        "two_kernels", "one_pass", "one_pass_64", "one_pass_64_one_launch"
    ]  # fmt: skip
    assert {case.heads for case in backward_paths.CASES} == {14, 16, 28}
    assert 0 < sum(case.quick for case in backward_paths.CASES) < len(backward_paths.CASES)
