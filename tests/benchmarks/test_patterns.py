# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/model/patterns.py`` on the CPU: its numbers against dense ones, its tables, a whole run."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.model import pattern_rows, patterns
from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.models.types import LayerInput
from megatron_mtraining.pattern import build_block_index, select_key_blocks
from megatron_mtraining.tools.inspect import measure

FOLDER = Path(__file__).parents[2] / "benchmarks"
SEQ, HEADS, KV_HEADS = 1024, 4, 2


@pytest.fixture(scope="module")
def given():
    torch.manual_seed(3)
    query, key = 2 * torch.randn(SEQ, 1, HEADS, 64), torch.randn(SEQ, 1, KV_HEADS, 64)
    return LayerInput(0, query, key, 0.25)


def true_attention(given):
    """Probabilities written out: float64 ``[h, s, s]``."""
    query, key = (t[:, 0].double().transpose(0, 1) for t in (given.query, given.key))
    scores = query @ key.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2)
    future = torch.ones(SEQ, SEQ).triu(1).bool()
    return (scores * given.softmax_scale).masked_fill(future, float("-inf")).softmax(-1)


@pytest.mark.parametrize("series", [("xattention", "own"), ("moba", "own"), ("price", "strata")])
def test_recall_and_density_are_those_of_dense_attention_under_the_mask(given, series, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 7 * 4 * HEADS * SEQ)  # rows in several parts
    cases = [case for case in patterns.cases_for(SEQ, 64) if case.series == series][1:3]
    rows = torch.arange(3, SEQ, 11)[:92]
    recall, density = patterns.measure(given, cases, rows)
    p = true_attention(given)
    causal = torch.ones(SEQ, SEQ).tril().bool()
    for number, case in enumerate(cases):
        for head in range(HEADS):
            if series == pattern_rows.DEFAULT:
                index = patterns.choose(case, given, rows).index
            else:
                blocks = select_key_blocks(
                    given.query, given.key, case.how, CPGroup(None), given.softmax_scale
                )
                none = torch.zeros(1, HEADS, SEQ // 128, dtype=torch.bool)
                columns = torch.zeros(1, HEADS, 0, dtype=torch.long)
                index = build_block_index(blocks, none, columns, SEQ, 128, 1)
            mask = index.token_mask(0, head)
            share = (mask & causal).double().sum() / causal.sum()
            assert density[number, head] == pytest.approx(share.item(), abs=1e-6)
            kept = (p[head] * mask)[rows].sum(-1)
            for half in range(2):
                expected = kept[half::2].mean().item()
                assert recall[number, half, head] == pytest.approx(expected, abs=1e-6)
    assert 0 < recall.min() and recall.max() < 0.999 and density.max() < 1


def test_what_is_measured():
    cases = patterns.cases_for(2048, 1 << 20)
    assert len({(case.series, case.setting) for case in cases}) == len(cases)
    strata = [case for case in cases if case.series == pattern_rows.DEFAULT]
    assert [case.how.policy.price for case in strata] == list(patterns.PRICES)
    assert all(
        case.how.sampling.num_rows == 256 and case.how.sampling.held_out_rows == 1
        for case in strata
    )
    assert {
        case.how.sampling.num_rows for case in cases if case.series == ("coverage", "last")
    } == {64}
    oracle = [case for case in cases if case.estimator == "oracle"]
    assert all(
        case.how.sampling.num_rows == 2048 and not case.how.sampling.held_out_rows
        for case in oracle
    )
    assert all(case.setting.endswith("all rows") for case in oracle)
    some = [case for case in patterns.cases_for(2048, 101) if case.estimator == "oracle"]
    assert all(
        case.how.sampling.num_rows == 100 and case.setting.endswith("100 of 2048 rows")
        for case in some
    )
    few = patterns.cases_for(2048, 64, [(64, 4), (256, 1)])
    assert [case.estimator for case in few[:: len(patterns.PRICES)]] == [
        "strata", "strata 64 x 4", "strata 256 x 1",
    ]  # fmt: skip
    assert [case.how.sampling.num_rows for case in few[:: len(patterns.PRICES)]] == [256, 256, 256]
    assert [case.how.sampling.held_out_rows for case in few[:: len(patterns.PRICES)]] == [1, 2, 0]
    assert patterns.options_from(["--model", "m", "--samples", "64x4"]).samples == [(64, 4)]
    fixed = [case.how.policy for case in cases if case.series == ("fixed", "last")]
    assert [(how.vertical, how.slash) for how in fixed] == [(1000, 100), (2048, 30), (1000, 2048)]
    longer = [case.how.top_k for case in patterns.cases_for(131072, 64) if case.policy == "moba"]
    assert longer == [4, 8, 16, 32, 64, 128, 256, 512]
    assert [case.how.top_k for case in cases if case.policy == "moba"] == [1, 2, 4, 8]


def measured_by_hand():
    """Two heads; halves of the rows disagree in the second."""
    kinds = [("price", "strata"), ("xattention", "own"), ("xattention", "own")]
    cases = [
        pattern_rows.Case(*kind, str(number), MTrainingConfig.from_options(price=0.5))
        for number, kind in enumerate(kinds)
    ]
    recall = np.array(
        [[[0.9, 0.8], [0.9, 0.6]], [[0.8, 0.6], [0.8, 0.9]], [[0.5, 0.1], [0.5, 0.1]]]
    )
    density = np.array([[0.3, 0.2], [0.2, 0.2], [0.1, 0.1]])
    return pattern_rows.Measured(cases, recall[:, None], density[:, None])


def test_each_head_takes_what_is_worth_most():
    measured = measured_by_hand()
    recall, density, taken = pattern_rows.best_of(measured, [0, 1, 2], 0.5, same_rows=False)
    # Judged by the first half, the second decides, and takes the lists in the second head.
    assert taken.tolist() == [[[0, 1]], [[0, 0]]]
    assert recall[0].tolist() == pytest.approx([0.9, (0.6 + 0.6) / 2])
    assert density[0].tolist() == pytest.approx([0.3, 0.2])
    recall, density, taken = pattern_rows.best_of(measured, [0, 1, 2], 2.0, same_rows=True)
    assert taken.tolist() == [[[1, 1]], [[1, 1]]]  # 0.9 - 0.6 < 0.8 - 0.4; 0.7 < 0.75
    assert recall[0].tolist() == pytest.approx([0.8, 0.75])
    recall, *_ = pattern_rows.best_of(measured, [1, 2], 0.0, same_rows=True)
    assert recall[0].tolist() == pytest.approx([0.8, 0.75])


def test_rows_weigh_heads_alike():
    rows = pattern_rows.rows_of(measured_by_hand())
    names = ["price", "xattention", "xattention", "mixed", "mixed, oracle choice"]
    assert [row["policy"] for row in rows] == [*names, "xattention, priced"]
    first = rows[0]
    assert first["recall"] == pytest.approx((0.9 + 0.7) / 2) and first["density"] == 0.25
    assert first["heads_below_0.9"] == 0.5 and first["recall_p10"] == pytest.approx(0.72)
    assert [row["lists"] for row in rows[3:]] == [0.25, 0.5, 1.0]


def test_density_at_a_recall():
    def row(recall, density, **more):
        numbers = {"recall_p10": recall - 0.1, "heads_below_0.9": 1 - recall}
        about = dict(policy="price", estimator="strata", setting=f"price {recall}")
        return dict(recall=recall, density=density, **numbers, **about) | more

    rows = [row(0.8, 0.1), row(0.95, 0.4), row(0.99, 0.8)]
    point = pattern_rows.at_recall(rows, 0.9)  # half way in what is lost: 0.2, 0.1, 0.05
    assert point["density"] == pytest.approx(0.2)
    assert point["recall_p10"] == pytest.approx(0.775)
    assert pattern_rows.at_recall(rows, 0.95)["density"] == pytest.approx(0.4)
    assert pattern_rows.at_recall(rows, 0.8) is None and pattern_rows.at_recall(rows, 0.995) is None
    moba = [row(r, 2 * d, policy="moba", estimator="own") for r, d in [(0.8, 0.1), (0.95, 0.4)]]
    fixed = row(0.9, 0.5, policy="fixed")
    lines = pattern_rows.summary(rows + moba + [fixed]).splitlines()
    cells = {tuple(line.split()[:3]): line.split()[3:] for line in lines if line}
    assert cells["moba", "own", "90%"] == ["40.0%", "77.5%", "12.5%", "2.00"]
    assert cells["moba", "own", "98%"] == ["not", "reached"]
    assert cells["price", "strata", "98%"][-1] == "1.00"
    assert cells["strata", "price", "0.9"][-1] == "2.50"  # the setting of the fixed row
    assert not [line for line in lines if "falls" in line]
    worse = row(0.93, 0.6)
    assert "0.9500" in pattern_rows.falls(pattern_rows.series_of([*rows, worse]))[0]


def test_the_standard_library_is_text():
    files = patterns.code_files()
    assert files == sorted(files) and sum(path.stat().st_size for path in files) > 2_000_000


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_from_a_model_to_rows(tmp_path, monkeypatch, capsys):
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setitem(sys.modules, "kernels", sys.modules.get("kernels"))
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=HEADS * 64, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=384,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    text = tmp_path / "ids.npy"
    np.save(text, torch.randint(64, (640,)).numpy())
    output = tmp_path / "patterns.jsonl"
    monkeypatch.setattr(patterns, "FIXED", ((50, 3),))
    for name in ("PRICES", "COVERAGES", "THRESHOLDS"):
        monkeypatch.setattr(patterns, name, getattr(patterns, name)[2:5:2])
    words = ["patterns.py", "--model", str(tmp_path / "tiny"), "--text", str(text), "--seq", "384"]
    words += ["640", "--yarn", "4", "--layers", "2", "--rows", "51", "--oracle-rows", "64"]
    monkeypatch.setattr(sys, "argv", [*words, "--device", "cpu", "--output", str(output)])
    for name in [name for name in os.environ if name.startswith(patterns.record.SETTINGS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MTRAINING_COMMIT", "a commit")
    monkeypatch.setenv("NVTE_ONE", "1")  # rows say what they ran under
    monkeypatch.setenv("NCCL_OTHER", "0")
    patterns.main()
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {(row["seq"], row["yarn"]) for row in rows} == {(384, None), (640, 4.0)}
    for row in rows:
        assert (row["model"], row["text"], row["commit"]) == ("tiny", "ids.npy", "a commit")
        assert (row["layers"], row["every"], row["heads"], row["rows"]) == (2, 2, HEADS, 50)
        words = "python patterns.py --model tiny --text ids.npy --seq 384"
        assert row["command"].startswith(f"NCCL_OTHER=0 NVTE_ONE=1 {words}")
        assert 0 < row["density"] <= 1 and 0 < row["recall_p10"] <= row["recall"] < 1 + 1e-6
    series = pattern_rows.series_of([row for row in rows if row["seq"] == 640])
    assert {policy for policy, _ in series} == {
        "price", "coverage", "fixed", "xattention", "moba", "mixed", "mixed, oracle choice",
        "xattention, priced",
    }  # fmt: skip
    assert pattern_rows.falls(series) == []
    for name in ("tiny ids.npy 384: 2 of 3 layers, 50 rows", "xattention, priced"):
        assert name in printed
    monkeypatch.setattr(sys, "argv", ["patterns.py", "--show", "--output", str(output)])
    patterns.main()
    tables = pattern_rows.summary([row for some in series.values() for row in some])
    assert set(tables.splitlines()) <= set(capsys.readouterr().out.splitlines())


def test_what_cannot_work_is_said(tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        patterns.options_from(["--model", "a", "--layers", "0"])
    with pytest.raises(SystemExit):
        patterns.options_from([])
    monkeypatch.setattr(sys, "argv", ["patterns.py", "--model", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="does not exist"):
        patterns.main()
