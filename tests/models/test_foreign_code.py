# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Model repositories of strangers: their own code does not run, and impossible sizes are refused at once."""

from __future__ import annotations

import io
import json
import os
import struct
import sys

import pytest

pytest.importorskip("transformers")

import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.models.gguf_header import check_header
from megatron_mtraining.models.hugging_face import open_folder, open_gguf
from megatron_mtraining.models.tokenizer import open_tokenizer
from megatron_mtraining.models.types import ModelOptions

CODE = "import pathlib\npathlib.Path({ran!r}).touch()\nclass Own: pass\n"


def options(folder):
    return ModelOptions(folder, torch.device("cpu"), torch.float32)


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "ran"


@pytest.fixture
def repository(tmp_path, ran, monkeypatch):
    """A model that wants its own code run, where each question is answered with yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    config = {"model_type": "own", "auto_map": dict.fromkeys(kinds, "own.Own")}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_code_of_a_model_does_not_run(repository, ran):
    with pytest.raises(ConfigError, match="wants Python code of its own.*never"):
        open_folder(options(repository))
    assert not ran.exists()


def test_code_of_a_tokenizer_does_not_run(repository, ran):
    with pytest.raises(ConfigError, match=r"--tokenizer is .*wants Python code of its own"):
        open_tokenizer(repository)
    assert not ran.exists()


class Touch:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_pickled_weights_do_not_run(llama, tmp_path, ran, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    torch.save({"model.embed_tokens.weight": Touch(ran)}, folder / "pytorch_model.bin")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ConfigError, match=r"weights of MODEL .* cannot be loaded"):
        with open_folder(options(folder)).loaded():
            pass
    assert not ran.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**18),
        ("num_hidden_layers", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("max_position_embeddings", 10**40),
        ("max_position_embeddings", 1024.5),
        ("hidden_size", "256"),
        ("vocab_size", 2**62),
        ("vocab_size", True),
        ("num_experts", 10**12),
        ("head_dim", [64]),
    ],
)
def test_impossible_sizes(field, value, llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigError, match=field) as refusal:
        open_folder(options(tmp_path))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


def test_config_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is nested too deeply"):
        open_folder(options(tmp_path))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(values: bytes = b"", count: int = 0, tensors: bytes = b"", of: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, of, count) + values + tensors


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


HEADERS = {
    "an array of 2^40": gguf(entry("a.b", 9, struct.pack("<IQ", 0, 2**40)), 1),
    "2^40 texts": gguf(entry("a.b", 9, struct.pack("<IQ", 8, 2**40)), 1),
    "arrays in arrays": gguf(entry("a.b", 9, struct.pack("<IQ", 9, 1) * 40), 1),
    "2^60 values": gguf(count=2**60),
    "2^60 tensors": gguf(of=2**60),
    "a text of 2^60 bytes": gguf(struct.pack("<Q", 2**60), 1),
    "a type of its own": gguf(entry("a.b", 77, b"0" * 20), 1),
    "cut off": gguf(entry("a.b", 4, b"0"), 1),
    "a version of its own": b"GGUF" + struct.pack("<I", 99) + bytes(40),
    "layers": gguf(entry("llama.block_count", 10, struct.pack("<Q", 10**18)), 1),
    "dimensions": gguf(tensors=text("x") + struct.pack("<I", 10**9) + bytes(40), of=1),
    "elements": gguf(tensors=text("x") + struct.pack("<I4Q", 4, *[2**40] * 4) + bytes(12), of=1),
}


@pytest.mark.parametrize("name", HEADERS)
def test_gguf_headers_that_do_not_fit(name, tmp_path):
    (tmp_path / "model.gguf").write_bytes(HEADERS[name])
    with pytest.raises(ConfigError, match=r"MODEL is .*model\.gguf"):
        open_gguf(options(tmp_path / "model.gguf"))


def test_a_gguf_header(tmp_path):
    values = [
        entry("llama.block_count", 4, struct.pack("<I", 2)),
        entry("llama.expert_count", 4, struct.pack("<I", 0)),
        entry("general.name", 8, text("a model")),
        entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
        entry("tokenizer.ggml.scores", 9, struct.pack("<IQff", 6, 2, 0.5, 1.0)),
        entry("some.flag", 7, b"\1"),
    ]
    tensor = text("x") + struct.pack("<I2QIQ", 2, 4, 4, 0, 0)
    (tmp_path / "model.gguf").write_bytes(gguf(b"".join(values), len(values), tensor, 1))
    check_header(tmp_path / "model.gguf", "it")
