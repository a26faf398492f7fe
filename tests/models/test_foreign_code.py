# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Model repositories: their own code does not run."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

pytest.importorskip("transformers")

import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.models.hugging_face import open_folder
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
