# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert verify``: its verdict, and what it refuses before it loads a model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import numpy as np

from megatron_mtraining.models import megatron_gpt
from megatron_mtraining.models.types import ModelOptions
from megatron_mtraining.tools.convert import verify as module
from megatron_mtraining.tools.convert.verify import as_text, verify
from tests.support.convert_cases import LLAMA3, change_args, config_of, convert, save

NAN = float("nan")


@pytest.fixture
def ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(256))
    return "--text", tmp_path / "ids.npy"


def compared(monkeypatch, first, second, tokens=64, dtype=torch.float32, **options) -> dict:
    """The result of ``verify`` for given logits."""
    checkpoint = SimpleNamespace(checksums=True)
    opened = module.Opened(torch.arange(tokens) % 7, checkpoint, None, None)
    monkeypatch.setattr(module, "_open", lambda *args: opened)
    for name, logits in (("_hugging_face", first), ("_megatron", second)):
        run = module.Run(lambda begin, end, logits=logits: logits[begin:end], None)
        monkeypatch.setattr(module, name, lambda *args, run=run: run)
    cpu = torch.device("cpu")
    models = [ModelOptions(Path(name), cpu, dtype, name=name) for name in ("DST", "SRC")]
    return verify(*models, **options)


def test_verdict(monkeypatch):
    """PASS at --min-agreement or more, whose default is lower in 16 bits."""
    logits = torch.randn(64, 7, generator=torch.manual_seed(1))
    logits[:, 3] += 10
    found = compared(monkeypatch, logits, logits + 0.01)
    assert found["differs"] is None and found["all"]["top1"] == 1
    assert as_text(found).splitlines()[-1].startswith("PASS")
    other = logits.clone()
    other[:2, 4] += 20  # 2 of 64 positions
    found = compared(monkeypatch, logits, other)
    assert "96.88%" in found["differs"] and "--min-agreement" in found["differs"]
    assert as_text(found).splitlines()[-1] == f"FAIL: {found['differs']}"
    for options in (dict(dtype=torch.bfloat16), dict(min_agreement=0.95)):
        assert compared(monkeypatch, logits, other, **options)["differs"] is None
    assert compared(monkeypatch, logits, other, dtype=torch.bfloat16, min_agreement=1.0)["differs"]


@pytest.mark.parametrize("value", [NAN, float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize(("side", "name"), [(1, "SRC"), (None, "DST")], ids=["second", "both"])
def test_logits_that_are_not_finite(side, name, value, monkeypatch):
    """NaN or infinity in one of the models, or in both, is a difference at any --min-agreement."""
    sides = [torch.randn(64, 7, generator=torch.manual_seed(1)).clone() for _ in range(2)]
    for each in sides if side is None else [sides[side]]:
        each[:3, 2] = value
    found = compared(monkeypatch, *sides, min_agreement=0.0)
    assert found["differs"] == f"logits of {name} are not finite at 3 of 64 positions"
    whole = [line for line in as_text(found).splitlines() if line.startswith("all ")][0]
    assert whole.split()[1] == ("inf" if value > 0 and side is not None else "nan")


def test_maximum_keeps_nan():
    assert str(module._max([NAN, 1.0])) == str(module._max([1.0, NAN])) == "nan"


def test_exit_status_and_json(plain, ids, tmp_path, monkeypatch, capsys):
    whole = dict(max=NAN, mean=NAN, top1=0.5, perplexity_hugging_face=2.0, perplexity_megatron=NAN)
    found = dict(
        tokens=2, ranges=[], all=whole, min_agreement=0.99, differs="all of it", checksums=False
    )
    monkeypatch.setattr(module, "verify", lambda *models, **options: found)
    words = ("verify", *plain, *ids, "--device", "cpu", "--output", tmp_path / "out.json")
    assert convert(*words) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: all of it"

    def strictly(word):
        raise AssertionError(f"{word} is not JSON")

    written = json.loads((tmp_path / "out.json").read_text(), parse_constant=strictly)
    assert written["all"]["max"] is None and written["all"]["top1"] == 0.5
    found["differs"] = None
    refused(capsys, words[1:], ["--output", tmp_path / "out.json", "exists", "--overwrite"])
    assert convert(*words, "--overwrite") == 0


def refused(capsys, words, named) -> None:
    """Assert that ``verify`` fails with a line that contains ``named``."""
    assert convert("verify", *words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    for word in named:
        assert str(word) in error, error
    assert "MODEL" not in error


def test_options_are_checked_before_models_load(plain, ids, tmp_path, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(module, "_hugging_face", never)
    cpu = ("--device", "cpu")
    there = tmp_path / "no" / "out.json"
    refused(capsys, (*plain, *ids, *cpu, "--output", there), ["--output", there])
    refused(capsys, (*plain, *ids, *cpu, "--output", tmp_path), ["--output", tmp_path])
    refused(capsys, (*plain, *ids, "--device", "tpux"), ["--device is tpux"])
    if not torch.cuda.is_available():
        refused(capsys, (*plain, *ids, "--device", "cuda"), ["--device is cuda", "no GPU"])
    refused(capsys, (plain[0], tmp_path / "none", *ids, *cpu), ["DST is", tmp_path / "none"])
    with pytest.raises(SystemExit):
        convert("verify", *plain, *ids, "--min-agreement", "99")


def test_messages_name_src_and_dst(plain, ids, tmp_path, capsys):
    """Errors in opening the models name the arguments of ``verify``, not those of other tools."""
    pytest.importorskip("megatron.core")
    cpu = ("--device", "cpu")
    folder, checkpoint = tmp_path / "hf", tmp_path / "meg"
    shutil.copytree(plain[0], folder)
    shutil.copytree(plain[1], checkpoint)
    words = (checkpoint, folder, *ids, *cpu)
    refused(capsys, (*words, "--seq", 512), ["SRC and DST has 256 positions"])
    # Shapes that differ from config.json's.
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 160}))
    refused(capsys, words, [folder, "gate_proj.weight", "[176, 128]", "[160, 128]"])
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "foo"}))
    refused(capsys, words, [f"DST ({folder})", "foo"])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    refused(capsys, (checkpoint, folder, *cpu), [f"DST is {folder}", "no tokenizer", ".npy"])
    change_args(checkpoint, mtp_num_layers=1)  # a model without these layers is run in verify
    refused(capsys, words, [f"SRC ({checkpoint}/release): mtp_num_layers is 1", "Qwen2ForCausalLM"])
    change_args(checkpoint, window_size=(64, 0))
    refused(capsys, words, [f"SRC ({checkpoint}/release)", "sliding windows"])
    (checkpoint / "release" / ".metadata").unlink()
    refused(capsys, words, [f"SRC is {checkpoint}/release", "not whole"])
    back = ("megatron-to-hf", checkpoint, tmp_path / "back")
    assert convert(*back) == 2
    assert f"SRC is {checkpoint}/release" in capsys.readouterr().err


