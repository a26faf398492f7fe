# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert`` and ``inspect`` of careless and hostile input: one line, exit status 2, no hang."""

from __future__ import annotations

import json
import os
import shutil

import pytest

pytest.importorskip("transformers")

from megatron_mtraining.tools import cli
from tests.support.convert_cases import change_args, config_of

INDEX = "model.safetensors.index.json"
LONG = "n" * 300


@pytest.fixture
def model(plain, tmp_path):
    shutil.copytree(plain[0], tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def checkpoint(plain, tmp_path):
    shutil.copytree(plain[1], tmp_path / "meg")
    return tmp_path / "meg"


def refused(capsys, *words) -> str:
    try:
        status = cli.main([str(word) for word in words])
    except SystemExit as end:  # argparse's
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and "Traceback" not in error, (status, error[-2000:])
    last = error.splitlines()[-1]
    assert last.startswith("mtraining ") and len(last) < 2200, last
    return last


def to_megatron(capsys, model, *more) -> str:
    target = model.parent / "out"
    last = refused(capsys, "convert", "hf-to-megatron", model, target, *more)
    assert not target.exists()
    return last


CONFIGS = {
    "num_hidden_layers": [10**18, 0, -1, 4.0, "4", None, True, [4], 10**400],
    "num_attention_heads": [0, 3, 10**12],
    "num_key_value_heads": [0, 3, 10**12],
    "max_position_embeddings": [1e40, 4096.5, 10**40, "256"],
    "layer_types": [
        ["full_attention"] * 3,
        ["full_attention"] * 9,
        "full_attention",
        [[]],
        {"a": 1},
    ],
    "hidden_size": [10**18, 127, float("nan")],
    "vocab_size": [10**18, 0],
    "rms_norm_eps": [float("inf"), float("nan"), "1e-6", -1],
    "architectures": ["Qwen2ForCausalLM", [], [["a"]], None, {}, [10**400]],
    "rope_parameters": [
        5,
        [],
        {"rope_type": []},
        {"rope_theta": 1e400},
        {"rope_type": "x" * 10_000},
    ],
    "tie_word_embeddings": ["false", 1],
    "head_dim": [0, 10**18, 63],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_fields_of_config(field, model, capsys):
    for value in CONFIGS[field]:
        config = json.dumps(config_of(model) | {field: value})
        (model.parent / "config").write_text(config)
        before = (model / "config.json").read_bytes()
        (model / "config.json").write_text(config)
        to_megatron(capsys, model)
        (model / "config.json").write_bytes(before)


FILES = {
    "nested": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "bytes": b"\xff\xfe\x00",
    "empty": b"",
    "null": b"null",
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "control": b'{"a": "\x00"}',
}


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_files(name, model, capsys):
    for content in FILES.values():
        (model / name).write_bytes(content)
        assert name in to_megatron(capsys, model)
    (model / name).unlink()
    os.mkfifo(model / name)
    to_megatron(capsys, model)
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    to_megatron(capsys, model)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "../x"}, {"a": "/dev/zero"}, {"a": LONG}, {"a": 5}, {"a": "a\0b"}, {"a": ""}, {"a": ".."}, [],
        {"a": "config.json"}, {"\ud800": "\ud800"},
    ],
)  # fmt: skip
def test_weight_maps(weight_map, model, capsys):
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    to_megatron(capsys, model)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, b"\0" * 100, b"\x10" + bytes(7) + b"{" * 16, b"\2" + bytes(7) + b"{}"],
)
def test_safetensors(content, model, capsys):
    for file in model.glob("*.safetensors"):
        file.write_bytes(content)
    to_megatron(capsys, model)


def test_pipes_as_weights(model, capsys):
    file = sorted(model.glob("*.safetensors"))[0]
    file.unlink()
    os.mkfifo(file)
    assert file.name in to_megatron(capsys, model)


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/a.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "link that leads nowhere", "folder"])
def test_files_beside_the_weights_that_cannot_be_copied(kind, name, model, capsys):
    """They would be left out in silence."""
    file = model / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("nowhere")
    assert name in to_megatron(capsys, model)


