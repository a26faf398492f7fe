# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect``: what is measured, against dense attention written out, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.models.types import LayerInput
from megatron_mtraining.pattern import build_index, choose_index
from megatron_mtraining.pattern.estimate import sample_rows
from megatron_mtraining.ring import Ring
from megatron_mtraining.tools.inspect import measure, results, sweep
from megatron_mtraining.tools.inspect.output import all_or_nothing, write_settings
from tests.support.inspect_cases import HEADS, SEQ, operands, true_attention

# Measuring


@pytest.mark.parametrize("block_size", [64, 128])
def test_recall_is_that_of_the_written_out_mask(block_size, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 7 * 4 * HEADS * SEQ)  # rows in several parts
    query, key = operands()
    configs = [
        MTrainingConfig.from_options(block_size=block_size, vertical=vertical, slash=slash)
        for vertical, slash in [(0, 0), (20, 2), (100, 5), (8, SEQ)]
    ]
    rows = measure.held_out_rows(SEQ, 100, configs, seed=1)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.2), configs, rows)
    p = true_attention(query, key, 0.2)
    for number, index in enumerate(found.patterns):
        for head in range(HEADS):
            mask = index.token_mask(0, head)
            kept = (p[head] * mask)[rows].sum(-1).mean()
            assert found.recall[number, head] == pytest.approx(kept.item(), abs=1e-6)
            density = mask.sum() / (SEQ * (SEQ + 1) / 2)
            assert found.density[number, head] == pytest.approx(density.item(), abs=1e-6)
    assert found.recall[-1] == pytest.approx(1, abs=1e-6) and (found.recall[0] < 0.9).all()
    cells = found.picture.shape[-1]
    assert cells == 32  # two of the rows in each, and a divisor
    coarse = p[:, rows].unflatten(-1, (cells, -1)).sum(-1)
    for cell in range(cells):
        inside = rows * cells // SEQ == cell
        expected = coarse[:, inside].mean(1)
        torch.testing.assert_close(found.picture[:, cell].double(), expected, atol=1e-6, rtol=0)


def test_probabilities_do_not_depend_on_the_models_dtype_alone():
    query, key = operands(dtype=torch.bfloat16)
    configs = [MTrainingConfig.from_options(vertical=40, slash=1, block_size=64)]
    rows = measure.held_out_rows(SEQ, 64, configs, seed=0)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.125), configs, rows)
    p = true_attention(query, key, 0.125)
    kept = [(p[h] * found.patterns[0].token_mask(0, h))[rows].sum(-1).mean() for h in range(HEADS)]
    assert found.recall[0] == pytest.approx(torch.stack(kept), abs=1e-6)


def test_a_column_under_a_slash_counts_once():
    seq, block = 256, 64
    distances = torch.zeros(1, 1, 4, dtype=torch.bool)
    distances[..., 2] = True
    columns = torch.tensor([[[3, 70, 200, seq]]])  # the last stands for none
    index = build_index(distances, columns, seq, block, 1)
    p = torch.rand(1, seq, seq).tril()
    mass = p.unflatten(-1, (-1, block)).sum(-1)
    kept = measure.kept_mass(p, mass, torch.arange(seq), index)
    torch.testing.assert_close(kept[0], (p[0] * index.token_mask(0, 0)).sum(-1))


