# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect``: its numbers against dense ones, its files, and all that it refuses."""

from __future__ import annotations

import builtins
import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig, cli
from megatron_mtraining.inspect import measure, options, results, sweep, text
from megatron_mtraining.inspect.output import all_or_nothing, write_settings
from megatron_mtraining.inspect.sources import LayerInput, Shape, dense_attention
from megatron_mtraining.pattern import build_index
from megatron_mtraining.pattern.estimate import sample_rows

options.hide_kernels_folder()
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers, which is not installed"
)
LAYERS, HEADS, KV_HEADS, SEQ = 2, 4, 2, 1024


def operands(seq=SEQ, heads=HEADS, kv_heads=KV_HEADS, dim=64, dtype=torch.float32):
    torch.manual_seed(5)
    query = 2 * torch.randn(seq, 1, heads, dim)
    return query.to(dtype), torch.randn(seq, 1, kv_heads, dim).to(dtype)


def true_attention(query, key, scale):
    """Causal attention probabilities written out: float64 ``[h, s, s]``."""
    group = query.shape[2] // key.shape[2]
    q = query[:, 0].double().transpose(0, 1)
    k = key[:, 0].double().transpose(0, 1).repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * scale
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(future, float("-inf")).softmax(-1)


# Measuring


@pytest.mark.parametrize("block_size", [64, 128])
def test_recall_is_that_of_the_written_out_mask(block_size, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_BYTES", 7 * 4 * HEADS * SEQ)  # rows in several parts
    query, key = operands()
    configs = [
        MTrainingConfig(block_size=block_size, vertical=vertical, slash=slash)
        for vertical, slash in [(0, 0), (20, 2), (100, 5), (8, SEQ)]
    ]
    rows = measure.held_out_rows(SEQ, 100, configs, seed=1)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.2), configs, rows)
    p = true_attention(query, key, 0.2)
    for number, index in enumerate(found.indices):
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
    configs = [MTrainingConfig(vertical=40, slash=1, block_size=64)]
    rows = measure.held_out_rows(SEQ, 64, configs, seed=0)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.125), configs, rows)
    p = true_attention(query, key, 0.125)
    kept = [(p[h] * found.indices[0].token_mask(0, h))[rows].sum(-1).mean() for h in range(HEADS)]
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
    config = MTrainingConfig(policy=policy, block_size=64, window=64, **how)
    rows = measure.held_out_rows(SEQ, 100, [config], seed=1)
    found = measure.LayerRecall(LayerInput(0, query, key, 0.2), [config], rows)
    p = true_attention(query, key, 0.2)
    (index,) = found.indices
    seen = measure.lists_at(index, rows)
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
        MTrainingConfig(sample_strata=64, sample_rows=1),
        MTrainingConfig(sample_strata=32, sample_rows=2),
    ]
    rows = measure.held_out_rows(8192, 512, configs, seed=0)
    assert len(rows) == 512 and (rows.diff() > 0).all()
    for config in configs:
        seen = sample_rows(8192, config.sample_strata, config.sample_rows)
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
    configs = [MTrainingConfig(vertical=SEQ)]
    with pytest.raises(ConfigError, match="layer 3 .*float32"):
        measure.LayerRecall(LayerInput(3, query, key, 0.125), configs, torch.arange(SEQ))


def test_dense_attention_is_attention():
    query, key = operands(seq=192)
    value = torch.randn_like(key)
    out = dense_attention(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), 0.2)
    v = value[:, 0].double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
    expected = true_attention(query, key, 0.2) @ v
    torch.testing.assert_close(out[0].double(), expected, atol=1e-5, rtol=0)


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
        configs = [MTrainingConfig(**setting) for setting in series.settings]
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


# Text


def characters():
    return lambda words: [ord(c) % 256 for c in words]


def tokens(path, seq=None, positions=1024, tokenizer=characters):
    return text.tokens_for([path], seq, positions, 128, tokenizer, "--yarn")


