# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect`` on Hugging Face models: its numbers and files, and all that it refuses."""

from __future__ import annotations

import builtins
import json
import os
import re
import sys
from html.parser import HTMLParser
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from megatron_mtraining import MTrainingConfig, requirements
from megatron_mtraining.models.types import LayerInput
from megatron_mtraining.tools.inspect import measure
from tests.support.inspect_cases import (
    HEADS,
    LAYERS,
    SEQ,
    SIZES,
    argparse_file,
    byte_tokenizer,
    inspect,
    quick,
    refused,
    save_model,
    true_attention,
)

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers, which is not installed"
)


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
    assert [series["policy"] for series in numbers["series"]] == ["price"]  # all that a CPU tries
    for series in numbers["series"]:
        for setting in series["settings"]:
            for name in ("recall", "density"):
                values = np.array(setting[name])
                assert values.shape == (LAYERS, HEADS) and ((values > 0) & (values <= 1)).all()
                assert setting[f"mean_{name}"] == pytest.approx(values.mean(), abs=1e-4)
        density = [setting["mean_density"] for setting in series["settings"]]
        # What a lower price keeps holds all that a higher one does.
        assert density == sorted(density)
    settings = json.loads((finished / "settings.json").read_text())
    assert settings == numbers["recommended"]["settings"]
    settings.pop("layers", None)
    assert MTrainingConfig.from_options(**settings).block_size == 64
    assert "hardest head" in (finished / "summary.txt").read_text()
    pictures = {path.name for path in finished.glob("*.png")}
    heads = {"head_easiest.png", "head_middle.png", "head_hardest.png"}
    assert pictures == {"recall_density.png", "density_needed.png"} | heads
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in finished.glob("*.png"))
    assert not [path for path in finished.iterdir() if path.name.startswith(".")]


def test_the_page_has_each_heads_attention_beside_its_pattern(finished):
    text = (finished / "inspect.html").read_text(encoding="utf-8")
    HTMLParser().feed(text)
    assert "hardest head" in text and "<script" not in text
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text), "it loads nothing"
    for kind in ("Easiest", "Middle", "Hardest"):
        assert re.search(rf"<h2>{kind} head: layer \d, head \d: .* recall [\d.]+% at density", text)
    for title in ("Dense attention", "Pattern"):
        for theme in ("light", "dark"):
            assert text.count(f'<div class="{theme}" role="img" aria-label="{title}">') == 3


@pytest.mark.usefixtures("unrendered")
def test_block_lists_are_inspected_and_drawn(llama, words, tmp_path):
    out = tmp_path / "out"
    more = ("--rows", 64, "--policy", "moba", "--block-size", 64, "--target-recall", 0.7)
    assert inspect(llama, *quick(words, out, *more)) == 0
    settings = json.loads((out / "settings.json").read_text())
    assert settings["policy"] == "moba" and settings["block_top_k"] >= 1
    settings.pop("layers", None)
    MTrainingConfig.from_options(**settings)
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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.usefixtures("unrendered")
@needs_transformers
def test_numbers_are_those_of_the_models_own_attention(kind, words, tmp_path):
    folder = save_model(tmp_path / "model", kind, **({"head_dim": 64} if kind == "qwen3" else {}))
    out = tmp_path / "out"
    assert inspect(folder, *quick(words, out, "--rows", 64, "--policy", "fixed")) == 0
    (series,) = json.loads((out / "results.json").read_text())["series"]
    configs = [
        MTrainingConfig.from_options(**setting["settings"]) for setting in series["settings"]
    ]
    rows = measure.held_out_rows(SEQ, 64, configs, seed=0)
    seen, _ = model_inputs(folder, source=words.read_text())
    assert len(seen) == LAYERS
    for layer, (query, key, scale) in enumerate(seen):
        p = true_attention(query, key, scale)
        found = measure.LayerRecall(LayerInput(layer, query, key, scale), configs, rows)
        for number, pattern in enumerate(found.patterns):
            for head in range(HEADS):
                kept = (p[head] * pattern.index.token_mask(0, head))[rows].sum(-1).mean().item()
                reported = series["settings"][number]["recall"][layer][head]
                assert reported == pytest.approx(kept, abs=2e-3)


@pytest.mark.usefixtures("unrendered")
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


@pytest.mark.usefixtures("unrendered")
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
    configs = [
        MTrainingConfig.from_options(**s["settings"]) for s in numbers["series"][0]["settings"]
    ]
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
    (["--window", "5000"], [": --window is 5000, more than the 1024 tokens", "--seq"]),
    (["--seq", "192", "--block-size", "64"], [": there are 192 tokens, fewer than the 256 rows"]),
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


@pytest.mark.parametrize(
    ("wrong", "named"),
    REFUSED,
    ids=[" ".join(wrong).replace(__file__, "FILE") for wrong, _ in REFUSED],
)
def test_bad_values_end_in_one_error_before_weights_are_read(
    wrong, named, llama, words, tmp_path, capsys, monkeypatch
):
    from megatron_mtraining.models.hugging_face import HuggingFaceModel

    def unexpected(*_):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(HuggingFaceModel, "loaded", unexpected)
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
    refused(capsys, ["MODEL", str(other), "gguf cannot read", "Hugging Face folder"], other, *rest)
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
        "dim32": (
            {**llama, "hidden_size": 128, "head_dim": 32},
            ["dimension 32", "(64, 96, 128, 192, 256)"],
        ),
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
    refused(capsys, ["config.json", "not a valid JSON"], tmp_path / "junk", *rest)
    # Supported, but there is neither a tokenizer nor weights.
    bare = write("bare", **llama)
    refused(capsys, ["tokenizer"], bare, *rest)
    byte_tokenizer().save_pretrained(bare)
    refused(capsys, ["weights"], bare, *rest)
    scaled = {**llama, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    refused(capsys, ["--yarn", "linear"], write("scaled", **scaled), *rest, "--yarn", 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["transformers", "matplotlib"])
def test_missing_packages_are_named_with_the_command(
    package, llama, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        requirements, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    named = [f"{package} not installed: pip install", package]
    refused(capsys, named, llama, *quick(words, tmp_path / "out"))


def test_help_needs_no_optional_package(capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        assert name.split(".")[0] not in ("transformers", "matplotlib", "tqdm", "gguf")
        return real(name, *rest, **more)

    for name in [
        name for name in sys.modules if name.startswith("megatron_mtraining.tools.inspect")
    ]:
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

    monkeypatch.setattr(measure.VerticalSlashPattern, "kept_mass", stop)
    assert inspect(llama, *quick(words, tmp_path / "out")) == 130
    assert calls and not list(tmp_path.iterdir())
    assert "nothing was written" in capsys.readouterr().err


def test_layers_whose_attention_is_special_are_refused(llama, tmp_path, words, capsys, monkeypatch):
    from megatron_mtraining.models import hugging_face

    own = hugging_face._LoadedModel.attention
    monkeypatch.setattr(
        hugging_face._LoadedModel,
        "attention",
        lambda self, *a, **k: own(self, *a, **{**k, "s_aux": 1}),
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
