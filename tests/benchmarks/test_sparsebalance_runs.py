# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/sparsebalance/measured.py`` and ``loss.py`` on the CPU, with a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.sparsebalance import loss, measured, sets, texts
from megatron_mtraining.balance.latency import LatencyModel
from tests.support.inspect_cases import LAYERS, save_model


def steep() -> LatencyModel:
    """A profile in which time is attended pairs alone: samples of few tokens differ too."""
    profile = LatencyModel.for_gpu("NVIDIA H200")
    terms = {"search": {"launch": 0.0}, "forward": {"pairs": 1.0}, "backward": {"pairs": 2.0}}
    entries = tuple(replace(entry, coefficients=terms) for entry in profile.entries)
    return replace(profile, gpu="none", entries=entries)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model, texts of two kinds, and where rows go."""
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder / "model")
    (folder / "book.txt").write_text(Path(json.__file__).read_text() * 8)
    (folder / "c.txt").write_text(Path(np.__file__).read_text()[:40000])
    steep().save(folder / "profile.json")
    return [
        "--profile", str(folder / "profile.json"),
        "--model", str(model), "--no-code", "--device", "cpu", "--cache", str(folder / "tokens.npz"),
        "--text", f"book={folder / 'book.txt'}", f"c={folder / 'c.txt'}", "--tokens", "200000",
    ]  # fmt: skip


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_texts_are_cut_in_order_and_kept(words, tmp_path):
    options = measured.options_from(words)
    tokens = texts.read(options)
    assert set(tokens) == {"book", "c"} and options.cache.exists()
    again = texts.read(options)
    assert all((tokens[kind] == again[kind]).all() for kind in tokens)
    source = texts.Texts({"book": np.arange(1000)}, seed=3)
    length = len(source.streams["book"])
    first, second = source.cut("book", 600), source.cut("book", 600)
    joined = np.concatenate((first, second))
    assert length == 970 and ((np.diff(joined) == 1) | (np.diff(joined) == 1 - length)).all()
    held_out = texts.Texts({"book": np.arange(1000)}, held_out=True)
    assert held_out.cut("book", 5).tolist() == [970, 971, 972, 973, 974]


@pytest.mark.slow
def test_measured_rows(words, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    few = ["--set", "bimodal", "--seq", "512", "--dp", "2", "--microbatches", "1", "--steps", "2"]
    measured.main([*words, *few, "--every", "1", "--output", str(output)])
    rows = rows_in(output)
    assert [row["mode"] for row in rows] == ["off", "length", "cost", "tuning", "both"]
    for row in rows:
        assert row["source"] == "measured" and row["gpus"] == row["dp"] == 2 and row["steps"] == 1
        assert 1 <= row["max_over_mean"] < 2 and 0 <= row["idle_share"] < 1
        assert row["idle_share"] == pytest.approx(1 - 1 / row["max_over_mean"], abs=0.05)
        assert 0 < row["density"] <= 1 and 0 < row["recall"] <= 1 and row["step_ms"] > 0
        assert np.shape(row["last_step"]["measured_ms"]) == (1, 2)
    plain = {row["mode"]: row["multipliers"] for row in rows}
    assert plain["off"] == plain["length"] == plain["cost"] == [1, 1]
    assert plain["tuning"] != [1, 1]
    # The same samples, at the same prices.
    assert rows[0]["density"] == pytest.approx(rows[1]["density"], abs=1e-4)
    capsys.readouterr()
    measured.main([*words, *few, "--output", str(output)])
    assert len(rows_in(output)) == 5  # there are rows of the set already


def test_a_timed_layer_gives_what_attention_gives(words):
    options = measured.options_from(words)
    config = measured.MTrainingConfig.from_options(price=0.25)
    visitor = measured.Timed(config, 1.0, np.array([300, 212]), 1, torch.device("cpu"))
    torch.manual_seed(0)
    query, key, value = (torch.randn(512, 1, heads, 64) for heads in (4, 2, 2))
    with torch.no_grad():
        out = visitor(measured.LayerInput(0, query, key, 0.125, value))
    expected = measured.attend(
        query, key, value, config=config, softmax_scale=0.125,
        documents=texts.documents_of(np.array([300, 212]), "cpu"),
    )  # fmt: skip
    assert torch.equal(out, expected.out)
    took, density, recall = visitor.result()
    assert took > 0 and recall == pytest.approx(expected.index.recall.mean().item())
    assert density == pytest.approx(expected.index.density().mean().item())
    assert options.every == 3 and len(visitor.spans) == 2


@pytest.mark.slow
def test_loss_rows(words, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    few = ["--seq", "512", "--dp", "2", "--steps", "2", "--held-out", "3", "--seeds", "1"]
    few += ["--lr", "1e-3", "--warm-up", "1", "--chunk", "200", "--output", str(output)]
    loss.main([*words, *few])
    rows = rows_in(output)
    names = [(row["run"], row["seed"]) for row in rows]
    assert names == [("dense", 1), ("off", 1), ("both", 1)]
    by_name = dict(zip(names, rows))
    for row in rows:
        assert len(row["losses"]) == 2 and row["held_out_after"] < row["held_out_before"]
    dense, off, both = (by_name[name, 1] for name in ("dense", "off", "both"))
    assert dense["density"] == dense["recall"] == 1
    assert dense["held_out_after"] == dense["held_out_after_dense"]
    assert off["multipliers"] == [1, 1] and off["mass_moved"] == 0
    assert both["multipliers"] != [1, 1] and 0 < both["mass_moved"] <= 0.01
    assert both["max_over_mean"] <= off["max_over_mean"]
    # The same samples: without tuning, the placement changes no loss.
    assert off["held_out_before"] == both["held_out_before"]
    assert off["losses"][0] == pytest.approx(both["losses"][0], abs=0.02)
    loss.main([*words, *few])
    assert len(rows_in(output)) == 3 and "0 runs" in capsys.readouterr().out


def test_a_document_s_last_token_has_no_label(words):
    options = loss.options_from([*words, "--seq", "512"])
    run = loss.Run(options, dense=True)
    tokens = torch.randint(200, (512,))
    lengths = np.array([300, 212])
    total = run.loss(tokens, lengths, run.dense, 1.0)
    alone = 0.0
    for part in tokens.split([300, 212]):
        one = run.loss(part, np.array([len(part)]), replace(run.dense, window=len(part)), 1.0)
        alone += one.item()
    assert total.item() == pytest.approx(alone, rel=1e-4)
    assert loss.labels_of(lengths) == 510 and LAYERS == len(run.attention.density) // 3


def test_sets_are_packed_to_the_last_token():
    for name in ("bimodal", "8K-72K"):
        packed = sets.build(name, 60, 1)
        assert len(packed.documents) >= 55
        assert all(each.sum() == packed.seq_length for each in packed.documents)
        samples = packed.samples()
        assert (samples.pairs <= packed.seq_length * (packed.seq_length + 1) / 2).all()
        assert samples.pairs.std() > 0.3 * samples.pairs.mean()
        again = sets.build(name, 60, 1)
        assert (again.datasets == packed.datasets).all()
        assert all((a == b).all() for a, b in zip(again.documents, packed.documents))
        other = sets.build(name, 60, 2)
        assert (other.samples().pairs[:20] != samples.pairs[:20]).any()


def test_a_set_has_its_share_of_tokens_in_each_range():
    lengths = sets.real_lengths()
    rng = np.random.default_rng(0)
    drawn = np.array(
        sets.draw_lengths("code", sets.SETS["bimodal"].ranges, 20_000_000, lengths, rng)
    )
    short = drawn[drawn <= 4096].sum() / drawn.sum()
    assert short == pytest.approx(0.5, abs=0.05)
    assert not ((drawn > 4096) & (drawn < 16384)).any()