def test_tokens_are_whole_blocks_of_the_text(tmp_path):
    path = tmp_path / "text"
    path.write_text("ab" * 300)
    assert tokens(path).shape == (512,) and tokens(path).dtype == torch.int64
    assert tokens(path, seq=256).tolist() == [97, 98] * 128
    assert tokens(path, positions=300).shape == (256,)
    seen = []

    def thrifty():
        return lambda words: seen.append(len(words)) or [1] * (len(words) // 10)

    path.write_text("ab" * 100_000)
    assert tokens(path, seq=1024, tokenizer=thrifty).shape == (1024,)
    assert seen == [8192, 16384]  # not all of it
    np.save(tmp_path / "ids.npy", np.arange(600, dtype=np.uint16).reshape(2, 300))
    assert tokens(tmp_path / "ids.npy", tokenizer=None).tolist() == list(range(512))


def test_texts_that_do_not_fit(tmp_path):
    path = tmp_path / "text"
    path.write_text("a" * 300)
    for seq, words in {
        384: ["--seq is 384", "300 tokens", "--seq 256"],
        200: ["--seq is 200", "128"],
        2048: ["--seq is 2048", "1024 positions", "--yarn"],
    }.items():
        with pytest.raises(ConfigError) as refused:
            tokens(path, seq=seq)
        assert all(word in str(refused.value) for word in words), refused.value
    path.write_text("a" * 100)
    with pytest.raises(ConfigError, match="has 100 tokens"):
        tokens(path)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="no text in it"):
        tokens(path)
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        tokens(path)
    np.save(tmp_path / "ids.npy", np.ones(600))
    with pytest.raises(ConfigError, match="float64"):
        tokens(tmp_path / "ids.npy")
    (tmp_path / "bad.npy").write_text("no array")
    with pytest.raises(ConfigError, match="numpy cannot read"):
        tokens(tmp_path / "bad.npy")


# The command, on a Hugging Face model


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SIZES = dict(
    vocab_size=256,
    hidden_size=HEADS * 64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=SEQ,
)