def test_extended_positions_are_compared_as_the_checkpoint_has_them(plain, tmp_path, capsys):
    """A conversion with --yarn is right, though config.json has the model's own positions."""
    np.save(tmp_path / "ids.npy", np.arange(768) % 320)  # three times the model's positions
    extended = tmp_path / "extended"
    assert convert("hf-to-megatron", plain[0], extended, "--yarn", "4") == 0
    capsys.readouterr()
    words = ("--text", tmp_path / "ids.npy", "--device", "cpu", "--output", tmp_path / "out.json")
    assert convert("verify", plain[0], extended, *words) == 0
    printed = capsys.readouterr().out
    assert "Positions: both models ran with the checkpoint's (rope_type yarn" in printed
    verdict = printed.splitlines()[-1]
    assert verdict.startswith("PASS of the weights: the top-1 token is the same at 100.00%")
    assert verdict.endswith("config.json has other rotary positions")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["positions"]["factor"] == 4 and found["tokens"] == 768
    assert found["all"]["max"] < 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_mup", True)],
)
def test_arguments_that_the_model_would_be_run_without(name, value, plain, ids, tmp_path, capsys):
    """verify refuses what megatron-to-hf refuses, and does not compare a model without it."""
    pytest.importorskip("megatron.core")
    checkpoint = shutil.copytree(plain[1], tmp_path / "meg")
    change_args(checkpoint, **{name: value})
    words = (plain[0], checkpoint, *ids, "--device", "cpu")
    refused(capsys, words, [f"DST ({checkpoint}/release)", f"{name} {value}"])
    assert convert("megatron-to-hf", checkpoint, tmp_path / "back") == 2


@pytest.fixture
def no_megatron_lm(monkeypatch):
    """As where it cannot be imported; packages of megatron-core from 0.19 on have it."""
    monkeypatch.setattr(module, "megatron_training", lambda: None)


@pytest.mark.parametrize("experts", ["qwen3 moe, not normed"])
def test_models_with_experts(experts, ids, tmp_path, capsys, no_megatron_lm):
    """On every version: routers of Megatron-Core 0.16 used to need Transformer Engine."""
    folder = save(experts, tmp_path / "hf")
    assert convert("hf-to-megatron", folder, tmp_path / "meg") == 0
    assert convert("verify", folder, tmp_path / "meg", *ids, "--device", "cpu") == 0
    assert "whether a Megatron-LM does was not checked" in capsys.readouterr().out


def test_rotary_positions_that_a_short_text_does_not_show(
    ids, tmp_path, monkeypatch, capsys, no_megatron_lm
):
    """A factor of Llama 3.2's that is lost on the way to the model."""
    folder = save("llama 3", tmp_path / "hf", rope_parameters={**LLAMA3, "factor": 32.0})
    assert convert("hf-to-megatron", folder, tmp_path / "meg") == 0
    words = ("verify", folder, tmp_path / "meg", *ids, "--device", "cpu")
    assert convert(*words) == 0
    assert "Warning: --rope-scaling-factor 32" in capsys.readouterr().out
    monkeypatch.setattr(megatron_gpt, "rope_scaling_factor", lambda args, label: 8.0)
    assert convert(*words) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("FAIL: their rotary positions differ")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama 3", "qwen3 moe"])
def test_the_model_is_built_by_megatron_lm(checkout, model, ids, tmp_path):
    """By its parser and builder, where it can be imported; flags that it does not take are refused."""
    more = {"rope_parameters": {**LLAMA3, "factor": 32.0}} if "llama" in model else {}
    folder = save(model, tmp_path / "hf", **more)
    assert convert("hf-to-megatron", folder, tmp_path / "meg") == 0

    def verified():
        words = (folder, tmp_path / "meg", *ids, "--device", "cpu")
        path = os.pathsep.join([str(Path(__file__).parents[3]), str(checkout)])
        return subprocess.run(
            [sys.executable, "-m", "megatron_mtraining", "convert", "verify", *map(str, words)],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip

    run = verified()
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Flags: as the parser and model builder of Megatron-LM 0." in run.stdout
    change_args(tmp_path / "meg", rotary_base=1000000.5)
    run = verified()
    assert run.returncode == 2, run.stderr[-4000:]
    assert "--rotary-base: invalid int value: '1000000.5'" in run.stderr.splitlines()[-1]