def test_pattern_picture_is_the_mask_at_the_rows(monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 16 * 256 * 5)
    distances = torch.zeros(1, 1, 4, dtype=torch.bool)
    distances[..., 2] = True
    index = build_index(distances, torch.tensor([[[3, 70, 256]]]), 256, 64, 1)
    rows = torch.arange(0, 256, 3)
    found = measure.pattern_picture(
        index.distances()[0, 0], index.columns[0, 0], rows, 256, 64, cells=16
    )
    mask = index.token_mask(0, 0).float()
    for cell in range(16):
        inside = rows[rows // 16 == cell]
        expected = mask[inside].unflatten(-1, (16, 16)).mean(-1).mean(0)
        torch.testing.assert_close(found[cell], expected)


@pytest.mark.parametrize("policy", ["xattention", "moba"])
def test_recall_of_block_lists_is_that_of_the_written_out_mask(policy, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 7 * 4 * HEADS * SEQ)  # rows in several parts
    query, key = operands()
    how = {"xattention": dict(block_threshold=0.5), "moba": dict(block_top_k=3)}[policy]
    config = MTrainingConfig.from_options(policy=policy, block_size=64, window=64, **how)
    rows = measure.held_out_rows(SEQ, 100, [config], seed=1)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.2), [config], rows)
    p = true_attention(query, key, 0.2)
    index = choose_index(query, key, config, Ring(None), 0.2)
    ((seen, _),) = found.patterns
    for head in range(HEADS):
        mask = index.token_mask(0, head)
        kept = (p[head] * mask)[rows].sum(-1).mean()
        pairs = mask.sum().item() / (SEQ * (SEQ + 1) / 2)
        assert found.recall[0, head] == pytest.approx(kept.item(), abs=1e-6)
        assert found.density[0, head] == pytest.approx(pairs, abs=1e-6)
        assert 0.1 < found.density[0, head] < 0.9
        picture = measure.lists_picture(seen[head], rows, SEQ, 64, cells=16)
        for cell in range(16):
            inside = rows[rows * 16 // SEQ == cell]
            expected = mask[inside].float().unflatten(-1, (16, -1)).mean(-1).mean(0)
            torch.testing.assert_close(picture[cell], expected)


def test_rows_are_spread_and_not_the_estimators():
    configs = [
        MTrainingConfig.from_options(sample_strata=64, sample_rows=1),
        MTrainingConfig.from_options(sample_strata=32, sample_rows=2),
    ]
    rows = measure.held_out_rows(8192, 512, configs, seed=0)
    assert len(rows) == 512 and (rows.diff() > 0).all()
    for config in configs:
        seen = sample_rows(8192, config.sampling.strata, config.sampling.rows)
        assert not set(rows.tolist()) & set(seen.tolist())
    assert rows.diff().max() < 3 * 8192 / 512  # everywhere
    assert not torch.equal(rows, measure.held_out_rows(8192, 512, configs, seed=1))
    all_left = measure.held_out_rows(256, 192, configs[:1], seed=0)
    assert len(set(all_left.tolist())) == 192
    with pytest.raises(ConfigError, match="--rows is 193.*at most 192"):
        measure.held_out_rows(256, 193, configs[:1], seed=0)
    assert len(measure.held_out_rows(256, None, configs[:1], seed=0)) == 192
    assert len(measure.held_out_rows(8192, None, configs[:1], seed=0)) == 512
    with pytest.raises(ConfigError, match="64 tokens.*longer text"):
        measure.held_out_rows(64, None, configs[:1], seed=0)


def test_scores_that_are_no_numbers_are_named():
    query, key = operands()
    query[5] = float("nan")
    configs = [MTrainingConfig.from_options(vertical=SEQ)]
    with pytest.raises(ConfigError, match="layer 3 .*float32"):
        measure.LayerRecall(LayerInput(3, query, key, 0.125), configs, torch.arange(SEQ))


# What follows


def test_reach_interpolates_from_sparse_to_dense():
    recall = np.array([0.5, 0.9, 1.0])
    point = results.reach(recall, 0.95)
    assert point.reached and point.before == 1 and point.share == pytest.approx(0.5)
    assert point.of(np.array([0.1, 0.2, 0.4])) == pytest.approx(0.3) and point.denser == 2
    assert results.reach(recall, 0.4) == results.Point(0, 0.0, True)
    assert results.reach(recall[:2], 0.95) == results.Point(1, 0.0, False)


@pytest.mark.parametrize(
    ("name", "values", "middle"),
    [("price", (4.0, 1.0), 2.0), ("coverage", (0.9, 0.999), 0.99), ("vertical", (10, 1000), 100)],
)
def test_settings_between_two(name, values, middle):
    settings = tuple({name: value} for value in values)
    series = sweep.Series("a", None, (name,), settings)
    assert series.between(0, 0.5) == {name: pytest.approx(middle)}
    assert type(series.between(0, 0.5)[name]) is type(values[0])
    assert series.between(1, 0) == settings[1]


def test_sweeps_are_settings_from_sparse_to_dense():
    found = sweep.series_for(8192, {"block_size": 64})
    assert [series.label for series in found] == [
        "price, strata", "price, last", "coverage, strata", "coverage, last", "fixed", "xattention", "moba",
    ]  # fmt: skip
    for series in found:
        configs = [MTrainingConfig.from_options(**setting) for setting in series.settings]
        assert len(configs) > 3 and all(config.block_size == 64 for config in configs)
    budgets = [(s["vertical"], s["slash"]) for s in found[4].settings]
    assert budgets == sorted(set(budgets))
    top = [setting["block_top_k"] for setting in found[-1].settings]
    assert top == sorted(set(top)) and top[-1] == 64  # half of the blocks
    with pytest.raises(ConfigError, match="--policy is dear: use .*fixed"):
        sweep.series_for(8192, {}, ["dear"])


def test_short_sequences_have_sweeps_too():
    for length in (128, 256, 512):
        (series,) = sweep.series_for(length, {}, ["fixed"])
        assert len(series.settings) > 1


def measured(recall, density, target=0.9):
    """Of one layer: recall and density are [settings][heads]."""
    series = sweep.Series("fixed", None, ("slash",), tuple({"slash": 2**i} for i in range(2)))
    recall, density = (np.array(values, dtype=float)[:, None] for values in (recall, density))
    return results.Measured(series, recall, density, target)


def test_recommendation_names_heads_that_stay_dense():
    # Head 0 is easy, head 1 takes nearly everything, head 2 never gets there.
    one = measured([[0.8, 0.5, 0.1], [1.0, 0.95, 0.2]], [[0.1] * 3, [0.9, 0.9, 0.9]])
    assert one.needed[0] == pytest.approx([0.5, 0.1 + 0.8 * 0.4 / 0.45, np.inf])
    assert one.dense_heads().tolist() == [[False, True, True]]
    recommended = results.Recommendation([one])
    # With two of three at 1, the third is left at its sparsest.
    assert recommended.recall == pytest.approx(2.8 / 3)
    assert recommended.density == pytest.approx(2.1 / 3)
    assert recommended.settings_file() == {
        "slash": 1,
        "layers": {"0": {"heads": {"1": {"dense": True}, "2": {"dense": True}}}},
    }


def test_recommendation_of_a_layer_that_stays_dense_and_of_none():
    hopeless = measured([[0.1, 0.1], [0.2, 0.2]], [[0.1] * 2, [0.5] * 2])
    file = results.Recommendation([hopeless]).settings_file()
    assert file["layers"] == {"0": {"dense": True}}
    easy = measured([[0.8, 0.8], [1.0, 1.0]], [[0.1] * 2, [0.3] * 2])
    assert results.Recommendation([easy]).settings_file() == {"slash": 1}
    best = results.Recommendation([hopeless, easy])
    assert best.measured is easy and best.density == pytest.approx(0.2)


def test_heads_out_of_reach_are_told_apart_by_their_recall():
    needed = np.array([np.inf, 0.3, np.inf, 0.1, 0.3])
    recall = np.array([0.2, 0.5, 0.6, 0.1, 0.4])
    assert results.by_difficulty(needed, recall).tolist() == [3, 1, 4, 2, 0]


def test_numbers_are_json_and_out_of_reach_is_null():
    one = measured([[0.8, 0.2], [1.0, 0.3]], [[0.1] * 2, [0.3] * 2])
    found = results.numbers([one], results.Recommendation([one]), {"model": "m"})
    found = json.loads(json.dumps(found, allow_nan=False))
    assert found["series"][0]["density_needed"] == [[pytest.approx(0.2), None]]
    assert found["series"][0]["settings"][1]["recall"] == [[1.0, 0.3]]
    assert found["series"][0]["at_target"]["reached"] is False
    assert "not reached" in results.summary([one], results.Recommendation([one]), 0.9)


# Files


def test_files_appear_all_or_none(tmp_path):
    folder = tmp_path / "a" / "out"
    with pytest.raises(KeyboardInterrupt), all_or_nothing(folder) as partial:
        (partial / "half").write_text("x")
        raise KeyboardInterrupt
    assert not folder.exists()
    folder.mkdir(parents=True)
    (folder / "old").write_text("old")
    with all_or_nothing(folder) as partial:
        (partial / "old").write_text("new")
        assert (folder / "old").read_text() == "old"
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert (folder / "old").read_text() == "new"
    with pytest.raises(ConfigError, match="--output"), all_or_nothing(Path(__file__) / "out"):
        pass


def test_settings_as_json_and_yaml(tmp_path):
    settings = {"slash": 3, "layers": {"0": {"dense": True}}}
    write_settings(tmp_path / "s.json", settings)
    assert json.loads((tmp_path / "s.json").read_text()) == settings
    yaml = pytest.importorskip("yaml")
    write_settings(tmp_path / "s.yaml", settings)
    assert yaml.safe_load((tmp_path / "s.yaml").read_text()) == settings
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ConfigError, match="--settings"):
        write_settings(tmp_path / "none" / "s.json", settings)