def save_model(folder, kind="llama", **changes):
    """A small untrained model and a tokenizer of bytes, in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    if find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed")
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(Path(argparse_file()).read_text()[:4000])
    return path


def argparse_file():
    import argparse

    return argparse.__file__


def inspect(*arguments):
    return cli.main(["inspect", *map(str, arguments)])


def quick(words, out, *more):
    return ["--text", words, "--output", out, "--device", "cpu", "--dtype", "float32", *more]


@pytest.fixture(scope="module")
def finished(llama, words, tmp_path_factory):
    """A whole run: its folder."""
    out = tmp_path_factory.mktemp("run") / "out"
    assert inspect(llama, *quick(words, out, "--rows", 100, "--block-size", 64)) == 0
    return out


def test_a_run_leaves_tables_numbers_pictures_and_settings(finished, capsys):
    numbers = json.loads((finished / "results.json").read_text())
    assert numbers["tokens"] == SEQ and numbers["layers"] == LAYERS and numbers["rows"] == 100
    assert numbers["target_recall"] == 0.95 and numbers["device"] == "cpu"
    for series in numbers["series"]:
        for setting in series["settings"]:
            for name in ("recall", "density"):
                values = np.array(setting[name])
                assert values.shape == (LAYERS, HEADS) and ((values > 0) & (values <= 1)).all()
                assert setting[f"mean_{name}"] == pytest.approx(values.mean(), abs=1e-4)
        density = [setting["mean_density"] for setting in series["settings"]]
        if series["policy"] == "price":  # what a lower price keeps holds all that a higher one does
            assert density == sorted(density)
    settings = json.loads((finished / "settings.json").read_text())
    assert settings == numbers["recommended"]["settings"]
    settings.pop("layers", None)
    assert MTrainingConfig(**settings).block_size == 64
    assert "hardest head" in (finished / "summary.txt").read_text()
    pictures = {path.name for path in finished.glob("*.png")}
    heads = {"head_easiest.png", "head_middle.png", "head_hardest.png"}
    assert pictures == {"recall_density.png", "density_needed.png"} | heads
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in finished.glob("*.png"))
    assert not [path for path in finished.iterdir() if path.name.startswith(".")]


def test_block_lists_are_inspected_and_drawn(llama, words, tmp_path):
    out = tmp_path / "out"
    more = ("--rows", 64, "--policy", "moba", "--block-size", 64, "--target-recall", 0.7)
    assert inspect(llama, *quick(words, out, *more)) == 0
    settings = json.loads((out / "settings.json").read_text())
    assert settings["policy"] == "moba" and settings["block_top_k"] >= 1
    settings.pop("layers", None)
    MTrainingConfig(**settings)
    assert len(list(out.glob("head_*.png"))) == 3


def model_inputs(folder, seq=SEQ, source=None, **config):
    """Each layer's rotary queries and keys, by transformers' own eager code, and token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def listen(module, query, key, value, attention_mask, scaling=None, **more):
        seen.append((query.permute(2, 0, 1, 3), key.permute(2, 0, 1, 3), scaling))
        group = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = query @ keys.transpose(2, 3) * scaling
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        p = scores.masked_fill(future, float("-inf")).softmax(-1)
        return (p @ values).transpose(1, 2).contiguous(), p

    ALL_ATTENTION_FUNCTIONS.register("listen", listen)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="listen", **config
    ).eval()
    ids = AutoTokenizer.from_pretrained(folder)(source).input_ids[:seq]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    return seen, ids


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@needs_transformers
def test_numbers_are_those_of_the_models_own_attention(kind, words, tmp_path):
    folder = save_model(tmp_path / "model", kind, **({"head_dim": 64} if kind == "qwen3" else {}))
    out = tmp_path / "out"
    assert inspect(folder, *quick(words, out, "--rows", 64, "--policy", "fixed")) == 0
    (series,) = json.loads((out / "results.json").read_text())["series"]
    configs = [MTrainingConfig(**setting["settings"]) for setting in series["settings"]]
    rows = measure.held_out_rows(SEQ, 64, configs, seed=0)
    seen, _ = model_inputs(folder, source=words.read_text())
    assert len(seen) == LAYERS
    for layer, (query, key, scale) in enumerate(seen):
        p = true_attention(query, key, scale)
        found = measure.LayerRecall(LayerInput(layer, query, key, scale), configs, rows)
        for number, index in enumerate(found.indices):
            for head in range(HEADS):
                kept = (p[head] * index.token_mask(0, head))[rows].sum(-1).mean().item()
                reported = series["settings"][number]["recall"][layer][head]
                assert reported == pytest.approx(kept, abs=2e-3)


def test_options_reach_the_run(llama, words, tmp_path, capsys):
    out, settings = tmp_path / "out", tmp_path / "mine.json"
    arguments = quick(words, out, "--seq", 512, "--rows", 40, "--policy", "fixed")
    more = ["--target-recall", 0.5, "--head", "1:3", "--settings", settings, "--window", 64]
    assert inspect(llama, *arguments, *more) == 0
    numbers = json.loads((out / "results.json").read_text())
    assert numbers["tokens"] == 512 and numbers["target_recall"] == 0.5
    assert [series["policy"] for series in numbers["series"]] == ["fixed"]
    assert (out / "head_layer1_head3.png").exists()
    assert json.loads(settings.read_text())["window"] == 64
    assert not (out / "settings.json").exists()
    assert str(out.resolve()) in capsys.readouterr().out


def test_yarn_goes_beyond_the_models_positions(llama, words, tmp_path):
    from transformers import AutoConfig

    out = tmp_path / "out"
    arguments = quick(words, out, "--rows", 32, "--policy", "fixed", "--yarn", 2, "--seq", 2048)
    assert inspect(llama, *arguments) == 0
    numbers = json.loads((out / "results.json").read_text())
    assert numbers["tokens"] == 2048 and numbers["yarn"] == 2
    # The same model with YaRN in its configuration, by transformers itself.
    config = AutoConfig.from_pretrained(llama)
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": SEQ,
    }
    seen, _ = model_inputs(llama, 2048, words.read_text(), config=config)
    configs = [MTrainingConfig(**s["settings"]) for s in numbers["series"][0]["settings"]]
    rows = measure.held_out_rows(2048, 32, configs, seed=0)
    found = measure.LayerRecall(LayerInput(0, *seen[0]), configs, rows)
    reported = [s["recall"][0] for s in numbers["series"][0]["settings"]]
    assert found.recall.numpy() == pytest.approx(np.array(reported), abs=2e-3)