@pytest.mark.parametrize("path", ["", LONG, "a\0b", "/dev/null", "/dev/stdin", f"{LONG}/x"])
def test_paths(path, model, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("text " * 2000)
    out, rest = tmp_path / "out", ("--device", "cpu")
    for words in (
        ("convert", "hf-to-megatron", path, out),
        ("convert", "hf-to-megatron", model, path),
        ("convert", "megatron-to-hf", path, out),
        ("convert", "megatron-to-hf", checkpoint, path),
        ("convert", "megatron-to-hf", checkpoint, out, "--like", path),
        ("convert", "verify", path, checkpoint, *rest),
        ("convert", "verify", model, path, *rest),
        ("inspect", path, "--text", tmp_path / "t.txt", *rest),
        ("inspect", model, "--text", path, *rest),
        ("inspect", model, "--text", tmp_path / "t.txt", "--tokenizer", path or "\0", *rest),
        ("patch", "check", path),
        ("patch", "apply", path),
    ):
        refused(capsys, *words)
        assert not out.exists()


@pytest.mark.parametrize("name", ["pipe", "pipe.npy", "zero"])
def test_texts_that_are_no_regular_files(name, model, checkpoint, tmp_path, capsys):
    os.mkfifo(tmp_path / name) if name != "zero" else (tmp_path / name).symlink_to("/dev/zero")
    words = ("verify", model, checkpoint, "--text", tmp_path / name, "--device", "cpu")
    assert "a regular file is needed" in refused(capsys, "convert", *words)


ARGS = {
    "rotary_base": ["abc", [], float("nan")],
    "window_size": [5, "x", ["a"]],
    "softmax_scale": ["x", []],
    "num_layers": [10**18, "4", -1],
    "norm_epsilon": ["x", float("nan")],
    "position_embedding_type": [[], 5, "x" * 5000],
    "normalization": [5, ["RMSNorm"]],
    "swiglu": ["yes"],
    "rotary_percent": ["x", [1]],
}


@pytest.mark.parametrize("name", ARGS)
def test_arguments_of_a_checkpoint(name, checkpoint, tmp_path, capsys):
    for value in ARGS[name]:
        change_args(checkpoint, **{name: value})
        refused(capsys, "convert", "megatron-to-hf", checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    "words",
    ["--dtype int8", "--shard-size 0", "--shard-size -5GB", "--shard-size 1e99GB", "--vocab-size 0",
     f"--vocab-size {10**30}", f"--vocab-size {'9' * 5000}", f"--shard-size {'9' * 400}GB"],
)  # fmt: skip
def test_options_of_megatron_to_hf(words, checkpoint, tmp_path, capsys):
    refused(capsys, "convert", "megatron-to-hf", checkpoint, tmp_path / "out", *words.split())


@pytest.mark.parametrize(
    "words",
    [f"--padded-vocab-size {10**30}", "--padded-vocab-size 1", f"--rotary-base {10**400}", "--yarn nan",
     "--yarn inf", "--yarn 0", "--rotary-base 0",
     f"--max-position-embeddings {10**40}", f"--rotary-base {'9' * 5000}"],
)  # fmt: skip
def test_options_of_hf_to_megatron(words, model, capsys):
    to_megatron(capsys, model, *words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--yarn 1e308",
        "--yarn inf",
        f"--rows -{10**30}",
        f"--head {10**30}:0",
        f"--head {'9' * 5000}:0",
    ],
)
def test_options_of_inspect(words, model, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("text " * 2000)
    more = ("--text", tmp_path / "t.txt", "--device", "cpu", "--output", tmp_path / "out")
    refused(capsys, "inspect", model, *more, *words.split())