REFUSED = [
    (["--target-recall", "1.5"], ["--target-recall", "1.5"]),
    (["--rows", "0"], ["--rows", "0"]),
    (["--rows", "5000"], ["--rows", "5000", "at most"]),
    (["--seq", "0"], ["--seq", "0"]),
    (["--seq", "1000"], ["--seq", "1000", "128"]),
    (["--seq", "2048"], ["--seq", "2048", "1024", "--yarn"]),
    (["--seq", "128000", "--yarn", "1000"], ["--seq", "128000", "tokens"]),
    (["--yarn", "0.5"], ["--yarn", "0.5"]),
    (["--yarn", "nan"], ["--yarn", "nan"]),
    (["--policy", "dear"], ["--policy", "dear", "fixed"]),
    (["--head", "x"], ["--head", "x", "LAYER:HEAD"]),
    (["--head", "7:0"], ["--head", "7:0", "2 layers"]),
    (["--window", "-1"], ["--window", "-1"]),
    (["--block-size", "48"], ["--block-size", "48", "64"]),
    (["--device", "abacus"], ["--device", "abacus"]),
    (["--output", __file__], ["--output", __file__]),
    (["--output", __file__ + "/out"], ["--output", __file__]),
    (["--settings", "/nowhere/settings.json"], ["--settings", "/nowhere"]),
    (["--text", "/nowhere.txt"], ["--text", "/nowhere.txt"]),
    (["--text", "/tmp"], ["--text", "/tmp", "folder"]),
    (["--tokenizer", "/nowhere"], ["--tokenizer", "/nowhere"]),
    (["--tokenizer", __file__], ["--tokenizer", __file__, ".gguf"]),
]


def refused(capsys, named, *arguments):
    status = inspect(*arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    error = lines[-1] if lines else ""
    assert status == 2 and error.startswith("mtraining inspect: "), lines
    for word in named:
        assert word in error, error


@pytest.mark.parametrize(("wrong", "named"), REFUSED)
def test_bad_values_end_in_one_error_before_weights_are_read(
    wrong, named, llama, words, tmp_path, capsys, monkeypatch
):
    from megatron_mtraining.inspect.hugging_face import HuggingFace

    def unexpected(*_):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(HuggingFace, "loaded", unexpected)
    monkeypatch.chdir(tmp_path)
    refused(capsys, named, llama, *quick(words, tmp_path / "out"), *wrong)
    assert not list(tmp_path.iterdir())


def test_models_that_are_none(tmp_path, words, capsys):
    empty, other, broken = (tmp_path / name for name in ("empty", "other.bin", "broken.gguf"))
    empty.mkdir()
    other.write_bytes(b"\x80\x04 pickle")
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    rest = quick(words, tmp_path / "out")
    refused(capsys, ["MODEL", "/nowhere", ".gguf"], "/nowhere", *rest)
    refused(capsys, ["MODEL", str(empty), "config.json", "metadata.json"], empty, *rest)
    refused(capsys, ["MODEL", str(other), "not a GGUF file"], other, *rest)
    if find_spec("gguf") and find_spec("transformers") and find_spec("accelerate"):
        refused(capsys, ["MODEL", str(broken), "gguf cannot read"], broken, *rest)
    (empty / "a.gguf").write_bytes(b"GGUF")
    refused(capsys, ["MODEL", str(empty), "a.gguf"], empty, *rest)


@needs_transformers
def test_models_that_are_not_supported(tmp_path, words, capsys):
    def write(name, **config):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    llama = {"model_type": "llama", **SIZES}
    rest = quick(words, tmp_path / "out")
    cases = {
        "dim32": ({**llama, "hidden_size": 128, "head_dim": 32}, ["dimension 32", "(64, 128)"]),
        "unknown": ({"model_type": "not-a-model"}, ["configuration", "not-a-model"]),
        "sliding": ({**llama, "model_type": "mistral", "sliding_window": 256}, ["sliding", "256"]),
        "layers": (
            {"model_type": "gpt_oss", "num_hidden_layers": 2, "head_dim": 64},
            ["sliding_attention", "full causal attention"],
        ),
        "mla": ({"model_type": "deepseek_v3"}, ["multi-latent", "kv_lora_rank"]),
        "capped": (
            {
                "model_type": "gemma2",
                "layer_types": ["full_attention"] * 26,
                "sliding_window": None,
            },
            ["capped scores", "50"],
        ),
        "mamba": ({"model_type": "mamba"}, ["mamba"]),
        "encoder": ({"model_type": "t5"}, ["t5", "decoder"]),
        "bloom": ({"model_type": "bloom"}, ["bloom"]),
    }
    for name, (config, named) in cases.items():
        refused(capsys, named, write(name, **config), *rest)
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "config.json").write_text("{")
    refused(capsys, ["configuration"], tmp_path / "junk", *rest)
    # Supported, but there is neither a tokenizer nor weights.
    bare = write("bare", **llama)
    refused(capsys, ["tokenizer"], bare, *rest)
    byte_tokenizer().save_pretrained(bare)
    refused(capsys, ["weights"], bare, *rest)
    scaled = {**llama, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    refused(capsys, ["--yarn", "linear"], write("scaled", **scaled), *rest, "--yarn", 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["transformers", "matplotlib", "tqdm"])
def test_missing_packages_are_named_with_the_command(
    package, llama, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        options, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    named = [package, "pip install 'megatron-mtraining[inspect]'"]
    refused(capsys, named, llama, *quick(words, tmp_path / "out"))


def test_help_needs_no_optional_package(capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        assert name.split(".")[0] not in ("transformers", "matplotlib", "tqdm", "gguf")
        return real(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith("megatron_mtraining.inspect")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit) as stopped:
        inspect("--help")
    assert stopped.value.code == 0 and "--target-recall" in capsys.readouterr().out


def test_an_interrupted_run_leaves_nothing(llama, words, tmp_path, capsys, monkeypatch):
    calls = []

    def stop(*arguments):
        calls.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "kept_mass", stop)
    assert inspect(llama, *quick(words, tmp_path / "out")) == 130
    assert calls and not list(tmp_path.iterdir())
    assert "nothing was written" in capsys.readouterr().err


def test_layers_whose_attention_is_special_are_refused(llama, tmp_path, words, capsys, monkeypatch):
    from megatron_mtraining.inspect.hugging_face import HuggingFace

    own = HuggingFace._attention
    monkeypatch.setattr(
        HuggingFace, "_attention", lambda self, *a, **k: own(self, *a, **{**k, "s_aux": 1})
    )
    refused(capsys, ["layer 0", "s_aux"], llama, *quick(words, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


GGUF = os.environ.get("MTRAINING_TEST_GGUF")


@pytest.mark.skipif(not GGUF, reason="MTRAINING_TEST_GGUF names no .gguf file")
def test_a_gguf_file(tmp_path):
    out = tmp_path / "out"
    more = ("--seq", 1024, "--rows", 64, "--policy", "fixed", "--block-size", 64)
    assert inspect(GGUF, *quick(argparse_file(), out, *more)) == 0
    numbers = json.loads((out / "results.json").read_text())
    shape = (numbers["layers"], numbers["heads"])
    setting = numbers["series"][0]["settings"][0]
    assert np.array(setting["recall"]).shape == shape
    # A trained model's attention is not spread evenly.
    assert setting["mean_recall"] > setting["mean_density"] + 0.1


def test_shape_is_checked():
    shape = Shape(1, 2, 2, 64, 128, 1000)
    shape.check("MODEL")
    with pytest.raises(ConfigError, match="dimension 80"):
        replace(shape, head_dim=80).check("MODEL")
